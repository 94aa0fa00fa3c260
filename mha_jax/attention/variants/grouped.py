"""Multi-head, grouped-query and multi-query attention: one config.

  q = x W_q, k = y W_k, v = z W_v        split into heads by their einsum
  o_i = attend(q_i, k_{i // g}, v_{i // g})

MHA has as many key/value heads as query heads (n = h), MQA one, GQA any
divisor in between. Self-attention has y = z = x.

Source: Vaswani et al. 2017 (MHA), Shazeer 2019 (MQA), Ainslie et al. 2023
(GQA); QK-norm: Dehghani et al. 2023 (layer), Qwen3 2025 (rms).
"""

import dataclasses
import functools

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import Norm, Projection, Row, Table
from mha_jax.attention.variants.config import (
  AttentionConfig,
  Heads,
  HeadsAttention,
  Positions,
  Project,
)


@dataclasses.dataclass(frozen=True)
class GroupedConfig(AttentionConfig):
  """The shape of a multi-head, grouped-query or multi-query attention.

  Args:
    d_model: width of the queries' input.
    num_heads: query heads h.
    num_kv_heads: key/value heads n, a divisor of h; None: h.
    head_dim: features k of a query and key head; None: d_model / h.
    v_head_dim: features v of a value head; None: head_dim.
    key_features: width of the keys' input; None: d_model.
    value_features: width of the values' input; None: key_features.
    out_features: width of the output; None: d_model.
    use_bias: whether the projections add a bias.
    normalize_qk: False, True or 'layer' (Flax's LayerNorm without bias), or
      'rms': norm of every query and key head.
    rope: rotates queries and keys, after the norm; None: no positions.
    logit_softcap: bound on the scores, see `attend`.

  Raises:
    ValueError: sizes do not divide or are not positive, or an option is
      unknown.
  """

  d_model: int
  num_heads: int
  num_kv_heads: int | None = None
  head_dim: int | None = None
  v_head_dim: int | None = None
  key_features: int | None = None
  value_features: int | None = None
  out_features: int | None = None
  use_bias: bool = True
  normalize_qk: bool | str = False
  rope: Rope | None = None
  logit_softcap: float | None = None

  def __post_init__(self) -> None:
    self.check_sizes()
    if self.head_dim is None:
      checks.divides('num_heads', self.num_heads, 'd_model', self.d_model)
    checks.divides('num_kv_heads', self.sizes['n'], 'num_heads', self.num_heads)
    if self.normalize_qk not in (False, True, *Norm.KINDS):
      raise ValueError(
        f'normalize_qk={self.normalize_qk!r} must be False, True (Flax, the '
        "same as 'layer'), 'layer' or 'rms'"
      )
    checks.softcap(self.logit_softcap)
    self.check_rope('head_dim', self.sizes['k'])

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """The sizes of the letters h, n, k and v."""
    h = self.num_heads
    k = self.head_dim or self.d_model // h
    return {
      'h': h,
      'n': self.num_kv_heads or h,
      'k': k,
      'v': self.v_head_dim or k,
    }

  @functools.cached_property
  def input_widths(self) -> tuple[int, int, int]:
    key_features = self.key_features or self.d_model
    return self.d_model, key_features, self.value_features or key_features

  @property
  def qk_head_dim(self) -> int:
    return self.sizes['k']

  @property
  def entry_shapes(self) -> tuple[tuple[int, int], ...]:
    """Keys (n, k) and values (n, v)."""
    n = self.sizes['n']
    return (n, self.sizes['k']), (n, self.sizes['v'])

  @functools.cached_property
  def table(self) -> Table:
    """The projections, and the norms where there are any."""
    x, y, z = self.input_widths
    out = self.out_features or self.d_model

    def projection(spec: str, features: int) -> Projection:
      return Projection(spec, self.sizes | {'d': features}, self.use_bias)

    rows: dict[str, Row] = {
      'query': projection('btd,dhk->bhtk', x),
      'key': projection('bsd,dnk->bnsk', y),
      'value': projection('bsd,dnv->bnsv', z),
    }
    if self.normalize_qk:
      kind = 'rms' if self.normalize_qk == 'rms' else 'layer'
      norm = Norm(kind, self.sizes['k'])
      rows |= {'query_ln': norm, 'key_ln': norm}
    return rows | {'out': projection('bhtv,hvd->btd', out)}

  def queries(self, project: Project, x: Array, positions: Positions) -> Parts:
    """Normalised, then rotated."""
    q = project('query', x)
    q = project('query_ln', q) if self.normalize_qk else q
    return (self.rotate(q, positions),)

  def entries(
    self, project: Project, y: Array, z: Array, positions: Positions
  ) -> Parts:
    """Keys, normalised and rotated, and values."""
    k = project('key', y)
    k = project('key_ln', k) if self.normalize_qk else k
    return self.rotate(k, positions), project('value', z)

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    del project
    return attention(q, *entries, logit_softcap=self.logit_softcap)

"""Grouped-tied attention: half of a key is half of its value.

  scores_i = (q_i k^T + w_i u^T) / sqrt(v),   k the first half of v_{i // g},
  w_i = rope(x W_w,i), u = rope(y W_u), one rotary half for all heads

Source: Zadouri et al. 2025, Hardware-Efficient Attention for Fast Decoding.
"""

import dataclasses
import functools

from mha_jax.attention import checks
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import Projection, Table
from mha_jax.attention.variants import config
from mha_jax.attention.variants.config import (
  Array,
  Heads,
  HeadsAttention,
  Parts,
  Positions,
  Project,
)


@dataclasses.dataclass(frozen=True)
class TiedConfig(config.AttentionConfig):
  """h heads over n states of head_dim features; rope None: no rotation."""

  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  use_bias: bool = False
  rope: Rope | None = None

  values_from_keys = True
  qk_head_dim = property(lambda self: self.head_dim)

  def __post_init__(self) -> None:
    self.check_sizes()
    n, h, v = self.num_kv_heads, self.num_heads, self.head_dim
    checks.divides('num_kv_heads', n, 'num_heads', h)
    checks.even('head_dim', v)
    self.check_rope('head_dim / 2', v // 2)

  @property
  def entry_shapes(self) -> tuple[tuple[int, int], ...]:
    return (self.num_kv_heads, self.head_dim), (1, self.head_dim // 2)

  @functools.cached_property
  def table(self) -> Table:
    d, h, n, v = self.d_model, self.num_heads, self.num_kv_heads, self.head_dim
    sizes = {'d': d, 'h': h, 'n': n, 'k': v // 2, 'p': v // 2, 'v': v}
    specs = {'query': 'btd,dhk->bhtk', 'query_rope': 'btd,dhp->bhtp'}
    specs |= {'value': 'bsd,dnv->bnsv', 'key_rope': 'bsd,dp->bsp'}
    specs |= {'out': 'bhtv,hvd->btd'}
    return {x: Projection(y, sizes, self.use_bias) for x, y in specs.items()}

  def queries(self, project: Project, x: Array, positions: Positions) -> Parts:
    return project('query', x), self.rotate(project('query_rope', x), positions)

  def entries(
    self, project: Project, y: Array, z: Array, positions: Positions
  ) -> Parts:
    return project('value', y), self.rotate(
      project('key_rope', y)[:, None], positions
    )

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    v, u = entries
    return attention(q, (v[..., : self.head_dim // 2], u), v)

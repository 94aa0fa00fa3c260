"""Grouped-tied attention: half of a key is half of its value.

  scores_i = (q_i k^T + w_i u^T) / sqrt(v),   k the first half of v_{i // g},
  w_i = rope(x W_w,i), u = rope(y W_u), one rotary half for all heads

Source: Zadouri et al. 2025, Hardware-Efficient Attention for Fast Decoding.
"""

import dataclasses
import functools

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import Projection, Table
from mha_jax.attention.variants.config import (
  AttentionConfig,
  Heads,
  HeadsAttention,
  Positions,
  Project,
)


@dataclasses.dataclass(frozen=True)
class TiedConfig(AttentionConfig):
  """The shape of a grouped-tied attention.

  Args:
    d_model: width of the input.
    num_heads: query heads h.
    num_kv_heads: states n, a divisor of h; each is a value and half of a key.
    head_dim: features v of a state, an even number.
    use_bias: whether projections add biases.
    rope: turns the other half of a key; None: nothing is turned.

  Raises:
    ValueError: sizes do not fit.
  """

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
    """States (n, v) and the shared half of the keys (1, v / 2)."""
    return (self.num_kv_heads, self.head_dim), (1, self.head_dim // 2)

  @functools.cached_property
  def table(self) -> Table:
    """The projections, all of them einsum strings."""
    d, h, n, v = self.d_model, self.num_heads, self.num_kv_heads, self.head_dim
    sizes = {'d': d, 'h': h, 'n': n, 'k': v // 2, 'p': v // 2, 'v': v}
    specs = {'query': 'btd,dhk->bhtk', 'query_rope': 'btd,dhp->bhtp'}
    specs |= {'value': 'bsd,dnv->bnsv', 'key_rope': 'bsd,dp->bsp'}
    specs |= {'out': 'bhtv,hvd->btd'}
    return {x: Projection(y, sizes, self.use_bias) for x, y in specs.items()}

  def queries(self, project: Project, x: Array, positions: Positions) -> Parts:
    """Two halves, of which the second is rotated."""
    return project('query', x), self.rotate(project('query_rope', x), positions)

  def entries(
    self, project: Project, y: Array, z: Array, positions: Positions
  ) -> Parts:
    """The states, and the rotated half of the keys."""
    return project('value', y), self.rotate(
      project('key_rope', y)[:, None], positions
    )

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    """Keys are half of the states beside the half that all heads share."""
    v, u = entries
    return attention(q, (v[..., : self.head_dim // 2], u), v)

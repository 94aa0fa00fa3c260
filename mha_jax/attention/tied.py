"""Grouped-tied attention: half of a key is half of its value.

  scores_i = (q_i k^T + w_i u^T) / sqrt(v),   k the first half of v_{i // g},
  w_i = rope(x W_w,i), u = rope(y W_u), one rotary half for all heads

Source: Zadouri et al. 2025, Hardware-Efficient Attention for Fast Decoding.
"""

import dataclasses
import functools

from mha_jax.attention import checks
from mha_jax.attention.layer import AttentionConfig, Core, Heads, Inputs, Rows
from mha_jax.attention.projections import Projection, Table
from mha_jax.attention.rope import Rope


@dataclasses.dataclass(frozen=True)
class TiedConfig(AttentionConfig):
  """h heads over n states of head_dim features, a multiple of 4."""

  d_model: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  use_bias: bool = False
  rope: Rope | None = None

  values_from_keys = True

  def __post_init__(self) -> None:
    self.check_sizes()
    n, h = self.num_kv_heads, self.num_heads
    checks.divides('num_kv_heads', n, 'num_heads', h)
    if self.head_dim % 4:
      raise ValueError(f'head_dim={self.head_dim} must be a multiple of 4')

  qk_head_dim = property(lambda c: c.head_dim)
  half = property(lambda c: c.head_dim // 2)
  cache_elements = property(lambda c: c.half * (2 * c.num_kv_heads + 1))

  @functools.cached_property
  def table(self) -> Table:
    sizes = {'d': self.d_model, 'h': self.num_heads, 'n': self.num_kv_heads}
    sizes |= dict.fromkeys('kp', self.half) | {'v': self.head_dim}
    specs = {
      'query': 'btd,dhk->bhtk',
      'query_rope': 'btd,dhp->bhtp',
      'value': 'bsd,dnv->bnsv',
      'key_rope': 'bsd,dp->bsp',
      'out': 'bhtv,hvd->btd',
    }
    return {x: Projection(y, sizes, self.use_bias) for x, y in specs.items()}

  def attend(self, rows: Rows, inputs: Inputs, core: Core) -> Heads:
    v, u = rows('value', inputs.y), rows('key_rope', inputs.y)[:, None]
    w = self.rotate(rows('query_rope', inputs.x), inputs.query_positions)
    u = self.rotate(u, inputs.key_positions)
    k = v[..., : self.half]
    return core((rows('query', inputs.x), w), (k, u), v)

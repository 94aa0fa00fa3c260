"""Grouped-tied attention, the example of a variant, against a loop."""

import jax
import oracles
from absl.testing import parameterized
from oracles import assert_close, booleans, normal, random_params

from mha_jax import attention
from mha_jax.attention import Rope, TiedConfig

B, T, S, D = 2, 7, 11, 5
apply = jax.jit(
  attention.apply, static_argnums=0, static_argnames=('return_weights',)
)


class TiedTest(oracles.X64TestCase):
  @parameterized.product(
    num_kv_heads=(1, 3), rope=(None, Rope(10.0)), cross=(False, True)
  )
  def test_against_numpy(self, num_kv_heads, rope, cross):
    """Keys are half of the values beside a rotary half for all heads."""
    config = TiedConfig(D, 6, num_kv_heads, 12, rope=rope)
    p, x = random_params(config), normal(1, B, T, D)
    y = normal(2, B, S, D) if cross else x
    mask = booleans(3, B, 6, T, y.shape[1])
    got = apply(
      config, p, x, y if cross else None, mask=mask, return_weights=True
    )
    theta = None if rope is None else (rope.theta, rope.layout)
    wanted = oracles.tied(p, x, y, rope=theta, allowed=mask)
    assert_close(got, wanted)

  def test_the_cache_is_smaller(self):
    """n v + v / 2 elements a token, a little over half of GQA's 2 n v."""
    self.assertEqual(TiedConfig(64, 8, 2, 16).cache_elements, 2 * 16 + 8)

  @parameterized.parameters(
    ({'num_kv_heads': 4}, 'num_kv_heads=4 must divide num_heads=6'),
    ({'head_dim': 7}, 'head_dim=7 must be even'),
    ({'head_dim': 6, 'rope': Rope()}, 'head_dim / 2=3 must be even for RoPE'),
    ({'head_dim': 0}, 'head_dim=0 must be a positive integer'),
  )
  def test_bad_configs(self, changes, message):
    """Each is refused with the name and the value."""
    options = {'d_model': D, 'num_heads': 6, 'num_kv_heads': 3, 'head_dim': 12}
    with self.assertRaisesRegex(ValueError, message):
      TiedConfig(**options | changes)

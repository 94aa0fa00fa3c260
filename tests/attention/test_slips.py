"""Wrong values that were once taken without a word."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_same_bits, normal

from mha_jax import attention, dot_product_attention
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  Norm,
  Projection,
  Rope,
  init_table,
  masks,
)


class X64Test(oracles.X64TestCase):
  def test_the_least_float64_bias(self):
    """Beside float32 inputs it is -inf: the query attends to nothing."""
    q = jnp.asarray(normal(0, 1, 3, 1, 4), jnp.float32)
    bias = np.zeros((3, 3))
    bias[1] = np.finfo(np.float64).min
    out = dot_product_attention(q, q, q, bias)
    np.testing.assert_array_equal(out[0, 1], 0)
    self.assertTrue(np.all(np.isfinite(out)))

  @parameterized.parameters('float64', float)
  def test_float64_by_any_name(self, dtype):
    """Norms too are then in float64."""
    config = LatentConfig(8, 2, 4)
    params = init_table(config.table, jax.random.key(0), dtype=jnp.float64)
    x = normal(0, 2, 5, 8)
    got = attention.apply(config, params, x, dtype=dtype)
    assert_same_bits(got, attention.apply(config, params, x))


class SlipsTest(parameterized.TestCase):
  def test_narrow_sizes(self):
    """NumPy's narrow integers do not wrap around."""
    self.assertEqual(
      masks.window(np.uint8(2), 0).draw(3, 3), masks.window(2, 0).draw(3, 3)
    )
    q = jnp.ones((1, 5, 1, 4))
    _, weights = dot_product_attention(
      q, q, q, local_window_size=np.array([2, 0], np.uint8), return_weights=True
    )
    np.testing.assert_array_equal(
      weights[0, 0] > 0, masks.window(2, 0).array(5, 5)[0, 0]
    )

  def test_rotating_integers(self):
    """They become fractions."""
    np.testing.assert_allclose(
      Rope().rotate([[1, 0]], [1]), [[np.cos(1), np.sin(1)]], rtol=1e-6
    )

  def test_parameters_of_another_shape(self):
    """A row refuses what would broadcast."""
    row = Projection('btd,dhk->bhtk', {'d': 8, 'h': 2, 'k': 3}, use_bias=False)
    with self.assertRaisesRegex(ValueError, r'has shapes .*\(8, 2, 1\)'):
      row.apply({'kernel': jnp.ones((8, 2, 1))}, jnp.ones((1, 5, 8)))
    with self.assertRaisesRegex(ValueError, r'has shapes .*\(1,\)'):
      Norm('rms', 5).apply({'scale': jnp.ones(1)}, jnp.ones((2, 5)))

  def test_no_batch_and_a_full_mask(self):
    """(t, h, k) inputs take the (1, 1, t, s) masks of jax.nn."""
    q = jnp.asarray(normal(0, 5, 2, 3), jnp.float32)
    mask = np.tri(5, dtype=bool)[None, None]
    assert_same_bits(
      dot_product_attention(q, q, q, mask=mask),
      dot_product_attention(q, q, q, is_causal=True),
    )

  def test_a_mask_that_vmap_takes_apart(self):
    """Over its batch axis it no longer fits, and says so."""
    config = GroupedConfig(8, 2)
    params = init_table(config.table, jax.random.key(0))
    x = jnp.ones((3, 5, 8))
    f = jax.vmap(lambda x, m: attention.apply(config, params, x, mask=m))
    for mask in (
      masks.lengths([2, 3, 4]),
      masks.segments(np.ones((3, 5), int)),
    ):
      with self.assertRaisesRegex(ValueError, 'of shape'):
        f(x, mask)
    self.assertEqual(
      masks.segments(np.zeros((2, 0), int)).keys.shape, (2, 1, 0)
    )

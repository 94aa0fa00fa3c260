"""Projection and Norm: what a table row says and does."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_same_bits, normal

from mha_jax.attention import (
  GroupedConfig,
  Norm,
  Projection,
  Row,
  init_table,
  num_params,
)

SIZES = {'b': 2, 't': 3, 'd': 5, 'h': 7, 'k': 11, 'v': 13, 'n': 17, 's': 19}
SPECS = {
  'query': ('btd,dhk->bhtk', 'd', 'hk'),
  'key': ('bsd,dnk->bnsk', 'd', 'nk'),
  'value': ('bsd,dnv->bnsv', 'd', 'nv'),
  'out': ('bhtv,hvd->btd', 'hv', 'd'),
  'dense': ('btd,df->btf', 'd', 'f'),
  'length_last': ('btd,dhk->bkht', 'd', 'hk'),
}
AXES = {'d': 'embed', 'h': 'heads', 'n': 'kv_heads', 'k': 'head_dim'} | {
  'v': 'v_head_dim',
  'f': 'mlp',
}
SIZES['f'] = 23
NAMED = [{'testcase_name': x, 'name': x} for x in SPECS]
VARIANTS = {
  'mha': {'num_heads': 6},
  'gqa': {'num_heads': 6, 'num_kv_heads': 2, 'v_head_dim': 7},
  'mqa': {'num_heads': 6, 'num_kv_heads': 1, 'head_dim': 5},
  'no_bias': {'num_heads': 6, 'use_bias': False, 'key_features': 13},
  'norms': {'num_heads': 6, 'num_kv_heads': 3, 'normalize_qk': True},
  'rms': {'num_heads': 6, 'normalize_qk': 'rms', 'out_features': 17},
}


def sizes(letters: str) -> tuple[int, ...]:
  return tuple(SIZES[letter] for letter in letters)


class ProjectionTest(oracles.X64TestCase):
  @parameterized.named_parameters(NAMED)
  def test_shapes(self, name: str):
    """The kernel's letters give shapes, fan-in, axis names and the count."""
    spec, contracted, rest = SPECS[name]
    row = Projection(spec, SIZES)
    self.assertEqual(row.kernel_shape, sizes(contracted + rest))
    self.assertEqual(row.bias_shape, sizes(rest))
    self.assertEqual(row.fan_in, np.prod(sizes(contracted)))
    self.assertEqual(
      row.logical_axes,
      {
        'kernel': tuple(AXES[x] for x in contracted + rest),
        'bias': tuple(AXES[x] for x in rest),
      },
    )
    count = np.prod(sizes(contracted + rest)) + np.prod(sizes(rest))
    self.assertEqual(row.num_params, count)
    without = Projection(spec, SIZES, use_bias=False)
    self.assertEqual(without.shapes, {'kernel': row.kernel_shape})
    self.assertEqual(list(without.logical_axes), ['kernel'])

  @parameterized.named_parameters(NAMED)
  def test_apply(self, name: str):
    """y = einsum(spec, x, kernel) + bias, summed by hand."""
    spec, contracted, rest = SPECS[name]
    row = Projection(spec, SIZES)
    x_letters, output = spec.split(',')[0], spec.split('->')[1]
    x = normal(0, *sizes(x_letters))
    kernel, bias = normal(1, *row.kernel_shape), normal(2, *row.bias_shape)
    got = row.apply(
      {'kernel': jnp.asarray(kernel), 'bias': jnp.asarray(bias)}, jnp.asarray(x)
    )
    wanted = np.zeros(sizes(output))
    for at in np.ndindex(wanted.shape):
      index = dict(zip(output, at, strict=True))
      total = bias[tuple(index[c] for c in rest)]
      for inner in np.ndindex(sizes(contracted)):
        full = index | dict(zip(contracted, inner, strict=True))
        total += (
          x[tuple(full[c] for c in x_letters)]
          * kernel[tuple(full[c] for c in contracted + rest)]
        )
      wanted[at] = total
    oracles.assert_close(got, wanted)

  @parameterized.parameters(
    (None, 'float32', 'float32', 'float32'),
    (None, 'bfloat16', 'float32', 'float32'),
    (None, 'bfloat16', 'bfloat16', 'bfloat16'),
    (None, 'int32', 'float32', 'float32'),
    (None, 'float32', 'float64', 'float64'),
    ('bfloat16', 'float32', 'float32', 'bfloat16'),
    ('float64', 'float32', 'float32', 'float64'),
  )
  def test_dtypes(self, dtype, x_dtype, param_dtype, wanted):
    """The result has the given dtype, or the common one of all."""
    row = Projection('btd,dhk->bhtk', SIZES)
    params = row.init(jax.random.key(0), dtype=jnp.dtype(param_dtype))
    chex.assert_type(list(params.values()), param_dtype)
    x = jnp.ones(sizes('btd'), x_dtype)
    self.assertEqual(row.apply(params, x, dtype).dtype, jnp.dtype(wanted))

  def test_equal_rows_are_equal_and_hashable(self):
    """A row is a value: sizes that the kernel does not have do not matter."""
    a = Projection('btd,dhk->bhtk', {'d': 2, 'h': 3, 'k': 5})
    b = Projection('btd,dhk->bhtk', {'k': 5, 'h': 3, 'd': 2, 'n': 7})
    self.assertEqual(a, b)
    self.assertLen({a, b}, 1)
    self.assertNotEqual(a, Projection('btd,dhk->bhtk', SIZES))


class InitTest(parameterized.TestCase):
  @parameterized.parameters(
    ('btd,df->btf', {'d': 211, 'f': 223}),
    ('btd,dhk->bhtk', {'d': 211, 'h': 13, 'k': 17}),
    ('bhtv,hvd->btd', {'h': 13, 'v': 17, 'd': 211}),
  )
  def test_spread(self, spec: str, sizes: dict[str, int]):
    """LeCun normal: std * sqrt(fan-in) = 1, also for a 3-D kernel."""
    row = Projection(spec, sizes)
    params = row.init(jax.random.key(0))
    self.assertEqual(
      jax.tree.map(jnp.shape, params),
      {'kernel': row.kernel_shape, 'bias': row.bias_shape},
    )
    fan_in = np.prod([sizes[x] for x in row.contracted])
    spread = np.std(np.asarray(params['kernel'], np.float64)) * np.sqrt(fan_in)
    count = np.prod(row.kernel_shape)
    self.assertGreater(count, 46_000)
    # The standard error of a standard deviation is 1 / sqrt(2 count) = 0.33%.
    self.assertAlmostEqual(spread, 1.0, delta=4 / np.sqrt(2 * count))
    self.assertFalse(np.any(params['bias']))

  def test_initialisers_see_fan_in_and_fan_out(self):
    """A user's initialiser gets the flattened shape."""
    seen = []

    def record(key, shape, dtype):
      del key
      seen.append(shape)
      return jnp.full(shape, 2, dtype)

    row = Projection('bhtv,hvd->btd', SIZES)
    params = row.init(jax.random.key(0), {'kernel': record, 'bias': record})
    h, v, d = sizes('hvd')
    self.assertEqual(seen, [(h * v, d), (d,)])
    self.assertEqual(params['kernel'].shape, (h, v, d))

  @parameterized.named_parameters(
    {'testcase_name': name, 'options': options}
    for name, options in VARIANTS.items()
  )
  def test_parameter_count(self, options: dict):
    """The table alone tells the count and the axes of the real tree."""
    config = GroupedConfig(d_model=30, **options)
    params = init_table(config.table, jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(params))
    self.assertEqual(num_params(config.table), count)
    for name, row in config.table.items():
      for parameter, names in row.logical_axes.items():
        self.assertLen(names, params[name][parameter].ndim)
        self.assertLen(set(names), len(names))

  def test_rows_draw_from_their_own_keys(self):
    """Two rows of one shape, and two keys, give different kernels."""
    table = GroupedConfig(d_model=6, num_heads=2).table
    a = init_table(table, jax.random.key(0))
    b = init_table(table, jax.random.key(1))
    kernels = [a['query'], a['key'], a['value'], b['query']]
    values = {float(x['kernel'][0, 0, 0]) for x in kernels}
    self.assertLen(values, 4)


class NormTest(oracles.X64TestCase):
  @parameterized.parameters('layer', 'rms')
  def test_formula(self, kind: str):
    """Against the formula in NumPy; ones are the initial scale."""
    row = Norm(kind, 5)
    x, scale = normal(0, 2, 3, 5), normal(1, 5)
    got = row.apply({'scale': jnp.asarray(scale)}, jnp.asarray(x))
    oracles.assert_close(got, oracles.norm(x, scale, kind))
    params = row.init(jax.random.key(0))
    oracles.assert_same_bits(params, {'scale': np.ones(5, np.float32)})
    self.assertEqual(row.num_params, 5)

  @parameterized.parameters('layer', 'rms')
  def test_bfloat16_statistics_are_float32(self, kind: str):
    """In bfloat16 only the result is rounded."""
    row = Norm(kind, 257)
    x = jnp.asarray(normal(0, 3, 257) + 3, jnp.bfloat16)
    scale = jnp.asarray(normal(1, 257), jnp.bfloat16)
    got = row.apply({'scale': scale}, x)
    self.assertEqual(got.dtype, jnp.bfloat16)
    wanted = oracles.norm(
      np.asarray(x, np.float64), np.asarray(scale, np.float64), kind
    )
    np.testing.assert_allclose(
      np.asarray(got, np.float64), wanted, rtol=2**-8, atol=1e-6
    )


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    'btd,dhk->bht',  # would sum over k
    'btd,dk->btv',
    'btd,dhk->bthkv',
    'btd,ddk->btk',
    'btd,dk->btkk',
  )
  def test_no_projection(self, spec):
    """The output has what input and kernel do not sum over, each once."""
    sizes = SIZES | {'v': 3}
    with self.assertRaisesRegex(ValueError, f"spec='{spec}': the output must"):
      Projection(spec, sizes)

  @parameterized.parameters(
    ('bxd,dhk->bhxk', SIZES, r"spec='bxd.*\['x'\].*the letters are btsd"),
    ('btd->bt', SIZES, r"spec='btd->bt' must read input,kernel->output"),
    ('btd,dhk', SIZES, r"spec='btd,dhk' must read input,kernel->output"),
    ('btd,hdk->bhtk', SIZES, r"spec='btd,hdk.*write it 'd' first"),
    ('btd,hk->bhtk', SIZES, r"spec='btd,hk.*must lead the kernel"),
    ('btd,dhk->bhtk', {'d': 2, 'h': 3}, r"sizes=.* lacks \['k'\]"),
    ('btd,dhk->bhtk', SIZES | {'h': 0}, r"sizes={'h': 0} must be at least 1"),
  )
  def test_bad_specs(self, spec, sizes, message):
    """A string or sizes that describe no projection are refused."""
    with self.assertRaisesRegex(ValueError, message):
      Projection(spec, sizes)

  def test_parameters_of_another_shape(self):
    """A row refuses what would broadcast."""
    row = Projection('btd,dhk->bhtk', SIZES, use_bias=False)
    with self.assertRaisesRegex(ValueError, r'has shapes .*\(5, 7, 1\)'):
      row.apply({'kernel': jnp.ones((5, 7, 1))}, jnp.ones((2, 3, 5)))
    with self.assertRaisesRegex(ValueError, r'has shapes .*\(1,\)'):
      Norm('rms', 5).apply({'scale': jnp.ones(1)}, jnp.ones((2, 5)))

  @parameterized.parameters(((2, 3, 7),), ((3, 5),), ((2, 3, 5, 5),))
  def test_wrong_input(self, shape):
    """An input that does not fit the kernel is named with its shape."""
    row = Projection('btd,dhk->bhtk', SIZES)
    params = row.init(jax.random.key(0))
    with self.assertRaisesRegex(
      ValueError, r"input of shape \([\d, ]+\) does not fit 'btd.*pass an array"
    ):
      row.apply(params, jnp.ones(shape))

  def test_unknown_norm(self):
    """The kinds are named."""
    with self.assertRaisesRegex(ValueError, "kind='batch' must be one of"):
      Norm('batch', 5)


class OwnRowTest(parameterized.TestCase):
  def test_a_row_of_other_parameters(self):
    """A row may have any names, and initialisers of its own."""

    class Sink(Row):
      @property
      def shapes(self):
        return {'sink': (3,)}

      @property
      def initializers(self):
        return {'sink': jax.nn.initializers.constant(-2.0)}

    table = {
      'sink': Sink(),
      'out': Projection('bhtv,hvd->btd', SIZES | {'v': 3}),
    }
    params = init_table(table, jax.random.key(0))
    np.testing.assert_array_equal(params['sink']['sink'], -2 * np.ones(3))
    ones = init_table(
      table, jax.random.key(0), {'sink': jax.nn.initializers.ones}
    )
    np.testing.assert_array_equal(ones['sink']['sink'], np.ones(3))
    assert_same_bits(ones['out'], params['out'])

  def test_a_config_for_a_table(self):
    """The likely slip says what to pass."""
    with self.assertRaisesRegex(ValueError, 'pass config.table'):
      init_table(GroupedConfig(4, 2), jax.random.key(0))

"""Whole layers as pure functions: MHA, GQA, MQA, self and cross."""

import functools
import re
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_close, assert_same_bits, booleans, normal

from mha_jax import attention
from mha_jax.attention import (
  Dropout,
  GroupedConfig,
  Rope,
  init_table,
  masks,
  multihead_attention,
)

B, T, S, D = 2, 7, 11, 5
apply = jax.jit(
  attention.apply,
  static_argnums=0,
  static_argnames=('return_weights', 'dtype', 'implementation'),
)
VARIANTS = {
  'mha': {'num_heads': 5},
  'gqa': {'num_heads': 6, 'num_kv_heads': 2, 'head_dim': 3},
  'mqa': {'num_heads': 3, 'num_kv_heads': 1, 'head_dim': 7, 'v_head_dim': 13},
  'no_bias': {'num_heads': 3, 'head_dim': 2, 'use_bias': False},
  'layer': {'num_heads': 3, 'head_dim': 7, 'normalize_qk': True},
  'rms': {'num_heads': 3, 'head_dim': 7, 'normalize_qk': 'rms'},
  'softcap': {'num_heads': 3, 'head_dim': 7, 'logit_softcap': 0.7},
  'widths': {
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 3,
    'v_head_dim': 7,
    'key_features': 13,
    'value_features': 17,
    'out_features': 19,
  },
}


def params_for(config: GroupedConfig, seed: int = 0, dtype=np.float64) -> dict:
  """Random parameters, biases and scales too."""
  return {
    name: {
      parameter: jnp.asarray(normal(seed + 10 * i + j, *shape) / 2, dtype)
      for j, (parameter, shape) in enumerate(row.shapes.items())
    }
    for i, (name, row) in enumerate(config.table.items())
  }


class LayerTest(oracles.X64TestCase):
  @parameterized.product(variant=tuple(VARIANTS), cross=(False, True))
  def test_against_numpy(self, variant, cross):
    """Output and weights of a layer, self- and cross-attention."""
    options = VARIANTS[variant]
    config = GroupedConfig(d_model=D, **options)
    cross = cross or variant == 'widths'
    p = params_for(config)
    x = normal(1, B, T, D)
    y = normal(2, B, S, config.key_features or D) if cross else None
    z = normal(3, B, S, config.value_features or D) if cross else None
    s = S if cross else T
    mask = booleans(4, B, 1, T, s)
    bias = normal(5, config.num_heads, T, s)
    got = apply(config, p, x, y, z, mask=mask, bias=bias, return_weights=True)
    kind = {True: 'layer', False: None}.get(config.normalize_qk, 'rms')
    wanted = oracles.layer(
      p,
      x,
      y,
      z,
      kind=kind,
      allowed=mask,
      bias=bias,
      softcap=config.logit_softcap,
    )
    assert_close(got, wanted)

  def test_sizes_are_free(self):
    """head_dim and v_head_dim need not follow from d_model."""
    config = GroupedConfig(d_model=D, **VARIANTS['widths'])
    shapes = {x: row.shapes for x, row in config.table.items()}
    self.assertEqual(
      shapes,
      {
        'query': {'kernel': (5, 4, 3), 'bias': (4, 3)},
        'key': {'kernel': (13, 2, 3), 'bias': (2, 3)},
        'value': {'kernel': (17, 2, 7), 'bias': (2, 7)},
        'out': {'kernel': (4, 7, 19), 'bias': (19,)},
      },
    )

  def test_values_from_keys(self):
    """Without inputs_v the values come from inputs_k."""
    config = GroupedConfig(d_model=D, num_heads=5)
    p, x, y = params_for(config), normal(1, B, T, D), normal(2, B, S, D)
    assert_same_bits(apply(config, p, x, y), apply(config, p, x, y, y))
    assert_same_bits(apply(config, p, x), apply(config, p, x, x, x))

  def test_one_head_a_group_is_mha(self):
    """num_kv_heads = num_heads is MHA, parameters included."""
    a = GroupedConfig(d_model=6, num_heads=3)
    b = GroupedConfig(d_model=6, num_heads=3, num_kv_heads=3, head_dim=2)
    p, x = init_table(a.table, jax.random.key(0)), normal(1, B, T, 6)
    assert_same_bits(p, init_table(b.table, jax.random.key(0)))
    assert_same_bits(apply(a, p, x), apply(b, p, x))

  @parameterized.parameters(1, 2)
  def test_gqa_is_mha_with_repeated_kernels(self, num_kv_heads):
    """GQA and MQA equal MHA whose key and value kernels repeat."""
    sizes = {'d_model': D, 'num_heads': 6, 'head_dim': 3, 'v_head_dim': 7}
    small = GroupedConfig(num_kv_heads=num_kv_heads, **sizes)
    large = GroupedConfig(**sizes)
    p, x = params_for(small), normal(1, B, T, D)
    repeat = functools.partial(jnp.repeat, repeats=6 // num_kv_heads, axis=-2)
    wide = p | {
      name: jax.tree.map(repeat, p[name]) for name in ('key', 'value')
    }
    options = {'mask': masks.causal(), 'return_weights': True}
    assert_close(
      apply(small, p, x, **options), apply(large, wide, x, **options)
    )

  @parameterized.parameters((), (3,), (2, 3), (2, 1, 3))
  def test_batch_dimensions(self, *batch):
    """None or several batch dimensions, with masks and positions for each."""
    config = GroupedConfig(
      d_model=D, num_heads=3, head_dim=4, rope=Rope(), num_kv_heads=1
    )
    p, x = params_for(config), normal(1, *batch, T, D)
    flat = x.reshape(-1, T, D)
    mask = booleans(2, *batch, 3, T, T)
    bias = normal(3, *batch, 1, T, T)
    positions = np.random.default_rng(0).integers(0, 99, (*batch, T))
    got, weights = apply(
      config,
      p,
      x,
      mask=mask,
      bias=bias,
      input_positions=positions,
      return_weights=True,
    )
    at = positions.reshape(-1, T)
    wanted = oracles.layer(
      p,
      flat,
      rope=(10_000.0, 'half'),
      positions=(at, at),
      allowed=mask.reshape(-1, 3, T, T),
      bias=bias.reshape(-1, 1, T, T),
    )
    self.assertEqual(got.shape, (*batch, T, D))
    self.assertEqual(weights.shape, (*batch, 3, T, T))
    assert_close(got.reshape(-1, T, D), wanted[0])
    assert_close(weights.reshape(-1, 3, T, T), wanted[1])

  @parameterized.parameters((T, T), (3, T, T), (3, 1, T, T), (2, 1, 1, 1, T))
  def test_masks_of_several_batch_dimensions(self, *shape):
    """A mask broadcasts to (..., h, t, s), whatever its leading shape."""
    config = GroupedConfig(d_model=D, num_heads=3, head_dim=4)
    p, x = params_for(config), normal(1, 2, 3, T, D)
    mask, bias = booleans(2, *shape), normal(3, *shape)
    full = functools.partial(np.broadcast_to, shape=(2, 3, 3, T, T))
    wanted, _ = oracles.layer(
      p,
      x.reshape(6, T, D),
      allowed=full(mask).reshape(6, 3, T, T),
      bias=full(bias).reshape(6, 3, T, T),
    )
    got = apply(config, p, x, mask=mask, bias=bias)
    assert_close(got.reshape(6, T, D), wanted)

  def test_input_positions_shift_masks(self):
    """causal compares input_positions, in self-attention on both sides."""
    config = GroupedConfig(d_model=D, num_heads=3, head_dim=4)
    p, x = params_for(config), normal(1, B, T, D)
    at = np.random.default_rng(0).permuted(
      np.tile(np.arange(T), (B, 1)), axis=1
    )
    got = apply(config, p, x, mask=masks.causal(), input_positions=at)
    allowed = at[:, None, None, :] <= at[:, None, :, None]
    assert_close(got, oracles.layer(p, x, allowed=allowed)[0])
    y, at_q = normal(2, B, S, D), at[0] + 2
    got = apply(config, p, x, y, mask=masks.causal(), input_positions=at_q)
    allowed = np.arange(S) <= at_q[:, None]
    assert_close(got, oracles.layer(p, x, y, allowed=allowed)[0])

  @parameterized.parameters(True, False)
  def test_positions_do_not_depend_on_jit(self, positional):
    """Passing the inputs again as keys means the same, jitted or not."""
    config = GroupedConfig(d_model=D, num_heads=3, head_dim=4)
    p, x = params_for(config), jnp.asarray(normal(1, B, T, D))
    options = {'mask': masks.causal(), 'input_positions': np.arange(T) + 3}
    arguments = (x,) * 3 if positional else (x,) * 2
    assert_close(
      apply(config, p, *arguments, **options),
      attention.apply(config, p, *arguments, **options),
    )


class GatesTest(oracles.X64TestCase):
  config = GroupedConfig(d_model=D, num_heads=6, num_kv_heads=2, head_dim=3)

  def test_ones_change_nothing(self):
    """Gates of one: the same bits."""
    p, x = params_for(self.config), normal(1, B, T, D)
    got = attention.apply(self.config, p, x, head_gates=np.ones(6))
    assert_same_bits(got, attention.apply(self.config, p, x))

  def test_zero_removes_a_head(self):
    """A gate of zero is a zero out kernel, to the bit."""
    p, x = params_for(self.config), normal(1, B, T, D)
    gates = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    cut = p | {'out': dict(p['out'])}
    cut['out']['kernel'] = p['out']['kernel'].at[np.array([2, 4])].set(0)
    got = attention.apply(self.config, p, x, head_gates=gates)
    assert_close(got, attention.apply(self.config, cut, x), 1e-15)
    out = p['out']['bias']
    none = attention.apply(self.config, p, x, head_gates=np.zeros(6))
    assert_same_bits(none, np.broadcast_to(out, none.shape))

  def test_any_gate_and_its_gradient(self):
    """Gates scale heads before out; the layer is linear in them."""
    p, x, gates = params_for(self.config), normal(1, B, T, D), normal(2, 6)

    def output(gates):
      return apply(self.config, p, x, head_gates=gates)

    assert_close(output(gates), oracles.layer(p, x, gates=gates)[0])
    rates = jax.jacfwd(output)(gates)
    assert_close(
      np.asarray(rates) @ gates + np.asarray(p['out']['bias']),
      oracles.layer(p, x, gates=gates)[0],
    )


class ContractsTest(parameterized.TestCase):
  def test_dropout_is_that_of_the_core(self):
    """One key: the layer drops what multihead_attention drops."""
    config = GroupedConfig(d_model=6, num_heads=3, use_bias=False)
    eye = np.eye(6, dtype=np.float32).reshape(6, 3, 2)
    p = {name: {'kernel': jnp.asarray(eye)} for name in config.table}
    p['out'] = {'kernel': jnp.asarray(eye.reshape(6, 6).reshape(3, 2, 6))}
    x = normal(0, B, T, 6).astype(np.float32)
    dropout = Dropout(jax.random.key(0), 0.4)
    got = apply(config, p, x, dropout=dropout)
    heads = np.moveaxis(x.reshape(B, T, 3, 2), 1, 2)
    core = multihead_attention(heads, heads, heads, dropout=dropout)
    assert_close(got, np.moveaxis(core, 1, 2).reshape(B, T, 6), 1e-6)

  @parameterized.parameters(None, 'bfloat16', 'float32')
  def test_dtypes(self, dtype):
    """Output and weights have the compute dtype, by strict promotion."""
    param_dtype = 'float32' if dtype else 'bfloat16'
    config = GroupedConfig(
      d_model=6,
      num_heads=3,
      num_kv_heads=1,
      rope=Rope(),
      normalize_qk='rms',
      logit_softcap=5.0,
    )
    p = params_for(config, dtype=param_dtype)
    x = jnp.asarray(normal(1, B, T, 6), 'bfloat16')
    with (
      jax.numpy_dtype_promotion('strict'),
      jax.numpy_rank_promotion('raise'),
    ):

      def loss(p, x, bias, gates):
        out, weights = attention.apply(
          config,
          p,
          x,
          mask=masks.causal() & masks.lengths([5, 3]),
          bias=bias,
          input_positions=np.arange(T) + 1,
          dropout=Dropout(jax.random.key(0), 0.2),
          head_gates=gates,
          dtype=dtype,
          return_weights=True,
        )
        wanted = jnp.dtype(dtype or 'bfloat16')
        self.assertEqual((out.dtype, weights.dtype), (wanted, wanted))
        return jnp.sum(out).astype(jnp.float32)

      bias = normal(2, 3, T, T).astype(np.float32)
      gates = np.ones(3, np.float32)
      grads = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3)), p, x, bias, gates)
    chex.assert_trees_all_equal_dtypes(grads[0], p)

  def test_padding_tokens_do_no_harm(self):
    """Keys from NaN inputs are inert for the outputs and input gradients."""
    config = GroupedConfig(d_model=D, num_heads=3, head_dim=4, num_kv_heads=1)
    p = params_for(config, dtype=np.float32)
    x = normal(1, B, T, D).astype(np.float32)
    y = normal(2, B, S, D).astype(np.float32)

    def loss(x, y):
      out = attention.apply(config, p, x, y, mask=masks.lengths([6, 4]))
      return jnp.sum(out**2), out

    f = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    results = []
    for filler in (np.nan, 0.0):
      y[0, 6:] = y[1, 4:] = filler
      results.append(f(x, y))
    chex.assert_tree_all_finite(results[0])
    assert_same_bits(*results)

  def test_lists(self):
    """Nested lists serve as inputs, positions, gates and bias."""
    config = GroupedConfig(d_model=2, num_heads=1, rope=Rope())
    p = params_for(config, dtype=np.float32)
    x, bias = normal(1, 3, 2).astype(np.float32), np.ones((3, 3), np.float32)
    lists = attention.apply(
      config,
      p,
      x.tolist(),
      bias=bias.tolist(),
      input_positions=[4, 5, 9],
      head_gates=[0.5],
    )
    arrays = attention.apply(
      config,
      p,
      jnp.asarray(x),
      bias=jnp.asarray(bias),
      input_positions=jnp.array([4, 5, 9]),
      head_gates=jnp.array([0.5]),
    )
    assert_same_bits(lists, arrays)


class ErrorsTest(parameterized.TestCase):
  """Bad calls: a ValueError with the name, the value and the remedy."""

  config = GroupedConfig(
    d_model=6, num_heads=3, key_features=5, value_features=7
  )
  x, y, z = (
    normal(i, B, *shape).astype(np.float32)
    for i, shape in enumerate(((T, 6), (S, 5), (S, 7)))
  )

  @parameterized.parameters(
    ({'num_heads': 6}, 'num_heads=6', 'divide d_model=64; nearest: 4, 8'),
    ({'num_heads': 128}, 'num_heads=128', 'divide d_model=64; nearest: 64'),
    ({'num_heads': 0}, 'num_heads=0', 'positive integer'),
    ({'num_heads': -2}, 'num_heads=-2', 'positive integer'),
    ({'num_heads': True}, 'num_heads=True', 'positive integer'),
    ({'num_kv_heads': 3}, 'num_kv_heads=3', 'num_heads=8; nearest: 2, 4'),
    ({'num_kv_heads': 16}, 'num_kv_heads=16', 'num_heads=8; nearest: 8'),
    ({'head_dim': 0}, 'head_dim=0', 'positive integer'),
    ({'v_head_dim': -1}, 'v_head_dim=-1', 'positive integer'),
    ({'out_features': 0}, 'out_features=0', 'positive integer'),
    ({'normalize_qk': 'batch'}, "normalize_qk='batch'", "'layer' or 'rms'"),
    ({'rope': Rope(), 'head_dim': 7}, 'head_dim=7', 'even .*nearest: 6, 8'),
    ({'logit_softcap': -1.0}, 'logit_softcap=-1.0', 'finite; None turns'),
    ({'logit_softcap': np.nan}, 'logit_softcap=nan', 'finite; None turns'),
  )
  def test_bad_configs(self, changes, value, remedy):
    """A config that cannot be is refused when it is made."""
    with self.assertRaisesRegex(ValueError, f'{value} must .*{remedy}'):
      GroupedConfig(**{'d_model': 64, 'num_heads': 8} | changes)

  @parameterized.parameters(
    ({'inputs_k': None}, 'inputs_v is given without inputs_k', 'pass the keys'),
    ({'inputs_q': y}, r'inputs_q of shape \(2, 11, 5\)', 'length, 6'),
    ({'inputs_k': z}, r'inputs_k of shape \(2, 11, 7\)', 'length, 5'),
    ({'inputs_v': y}, r'inputs_v of shape \(2, 11, 5\)', 'length, 7'),
    ({'inputs_q': x[0, 0]}, r'inputs_q of shape \(6,\)', 'length, 6'),
    ({'inputs_v': z[:, 1:]}, r'inputs_v of shape \(2, 10, 7\)', 'must agree'),
    ({'inputs_q': x[:1]}, r'inputs_q of shape \(1, 7, 6\)', 'must agree'),
    ({'mask': np.ones((T, T), bool)}, r'mask of shape .*7, 7\)', 'give each'),
    ({'mask': np.ones((T, S))}, 'mask has dtype float32', 'mask != 0'),
    (
      {'mask': masks.lengths([3] * 5)},
      r'lengths of shape \(5, 1\)',
      'give each',
    ),
    ({'mask': np.ones((1,) * 5, bool)}, r'mask .*of shape', r'broad.*\(.*h, t'),
    ({'bias': np.ones((T, S), bool)}, 'bias has dtype bool', 'as mask='),
    ({'bias': np.ones((S, T))}, r'bias of shape .*11, 7\)', 'give each'),
    ({'head_gates': np.ones(2)}, r'head_gates of shape \(2,\)', r'be \(3,\)'),
    ({'head_gates': 1.0}, r'head_gates of shape \(\)', r'must be \(3,\)'),
    ({'input_positions': np.arange(S)}, 'input_positions', r'\(2, 7\).*11'),
    ({'input_positions': np.ones(T)}, 'input_positions', 'integers.*float32'),
    ({'key_positions': np.arange(T)}, 'key_positions', r'\(2, 11\).*7'),
    ({'implementation': 'fast'}, "implementation='fast'", 'use one of'),
  )
  def test_bad_calls(self, changes, value, remedy):
    """And no product or softmax is taken before."""
    p = params_for(self.config, dtype=np.float32)
    arguments = {'inputs_q': self.x, 'inputs_k': self.y, 'inputs_v': self.z}
    forbidden = mock.Mock(side_effect=AssertionError('computed'))
    with (
      mock.patch.object(jnp, 'einsum', forbidden),
      mock.patch.object(jax.nn, 'softmax', forbidden),
      self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'),
    ):
      attention.apply(self.config, p, **arguments | changes)

  @parameterized.parameters('mask', 'bias')
  def test_bad_masks_of_several_batch_dimensions(self, name):
    """A leading shape that does not broadcast is named."""
    config = GroupedConfig(d_model=6, num_heads=3)
    p = params_for(config, dtype=np.float32)
    x = normal(0, 2, 3, T, 6).astype(np.float32)
    array = np.ones((5, 3, 1, T, T), bool if name == 'mask' else np.float32)
    with self.assertRaisesRegex(
      ValueError, rf'{name}.* of shape \(5, 3, 1, 7, 7\) does not broadcast'
    ):
      attention.apply(config, p, x, **{name: array})

  @parameterized.parameters(
    (lambda p: p | {'key': p['query']}, r"params\['key'\].*asks for"),
    (lambda p: {n: p[n] for n in ('query', 'key')}, r"params\['value'\] has"),
    (lambda p: p | {'key_ln': {'scale': np.ones(2)}}, "'key_ln'.*not ask"),
    (
      lambda p: p | {'out': {'kernel': p['out']['kernel']}},
      r"params\['out'\].*another config",
    ),
  )
  def test_params_of_another_config(self, change, message):
    """Are refused: broadcasting would make a wrong answer of them."""
    config = GroupedConfig(d_model=6, num_heads=3, num_kv_heads=1)
    params = change(params_for(config, dtype=np.float32))
    with self.assertRaisesRegex(ValueError, message):
      attention.apply(config, params, normal(0, 2, 7, 6).astype(np.float32))

  @parameterized.parameters(
    (
      {'dropout': 0.1},
      r'dropout=0.1 must be a Dropout, as Dropout\(key, 0.1\)',
    ),
    ({'dropout': Dropout(None, 0.1)}, r'dropout.key=None must be a random key'),
    ({'dropout': Dropout(3, 0.1)}, r'dropout.key=3 must be a random key'),
    ({'params': [1]}, r"params of type list must be a dict by row: \['key'"),
    ({'config': {'d_model': 4}}, "config={'d_model': 4} must be an Attention"),
    ({'precision': 'most'}, "precision='most' must be one jax.lax.Precision"),
  )
  def test_bad_types(self, changes, message):
    """The likely slips: a rate for a Dropout, a dict for a config."""
    config = GroupedConfig(d_model=4, num_heads=2)
    arguments = {
      'config': config,
      'params': init_table(config.table, jax.random.key(0)),
      'inputs_q': np.ones((1, 3, 4), np.float32),
    }
    with self.assertRaisesRegex(ValueError, message):
      attention.apply(**arguments | changes)


class PrecisionTest(parameterized.TestCase):
  @parameterized.parameters(
    (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST),
    ('highest', jax.lax.Precision.HIGHEST),
    ('float32', jax.lax.Precision.HIGHEST),
    ('bfloat16_3x', jax.lax.Precision.HIGH),
    ('fastest', jax.lax.Precision.DEFAULT),
    (None, jax.lax.Precision.HIGH),
  )
  def test_reaches_every_product(self, given, wanted):
    """By any of jax.lax.Precision's names; None leaves what is set around."""
    self.check_products(given, wanted, 'exact')

  def test_reaches_every_product_by_blocks(self):
    """Those of the gradient too, which is traced later."""
    highest = jax.lax.Precision.HIGHEST
    self.check_products(highest, highest, 'blockwise')

  def check_products(self, given, wanted, implementation):
    config = GroupedConfig(d_model=4, num_heads=2)
    params = init_table(config.table, jax.random.key(0))
    f = functools.partial(
      attention.apply,
      config,
      params,
      precision=given,
      implementation=implementation,
    )
    with jax.default_matmul_precision('high'):
      jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(f(x))))(
        jnp.ones((1, 3, 4))
      )
    found = re.findall(r'precision=([^\n]*)', str(jaxpr))
    products = [x for x in found if 'Precision' in x]
    self.assertGreater(len(products), 8)
    for product in products:
      self.assertEqual(product.count(f'Precision.{wanted.name}'), 2, product)


class PlainFieldsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'use_bias': 'no'}, "use_bias='no' must be True or False"),
    ({'use_bias': 2}, 'use_bias=2 must be True or False'),
    ({'use_bias': []}, r'use_bias=\[\] must be a plain value or a tuple'),
    ({'normalize_qk': np.array(['rms'])}, 'normalize_qk=.* a plain value'),
    ({'logit_softcap': 1e39}, 'logit_softcap=1e.39 must be positive'),
    ({'logit_softcap': 10**400}, 'must be positive and finite'),
  )
  def test_refused(self, options, message):
    """Words are no booleans, arrays cannot be hashed, float32 has an end."""
    with self.assertRaisesRegex(ValueError, message):
      attention.GroupedConfig(8, 2, **options)

  def test_one_is_true(self):
    """And the config is that of True."""
    for value in (1, np.bool_(True)):
      config = attention.GroupedConfig(8, 2, use_bias=value)
      self.assertIs(config.use_bias, True)

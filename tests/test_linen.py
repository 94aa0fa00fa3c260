"""The Linen shells: Flax's own module, and Flax's transformations."""

import functools
from unittest import mock

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from flax.core import meta
from oracles import assert_close, assert_same_bits, booleans, normal

import mha_jax.linen as mha
from mha_jax import attention
from mha_jax.attention import Dropout, GroupedConfig, Rope, masks

B, T, S, D = 2, 7, 11, 6
SHELLS = {
  'mha': functools.partial(mha.MultiHeadAttention, num_heads=3),
  'gqa': functools.partial(
    mha.GroupedQueryAttention, num_heads=6, num_kv_heads=2, head_dim=3
  ),
  'mqa': functools.partial(mha.MultiQueryAttention, num_heads=3, v_head_dim=5),
}


def randomised(variables, seed: int = 0):
  """The same tree with random values, biases and scales too."""
  leaves, tree = jax.tree.flatten(variables)
  return tree.unflatten(
    jnp.asarray(normal(seed + i, *x.shape) / 2, x.dtype)
    for i, x in enumerate(leaves)
  )


def variables_of(module, *inputs, seed: int = 0):
  """Random variables of the module's tree, without its initialisers."""
  init = functools.partial(module.init, deterministic=True)
  return randomised(jax.eval_shape(init, jax.random.key(0), *inputs), seed)


def causal_padding(x_shape):
  """Flax's helpers: causal and padding, 0/1 numbers."""
  batch, t = x_shape[:-2], x_shape[-2]
  padding = np.ones((*batch, t), np.float32)
  padding[..., -2:] = 0
  return nn.combine_masks(
    nn.make_causal_mask(np.ones((*batch, t))),
    nn.make_attention_mask(np.ones((*batch, t)), padding),
  )


FLAX_CASES = {
  # options, shapes of the inputs, mask
  'self': ({'num_heads': 3}, [(B, T, D)], None),
  'causal': (
    {'num_heads': 3},
    [(B, T, D)],
    nn.make_causal_mask(np.ones((B, T))),
  ),
  'padding': ({'num_heads': 2}, [(B, T, D)], causal_padding((B, T, D))),
  'cross': (
    {'num_heads': 5, 'qkv_features': 35, 'out_features': 13},
    [(B, T, D), (B, S, 17), (B, S, 19)],
    nn.make_attention_mask(
      np.ones((B, T)), booleans(0, B, S) | (np.arange(S) < 1)
    ),
  ),
  'no_bias': (
    {'num_heads': 3, 'use_bias': False, 'qkv_features': 15},
    [(B, T, D), (B, S, D)],
    None,
  ),
  'qk_norm': (
    {'num_heads': 3, 'qkv_features': 21, 'normalize_qk': True},
    [(B, T, D)],
    None,
  ),
  'initialisers': (
    {
      'num_heads': 3,
      'kernel_init': nn.initializers.xavier_uniform(),
      'bias_init': nn.initializers.normal(0.1),
    },
    [(B, T, D), (B, S, 5)],
    booleans(1, B, 1, T, S) | np.eye(T, S, dtype=bool),
  ),
  'batches': (
    {'num_heads': 3},
    [(2, 3, T, D)],
    causal_padding((2, 3, T, D)),
  ),
  'no_batch': ({'num_heads': 3}, [(T, D)], nn.make_causal_mask(np.ones(T))),
}


class Pair:
  """Our shell and Flax's module with the same options."""

  def __init__(self, case: str, **more):
    options, shapes, self.mask = FLAX_CASES[case]
    self.ours = mha.MultiHeadAttention(**options | more)
    self.theirs = nn.MultiHeadDotProductAttention(**options | more)
    self.inputs = [normal(i, *shape) for i, shape in enumerate(shapes)]

  def init(self, module):
    return jax.jit(module.init)(jax.random.key(0), *self.inputs)

  def value_and_grads(self, module, variables, inputs):
    """Output and the gradients of parameters and inputs."""

    def loss(variables, *inputs):
      out = module.apply(variables, *inputs, mask=self.mask)
      weight = jnp.reshape(jnp.cos(jnp.arange(out.size)), out.shape)
      return jnp.sum(out * weight.astype(out.dtype)), out

    over = tuple(range(1 + len(inputs)))
    f = jax.jit(jax.grad(loss, over, has_aux=True))
    return f(variables, *inputs)


class FlaxTest(oracles.X64TestCase):
  """Against flax.linen.MultiHeadDotProductAttention."""

  @parameterized.product(case=tuple(FLAX_CASES))
  def test_same(self, case):
    """Tree, initial values to the bit, outputs and gradients to rounding."""
    pair = Pair(case, dtype=jnp.float64)
    ours, theirs = pair.init(pair.ours), pair.init(pair.theirs)
    assert_same_bits(ours, theirs)
    chex.assert_trees_all_equal_dtypes(ours, theirs)
    variables = jax.tree.map(
      lambda x: x.astype(jnp.float64), randomised(theirs)
    )
    got, wanted = (
      pair.value_and_grads(module, variables, pair.inputs)
      for module in (pair.ours, pair.theirs)
    )
    grads, their_grads = got[0], wanted[0]
    # The key bias adds the same to all scores of a query: no gradient.
    for tree in (grads[0], their_grads[0]):
      bias = tree['params']['key'].pop('bias', None)
      if bias is not None and 'query_ln' not in tree['params']:
        self.assertLess(np.max(np.abs(bias)), 1e-12)
    assert_close(got[1], wanted[1])
    assert_close(grads, their_grads)

  @parameterized.parameters('causal', 'cross', 'qk_norm')
  def test_bfloat16(self, case):
    """dtype=bfloat16: float32 parameters, the same up to bfloat16."""
    pair = Pair(case, dtype=jnp.bfloat16)
    variables, theirs = (
      variables_of(module, *pair.inputs) for module in (pair.ours, pair.theirs)
    )
    chex.assert_trees_all_equal(variables, theirs)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    inputs = [jnp.asarray(x, jnp.float32) for x in pair.inputs]
    exact = Pair(case, dtype=jnp.float64)
    (got, out), (wanted, _), (best, best_out) = (
      p.value_and_grads(module, variables, inputs)
      for p, module in (
        (pair, pair.ours),
        (pair, pair.theirs),
        (exact, exact.theirs),
      )
    )
    self.assertEqual(out.dtype, jnp.bfloat16)
    chex.assert_trees_all_equal_dtypes(got, wanted)
    assert_close(out, best_out, 2**-6)
    # A bias gradient is a sum that cancels: rounding there says nothing.
    for tree in (got, best):
      for row in tree[0]['params'].values():
        row.pop('bias', None)
    assert_close(got, best, 2**-5)  # eight roundings of bfloat16

  def test_fully_masked_rows(self):
    """Flax gives the mean of the values there, we give zeros before out."""
    x = normal(0, B, T, D)
    mask = booleans(0, B, 1, T, T)
    mask[:, :, 3] = False
    module = mha.MultiHeadAttention(num_heads=3, param_dtype=jnp.float64)
    variables = variables_of(module, x)
    out = module.apply(variables, x, mask=mask)
    bias = variables['params']['out']['bias']
    assert_same_bits(out[:, 3], np.broadcast_to(bias, (B, D)))

  @parameterized.product(rate=(0.1, 0.5))
  def test_deterministic_loads_and_runs(self, rate):
    """Dropout off: Flax's module with a rate gives what ours gives."""
    pair = Pair('self', dropout_rate=rate, deterministic=True)
    x = pair.inputs[0]
    theirs = pair.theirs.clone(deterministic=None)
    variables = variables_of(theirs, x)
    assert_close(
      pair.ours.apply(variables, x), pair.theirs.apply(variables, x), 1e-6
    )


class ShellTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)
    self.y = normal(1, B, S, D).astype(np.float32)

  @parameterized.product(shell=tuple(SHELLS))
  def test_no_arithmetic(self, shell):
    """A shell is its pure function, with everything passed on."""
    module = SHELLS[shell](
      head_dim=4, rope=Rope(), logit_softcap=2.0, normalize_qk='rms'
    )
    variables = variables_of(module, self.x, self.y)
    options = {
      'mask': masks.causal() & masks.lengths([5, 9]),
      'bias': normal(2, T, S).astype(np.float32),
      'input_positions': np.arange(T) + 3,
      'key_positions': np.arange(S) + 1,
      'head_gates': normal(3, module.num_heads).astype(np.float32),
    }
    config = GroupedConfig(
      d_model=D,
      num_heads=module.num_heads,
      num_kv_heads={'mha': 3, 'gqa': 2, 'mqa': 1}[shell],
      head_dim=4,
      v_head_dim=module.v_head_dim,
      rope=Rope(),
      logit_softcap=2.0,
      normalize_qk='rms',
    )
    got = jax.jit(module.apply)(variables, self.x, self.y, **options)
    pure = jax.jit(attention.apply, static_argnums=0)
    wanted = pure(config, variables['params'], self.x, self.y, **options)
    assert_same_bits(got, wanted)
    if shell != 'gqa':
      return
    f = jax.jit(functools.partial(module.apply, variables, self.x, self.y))
    without = {n: options | {n: None} for n in options if n != 'key_positions'}
    with self.assertRaisesRegex(ValueError, 'pass key_positions'):
      f(**options | {'key_positions': None})
    for name, less in without.items():
      self.assertGreater(oracles.relative_error(f(**less), got), 1e-3, name)

  @parameterized.product(shell=tuple(SHELLS), jit=(False, True))
  def test_lists_and_numpy(self, shell, jit):
    """Nested lists and NumPy arrays serve as inputs."""
    module = SHELLS[shell]()
    f = jax.jit(module.apply) if jit else module.apply
    variables = variables_of(module, self.x)
    wanted = f(variables, jnp.asarray(self.x), jnp.asarray(self.y))
    assert_same_bits(f(variables, self.x, self.y), wanted)
    if not jit:
      lists = module.apply(variables, self.x.tolist(), self.y.tolist())
      assert_same_bits(lists, wanted)

  def test_input_positions(self):
    """Positions reach RoPE and masks; a list and (t,) will do."""
    module = mha.MultiHeadAttention(num_heads=3, rope=Rope())
    variables = variables_of(module, self.x)
    f = functools.partial(module.apply, variables, self.x)
    causal, at = masks.causal(), [3, 1, 4, 0, 5, 9, 2]
    order = np.argsort(at)
    moved = f(mask=causal, input_positions=at)
    rows = np.tile(at, (B, 1))
    assert_same_bits(f(mask=causal, input_positions=rows), moved)
    straight = module.apply(
      variables,
      self.x[:, order],
      mask=causal,
      input_positions=np.sort(at),
    )
    assert_close(moved[:, order], straight, 1e-5)

  @parameterized.parameters(('gqa',))
  def test_vmap_and_grad(self, shell):
    """vmap over the batch is the batch; gradients reach all parameters."""
    module = SHELLS[shell](normalize_qk=True)
    variables = variables_of(module, self.x)
    f = functools.partial(module.apply, variables)
    assert_close(jax.jit(jax.vmap(f))(self.x), jax.jit(f)(self.x), 1e-5)

    def loss(variables):
      return jnp.sum(jnp.sin(module.apply(variables, self.x)))

    grads = jax.jit(jax.grad(loss))(variables)
    for path, x in jax.tree_util.tree_leaves_with_path(grads):
      self.assertTrue(np.any(x != 0), jax.tree_util.keystr(path))

  def test_sow_weights(self):
    """The weights (b, h, t, s) are sown before dropout; outputs stay."""
    module = mha.MultiQueryAttention(num_heads=3, dropout_rate=0.5)
    variables = variables_of(module, self.x, self.y)
    f = functools.partial(
      module.apply,
      variables,
      self.x,
      self.y,
      deterministic=False,
      rngs={'dropout': jax.random.key(1)},
    )
    out, sown = f(sow_weights=True, mutable=['intermediates'])
    (weights,) = sown['intermediates']['attention_weights']
    self.assertEqual(weights.shape, (B, 3, T, S))
    _, wanted = oracles.layer(variables['params'], self.x, self.y)
    assert_close(weights, wanted, 1e-5)
    assert_same_bits(f(), out)
    plain, state = f(mutable=['intermediates'])
    assert_same_bits(plain, out)
    self.assertEmpty(state)


class Unnamed(nn.Module):
  """A parent that leaves its child's name to Linen."""

  child: type

  @nn.compact
  def __call__(self, x):
    return self.child(num_heads=3)(x)


class UnnamedTest(parameterized.TestCase):
  @parameterized.parameters(
    'MultiHeadAttention', 'MultiHeadDotProductAttention'
  )
  def test_in_a_parent(self, name):
    """A change of import: Linen's name for the child, its initial values."""
    x = normal(0, B, T, D).astype(np.float32)
    ours, theirs = Unnamed(getattr(mha, name)), Unnamed(getattr(nn, name))
    variables = jax.jit(theirs.init)(jax.random.key(0), x)
    assert_same_bits(jax.jit(ours.init)(jax.random.key(0), x), variables)
    self.assertIn(f'{name}_0', variables['params'])
    assert_close(ours.apply(variables, x), theirs.apply(variables, x), 1e-5)


class DropoutTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)
    self.module = mha.MultiHeadAttention(num_heads=3, dropout_rate=0.5)
    self.variables = variables_of(self.module, self.x)
    self.apply = functools.partial(self.module.apply, self.variables, self.x)

  def test_same_key_same_bits(self):
    """The module, its dropout_rng and the pure function agree on a key."""
    key = jax.random.key(5)
    got = self.apply(deterministic=False, dropout_rng=key)
    wanted = attention.apply(
      GroupedConfig(d_model=D, num_heads=3),
      self.variables['params'],
      self.x,
      dropout=Dropout(key, 0.5),
    )
    assert_same_bits(got, wanted)
    streams = [
      self.apply(deterministic=False, rngs={'dropout': jax.random.key(i)})
      for i in (0, 0, 1)
    ]
    assert_same_bits(streams[0], streams[1])
    self.assertFalse(np.array_equal(streams[0], streams[2]))
    self.assertFalse(np.array_equal(streams[0], self.apply(deterministic=True)))

  def test_deterministic_semantics(self):
    """As in Flax: here or in the constructor, not both, not neither."""
    off = mha.MultiHeadAttention(
      num_heads=3, dropout_rate=0.5, deterministic=True
    )
    assert_same_bits(
      off.apply(self.variables, self.x), self.apply(deterministic=True)
    )
    without = mha.MultiHeadAttention(num_heads=3)
    for flag in (None, True, False):
      assert_same_bits(
        without.apply(self.variables, self.x, deterministic=flag),
        self.apply(deterministic=True),
      )
    with self.assertRaisesRegex(ValueError, 'deterministic'):
      self.apply()
    with self.assertRaisesRegex(ValueError, 'deterministic'):
      off.apply(self.variables, self.x, deterministic=True)
    with self.assertRaisesRegex(flax.errors.InvalidRngError, 'dropout'):
      self.apply(deterministic=False)


class Block(nn.Module):
  """A residual attention layer, in the form that nn.scan wants."""

  attention: functools.partial
  deterministic: bool = False

  @nn.compact
  def __call__(self, x, _=None):
    layer = self.attention(dropout_rate=0.3)
    return x + layer(
      x, mask=masks.causal(), deterministic=self.deterministic
    ), ()


class LiftedTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)
    self.rngs = {'dropout': jax.random.key(1)}

  @parameterized.parameters(('mha',), ('gqa',))
  def test_remat(self, shell):
    """nn.remat with dropout: the same output and gradients."""

    def value_and_grad(block, variables):
      def loss(variables):
        out, _ = block.apply(variables, self.x, rngs=self.rngs)
        return jnp.sum(out**2), out

      return jax.jit(jax.grad(loss, has_aux=True))(variables)

    plain = Block(SHELLS[shell])
    variables = jax.jit(plain.init)(
      {'params': jax.random.key(0)} | self.rngs, self.x
    )
    lifted = nn.remat(Block)(SHELLS[shell])
    got = value_and_grad(lifted, variables)
    wanted = value_and_grad(plain, variables)
    for tree in (got, wanted):
      for row in tree[0]['params'].values():
        row['key'].pop('bias')  # its gradient is 0 up to rounding
    assert_close(got, wanted, 1e-5)

  @parameterized.parameters(('mha',), ('gqa',))
  def test_scan(self, shell):
    """nn.scan over three layers is three layers, dropout per layer."""
    scanned = nn.scan(
      Block,
      variable_axes={'params': 0},
      split_rngs={'params': True, 'dropout': True},
      length=3,
    )
    stack = scanned(SHELLS[shell], deterministic=True)
    variables = jax.jit(stack.init)(jax.random.key(0), self.x)
    got, _ = jax.jit(stack.apply)(variables, self.x)
    x, one = self.x, jax.jit(Block(SHELLS[shell], deterministic=True).apply)
    for i in range(3):
      layer = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
      x, _ = one(layer, x)
    assert_close(got, x, 1e-5)
    kernels = jax.tree.leaves(variables)
    self.assertFalse(np.array_equal(kernels[-1][0], kernels[-1][1]))
    noisy = scanned(SHELLS[shell])
    out, _ = jax.jit(noisy.apply)(variables, self.x, rngs=self.rngs)
    chex.assert_tree_all_finite(out)
    self.assertGreater(oracles.relative_error(out, got), 1e-3)

  @parameterized.parameters(
    (nn.with_partitioning, nn.Partitioned),
    (nn.with_logical_partitioning, nn.LogicallyPartitioned),
  )
  def test_partitioned_boxes(self, with_axes, box):
    """An initialiser's box comes through, with the kernel's real shape."""
    module = mha.GroupedQueryAttention(
      num_heads=6,
      num_kv_heads=2,
      head_dim=3,
      kernel_init=with_axes(
        nn.initializers.lecun_normal(), ('embed', 'heads', 'kv')
      ),
    )
    variables = jax.jit(module.init)(jax.random.key(0), self.x)
    plain = module.clone(kernel_init=nn.initializers.lecun_normal())
    wanted = jax.jit(plain.init)(jax.random.key(0), self.x)
    for name, row in variables['params'].items():
      self.assertIsInstance(row['kernel'], box, name)
      self.assertEqual(row['kernel'].names, ('embed', 'heads', 'kv'))
      self.assertEqual(row['kernel'].unbox().ndim, 3)
      self.assertNotIsInstance(row['bias'], meta.AxisMetadata)
    assert_same_bits(nn.unbox(variables), wanted)
    assert_same_bits(
      module.apply(variables, self.x), plain.apply(wanted, self.x)
    )

  @parameterized.product(shell=('gqa',), dtype=(None, 'bfloat16'))
  def test_strict_promotion(self, shell, dtype):
    """Shells run under strict dtype and rank promotion, in bfloat16 too."""
    module = SHELLS[shell](
      head_dim=4,
      dtype=dtype,
      dropout_rate=0.2,
      rope=Rope(),
      normalize_qk=True,
    )
    x = jnp.asarray(self.x, dtype)
    variables = variables_of(module, x)
    with (
      jax.numpy_dtype_promotion('strict'),
      jax.numpy_rank_promotion('raise'),
    ):

      def loss(variables, x):
        out = module.apply(
          variables,
          x,
          mask=causal_padding(x.shape),
          bias=np.ones((T, T), np.float32),
          head_gates=np.ones(module.num_heads, np.float32),
          input_positions=np.arange(T),
          deterministic=False,
          rngs=self.rngs,
        )
        self.assertEqual(out.dtype, jnp.dtype(dtype or 'float32'))
        return jnp.sum(out).astype(jnp.float32)

      grads = jax.eval_shape(jax.grad(loss), variables, x)
    chex.assert_trees_all_equal_dtypes(grads, variables)


class ErrorsTest(parameterized.TestCase):
  """Bad calls: a ValueError with the name, the value and the remedy."""

  x = normal(0, B, T, D).astype(np.float32)

  @parameterized.parameters(
    ('mha', {'num_heads': 4}, 'num_heads=4', 'd_model=6; nearest: 3, 6'),
    ('mha', {'qkv_features': 7}, 'num_heads=3', 'qkv_features=7; nearest'),
    ('mha', {'num_heads': 0, 'qkv_features': 6}, 'num_heads=0', 'positive'),
    (
      'mha',
      {'num_kv_heads': 2},
      'num_kv_heads=2',
      'num_heads=3; nearest: 1, 3',
    ),
    ('mqa', {'num_kv_heads': 3}, 'num_kv_heads=3', 'GroupedConfig'),
    ('gqa', {'num_kv_heads': None}, 'num_kv_heads=None', 'a divisor of num_h'),
    (
      'gqa',
      {'num_kv_heads': 4},
      'num_kv_heads=4',
      'num_heads=6; nearest: 3, 6',
    ),
    ('gqa', {'qkv_features': 12}, 'qkv_features=12', 'head_dim=3.*give one'),
    ('mha', {'out_features': 0}, 'out_features=0', 'positive'),
    (
      'mha',
      {'head_dim': 5, 'rope': Rope()},
      'head_dim=5',
      'even.*nearest: 4, 6',
    ),
    ('mha', {'normalize_qk': 'l2'}, "normalize_qk='l2'", "'layer' or 'rms'"),
    ('mha', {'logit_softcap': -1.0}, 'logit_softcap=-1.0', 'finite; None'),
    ('mha', {'implementation': 'x'}, "implementation='x'", 'use one of'),
    ('mha', {'dropout_rate': -0.1}, 'dropout_rate=-0.1', '0 turns dropout off'),
    ('mha', {'dropout_rate': 1.0}, 'dropout_rate=1.0', '0 turns dropout off'),
    (
      'mha',
      {'dropout_rate': np.nan},
      'dropout_rate=nan',
      '0 turns dropout off',
    ),
  )
  def test_bad_options(self, shell, options, value, remedy):
    """Already when the parameters are made."""
    module = SHELLS[shell](**options)
    with self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'):
      module.init(jax.random.key(0), self.x, deterministic=True)

  @parameterized.parameters(
    ({'inputs_v': x}, 'inputs_v is given without inputs_k', 'pass the keys'),
    ({'inputs_k': x[:1]}, r'inputs_k of shape \(1, 7, 6\)', 'must agree'),
    ({'mask': np.ones((3, S))}, r'mask of shape .*3, 11\)', 'give each'),
    ({'mask': masks.lengths([1] * 3)}, r'lengths of shape', 'give each'),
    ({'bias': np.ones((T, T), bool)}, 'bias has dtype bool', 'as mask='),
    ({'head_gates': np.ones(D)}, r'head_gates of shape \(6,\)', r'be \(3,\)'),
    ({'input_positions': np.ones((T,))}, 'input_positions', 'integers'),
    ({'input_positions': np.arange(S)}, 'input_positions', r'\(2, 7\)'),
  )
  def test_bad_calls(self, arguments, value, remedy):
    """And no product or softmax is taken before."""
    module = mha.MultiHeadAttention(num_heads=3)
    variables = variables_of(module, self.x)
    forbidden = mock.Mock(side_effect=AssertionError('computed'))
    with (
      mock.patch.object(jnp, 'einsum', forbidden),
      mock.patch.object(jax.nn, 'softmax', forbidden),
      self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'),
    ):
      module.apply(variables, self.x, **arguments)

  def test_wrong_width(self):
    """Parameters made for another width are refused."""
    module = mha.MultiHeadAttention(num_heads=3, head_dim=2)
    variables = variables_of(module, self.x)
    with self.assertRaisesRegex(ValueError, r'\(6, 3, 2\).*another config'):
      module.apply(variables, self.x[..., :5])

  def test_an_additive_mask(self):
    """Would allow what it forbids: nonzero may attend. It is refused."""
    module = SHELLS['mha']()
    x = normal(0, B, T, D).astype(np.float32)
    variables = variables_of(module, x)
    additive = np.where(booleans(1, T, T), 0, -1e9)
    with self.assertRaisesRegex(ValueError, 'additive values as bias='):
      module.apply(variables, x, mask=additive)

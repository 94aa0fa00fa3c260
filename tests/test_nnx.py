"""The NNX shells: Flax's own module, and Flax's transformations."""

import functools
import pathlib
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import orbax.checkpoint as ocp
from absl.testing import parameterized
from flax import nnx
from oracles import assert_close, assert_same_bits, booleans, normal

import mha_jax.linen
import mha_jax.nnx as mha
from mha_jax import attention
from mha_jax.attention import Dropout, Rope, TiedConfig, masks

B, T, S, D, E = 2, 7, 11, 6, 17
TIED = TiedConfig(d_model=D, num_heads=6, num_kv_heads=2, head_dim=4)
SHELLS = {
  'mha': functools.partial(mha.MultiHeadAttention, 3, D),
  'gqa': functools.partial(
    mha.GroupedQueryAttention,
    num_heads=6,
    in_features=D,
    num_kv_heads=2,
    head_dim=4,
    in_kv_features=E,
    normalize_qk='rms',
    rope=Rope(),
    logit_softcap=2.0,
  ),
  'mqa': functools.partial(mha.MultiQueryAttention, 3, D, v_head_dim=5),
  'mla': functools.partial(
    mha.MultiHeadLatentAttention,
    num_heads=3,
    in_features=D,
    kv_lora_rank=5,
    in_kv_features=E,
    q_lora_rank=7,
    qk_rope_head_dim=4,
    out_features=13,
    use_bias=True,
  ),
  'config': functools.partial(mha.Attention, TIED),
}
LINEN = {
  'gqa': functools.partial(
    mha_jax.linen.GroupedQueryAttention,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    normalize_qk='rms',
    rope=Rope(),
    logit_softcap=2.0,
  ),
  'mla': functools.partial(
    mha_jax.linen.MultiHeadLatentAttention,
    num_heads=3,
    kv_lora_rank=5,
    q_lora_rank=7,
    qk_rope_head_dim=4,
    out_features=13,
    use_bias=True,
  ),
  'config': functools.partial(mha_jax.linen.Attention, TIED),
}


def params_of(module) -> dict:
  """The parameters as the dictionary that the pure function takes."""
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def randomise(module, seed: int = 0, dtype=None):
  """Gives every parameter random values, biases and scales too."""
  leaves, tree = jax.tree.flatten(nnx.state(module, nnx.Param))
  values = (
    jnp.asarray(normal(seed + i, *x.shape) / 2, dtype or x.dtype)
    for i, x in enumerate(leaves)
  )
  nnx.update(module, tree.unflatten(values))
  return module


def random(shell: str, seed: int = 0, **options):
  """A shell with random parameters and a stream for dropout."""
  options = {'dropout_rate': 0.5, 'deterministic': False} | options
  return randomise(SHELLS[shell](rngs=nnx.Rngs(seed), **options), seed)


@functools.partial(
  nnx.jit, static_argnames=('deterministic', 'is_causal', 'sow_weights')
)
def run(module, *inputs, **options):
  """The module's output; its stream goes on as without jit."""
  return module(*inputs, **options)


def key_data(state):
  """The state with the bits of its random keys."""

  def data(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(x)
    return x

  return jax.tree.map(data, state)


ONES = np.ones((B, T))
CAUSAL = np.asarray(nnx.make_causal_mask(ONES))
PADDING = np.asarray(nnx.make_attention_mask(ONES, ONES * (np.arange(T) < 5)))
FLAX_CASES = {
  # options, shapes of the inputs, arguments of the call
  'self': ({'num_heads': 3}, [(B, T, D)], {}),
  'causal': ({'num_heads': 3}, [(B, T, D)], {'is_causal': True}),
  'padding': (
    {'num_heads': 2},
    [(B, T, D)],
    {'mask': np.asarray(nnx.combine_masks(CAUSAL, PADDING))},
  ),
  'gqa': (
    {'num_heads': 6, 'num_kv_heads': 2, 'qkv_features': 30},
    [(B, T, D)],
    {'mask': booleans(0, B, 6, T, T) | np.eye(T, dtype=bool)},
  ),
  'mqa': (
    {'num_heads': 3, 'num_kv_heads': 1},
    [(B, T, D)],
    {'mask': PADDING, 'is_causal': True},
  ),
  'cross': (
    {
      'num_heads': 5,
      'qkv_features': 35,
      'out_features': 13,
      'in_kv_features': E,
    },
    [(B, T, D), (B, S, E), (B, S, E)],
    {'mask': booleans(1, B, 1, T, S) | np.eye(T, S, dtype=bool)},
  ),
  'no_bias': (
    {'num_heads': 3, 'use_bias': False, 'qkv_features': 15},
    [(B, T, D), (B, S, D)],
    {'is_causal': True},
  ),
  'qk_norm': (
    {
      'num_heads': 6,
      'num_kv_heads': 3,
      'qkv_features': 42,
      'normalize_qk': True,
    },
    [(B, T, D)],
    {},
  ),
  'initialisers': (
    {
      'num_heads': 3,
      'kernel_init': nnx.initializers.xavier_uniform(),
      'bias_init': nnx.initializers.normal(0.1),
    },
    [(B, T, D)],
    {},
  ),
  'out_initialisers': (
    {
      'num_heads': 3,
      'out_kernel_init': nnx.initializers.normal(0.3),
      'out_bias_init': nnx.initializers.normal(0.2),
      'param_dtype': jnp.float64,
    },
    [(B, T, D)],
    {},
  ),
  'batches': (
    {'num_heads': 3},
    [(2, 3, T, D)],
    {
      'mask': booleans(2, 2, 3, 1, T, T) | np.eye(T, dtype=bool),
      'is_causal': True,
    },
  ),
  'no_batch': ({'num_heads': 3}, [(T, D)], {'is_causal': True}),
}


class Pair:
  """Our shell and Flax's module with the same options.

  Flax's module takes the softmax in float32 (`jax.nn`) where it has no
  dropout. With a rate, and dropout off, it computes in float64.
  """

  def __init__(self, case: str, seed: int = 0, **more):
    options, shapes, self.call = FLAX_CASES[case]
    options = {
      'in_features': D,
      'dropout_rate': 0.3,
      'deterministic': True,
      'decode': False,
      **options,
      **more,
    }
    self.ours = mha.MultiHeadAttention(**options, rngs=nnx.Rngs(seed))
    self.theirs = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(seed))
    self.inputs = [normal(i, *shape) for i, shape in enumerate(shapes)]

  def value_and_grads(self, module, inputs):
    """Output and the gradients of parameters and inputs."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, *inputs):
      out = nnx.merge(graphdef, params, rest)(*inputs, **self.call)
      weight = jnp.reshape(jnp.cos(jnp.arange(out.size)), out.shape)
      return jnp.sum(out * weight.astype(out.dtype)), out

    over = tuple(range(1 + len(inputs)))
    f = jax.jit(jax.grad(loss, over, has_aux=True))
    (params, *inputs), out = f(params, *inputs)
    return out, nnx.to_pure_dict(params), inputs


class FlaxTest(oracles.X64TestCase):
  """Against flax.nnx.MultiHeadAttention."""

  @parameterized.product(case=tuple(FLAX_CASES))
  def test_same(self, case):
    """Tree, initial values to the bit, outputs and gradients to rounding."""
    pair = Pair(case)
    ours, theirs = nnx.state(pair.ours), nnx.state(pair.theirs)
    assert_same_bits(key_data(ours), key_data(theirs))
    chex.assert_trees_all_equal_dtypes(ours, theirs)
    got, wanted = (
      pair.value_and_grads(randomise(module, 0, jnp.float64), pair.inputs)
      for module in (pair.ours, pair.theirs)
    )
    self.assertEqual(got[0].dtype, jnp.float64)
    # The key bias adds the same to all scores of a query: no gradient.
    if 'query_ln' not in got[1]:
      for _, grads, _ in (got, wanted):
        bias = grads['key'].pop('bias', 0.0)
        self.assertLess(np.max(np.abs(bias)), 1e-12)
    assert_close(got, wanted)

  @parameterized.parameters('gqa', 'qk_norm')
  def test_bfloat16(self, case):
    """dtype=bfloat16: float32 parameters, the same up to bfloat16."""
    pair, exact = Pair(case, dtype=jnp.bfloat16), Pair(case, dtype=jnp.float64)
    inputs = [jnp.asarray(x, jnp.float32) for x in pair.inputs]
    got, wanted, best = (
      pair.value_and_grads(randomise(module), inputs)
      for module in (pair.ours, pair.theirs, exact.theirs)
    )
    self.assertEqual(got[0].dtype, jnp.bfloat16)
    chex.assert_trees_all_equal_dtypes(got, wanted)
    assert_close(got[0], best[0], 2**-6)
    # The gradient of a bias or scale is a sum over tokens that cancels, here
    # by a factor of 70: rounding there says nothing.
    for _, grads, _ in (got, best):
      for row in grads.values():
        row.pop('bias', None)
        row.pop('scale', None)
    assert_close(got[1:], best[1:], 2**-5)  # eight roundings of bfloat16

  def test_without_dropout(self):
    """Flax's path over `jax.nn`, which takes the softmax in float32."""
    pair = Pair('gqa', dropout_rate=0.0)
    for module in (pair.ours, pair.theirs):
      randomise(module)
      self.assertIsNone(module.rngs)
    inputs = [x.astype(np.float32) for x in pair.inputs]
    got, wanted = (
      run(module, *inputs, **pair.call) for module in (pair.ours, pair.theirs)
    )
    self.assertEqual(got.dtype, jnp.float32)
    assert_close(got, wanted, 1e-6)

  @parameterized.parameters('gqa', 'qk_norm')
  def test_checkpoint(self, case):
    """Flax's state loads as it is, and comes back from a checkpoint."""
    pair, other = Pair(case, seed=1), Pair(case, seed=2)
    theirs, ours = randomise(pair.theirs), other.ours
    wanted = run(theirs, *pair.inputs, **pair.call)
    state = nnx.state(theirs)
    merged = nnx.merge(nnx.graphdef(ours), state)
    nnx.update(ours, state)
    got = run(ours, *pair.inputs, **pair.call)
    assert_close(got, wanted)
    assert_same_bits(run(merged, *pair.inputs, **pair.call), got)
    with (
      tempfile.TemporaryDirectory() as folder,
      ocp.StandardCheckpointer() as checkpointer,
    ):
      path = pathlib.Path(folder).absolute() / 'state'
      checkpointer.save(path, state)
      checkpointer.wait_until_finished()
      like = nnx.state(other.theirs)
      graphdef, like = nnx.split(nnx.eval_shape(lambda: Pair(case).ours))
      restored = nnx.merge(graphdef, checkpointer.restore(path, like))
    assert_same_bits(run(restored, *pair.inputs, **pair.call), got)

  def test_stream(self):
    """Our stream is Flax's: the same keys, used up at the same pace."""
    pair = Pair('self')
    x = pair.inputs[0]
    for module in (pair.ours, pair.theirs):
      for _ in range(3):
        run(module, x, deterministic=False)
      run(module, x)  # dropout is off: no key is taken
    assert_same_bits(
      *(key_data(nnx.state(m.rngs)) for m in (pair.ours, pair.theirs))
    )
    self.assertEqual(pair.ours.rngs.count[...], 3)

  def test_sow_weights(self):
    """The weights (b, h, t, s) are sown before dropout, as Flax does."""
    pair = Pair('gqa', deterministic=False)
    sown = []
    for module in (pair.ours, pair.theirs):
      randomise(module)
      f = functools.partial(nnx.capture(run, nnx.Intermediate), module)
      out, state = f(*pair.inputs, sow_weights=True, **pair.call)
      sown.append(nnx.to_pure_dict(state))
      self.assertEmpty(nnx.state(module, nnx.Intermediate))
      module.rngs.count[...] = 0
      plain, nothing = f(*pair.inputs, **pair.call)
      self.assertEmpty(nothing)
      if module is pair.ours:
        assert_same_bits(plain, out)
    self.assertEqual(jax.tree.leaves(sown[0])[0].shape, (B, 6, T, T))
    assert_close(*sown)


class PureTest(parameterized.TestCase):
  """A shell is its pure function, with everything passed on."""

  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)

  def inputs_for(self, module):
    """Queries, and keys of another length and the width that is asked for."""
    width = module.config.input_widths[1]
    return self.x, normal(1, B, S, width).astype(np.float32)

  def options_for(self, module):
    h = module.config.num_heads
    return {
      'mask': masks.causal() & masks.lengths([5, 9]),
      'bias': normal(2, T, S).astype(np.float32),
      'input_positions': np.arange(T) + 3,
      'key_positions': np.arange(S) + 1,
      'head_gates': normal(3, h).astype(np.float32),
    }

  @parameterized.product(shell=tuple(SHELLS), train=(False, True))
  def test_no_arithmetic(self, shell, train):
    """Bits of the pure function, with the one key that the stream yields.

    And those of the Linen module on the same parameter tree.
    """
    module = random(shell, deterministic=not train)
    inputs, options = self.inputs_for(module), self.options_for(module)
    key, params = nnx.clone(module.rngs)(), params_of(module)
    got = run(module, *inputs, **options)
    wanted = jax.jit(attention.apply, static_argnums=0)(
      module.config,
      params,
      *inputs,
      dropout=Dropout(key, 0.5) if train else None,
      **options,
    )
    assert_same_bits(got, wanted)
    if shell not in LINEN:
      return
    linen = LINEN[shell](dropout_rate=0.5, deterministic=not train)
    f = jax.jit(linen.apply)
    assert_same_bits(
      f({'params': params}, *inputs, dropout_rng=key, **options), wanted
    )

  @parameterized.parameters('gqa', 'mla')
  def test_everything_is_passed_on(self, shell):
    """Without one of the arguments the result is another."""
    module = random(shell, deterministic=True)
    inputs, options = self.inputs_for(module), self.options_for(module)
    out = run(module, *inputs, **options)
    for name in options:
      if name == 'key_positions':  # RoPE asks for both or none
        continue
      less = options | {name: None}
      other = run(module, *inputs, **less)
      self.assertGreater(oracles.relative_error(other, out), 1e-3, name)
    with self.assertRaisesRegex(ValueError, 'pass key_positions'):
      run(module, *inputs, **options | {'key_positions': None})

  @parameterized.parameters(('gqa', 'jax'), ('mla', 'nnx'))
  def test_batched_masks(self, shell, transform):
    """Under vmap each example has its own mask: a Mask, booleans, numbers."""
    module = random(shell, deterministic=True)
    x, y = self.inputs_for(module)
    h = module.config.num_heads
    lengths, keep = np.array([5, 3]), booleans(2, B, h, T, S)
    wanted = run(module, x, y, mask=masks.lengths(lengths) & keep)

    def one(module, x, y, mask, keep):
      return module(x, y, mask=mask & keep)

    each = jax.vmap(masks.lengths)(lengths[:, None])
    if transform == 'jax':
      f = jax.jit(jax.vmap(functools.partial(one, module)))
    else:
      over = nnx.jit(nnx.vmap(one, in_axes=(None, 0, 0, 0, 0)))
      f = functools.partial(over, module)
    for array in (keep, keep.astype(np.float32)):
      assert_close(f(x, y, each, array), wanted, 1e-6)


class TransformsTest(parameterized.TestCase):
  """Flax's transformations, dropout on."""

  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)

  def test_params(self):
    """Parameters are `nnx.Param`s, by name, and are read at every call."""
    module = random('mha', deterministic=True)
    self.assertIsInstance(module.query.kernel, nnx.Param)
    self.assertEqual(module.query.kernel.shape, (D, 3, 2))
    module.out.kernel[...] = jnp.zeros_like(module.out.kernel[...])
    out = run(module, self.x)
    assert_same_bits(out, np.broadcast_to(module.out.bias[...], out.shape))

  def test_split_and_merge(self):
    """A merged module is the module, its stream too."""
    module = random('mqa')
    merged = nnx.merge(*nnx.split(module), copy=True)
    for _ in range(2):
      assert_same_bits(run(merged, self.x), run(module, self.x))

  def test_jit(self):
    """Under jit the stream goes on: every call draws anew."""
    module = random('mha')
    plain = nnx.clone(module)
    first, second = run(module, self.x), run(module, self.x)
    self.assertGreater(oracles.relative_error(second, first), 1e-3)
    self.assertEqual(module.rngs.count[...], 2)
    assert_close([first, second], [plain(self.x), plain(self.x)], 1e-5)

  @parameterized.parameters(
    ('mha', {'normalize_qk': True}), ('mla', {'in_kv_features': D})
  )
  def test_optimizer(self, shell, options):
    """One step of `nnx.Optimizer` moves every parameter down the gradient."""
    module = random(shell, **options)
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, params_of(module))

    @nnx.jit
    def step(module, optimizer, x):
      def loss(module):
        return jnp.sum(jnp.sin(module(x)))

      grads = nnx.grad(loss)(module)
      optimizer.update(module, grads)
      return nnx.to_pure_dict(grads)

    grads = step(module, optimizer, self.x)
    self.assertEqual(set(grads), set(module.config.table))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
      self.assertTrue(np.any(g != 0), jax.tree_util.keystr(path))
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)
    assert_close(params_of(module), wanted, 1e-6)
    self.assertEqual(module.rngs.count[...], 1)

  def stacked(self, shell: str, **options):
    """Three layers as one module with stacked state, and one by one."""

    @nnx.jit
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def create(rngs):
      return SHELLS[shell](
        rngs=rngs, dropout_rate=0.5, deterministic=False, **options
      )

    stack = create(nnx.Rngs(0))
    graphdef, state = nnx.split(stack)
    kernels = stack.out.kernel[...]
    self.assertFalse(np.array_equal(kernels[0], kernels[1]))
    layers = [
      nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))
      for i in range(3)
    ]
    return stack, layers

  @parameterized.parameters(
    ('mha', {'normalize_qk': True}),
    ('mla', {'in_kv_features': D, 'out_features': D}),
  )
  def test_scan(self, shell, options):
    """nnx.scan over three layers is three layers, dropout per layer."""
    stack, layers = self.stacked(shell, **options)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
      return x + layer(x, is_causal=True)

    got, wanted = forward(stack, self.x), self.x
    for layer in layers:
      wanted = wanted + run(layer, wanted, is_causal=True)
    assert_close(got, wanted, 1e-5)
    np.testing.assert_array_equal(stack.rngs.count[...], [1, 1, 1])
    quiet = forward(nnx.view(stack, deterministic=True), self.x)
    self.assertGreater(oracles.relative_error(quiet, got), 1e-3)

  @parameterized.parameters(('gqa', {'in_kv_features': D}), ('config', {}))
  def test_vmap(self, shell, options):
    """nnx.vmap over stacked layers is each layer."""
    stack, layers = self.stacked(shell, **options)
    f = nnx.jit(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None)))
    wanted = np.stack([run(layer, self.x) for layer in layers])
    assert_close(f(stack, self.x), wanted, 1e-5)

  def test_remat(self):
    """nnx.remat with dropout: the same output and gradients."""
    module = random('mqa')
    results = []
    for f in (lambda m, x: m(x), nnx.remat(lambda m, x: m(x))):
      each = nnx.clone(module)

      def loss(m, f=f):
        out = f(m, self.x)
        return jnp.sum(out**2), out

      grads, out = nnx.jit(nnx.grad(loss, has_aux=True))(each)
      grads = nnx.to_pure_dict(grads)
      grads['key'].pop('bias')  # its gradient is 0 up to rounding
      results.append((grads, out))
      self.assertEqual(each.rngs.count[...], 1)
    assert_close(*results, 1e-5)


class DropoutTest(parameterized.TestCase):
  """Streams, and whether dropout is off."""

  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype(np.float32)
    self.module = random('mha', deterministic=None)
    self.off = run(self.module, self.x, deterministic=True)

  def test_deterministic(self):
    """At the call, in the constructor, by train, eval or a view."""
    module, x = self.module, self.x
    with self.assertRaisesRegex(
      ValueError, '(?s)deterministic=None.*dropout_rate=0.5.*pass it'
    ):
      module(x)
    with self.assertRaisesRegex(ValueError, 'deterministic=None'):
      random('config', deterministic=None)(x)
    module.eval()
    self.assertTrue(module.deterministic)
    assert_same_bits(run(module, x), self.off)
    module.train()
    self.assertFalse(module.deterministic)
    self.assertFalse(np.array_equal(run(module, x), self.off))
    assert_same_bits(run(module, x, deterministic=True), self.off)
    off = nnx.view(module, deterministic=True, decode=False)
    assert_same_bits(run(off, x), self.off)
    self.assertFalse(module.deterministic)
    self.assertIs(off.query.kernel, module.query.kernel)
    self.assertFalse(np.array_equal(run(module, x), self.off))
    with self.assertRaisesRegex(ValueError, 'decode=True is not taken'):
      nnx.view(module, decode=True)
    without = random('mha', deterministic=None, dropout_rate=0.0)
    for flag in (None, True, False):
      assert_same_bits(run(without, x, deterministic=flag), self.off)

  def test_rngs_at_the_call(self):
    """A stream, or the 'dropout' one of an Rngs, in place of the own one."""
    module = nnx.view(self.module, deterministic=False)
    key = nnx.Rngs(dropout=5).dropout()
    wanted = jax.jit(attention.apply, static_argnums=0)(
      module.config, params_of(module), self.x, dropout=Dropout(key, 0.5)
    )
    for rngs in (
      nnx.Rngs(dropout=5),
      nnx.Rngs(7, dropout=5),
      nnx.Rngs(dropout=5).dropout,
    ):
      assert_same_bits(run(module, self.x, rngs=rngs), wanted)
    default = nnx.Rngs(5)
    assert_same_bits(run(module, self.x, rngs=default), wanted)
    self.assertEqual(default.default.count[...], 1)
    self.assertEqual(module.rngs.count[...], 0)
    self.assertFalse(np.array_equal(run(module, self.x), wanted))

  def test_keep_rngs(self):
    """keep_rngs=False: no stream in the state, one is given at the call."""
    module = randomise(
      SHELLS['mha'](
        rngs=nnx.Rngs(0),
        dropout_rate=0.5,
        deterministic=False,
        keep_rngs=False,
      )
    )
    self.assertIsNone(module.rngs)
    self.assertEmpty(nnx.state(module, nnx.RngState))
    with self.assertRaisesRegex(
      ValueError, '(?s)rngs=None.*pass one.*keep_rngs'
    ):
      module(self.x)
    assert_same_bits(run(module, self.x, deterministic=True), self.off)
    assert_same_bits(
      run(module, self.x, rngs=nnx.Rngs(dropout=5)),
      run(
        nnx.view(self.module, deterministic=False),
        self.x,
        rngs=nnx.Rngs(dropout=5),
      ),
    )


KERNEL, BIAS = ('embed', 'heads', 'kv'), ('heads', 'kv')


class MetadataTest(parameterized.TestCase):
  """What an `nnx.Param` carries beside its value."""

  def metadata(self, cls, **options):
    """The metadata of all parameters, no array put on a mesh."""
    with nnx.use_eager_sharding(False):
      module = cls(3, D, normalize_qk=True, rngs=nnx.Rngs(0), **options)
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: param.get_metadata() for path, param in state}

  @parameterized.parameters(
    {'kernel_metadata': {'out_sharding': KERNEL, 'note': 1}},
    {'out_kernel_metadata': {'out_sharding': ('heads', 'kv', 'embed')}},
    {
      'kernel_metadata': {'note': 1},
      'out_kernel_metadata': {'note': 2},
      'bias_metadata': {'note': 3},
    },
    {
      'bias_metadata': {'out_sharding': BIAS},
      'out_bias_metadata': {'out_sharding': ('embed',)},
    },
    {'query_ln_scale_metadata': {'out_sharding': ('kv',)}},
    {'key_ln_scale_metadata': {'note': 4}},
    {
      'kernel_init': nnx.with_partitioning(
        nnx.initializers.lecun_normal(), KERNEL
      )
    },
    {
      'bias_init': nnx.with_metadata(nnx.initializers.zeros_init(), note=5),
      'out_bias_init': nnx.with_partitioning(
        nnx.initializers.zeros_init(), ('embed',)
      ),
    },
  )
  def test_same(self, **options):
    """Every parameter carries what Flax's carries, and nothing is lost."""
    got = self.metadata(mha.MultiHeadAttention, **options)
    wanted = self.metadata(nnx.MultiHeadAttention, **options)
    self.assertEqual(got, wanted)
    self.assertNotEqual(got, self.metadata(mha.MultiHeadAttention))

  def test_values(self):
    """A partitioned initialiser sees the flattened shape, as a plain one."""
    kernel_init = nnx.initializers.xavier_uniform()
    with nnx.use_eager_sharding(False):
      boxed, plain = (
        SHELLS['gqa'](kernel_init=init, rngs=nnx.Rngs(0))
        for init in (nnx.with_partitioning(kernel_init, KERNEL), kernel_init)
      )
    assert_same_bits(params_of(boxed), params_of(plain))

  def test_mesh(self):
    """Under a mesh the arrays are placed as the names say."""
    mesh = jax.make_mesh(
      (1,), ('embed',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    names = (None, 'embed', None)
    with jax.set_mesh(mesh):
      module = SHELLS['mqa'](
        rngs=nnx.Rngs(0), kernel_metadata={'out_sharding': names}
      )
    self.assertEqual(module.value.kernel[...].sharding.spec, jax.P(*names))
    self.assertNotIn('out_sharding', module.value.bias.get_metadata())

  @parameterized.parameters(
    ({'kernel_metadata': {'out_sharding': 4 * ('a',)}}, "of 'query'", 4),
    ({'kernel_metadata': {'out_sharding': 4 * (None,)}}, 'kernel of', 4),
    ({'bias_metadata': {'out_sharding': KERNEL}}, "bias of 'query'", 3),
    ({'out_bias_metadata': {'out_sharding': BIAS}}, "bias of 'out'", 2),
    ({'key_ln_scale_metadata': {'out_sharding': BIAS}}, "of 'key_ln'", 2),
    (
      {
        'out_kernel_init': nnx.with_partitioning(
          nnx.initializers.lecun_normal(), jax.P(*KERNEL, None)
        )
      },
      "kernel of 'out'",
      4,
    ),
  )
  def test_wrong_number(self, options, name, count):
    """Too many axis names: the parameter, its shape, the remedy.

    Also where Flax would ask for a mesh before it looks at the names.
    """
    for eager in (False, True):
      with (
        nnx.use_eager_sharding(eager),
        self.assertRaisesRegex(
          ValueError, f'(?s){name}.*: {count} axis names .*one per dimension'
        ),
      ):
        SHELLS['gqa'](rngs=nnx.Rngs(0), **options)


class ErrorsTest(parameterized.TestCase):
  """Bad arguments: a ValueError with the name, the value and the remedy."""

  x = normal(0, B, T, D).astype(np.float32)

  @parameterized.parameters(
    (mha.MultiHeadAttention, {'num_heads': 4}, 'num_heads=4', 'nearest: 3, 6'),
    (mha.MultiHeadAttention, {'qkv_features': 7}, 'num_heads=3', 'nearest'),
    (mha.MultiHeadAttention, {'num_kv_heads': 2}, 'num_kv_heads=2', 'nearest'),
    (mha.MultiQueryAttention, {'num_kv_heads': 3}, 'num_kv_heads=3', 'Grouped'),
    (mha.GroupedQueryAttention, {}, 'num_kv_heads=None', 'divisor of num_head'),
    (
      mha.MultiHeadAttention,
      {'dropout_rate': 1.0},
      'dropout_rate=1.0',
      '0 tur',
    ),
    (mha.MultiHeadAttention, {'normalize_qk': 'l2'}, "qk='l2'", "'layer' or"),
    (
      mha.MultiHeadLatentAttention,
      {'kv_lora_rank': 0},
      'kv_lora_rank=0',
      'positive',
    ),
    (
      mha.MultiHeadLatentAttention,
      {'kv_lora_rank': 5, 'form': 'x'},
      "form='x'",
      'one of',
    ),
  )
  def test_bad_options(self, cls, options, value, remedy):
    """When the module is made."""
    options = {'num_heads': 3, 'in_features': D} | options
    with self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'):
      cls(**options, rngs=nnx.Rngs(0))

  @parameterized.parameters(
    ('mha', {'inputs_k': x[..., :5]}, r'inputs_k of shape \(2, 7, 5\)', '6 fe'),
    ('mla', {}, r'inputs_k of shape \(2, 7, 6\)', 'made for 17 features'),
    (
      'config',
      {'inputs_k': x, 'inputs_v': x},
      'inputs_v is given',
      'leave inputs_v None',
    ),
    ('mha', {'inputs_v': x}, 'without inputs_k', 'pass the keys'),
    ('mha', {'head_gates': np.ones(D)}, r'shape \(6,\)', r'be \(3,\)'),
    ('mha', {'mask': -np.ones((T, T))}, 'negative', 'as bias='),
    ('mha', {'mask': np.ones((3, S))}, r'mask of shape', 'give each'),
  )
  def test_bad_calls(self, shell, arguments, value, remedy):
    """When the module is called."""
    module = SHELLS[shell](rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'):
      module(self.x, **arguments)

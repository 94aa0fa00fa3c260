"""What holds for every variant of the table, in both front ends.

A new variant gets its tests by a row in EXAMPLES.
"""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from flax import nnx
from oracles import assert_close, assert_same_bits, booleans, normal

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import attention
from mha_jax.attention import Dropout, Projection, Rope, masks, num_params
from mha_jax.attention.variants import VARIANTS, build

B, T, S, D = 2, 7, 11, 5
EXAMPLES = {
  'mha': {'num_heads': 3, 'head_dim': 2, 'rope': Rope()},
  'gqa': {
    'num_heads': 6,
    'num_kv_heads': 3,
    'head_dim': 4,
    'v_head_dim': 7,
    'rope': Rope(),
    'normalize_qk': 'rms',
  },
  'mqa': {'num_heads': 3, 'head_dim': 2, 'rope': Rope(), 'logit_softcap': 2.0},
  'mla': {
    'num_heads': 3,
    'kv_lora_rank': 13,
    'q_lora_rank': 11,
    'qk_nope_head_dim': 7,
    'qk_rope_head_dim': 2,
    'v_head_dim': 5,
    'use_bias': True,
  },
  'gta': {'num_heads': 6, 'num_kv_heads': 3, 'head_dim': 4, 'rope': Rope()},
}
NAMED = {
  'mha': ('MultiHeadAttention', {}),
  'gqa': ('GroupedQueryAttention', {}),
  'mqa': ('MultiQueryAttention', {}),
  'mla': ('MultiHeadLatentAttention', {}),
}
KINDS = tuple(VARIANTS)


def config_of(kind: str, **more):
  return build(kind, d_model=D, **EXAMPLES[kind] | more)


def vars_of(config) -> dict:
  """The fields of a config."""
  return {x.name: getattr(config, x.name) for x in dataclasses.fields(config)}


def random_params(config, seed: int = 0, dtype=np.float32):
  return jax.tree.map(
    jnp.asarray, oracles.random_params(config, seed, np.dtype(dtype))
  )


def nnx_module(module, params):
  """An NNX module that holds these parameters."""
  graph, state = nnx.split(module)
  nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
  return nnx.merge(graph, state)


class TableTest(parameterized.TestCase):
  def test_every_variant_has_an_example(self):
    """So that the tests below hold for it."""
    self.assertEqual(EXAMPLES.keys(), VARIANTS.keys())

  @parameterized.parameters(*((kind,) for kind in KINDS))
  def test_counts_and_shapes(self, kind):
    """The table's shapes and counts are those of both front ends' trees."""
    config = config_of(kind)
    shapes = {name: row.shapes for name, row in config.table.items()}
    module = linen.Attention(config)
    x = jnp.zeros((B, T, D))
    tree = jax.eval_shape(module.init, jax.random.key(0), x)['params']
    self.assertEqual(jax.tree.map(lambda a: a.shape, tree), shapes)
    other = mha_nnx.Attention(config, rngs=nnx.Rngs(0))
    state = nnx.to_pure_dict(nnx.state(other, nnx.Param))
    self.assertEqual(jax.tree.map(lambda a: a.shape, state), shapes)
    sizes = [a.size for a in jax.tree.leaves(tree)]
    self.assertEqual(num_params(config.table), sum(sizes))

  @parameterized.parameters(*((kind,) for kind in KINDS))
  def test_entries(self, kind):
    """What decoding keeps has the shapes, and the size, that a config says."""
    config, seen = config_of(kind), []

    class Watched(type(config)):
      def entries(self, *arguments):
        seen.append(super().entries(*arguments))
        return seen[-1]

    watched = Watched(**vars_of(config))
    params = random_params(config)
    jax.eval_shape(
      functools.partial(attention.apply, watched),
      params,
      jnp.zeros((B, T, D)),
      jnp.zeros((B, S, D)),
    )
    wanted = [(B, n, S, size) for n, size in config.entry_shapes]
    self.assertEqual([x.shape for x in seen[0]], wanted)
    elements = sum(x.size for x in seen[0]) // (B * S)
    self.assertEqual(config.cache_elements, elements)

  @parameterized.parameters(('mha', 3), ('gqa', 3), ('mqa', 1))
  def test_a_name_settles_the_sharing(self, kind, num_kv_heads):
    """MHA has a key/value head for each head, MQA one."""
    self.assertEqual(config_of(kind).sizes['n'], num_kv_heads)

  @parameterized.parameters(*((kind,) for kind in KINDS))
  def test_axis_names(self, kind):
    """Every dimension of every parameter has its logical axis."""
    for row in config_of(kind).table.values():
      for name, shape in row.shapes.items():
        self.assertLen(row.logical_axes[name], len(shape))

  @parameterized.parameters(*((kind,) for kind in KINDS))
  def test_hashable(self, kind):
    """A config is a static argument: equal ones are one."""
    self.assertEqual(hash(config_of(kind)), hash(config_of(kind)))
    self.assertEqual(config_of(kind), dataclasses.replace(config_of(kind)))

  @parameterized.parameters(
    ('x', {}, r"attention='x' must be in \('mha', 'gqa', 'mqa', 'mla'"),
    ('mha', {'kv_lora_rank': 3}, "kv_lora_rank=3 is no option of 'mha'; its"),
    ('mla', {'num_kv_heads': 3}, "num_kv_heads=3 is no option of 'mla'"),
    ('mla', {'head_dim': 3}, "head_dim=3 is no option of 'mla'.*qk_nope_h"),
    ('mha', {'num_kv_heads': 1}, "num_kv_heads=1 must be 3 or None in 'mha'"),
    ('mqa', {'num_kv_heads': 3}, "num_kv_heads=3 must be 1 or None in 'mqa'"),
    ('gqa', {'num_kv_heads': None}, "num_kv_heads=None: 'gqa' needs it"),
    ('mla', {'kv_lora_rank': None}, "kv_lora_rank=None: 'mla' needs it"),
    ('gta', {'head_dim': None}, "head_dim=None: 'gta' needs it: an even"),
  )
  def test_bad_options(self, kind, changes, message):
    """An option that is unknown, contradicts, or is missing."""
    options = {'d_model': D, **EXAMPLES.get(kind, {}), **changes}
    with self.assertRaisesRegex(ValueError, message):
      build(kind, **options)


class ThreeWaysTest(oracles.X64TestCase):
  """Linen, NNX and the pure function are one function of one tree."""

  def setUp(self):
    super().setUp()
    self.x, self.y = (
      normal(i, B, n, D).astype('f') for i, n in ((0, T), (1, S))
    )

  @parameterized.product(kind=KINDS, train=(False, True))
  def test_same(self, kind, train):
    """Outputs, bit for bit, with all options; dropout on with one key."""
    config = config_of(kind)
    params = random_params(config)
    key = jax.random.key(3)
    options = {
      'mask': masks.window(4, 1) & masks.lengths([5, 9]),
      'bias': normal(2, T, S).astype('f'),
      'input_positions': np.arange(T) + 3,
      'key_positions': np.arange(S) + 1,
      'head_gates': normal(3, config.num_heads).astype('f'),
    }
    rate = 0.4
    pure = functools.partial(
      attention.apply,
      config,
      dropout=Dropout(key, rate) if train else None,
    )
    wanted = jax.jit(pure)(params, self.x, self.y, **options)
    module = linen.Attention(config, dropout_rate=rate, deterministic=not train)
    got = jax.jit(module.apply)(
      {'params': params}, self.x, self.y, dropout_rng=key, **options
    )
    assert_same_bits(got, wanted)
    other = nnx_module(
      mha_nnx.Attention(
        config,
        dropout_rate=rate,
        deterministic=not train,
        rngs=nnx.Rngs(0),
        keep_rngs=False,
      ),
      params,
    )
    stream = nnx.RngStream(key, tag='dropout')
    got = nnx.jit(other)(self.x, self.y, rngs=stream, **options)
    if not train:
      assert_same_bits(got, wanted)
    # A stream folds its count into its key.
    pure = functools.partial(
      attention.apply,
      config,
      dropout=Dropout(jax.random.fold_in(key, 0), rate) if train else None,
    )
    assert_same_bits(got, jax.jit(pure)(params, self.x, self.y, **options))

  @parameterized.parameters(*((kind,) for kind in NAMED))
  def test_named_modules(self, kind):
    """The named modules are their configs, in both front ends."""
    config, name = config_of(kind), NAMED[kind][0]
    params = random_params(config)
    options = {**EXAMPLES[kind]}
    wanted = attention.apply(config, params, self.x, mask=masks.causal())
    module = getattr(linen, name)(**options)
    self.assertEqual(module.config_for(self.x, None, None).table, config.table)
    got = module.apply({'params': params}, self.x, mask=masks.causal())
    assert_same_bits(got, wanted)
    other = getattr(mha_nnx, name)(in_features=D, rngs=nnx.Rngs(0), **options)
    self.assertEqual(other.config.table, config.table)
    got = nnx_module(other, params)(self.x, mask=masks.causal())
    assert_same_bits(got, wanted)

  @parameterized.parameters('gqa', 'mla')
  def test_keys_values(self, kind):
    """Cross-attention over what was projected once, in both front ends."""
    config = config_of(kind)
    params = random_params(config)
    lengths = [5, 9]

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(call, keys_values, x, y):
      cache = keys_values(y, lengths=lengths)
      out, after = call(x, cache=cache)
      return cache, after, out, call(x, y, mask=masks.lengths(lengths))

    pure = functools.partial(attention.apply, config, params)
    wanted = functools.partial(attention.keys_values, config, params)
    wanted = run(pure, wanted, self.x, self.y)
    module = linen.Attention(config)
    apply = functools.partial(module.apply, {'params': params})
    project = functools.partial(apply, method='keys_values')
    other = nnx_module(mha_nnx.Attention(config, rngs=nnx.Rngs(0)), params)
    for functions in (apply, project), (other, other.keys_values):
      got = run(*functions, self.x, self.y)
      assert_same_bits(got, wanted)
    cache, after, out, full = wanted
    assert_same_bits(after, cache)
    assert_close(out, full, 1e-5)

  @parameterized.parameters(
    (linen.GroupedQueryAttention(6, num_kv_heads=3, head_dim=4),),
    (linen.MultiHeadLatentAttention(3, 5, q_lora_rank=7, qk_nope_head_dim=4),),
  )
  def test_keys_values_of_another_width(self, module):
    """Linen's named modules know the widths from their parameters."""
    x, y = normal(0, 2, 3, D), normal(1, 2, 5, D + 2)
    wanted, variables = module.init_with_output(jax.random.key(0), x, y)
    cache = module.apply(variables, y, method='keys_values')
    got, _ = module.apply(variables, x, cache=cache)
    assert_close(got, wanted, 1e-5)

  @parameterized.parameters(*NAMED)
  def test_init_cache(self, kind):
    """Modules, also unbound ones, make the caches of their configs."""
    name, example = NAMED[kind][0], EXAMPLES[kind]
    module = getattr(linen, name)(**example)
    other = getattr(mha_nnx, name)(in_features=D, rngs=nnx.Rngs(0), **example)
    for options in {'capacity': S}, {'window': 3, 'dtype': jnp.bfloat16}:
      wanted = attention.init_cache(config_of(kind), B, **options)
      for front_end in (module, other):
        got = front_end.init_cache(B, **options)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)

  @parameterized.parameters(
    (linen.MultiHeadAttention(3), 'make the module with head_dim='),
    (
      linen.MultiHeadLatentAttention(3, 5, rope=Rope()),
      'qk_rope_head_dim=None and qk_nope_head_dim=None: w',
    ),
  )
  def test_init_cache_without_a_size(self, module, message):
    """A size that a module infers from its inputs must be given."""
    with self.assertRaisesRegex(ValueError, message):
      module.init_cache(B, S)


class PropertiesTest(oracles.X64TestCase):
  """What attention promises, of every variant, in float64."""

  def setUp(self):
    super().setUp()
    self.x, self.y = normal(0, B, T, D), normal(1, B, S, D)

  def layer(self, kind, **more):
    config = config_of(kind, **more)
    params = random_params(config, dtype=np.float64)
    return config, params, jax.jit(functools.partial(attention.apply, config))

  @parameterized.product(kind=KINDS)
  def test_head_permutation(self, kind):
    """Groups of heads in another order, weights and all: the same output."""
    config, params, f = self.layer(kind)
    sizes = dict(
      size
      for row in config.table.values()
      for size in getattr(row, 'sizes', ())
    )
    h = config.num_heads
    groups = sizes.get('n', h)
    order = np.random.default_rng(0).permutation(groups)
    heads = np.arange(h).reshape(groups, -1)[order].reshape(-1)

    def permute(row, name, array):
      if not isinstance(row, Projection):
        return array
      letters = row.kernel_letters if name == 'kernel' else row.bias_letters
      for axis, letter in enumerate(letters):
        index = {'h': heads, 'n': order}.get(letter)
        array = array if index is None else jnp.take(array, index, axis)
      return array

    permuted = {
      row_name: {
        name: permute(config.table[row_name], name, array)
        for name, array in row.items()
      }
      for row_name, row in params.items()
    }
    self.assertFalse(np.array_equal(order, np.arange(groups)) and groups > 1)
    mask = booleans(1, B, h, T, S)
    assert_close(
      f(permuted, self.x, self.y, mask=mask[:, heads]),
      f(params, self.x, self.y, mask=mask),
    )

  @parameterized.product(kind=KINDS)
  def test_key_permutation(self, kind):
    """Keys in another order, with their positions: the same output."""
    _, params, f = self.layer(kind)
    order = np.random.default_rng(1).permutation(S)
    at = np.arange(S) + 2
    options = {'mask': masks.causal(), 'input_positions': np.arange(T) + 4}
    assert_close(
      f(params, self.x, self.y[:, order], key_positions=at[order], **options),
      f(params, self.x, self.y, key_positions=at, **options),
    )

  @parameterized.product(kind=KINDS)
  def test_causality(self, kind):
    """An output has no gradient, of 0 exactly, in later inputs."""
    _, params, f = self.layer(kind)

    def early(x):
      return jnp.sum(jnp.sin(f(params, x, mask=masks.causal())[:, :3]))

    grad = jax.jit(jax.grad(early))(self.x)
    np.testing.assert_array_equal(grad[:, 3:], 0)
    self.assertGreater(np.min(np.max(np.abs(grad[:, :3]), axis=-1)), 1e-6)

  @parameterized.product(kind=KINDS, shift=(1, 997))
  def test_only_differences_of_positions_matter(self, kind, shift):
    """A uniform shift changes nothing; a stretch does."""
    _, params, f = self.layer(kind)
    at = np.array([0, 3, 4, 9, 11, 12, 20])
    options = {'mask': masks.window(10, 0)}
    wanted = f(params, self.x, input_positions=at, **options)
    got = f(params, self.x, input_positions=at + shift, **options)
    assert_close(got, wanted, 1e-11)
    other = f(params, self.x, input_positions=at * 2 // 2 * 3, mask=None)
    self.assertGreater(oracles.relative_error(other, wanted), 1e-3)

  @parameterized.product(kind=KINDS)
  def test_nobody_to_attend_to(self, kind):
    """Zeros before the output projection, no gradient, no NaN."""
    _, params, f = self.layer(kind)
    blind = np.ones((B, 1, T, S), bool)
    blind[0, :, 2] = False

    def loss(params, x, y):
      out = f(params, x, y, mask=blind)
      return jnp.sum(out**2), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(params, self.x, self.y)
    bias = params['out'].get('bias', jnp.zeros(D))
    np.testing.assert_array_equal(out[0, 2], bias)
    np.testing.assert_array_equal(grads[1][0, 2], 0)
    chex.assert_tree_all_finite(grads)

  @parameterized.product(kind=KINDS)
  def test_gates(self, kind):
    """A gate scales its head's rows of the output kernel."""
    config, params, f = self.layer(kind)
    gates = normal(2, config.num_heads)
    scaled = params | {'out': dict(params['out'])}
    scaled['out']['kernel'] *= gates[:, None, None]
    assert_close(f(params, self.x, head_gates=gates), f(scaled, self.x))

  @parameterized.product(kind=KINDS)
  def test_dropout(self, kind):
    """The same key drops the same; the mean over keys is the plain output."""
    _, params, f = self.layer(kind)
    keys = jax.random.split(jax.random.key(0), 400)

    @jax.jit
    @jax.vmap
    def noisy(key):
      return f(params, self.x, dropout=Dropout(key, 0.3))

    outs, plain = noisy(keys), f(params, self.x)
    assert_same_bits(outs, noisy(keys))
    self.assertFalse(np.array_equal(outs[0], outs[1]))
    deviation = np.std(outs, axis=0) / np.sqrt(len(keys))
    self.assertLess(np.max(np.abs(np.mean(outs, 0) - plain) / deviation), 5)


class Block(nn.Module):
  """A residual layer, in the form that nn.scan wants."""

  config: attention.AttentionConfig
  deterministic: bool = False

  @nn.compact
  def __call__(self, x, cache=None):
    layer = linen.Attention(
      self.config, dropout_rate=0.3, deterministic=self.deterministic
    )
    out = layer(x, mask=masks.causal(), cache=cache)
    out, cache = (out, None) if cache is None else out
    return x + out, cache


class NnxBlock(nnx.Module):
  """The same in NNX."""

  def __init__(self, config, rngs):
    self.attention = mha_nnx.Attention(
      config, dropout_rate=0.3, deterministic=False, rngs=rngs
    )

  def __call__(self, x, cache=None):
    out = self.attention(x, mask=masks.causal(), cache=cache)
    out, cache = (out, None) if cache is None else out
    return x + out, cache


class TransformsTest(parameterized.TestCase):
  """jit, grad, vmap, scan and remat, with dropout on.

  Scan and remat of the grouped family are tested in test_linen and test_nnx.
  """

  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype('f')

  @parameterized.product(kind=KINDS)
  def test_vmap_over_masks(self, kind):
    """vmap over inputs and masks of all kinds is one call for each."""
    config = config_of(kind)
    params = random_params(config)

    def make(dense, lengths, segments):
      return masks.causal() & masks.dense(dense) & masks.lengths(
        lengths
      ) | masks.segments(segments) & masks.window(2, 0)

    rng = np.random.default_rng(0)
    leaves = (
      booleans(0, 3, B, config.num_heads, T, T),
      rng.integers(0, T, (3, B)),
      rng.integers(0, 2, (3, B, T)),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    xs = normal(1, 3, B, T, D).astype('f')

    def run(x, mask, key):
      return attention.apply(
        config, params, x, mask=mask, dropout=Dropout(key, 0.3)
      )

    got = jax.jit(jax.vmap(run))(xs, jax.vmap(make)(*leaves), keys)
    one = jax.jit(run)
    for i in range(3):
      wanted = one(xs[i], make(*(leaf[i] for leaf in leaves)), keys[i])
      assert_close(got[i], wanted, 1e-5)

  @parameterized.product(kind=('mla', 'gta'))
  def test_linen_scan_and_remat(self, kind):
    """nn.scan of nn.remat over layers: finite gradients of all parameters."""
    stack = nn.scan(
      nn.remat(Block),
      variable_axes={'params': 0},
      split_rngs={'params': True, 'dropout': True},
      length=3,
    )(config_of(kind))
    rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    variables = jax.jit(stack.init)(rngs, self.x)

    def loss(variables):
      out, _ = stack.apply(variables, self.x, rngs={'dropout': rngs['dropout']})
      return jnp.sum(out**2)

    self.check_grads(jax.jit(jax.grad(loss))(variables), variables)

  @parameterized.product(kind=('mla', 'gta'))
  def test_nnx_scan_and_remat(self, kind):
    """The same of nnx.scan and nnx.remat."""
    layers = self.nnx_layers(config_of(kind))

    def loss(layers):
      @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
      @nnx.remat
      def forward(x, layer):
        return layer(x)[0]

      return jnp.sum(forward(self.x, layers) ** 2)

    grads = nnx.jit(nnx.grad(loss))(layers)
    state = nnx.state(layers, nnx.Param)
    self.check_grads(nnx.to_pure_dict(grads), nnx.to_pure_dict(state))

  def test_linen_scan_of_caches(self):
    """nn.scan over layers and their stacked caches: chunks are the whole."""
    config = config_of('gqa')
    stack = nn.scan(
      Block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=3,
    )(config, deterministic=True)
    init = linen.Attention(config).init_cache
    variables = jax.jit(stack.init)(jax.random.key(0), self.x)
    self.check_chunks(jax.jit(functools.partial(stack.apply, variables)), init)

  def test_nnx_scan_of_caches(self):
    """The same of nnx.scan."""
    layers = self.nnx_layers(config_of('mla'))
    layers.eval()

    @nnx.jit
    def apply(layers, x, caches=None):
      @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
      def forward(x, layer, cache):
        return layer(x, cache)

      return forward(x, layers, caches)

    init = layers.attention.init_cache
    self.check_chunks(functools.partial(apply, layers), init)

  def nnx_layers(self, config):
    """Three blocks, their parameters stacked."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0)
    def make(rngs):
      return NnxBlock(config, rngs)

    return make(nnx.Rngs(0))

  def check_chunks(self, apply, init_cache):
    caches = jax.vmap(lambda _: init_cache(B, T))(np.arange(3))
    outs = []
    for chunk in np.split(self.x, (3, 6), axis=1):
      out, caches = apply(chunk, caches)
      outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), apply(self.x)[0], 1e-5)
    np.testing.assert_array_equal(caches.lengths, np.full((3, B), T))

  def check_grads(self, grads, params):
    chex.assert_trees_all_equal_shapes(grads, params)
    chex.assert_tree_all_finite(grads)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
      self.assertEqual(grad.shape[0], 3)
      self.assertTrue(np.any(grad != 0), jax.tree_util.keystr(path))

"""What a variant of attention owes, in both front ends.

A new variant owes it from the row in the registry on: without an example in
tests/examples.py its tests here fail. Each method is one obligation.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from examples import (
  EXAMPLES,
  KINDS,
  LOOPS,
  D,
  config_of,
  nnx_module,
  params_of,
)
from flax import nnx, serialization
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, assert_same_bits, booleans, normal
from shapes import alone

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import attention
from mha_jax.analysis import costs
from mha_jax.attention import (
  Dropout,
  Projection,
  init_cache,
  keys_values,
  masks,
  num_params,
)
from mha_jax.attention.implementations import OURS
from mha_jax.attention.variants import VARIANTS

B, T, S = 2, 7, 11
each_variant = parameterized.parameters(*((kind,) for kind in KINDS))
splits = st.sampled_from(((7,), (1,) * 7, (3, 1, 3), (4, 3), (1, 4, 1, 1)))

# Jitted once, so that tests which call alike compile once.
apply = jax.jit(
  attention.apply, static_argnums=0, static_argnames='implementation'
)


def layer(kind: str):
  """A variant's example: config, float64 parameters, and `apply` with it."""
  config = config_of(kind)
  params = params_of(config, dtype=np.float64)
  return config, params, functools.partial(apply, config)


class TableTest(parameterized.TestCase):
  """What is true of the config and its table, before anything is computed."""

  def test_every_variant_has_an_example(self):
    """The tables of examples and of loops have a row for each, and no other."""
    self.assertEqual(EXAMPLES.keys(), VARIANTS.keys())
    self.assertEqual(LOOPS.keys(), VARIANTS.keys())

  @each_variant
  def test_parameters(self, kind):
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
    count = sum(a.size for a in jax.tree.leaves(tree))
    self.assertEqual(num_params(config.table), count)
    self.assertEqual(costs.attention_params(config), count)

  @each_variant
  def test_entries(self, kind):
    """What decoding keeps has the shapes, and the size, that a config says."""
    config, seen = config_of(kind), []

    class Watched(type(config)):
      def entries(self, *arguments):
        seen.append(super().entries(*arguments))
        return seen[-1]

    fields = dataclasses.fields(config)
    watched = Watched(**{x.name: getattr(config, x.name) for x in fields})
    jax.eval_shape(
      functools.partial(attention.apply, watched),
      params_of(config),
      jnp.zeros((B, T, D)),
      jnp.zeros((B, S, D)),
    )
    wanted = [(B, n, S, size) for n, size in config.entry_shapes]
    self.assertEqual([x.shape for x in seen[0]], wanted)
    elements = sum(x.size for x in seen[0]) // (B * S)
    self.assertEqual(config.cache_elements, elements)

  @each_variant
  def test_axis_names(self, kind):
    """Every dimension of every parameter has its logical axis."""
    for row in config_of(kind).table.values():
      for name, shape in row.shapes.items():
        self.assertLen(row.logical_axes[name], len(shape))

  @each_variant
  def test_hashable(self, kind):
    """A config is a static argument: equal ones are one."""
    config = config_of(kind)
    same = dataclasses.replace(config)
    self.assertIsNot(same, config)
    self.assertEqual(same, config)
    self.assertEqual(hash(same), hash(config))


class ThreeWaysTest(oracles.X64TestCase):
  """Linen, NNX and the pure function are one function of one tree."""

  def setUp(self):
    super().setUp()
    self.x, self.y = (
      normal(i, B, n, D).astype('f') for i, n in ((0, T), (1, S))
    )

  @parameterized.product(kind=KINDS, train=(False, True))
  def test_same_bits(self, kind, train):
    """Outputs, bit for bit, with all options; dropout on with one key."""
    config = config_of(kind)
    params = params_of(config)
    key = jax.random.key(3)
    options = {
      'mask': masks.window(4, 1) & masks.lengths([5, 9]),
      'bias': normal(2, T, S).astype('f'),
      'input_positions': np.arange(T) + 3,
      'key_positions': np.arange(S) + 1,
      'head_gates': normal(3, config.num_heads).astype('f'),
    }
    rate = 0.4

    def pure(key):
      dropout = Dropout(key, rate) if train else None
      return apply(config, params, self.x, self.y, dropout=dropout, **options)

    module = linen.Attention(config, dropout_rate=rate, deterministic=not train)
    got = jax.jit(module.apply)(
      {'params': params}, self.x, self.y, dropout_rng=key, **options
    )
    assert_same_bits(got, pure(key))
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
    # A stream folds its count into its key.
    assert_same_bits(got, pure(jax.random.fold_in(key, 0)))


@functools.partial(jax.jit, static_argnums=0, static_argnames='implementation')
def value_and_grads(config, params, x, y, cotangent, **options):
  """The output, and gradients of sum(output * cotangent)."""

  def loss(params, x, y):
    out = attention.apply(config, params, x, y, **options)
    return jnp.sum(out * cotangent), out

  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, y)
  return out, grads


class LoopTest(oracles.X64TestCase):
  """The numbers, forward and backward: one call with a query that is blind."""

  def setUp(self):
    super().setUp()
    self.x, self.y = normal(0, B, T, D), normal(1, B, S, D)
    self.cotangent = normal(2, B, T, D)
    self.at = np.arange(T) + 3, np.array([2, 3, 5, 7, 11, 13, 0, 1, 4, 6, 8])

  def run_layer(self, kind, implementation):
    """Config, parameters, gates and mask; output and gradients."""
    config, params, _ = layer(kind)
    gates = normal(3, config.num_heads)
    allowed = booleans(4, B, config.num_heads, T, S)
    allowed[0, :, 2] = False
    out, grads = value_and_grads(
      config,
      params,
      self.x,
      self.y,
      self.cotangent,
      mask=allowed,
      head_gates=gates,
      input_positions=self.at[0],
      key_positions=self.at[1],
      implementation=implementation,
    )
    return (config, params, gates, allowed), out, grads

  @each_variant
  def test_loop(self, kind):
    """Output and gradients are those of a float64 NumPy loop.

    The gradients along a random direction: a difference of the loop's values at
    five points.
    """
    (config, params, gates, allowed), out, grads = self.run_layer(kind, 'exact')
    point = jax.tree.map(np.asarray, (params, self.x, self.y))
    leaves, structure = jax.tree.flatten(point)
    steps = [normal(i + 5, *x.shape) for i, x in enumerate(leaves)]

    def loop(distance):
      moved = [
        x + distance * step for x, step in zip(leaves, steps, strict=True)
      ]
      return LOOPS[kind](
        config,
        *structure.unflatten(moved),
        positions=self.at,
        gates=gates,
        allowed=allowed,
      )[0]

    assert_close(out, loop(0.0))
    e = 1e-3
    a, b, c, d = (np.sum(loop(i * e) * self.cotangent) for i in (-2, -1, 1, 2))
    wanted = (a - 8 * b + 8 * c - d) / (12 * e)
    slopes = map(np.vdot, jax.tree.leaves(grads), steps)
    assert_close(sum(slopes), wanted, 1e-8)

  @each_variant
  def test_implementations(self, kind):
    """Blocks give the output and the gradients of all scores at once."""
    wanted = self.run_layer(kind, 'exact')[1:]
    for implementation in sorted({*OURS} - {'exact'}):
      got = self.run_layer(kind, implementation)[1:]
      assert_close(got, wanted, 1e-11)

  @parameterized.product(kind=KINDS, implementation=OURS)
  def test_blind_query(self, kind, implementation):
    """Zeros before the output projection, no gradient, no NaN."""
    (_, params, *_), out, grads = self.run_layer(kind, implementation)
    bias = params['out'].get('bias', jnp.zeros(D))
    np.testing.assert_array_equal(out[0, 2], bias)
    np.testing.assert_array_equal(grads[1][0, 2], 0)
    chex.assert_tree_all_finite(grads)


class FunctionTest(oracles.X64TestCase):
  """What holds of the function, in float64."""

  def setUp(self):
    super().setUp()
    self.x, self.y = normal(0, B, T, D), normal(1, B, S, D)

  @each_variant
  def test_head_permutation(self, kind):
    """Groups, and heads within them, in another order: the same output."""
    config, params, f = layer(kind)
    sizes = dict(
      size
      for row in config.table.values()
      for size in getattr(row, 'sizes', ())
    )
    h = config.num_heads
    groups, rng = sizes.get('n', h), np.random.default_rng(0)
    order = rng.permutation(groups)
    heads = np.arange(h).reshape(groups, -1)[order]
    heads = rng.permuted(heads, axis=1).reshape(-1)

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
    self.assertFalse(np.array_equal(heads, np.arange(h)))
    mask = booleans(1, B, h, T, S)
    assert_close(
      f(permuted, self.x, self.y, mask=mask[:, heads]),
      f(params, self.x, self.y, mask=mask),
    )

  @each_variant
  def test_key_permutation(self, kind):
    """Keys in another order, with their positions: the same output."""
    _, params, f = layer(kind)
    order = np.random.default_rng(1).permutation(S)
    at = np.arange(S) + 2
    options = {'mask': masks.causal(), 'input_positions': np.arange(T) + 4}
    assert_close(
      f(params, self.x, self.y[:, order], key_positions=at[order], **options),
      f(params, self.x, self.y, key_positions=at, **options),
    )

  @each_variant
  def test_causality(self, kind):
    """An output has no gradient, of 0 exactly, in later inputs."""
    _, params, f = layer(kind)

    def early(x):
      return jnp.sum(jnp.sin(f(params, x, mask=masks.causal())[:, :3]))

    grad = jax.jit(jax.grad(early))(self.x)
    np.testing.assert_array_equal(grad[:, 3:], 0)
    self.assertGreater(np.min(np.max(np.abs(grad[:, :3]), axis=-1)), 1e-6)

  @parameterized.product(kind=KINDS, shift=(1, 997))
  def test_only_differences_of_positions_matter(self, kind, shift):
    """A uniform shift changes nothing; a stretch does.

    Of a stretch the mask sees nothing, and the rotation alone makes the
    difference.
    """
    _, params, f = layer(kind)
    at = np.array([0, 3, 4, 9, 11, 12, 20])
    options = {'mask': masks.window(10, 0)}
    wanted = f(params, self.x, input_positions=at, **options)
    got = f(params, self.x, input_positions=at + shift, **options)
    assert_close(got, wanted, 1e-11)
    options = {'mask': masks.causal()}
    near = f(params, self.x, input_positions=at, **options)
    far = f(params, self.x, input_positions=3 * at, **options)
    self.assertGreater(oracles.relative_error(far, near), 1e-3)

  @each_variant
  def test_gates(self, kind):
    """A gate scales its head's rows of the output kernel."""
    config, params, f = layer(kind)
    gates = normal(2, config.num_heads)
    scaled = params | {'out': dict(params['out'])}
    scaled['out']['kernel'] *= gates[:, None, None]
    assert_close(f(params, self.x, head_gates=gates), f(scaled, self.x))

  @each_variant
  def test_dropout(self, kind):
    """The same key drops the same; the mean over keys is the plain output."""
    _, params, f = layer(kind)
    keys = jax.random.split(jax.random.key(0), 400)

    @jax.jit
    @jax.vmap
    def noisy(key):
      return f(params, self.x, dropout=Dropout(key, 0.3))

    outs, plain = noisy(keys), f(params, self.x)
    alone = f(params, self.x, dropout=Dropout(keys[7], 0.3))
    assert_close(outs[7], alone)
    self.assertFalse(np.array_equal(outs[0], outs[1]))
    deviation = np.std(outs, axis=0) / np.sqrt(len(keys))
    self.assertLess(np.max(np.abs(np.mean(outs, 0) - plain) / deviation), 5)


class VmapTest(parameterized.TestCase):
  @each_variant
  def test_masks(self, kind):
    """vmap over inputs and masks of all kinds is one call for each."""
    config = config_of(kind)
    params = params_of(config)

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


def poisoned(cache):
  """NaN in every slot."""
  entries = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.entries)
  return dataclasses.replace(cache, entries=entries)


class CacheTest(oracles.X64TestCase):
  """Decoding: what was fed in pieces is what was fed at once."""

  def setUp(self):
    super().setUp()
    self.x = normal(1, B, T, D)

  @each_variant
  @given(split=splits, spare=st.sampled_from((0, 4)))
  def test_any_split(self, kind, split, spare):
    """In any split, the outputs of the full pass; NaN in empty slots."""
    config, params, f = layer(kind)
    cache = poisoned(init_cache(config, B, T + spare, jnp.float64))
    outs = []
    for piece in np.split(self.x, np.cumsum(split)[:-1], axis=1):
      out, cache = f(params, piece, cache=cache, mask=masks.causal())
      outs.append(out)
    wanted = f(params, self.x, mask=masks.causal())
    assert_close(jnp.concatenate(outs, axis=1), wanted)
    np.testing.assert_array_equal(cache.lengths, [T, T])

  @parameterized.product(kind=KINDS, side=('left', 'right'), ring=(False, True))
  def test_ragged(self, kind, side, ring):
    """Rows of other lengths, padded on either side with NaN, then a token."""
    config, params, f = layer(kind)
    lengths, width = np.array([5, 3]), 6
    valid = np.arange(width) < lengths[:, None]
    valid = valid if side == 'right' else valid[:, ::-1]
    prompts = np.full((B, width, D), np.nan)
    for row in range(B):
      prompts[row][valid[row]] = self.x[row, : lengths[row]]
    options = {'window': 4} if ring else {'capacity': 8}
    cache = poisoned(init_cache(config, B, dtype=jnp.float64, **options))
    causal = masks.causal()
    wanted = f(params, self.x, mask=masks.window(3, 0) if ring else causal)
    got, cache = f(params, prompts, cache=cache, mask=causal, valid=valid)
    self.assertTrue(np.all(np.isfinite(got)))
    token = np.stack([self.x[row, lengths[row]] for row in range(B)])[:, None]
    after, cache = f(params, token, cache=cache, mask=causal)
    np.testing.assert_array_equal(cache.lengths, lengths + 1)
    for row in range(B):
      n = lengths[row]
      assert_close(got[row][valid[row]], wanted[row, :n])
      assert_close(after[row, 0], wanted[row, n])

  @each_variant
  def test_static(self, kind):
    """Cross-attention over what was projected once; rows of other lengths."""
    config, params, f = layer(kind)
    y = normal(2, B, S, D)
    cache = keys_values(config, params, y)
    got, same = f(params, self.x, cache=cache)
    assert_close(got, f(params, self.x, y))
    assert_same_bits(same, cache)
    short = keys_values(config, params, y, lengths=[4, 9])
    got, _ = f(params, self.x, cache=short)
    assert_close(got, f(params, self.x, y, mask=masks.lengths([4, 9])))

  @each_variant
  def test_bytes(self, kind):
    """A cache takes the bytes that its arrays, config and costs say."""
    config = config_of(kind)
    cache = init_cache(config, 3, 13, jnp.bfloat16)
    self.assertEqual(cache.nbytes, sum(x.nbytes for x in cache.entries))
    self.assertEqual(cache.nbytes_per_token, 2 * config.cache_elements)
    self.assertEqual(cache.nbytes, 3 * 13 * 2 * config.cache_elements)
    kept = costs.cache_bytes(alone(config), 13, 3, 'bf16')
    self.assertEqual(cache.nbytes, kept)
    self.assertIs(
      type(cache),
      attention.LatentCache if config.keeps_latent else attention.KVCache,
    )
    ring = init_cache(config, 3, window=4)
    self.assertIs(type(ring), attention.WindowCache)
    self.assertEqual(ring.nbytes, 3 * 4 * 4 * config.cache_elements)

  @each_variant
  def test_serialisation(self, kind):
    """Its caches come back from Flax's bytes as they went."""
    config = config_of(kind)
    for options in {'capacity': 13}, {'window': 3}:
      empty = init_cache(config, B, **options)
      leaves, structure = jax.tree.flatten(empty)
      full = structure.unflatten(
        jnp.asarray(normal(i, *x.shape) * 9).astype(x.dtype)
        for i, x in enumerate(leaves)
      )
      data = serialization.to_bytes(full)
      self.assertEqual(serialization.from_bytes(empty, data), full)

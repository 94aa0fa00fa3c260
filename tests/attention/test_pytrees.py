"""Frozen pytrees: when two are equal, and how they travel in `jax.export`."""

import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from examples import kinds_of
from jax import export
from oracles import assert_close, normal

from mha_jax import attention
from mha_jax.attention import (
  Dropout,
  GroupedConfig,
  LatentConfig,
  StaticCache,
  init_cache,
  masks,
)
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.caches import Cache, View
from mha_jax.attention.one_head.block_pairs import BlockPairs
from mha_jax.tasks.task import Batch

B, T, D = 2, 3, 6
CONFIG = GroupedConfig(d_model=D, num_heads=3)
LATENT = LatentConfig(d_model=D, num_heads=3, kv_lora_rank=5)
SEGMENTS = np.array([[0, 1, 1], [2, 2, 2]])

KINDS = {
  'causal': masks.causal,
  'window': lambda: masks.window(1, None),
  'another_window': lambda: masks.window(1, 0),
  'lengths': lambda: masks.lengths([1, 3]),
  'other_lengths': lambda: masks.lengths([1, 2]),
  'query_lengths': lambda: masks.lengths([1, 3], [1, 3]),
  'segments': lambda: masks.segments(SEGMENTS),
  'dense': lambda: masks.dense(np.eye(T, dtype=bool)),
  'and': lambda: masks.causal() & masks.lengths([1, 3]),
  'or': lambda: masks.causal() | masks.lengths([1, 3]),
  'kv_cache': lambda: init_cache(CONFIG, B, 4),
  'bfloat16_cache': lambda: init_cache(CONFIG, B, 4, jnp.bfloat16),
  'window_cache': lambda: init_cache(CONFIG, B, window=4),
  'latent_cache': lambda: init_cache(LATENT, B, 4),
  'static_cache': lambda: StaticCache((jnp.ones((B, 1, T, 2)),), jnp.ones(B)),
  'view': lambda: View((jnp.ones((B, 1, T, 2)),), jnp.ones((B, T)), True),
  'dropout': lambda: Dropout(jax.random.key(0), 0.1),
  'other_rate': lambda: Dropout(jax.random.key(0), 0.2),
  'other_key': lambda: Dropout(jax.random.key(1), 0.1),
  'raw_key': lambda: Dropout(jax.random.PRNGKey(0), 0.1),
  'axis': lambda: Axis(T, jnp.arange(T)),
  'shorter_axis': lambda: Axis(T - 1, jnp.arange(T)),
  'blocks': lambda: Blocks(T, 2, jnp.arange(T)),
  'block_pairs': lambda: BlockPairs(jnp.arange(2), jnp.arange(2), 2),
  'batch': lambda: Batch(*[jnp.ones((B, T), jnp.int32)] * 2, jnp.ones((B, T))),
  'shapes': lambda: jax.eval_shape(KINDS['kv_cache']),
}


class EqualityTest(parameterized.TestCase):
  """True or False, never an array."""

  def test_every_kind_has_a_row(self):
    """A new mask or cache must have one above."""
    found = {type(make()).__name__ for make in KINDS.values()}
    self.assertContainsSubset(kinds_of(masks.Mask) | kinds_of(Cache), found)

  @parameterized.parameters(*KINDS)
  def test_equal(self, name):
    """Two of one kind with the same content, and their hashes."""
    one, other = KINDS[name](), KINDS[name]()
    self.assertIs(one == other, True)
    self.assertIs(one != other, False)
    self.assertEqual(hash(one), hash(other))

  def test_all_others_differ(self):
    """By class, structure, static fields, shape, dtype or a single value."""
    made = {name: make() for name, make in KINDS.items()}
    for one, other in itertools.permutations(made, 2):
      self.assertIs(made[one] == made[other], False, (one, other))
    self.assertFalse(made['causal'] == np.ones((T, T), bool))
    self.assertFalse(np.ones((T, T), bool) == made['causal'])

  def test_traced(self):
    """Nobody knows the values: equal to itself alone."""
    seen = []

    @jax.jit
    def f(x):
      mask = masks.lengths(x)
      known = masks.lengths([1, 2])
      seen.extend([mask == mask, mask == masks.lengths(x + 0), mask == known])
      hash(mask)
      return x

    f(np.array([1, 2]))
    self.assertEqual(seen, [True, False, False])

  def test_static_argument(self):
    """Equal masks are one to jit, others are not."""
    traced = []

    def f(mask):
      traced.append(mask)
      return mask.array(T, T)

    f = jax.jit(f, static_argnums=0)
    for lengths in ([1, 3], [1, 3], [1, 2]):
      got = f(masks.lengths(lengths) & masks.causal())
      wanted = (masks.lengths(lengths) & masks.causal()).array(T, T)
      np.testing.assert_array_equal(got, wanted)
    self.assertLen(traced, 2)


class ExportTest(parameterized.TestCase):
  """Arguments and results of an exported function, through bytes."""

  def through_bytes(self, function, *args):
    exported = export.export(jax.jit(function))(*args)
    again = export.deserialize(exported.serialize())
    self.assertEqual(again.in_tree, exported.in_tree)
    self.assertEqual(again.out_tree, exported.out_tree)
    return again.call(*args)

  @parameterized.parameters('kv_cache', 'window_cache', 'latent_cache')
  def test_a_decoding_step(self, name):
    """The cache goes in and comes out."""
    config = LATENT if name == 'latent_cache' else CONFIG
    params = attention.init_table(config.table, jax.random.key(0))

    def step(x, cache):
      mask = masks.causal()
      return attention.apply(config, params, x, cache=cache, mask=mask)

    x, cache = normal(0, B, T, D).astype(np.float32), KINDS[name]()
    (got, after), (wanted, held) = (
      self.through_bytes(step, x, cache),
      step(x, cache),
    )
    self.assertIs(type(after), type(held))
    assert_close((got, after.entries), (wanted, held.entries), 1e-5)

  def test_all_kinds(self):
    """Masks of every kind, dropout with both kinds of keys, caches."""
    inside = ('axis', 'shorter_axis', 'blocks', 'shapes')  # of a call
    trees = {name: f() for name, f in KINDS.items() if name not in inside}
    got = self.through_bytes(lambda x: x, trees)
    for name, tree in trees.items():
      self.assertEqual(jax.tree.map(jnp.asarray, tree), got[name], name)


class AgainTest(absltest.TestCase):
  def test_reload(self):
    """A module loaded again, as notebooks do, makes its classes anew."""
    source = importlib.util.find_spec('mha_jax.attention.masks.kinds')
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    self.assertEqual(module.causal(), module.causal())

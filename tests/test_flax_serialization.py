"""Caches through `flax.serialization`: bytes, state dicts and errors."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from examples import kinds_of
from flax import serialization
from oracles import normal

import mha_jax.linen
from mha_jax import flax_serialization
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  StaticCache,
  apply,
  init_cache,
  init_table,
  masks,
)
from mha_jax.attention.caches import Cache

B, T, D = 2, 3, 6
CONFIG = GroupedConfig(d_model=D, num_heads=3)
PLAIN = LatentConfig(d_model=D, num_heads=3, kv_lora_rank=5)
LATENT = LatentConfig(D, 3, kv_lora_rank=5, qk_rope_head_dim=2)


def filled(config, capacity=None, dtype=jnp.float32, **options):
  """A cache with tokens in it."""
  params = init_table(config.table, jax.random.key(0))
  cache = init_cache(config, B, capacity, dtype, **options)
  x = normal(0, B, T, D).astype(np.float32)
  return apply(config, params, x, mask=masks.causal(), cache=cache)[1]


def static(positions):
  entries = (jnp.asarray(normal(0, B, 3, T, 2), jnp.float32),)
  return StaticCache(entries, jnp.array([1, 3]), positions)


STATES = {
  'KVCache': lambda: filled(CONFIG, 5),
  'KVCache of bfloat16': lambda: filled(CONFIG, 5, jnp.bfloat16),
  'KVCache of 7 slots': lambda: filled(CONFIG, 7),
  'LatentCache': lambda: filled(LATENT, 5),
  'WindowCache': lambda: filled(CONFIG, window=5),
  'StaticCache': lambda: static(None),
  'StaticCache at positions': lambda: static(jnp.array([[1, 3, 4]])),
  'Causal': masks.causal,
  'Window': lambda: masks.window(1, None),
  'Lengths': lambda: masks.lengths([1, 3], [2, 0]),
  'Segments': lambda: masks.segments(np.array([[0, 1, 1], [2, 2, 2]])),
  'And': lambda: masks.causal() & masks.lengths([1, 3]),
  'Or': lambda: masks.window(1, 0) | masks.segments(np.ones((B, T), int)),
  'Dense': lambda: masks.dense(np.eye(T, dtype=bool)),
}


class RoundTripTest(parameterized.TestCase):
  def test_every_kind_has_a_state(self):
    """A new mask or cache must be known to Flax and have a row above."""
    wanted = kinds_of(Cache) | kinds_of(masks.Mask)
    self.assertEqual({x.__name__ for x in flax_serialization.KINDS}, wanted)
    self.assertEqual({type(x()).__name__ for x in STATES.values()}, wanted)

  @parameterized.parameters(*STATES)
  def test_bytes(self, name):
    """What comes back is equal, also by a target of shapes alone."""
    state = {'step': 3, 'layers': (STATES[name](), STATES[name]())}
    data = serialization.to_bytes(state)
    for target in (
      {'step': 0, 'layers': state['layers']},
      {'step': 0, 'layers': jax.eval_shape(lambda: state['layers'])},
    ):
      self.assertEqual(serialization.from_bytes(target, data), state)

  def test_state_dict(self):
    """Arrays by name, under the class."""
    state = serialization.to_state_dict(STATES['WindowCache']())
    shapes = jax.tree.map(np.shape, state)
    entries = {'0': (B, 3, 5, 2), '1': (B, 3, 5, 2)}
    self.assertEqual(
      shapes, {'WindowCache': {'entries': entries, 'lengths': (B,)}}
    )

  def test_goes_on(self):
    """Decoding goes on from bytes as it does without."""
    layer = mha_jax.linen.MultiHeadAttention(num_heads=3, head_dim=2)
    x = normal(0, B, T + 1, D).astype(np.float32)
    variables = layer.init(jax.random.key(0), x)
    call = {'mask': masks.causal()}
    empty = layer.init_cache(B, T + 1)
    _, cache = layer.apply(variables, x[:, :T], cache=empty, **call)
    again = serialization.from_bytes(empty, flax.serialization.to_bytes(cache))
    got, wanted = (
      layer.apply(variables, x[:, T:], cache=kept, **call)[0]
      for kept in (again, cache)
    )
    np.testing.assert_array_equal(got, wanted)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      'KVCache',
      'WindowCache',
      r"\['WindowCache'\] was saved.*KVCache of .*; rest",
    ),
    (
      'KVCache',
      'KVCache of 7 slots',
      r'entries.0 of KVCache .* float32\[2, 3, 7, 2\], .* float32\[2, 3, 5, 2\]'
      '; make it',
    ),
    ('KVCache', 'KVCache of bfloat16', r'saved as bfloat16\[.* has float32'),
    (
      'StaticCache',
      'StaticCache at positions',
      r'given_positions of StaticCache was saved as int32\[1, 3\].*has None',
    ),
    ('StaticCache at positions', 'StaticCache', r'saved as None.*has int32'),
    ('And', 'Or', r"\['Or'\] was saved.*is And of"),
  )
  def test_another(self, target, saved, message):
    """Of another class, size or dtype: what was saved, and the target."""
    data = serialization.to_bytes(STATES[saved]())
    with self.assertRaisesRegex(ValueError, message):
      serialization.from_bytes(STATES[target](), data)

  @parameterized.parameters(
    (
      masks.window(1, 0),
      masks.window(2, 0),
      r'Window\(left=2, right=0\).*Window\(left=1, right=0\)',
    ),
    (STATES['KVCache'](), jnp.ones(3), 'ndarray was saved'),
    (
      STATES['KVCache'](),
      {'KVCache': {'lengths': 1}},
      r'KVCache.* was saved.*entries',
    ),
    (filled(PLAIN, 5), filled(LATENT, 5), 'got 1 and 2 at path ./entries'),
  )
  def test_others(self, target, saved, message):
    """Other static fields, and what is no cache at all."""
    data = serialization.to_bytes(saved)
    with self.assertRaisesRegex(ValueError, message):
      serialization.from_bytes(target, data)

"""Decoding by modules and models: any split of ragged rows is the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, normal

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax.attention import Rope, masks
from mha_jax.decoder import DecoderLM, decoder_config

B, T, D, M, WINDOW = 2, 7, 12, 11, 4
DTYPES = {
  'float64': (jnp.float64, 1e-12),
  'float32': (jnp.float32, 1e-5),
  'bfloat16': (jnp.bfloat16, 2**-7),
}
"""What entries are kept in, and the relative error."""
GROUPED = {'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 6}
LATENT = {'num_heads': 3, 'kv_lora_rank': 5, 'qk_nope_head_dim': 4}
LM = {'vocab_size': M, 'max_len': T, 'd_model': D, 'num_layers': 2}
calls = st.lists(
  st.tuples(
    st.sampled_from((1, 3)),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(('left', 'right')),
  ),
  max_size=4,
)
"""Of each call the width, the tokens of two rows, and where padding stands."""


def random_params(module, *inputs):
  tree = jax.eval_shape(module.init, jax.random.key(0), *inputs)
  return jax.tree.map(
    lambda a: jnp.asarray(normal(a.size, *a.shape) / 2, a.dtype), tree
  )


def of_linen(dtype):
  module = linen.GroupedQueryAttention(**GROUPED, rope=Rope(), dtype=dtype)
  x = normal(0, B, T, D).astype(dtype)
  return module, functools.partial(module.apply, random_params(module, x)), x


def of_nnx(dtype):
  module = mha_nnx.MultiHeadLatentAttention(
    in_features=D, **LATENT, rope=Rope(), dtype=dtype, rngs=nnx.Rngs(0)
  )
  return module, module, normal(0, B, T, D).astype(dtype)


def of_lm(dtype, **options):
  config = decoder_config(**LM | options, dtype=np.dtype(dtype).name)
  module = DecoderLM(config)
  x = np.random.default_rng(0).integers(0, M, (B, T))
  return module, functools.partial(module.apply, random_params(module, x)), x


MODELS = {
  'linen': of_linen,
  'nnx': of_nnx,
  'rope': functools.partial(
    of_lm, attention='gqa', positions='rope', mlp_dim=5, **GROUPED
  ),
  'learned': functools.partial(of_lm, attention='mla', **LATENT),
}


@functools.cache
def setting(name, dtype, ring):
  """Of a model a compiled call with a cache, the cache, inputs, outputs."""
  kept, _ = DTYPES[dtype]
  module, apply, x = MODELS[name](jnp.promote_types(kept, jnp.float32))
  options = {'window': WINDOW} if ring else {'capacity': T}
  cache = module.init_cache(B, dtype=kept, **options)

  @jax.jit
  def step(x, cache, valid):
    return apply(x, mask=masks.causal(), cache=cache, valid=valid)

  mask = masks.window(WINDOW - 1, 0) if ring else masks.causal()
  return step, cache, x, jax.jit(functools.partial(apply, mask=mask))(x)


def in_calls(step, cache, x, out, calls):
  """Each token's output, all tokens given in the calls and more of width 3."""
  used, got = np.zeros(B, int), np.full(out.shape, np.nan)
  for width, *counts, side in (*calls, *[(3, 3, 3, 'right')] * 3):
    counts = np.minimum(np.minimum(counts, width), T - used)[:, None]
    valid = np.arange(width) < counts
    valid = valid if side == 'right' else valid[:, ::-1]
    at = np.nonzero(valid)
    tokens = at[0], used[at[0]] + (np.cumsum(valid, axis=1) - 1)[at]
    chunk = np.full((B, width, *x.shape[2:]), M if x.ndim == 2 else np.nan)
    chunk = chunk.astype(x.dtype)
    chunk[at] = x[tokens]
    new, cache = step(chunk, cache, valid)
    got[tokens] = new[at]
    used += counts[:, 0]
  return got, cache


class CallsTest(oracles.X64TestCase):
  @parameterized.parameters(
    ('linen', 'float64', True),
    ('nnx', 'float64', False),
    ('nnx', 'float32', True),
    ('rope', 'float64', True),
    ('rope', 'bfloat16', False),
    ('learned', 'float64', False),
  )
  @given(calls=calls)
  def test_whole(self, name, dtype, ring, calls):
    """The full pass, whatever rows are given at each call."""
    step, cache, x, wanted = setting(name, dtype, ring)
    got, cache = in_calls(step, cache, x, wanted, calls)
    assert_close(got, wanted, DTYPES[dtype][1])
    layers = cache if isinstance(cache, tuple) else (cache,)
    for layer in layers:
      np.testing.assert_array_equal(layer.lengths, T)
      self.assertEqual(layer.entries[0].dtype, DTYPES[dtype][0])


class LearnedPositionsTest(parameterized.TestCase):
  """There are max_len of them, also where a ring never overflows."""

  def setUp(self):
    super().setUp()
    module, self.apply, x = of_lm(jnp.float32, num_layers=1, num_heads=3)
    self.x = x[:, :2]
    self.cache = tuple(
      dataclasses.replace(layer, lengths=jnp.array([T - 1, T - 3]))
      for layer in module.init_cache(B, window=WINDOW)
    )

  def test_known_lengths(self):
    """Past the last one there are none: a ValueError."""
    with self.assertRaisesRegex(
      ValueError,
      r'positions in cache from 4 to 7 must lie in \[0, 6\], below max_len=7; ',
    ):
      self.apply(self.x, cache=self.cache)

  def test_padding_has_none(self):
    """Nor need it be a token: it is not refused, nor NaN."""
    valid = np.array([[True, False], [True, True]])
    tokens = np.where(valid, self.x, M)
    out, _ = self.apply(tokens, cache=self.cache, valid=valid)
    self.assertTrue(np.all(np.isfinite(out)))

  def test_traced_lengths(self):
    """NaN in that row from there on; others go on."""
    step = jax.jit(lambda cache: self.apply(self.x, cache=cache))
    out, cache = step(self.cache)
    self.assertTrue(np.all(np.isnan(out[0, 1])))
    self.assertTrue(np.all(np.isfinite(out[1])))
    out, _ = step(cache)
    self.assertTrue(np.all(np.isnan(out[0])))
    self.assertTrue(np.all(np.isnan(out[1, 1])))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'valid': np.ones((B, 3), bool)}, r'valid of bool and shape \(2, 3\)'),
    (
      {'cache': (1, 2)},
      'cache of type int must be a cache, as init_cache makes it',
    ),
    ({'cache': 'of another batch'}, r'cache has entries .* ask for \[\(2, 1'),
  )
  def test_calls_of_a_model(self, changes, message):
    """What does not fit is refused before it is embedded."""
    module, apply, x = MODELS['learned'](jnp.float32)
    options = {'cache': module.init_cache(B, T)} | changes
    if isinstance(options['cache'], str):
      options['cache'] = module.init_cache(B + 1, T)
    with self.assertRaisesRegex(ValueError, message):
      apply(x, **options)

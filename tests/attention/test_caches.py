"""Caches: rings, overflow, errors and programs.

What every variant owes of its caches is in `test_variants`.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from examples import D, config_of, params_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, assert_same_bits, normal

from mha_jax import attention
from mha_jax.attention import (
  LatentConfig,
  init_cache,
  keys_values,
  masks,
)
from mha_jax.attention.variants import build

B, T = 2, 7
DROPOUT = attention.Dropout(np.zeros(2, np.uint32), 0.1)
splits = st.sampled_from(((7,), (1,) * 7, (3, 1, 3), (4, 3), (1, 4, 1, 1)))


@functools.partial(jax.jit, static_argnums=0)
def step(config, params, x, cache, mask, valid=None):
  return attention.apply(config, params, x, cache=cache, mask=mask, valid=valid)


@functools.partial(jax.jit, static_argnums=0)
def whole(config, params, x, mask):
  return attention.apply(config, params, x, mask=mask)


def setting(kind: str, dtype=np.float64):
  config = config_of(kind)
  params = params_of(config, dtype=dtype)
  return config, params, normal(1, B, T, D).astype(dtype)


def poisoned(cache):
  """NaN in every slot."""
  entries = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.entries)
  return dataclasses.replace(cache, entries=entries)


def in_pieces(config, params, x, cache, split, mask):
  outs, start = [], 0
  for size in split:
    piece = x[:, start : start + size]
    out, cache = step(config, params, piece, cache, mask)
    outs.append(out)
    start += size
  return jnp.concatenate(outs, axis=1), cache


class SplitTest(oracles.X64TestCase):
  @parameterized.parameters('gqa', 'mla')
  @given(split=splits, window=st.sampled_from((1, 3, 9)))
  def test_window(self, kind, split, window):
    """A ring gives the windowed full pass, also where a chunk crosses it."""
    config, params, x = setting(kind)
    cache = poisoned(init_cache(config, B, dtype=jnp.float64, window=window))
    got, _ = in_pieces(config, params, x, cache, split, masks.causal())
    wanted = whole(config, params, x, masks.window(window - 1, 0))
    assert_close(got, wanted)

  @parameterized.product(kind=('gqa', 'mla'), form=('expanded', 'absorbed'))
  def test_either_form(self, kind, form):
    """The latent's form does not change the result, nor do other dtypes."""
    config, params, x = setting(kind, np.float32)
    if kind == 'mla':
      config = dataclasses.replace(config, form=form)
    wanted = whole(config, params, x, masks.causal())
    for dtype, tolerance in (('float32', 1e-5), ('bfloat16', 2**-6)):
      cache = init_cache(config, B, T, jnp.dtype(dtype))
      got, cache = in_pieces(config, params, x, cache, (3, 4), masks.causal())
      self.assertEqual(cache.entries[0].dtype, dtype)
      self.assertEqual(got.dtype, jnp.float32)
      assert_close(got, wanted, tolerance)

  @parameterized.parameters(
    ('gqa', {'capacity': T}),
    ('mla', {'capacity': T}),
    ('gqa', {'window': 3}),
    ('mla', None),
  )
  def test_one_trace(self, kind, options):
    """Lengths grow, in a static cache they differ; nothing is traced again."""
    config, params, x = setting(kind)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def one(x, cache):
      return attention.apply(
        config, params, x, cache=cache, mask=masks.causal()
      )

    if options is not None:
      cache = init_cache(config, B, dtype=jnp.float64, **options)
    for i in range(T):
      if options is None:
        cache = keys_values(config, params, x, lengths=[i, T])
      _, cache = one(x[:, i : i + 1], cache)


class OverflowTest(oracles.X64TestCase):
  def setUp(self):
    super().setUp()
    self.config, self.params, self.x = setting('gqa')

  def test_known_lengths(self):
    """Raises with the numbers before anything is computed."""
    cache = init_cache(self.config, B, 6, jnp.float64)
    _, cache = attention.apply(
      self.config, self.params, self.x[:, :5], cache=cache
    )
    with self.assertRaisesRegex(
      ValueError,
      'cache row 0 holds 5 tokens of capacity=6 and cannot take 2 more.* 7 or',
    ):
      attention.apply(self.config, self.params, self.x[:, :2], cache=cache)

  def test_traced_lengths(self):
    """NaN in that row from then on; its entries stay, other rows go on."""
    valid = np.ones((B, 4), bool)
    valid[1, 2:] = False
    cache = init_cache(self.config, B, 6, jnp.float64)
    causal = masks.causal()
    _, before = step(
      self.config, self.params, self.x[:, :4], cache, causal, valid
    )
    out, after = step(self.config, self.params, self.x[:, 4:7], before, causal)
    np.testing.assert_array_equal(after.lengths, [7, 5])
    self.assertTrue(np.all(np.isnan(out[0])))
    row = np.concatenate([self.x[1:, :2], self.x[1:, 4:7]], axis=1)
    wanted = whole(self.config, self.params, row, causal)
    assert_close(out[1], wanted[0, 2:])
    for old, new in zip(before.entries, after.entries, strict=True):
      assert_same_bits(new[0], old[0])
    out, _ = step(self.config, self.params, self.x[:, :1], after, causal)
    self.assertTrue(np.all(np.isnan(out[0])) and np.all(np.isfinite(out[1])))


class SizesTest(parameterized.TestCase):
  def test_published(self):
    """Llama 3 70B, DeepSeek-V2 and V3, and the lesson's d = 64."""
    shape = {'d_model': 8192, 'num_heads': 64, 'head_dim': 128}
    mha, gqa = build('mha', **shape), build('gqa', num_kv_heads=8, **shape)
    self.assertEqual(mha.cache_elements, 8 * gqa.cache_elements)
    mla = LatentConfig(
      5120,
      128,
      512,
      1536,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
    )
    self.assertEqual(60 * mla.cache_elements, 34_560)
    cache = jax.eval_shape(lambda: init_cache(mla, 1, 1, jnp.bfloat16))
    self.assertEqual(61 * cache.nbytes_per_token, 70_272)
    small = {'d_model': 64, 'num_heads': 8, 'use_bias': False}
    mha, mqa = build('mha', **small), build('mqa', **small)
    sizes = [init_cache(x, 1, 2048, jnp.bfloat16).nbytes for x in (mha, mqa)]
    self.assertEqual(sizes, [512 * 1024, 64 * 1024])
    counts = [attention.num_params(x.table) for x in (mha, mqa)]
    self.assertEqual(1 - counts[1] / counts[0], 0.4375)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'cache': 3}, 'cache of type int must be a cache, as init_cache makes it'),
    ({'inputs_k': np.ones((B, T, D))}, 'inputs_k is given with a cache'),
    ({'input_positions': np.arange(T)}, 'input_positions and key_pos.* None'),
    ({'key_positions': np.arange(T)}, 'input_positions and key_pos.* None'),
    ({'dropout': DROPOUT}, 'dropout is on with a cache'),
    ({'valid': np.ones((B, 3), bool)}, r'valid of bool and shape \(2, 3\)'),
    ({'valid': np.ones((B, T))}, 'valid of float.* must be booleans'),
    ({'cache': None, 'valid': np.ones((B, T))}, 'valid is given without a'),
    ({'inputs_q': np.ones((3, T, D))}, r'for \[\(3, 3, 4\)'),
  )
  def test_bad_calls(self, changes, message):
    """A ValueError with the name, the value and the remedy."""
    config, params, x = setting('gqa', np.float32)
    arguments = {'inputs_q': x, 'cache': init_cache(config, B, T)} | changes
    with self.assertRaisesRegex(ValueError, message):
      attention.apply(config, params, **arguments)

  @parameterized.parameters(([1, 2, 3],), ([4],), (4,), (np.array([1.0, 2.0]),))
  def test_bad_lengths(self, lengths):
    """One whole number for each row of a static cache."""
    config, params, x = setting('gqa', np.float32)
    with self.assertRaisesRegex(
      ValueError, r'lengths must be integers of shape \(2,\), got'
    ):
      keys_values(config, params, x, lengths=lengths)

  @parameterized.parameters(
    ({'mask': masks.lengths([1, 2])}, 'by columns, but a WindowCache writes'),
    ({'mask': np.ones((1, 3), bool)}, 'by columns, but a WindowCache writes'),
    ({'bias': np.ones((1, 3), np.float32)}, 'by columns, but a WindowCache'),
  )
  def test_columns_of_a_ring(self, changes, message):
    """A ring has no columns to speak of."""
    config, params, x = setting('gqa', np.float32)
    cache = init_cache(config, B, window=3)
    with self.assertRaisesRegex(ValueError, message):
      attention.apply(config, params, x, cache=cache, **changes)

  def test_what_is_no_config_and_no_sequence(self):
    """Is said in one line."""
    config, params, _ = setting('gqa')
    with self.assertRaisesRegex(ValueError, 'config=4 must be an Attention'):
      init_cache(4, B, 3)
    with self.assertRaisesRegex(ValueError, 'inputs_k=None must be the other'):
      keys_values(config, params, None)

  @parameterized.parameters(
    ({}, 'capacity=None and window=None: give one of the two'),
    ({'capacity': 3, 'window': 3}, 'capacity=3 and window=3: give one'),
    ({'capacity': 0}, 'capacity=0 must be a positive integer'),
    ({'window': -1}, 'window=-1 must be a positive integer'),
    ({'batch_size': 0, 'capacity': 1}, 'batch_size=0 must be a positive'),
  )
  def test_bad_sizes(self, options, message):
    """init_cache names what is wrong."""
    config, _, _ = setting('gqa')
    with self.assertRaisesRegex(ValueError, message):
      init_cache(config, **{'batch_size': B} | options)


class StaticTest(oracles.X64TestCase):
  @parameterized.parameters('gqa', 'mla')
  def test_positions(self, kind):
    """Keys keep theirs, for RoPE and for masks; queries bring their own."""
    config, params, x = setting(kind)
    keys, at = 100 + jnp.arange(T), jnp.asarray([104, 101])
    mask = masks.window(2, 1)
    kept = keys_values(config, params, x, key_positions=keys)
    got, _ = attention.apply(
      config, params, x[:, :2], cache=kept, mask=mask, input_positions=at
    )
    wanted = attention.apply(
      config,
      params,
      x[:, :2],
      x,
      mask=mask,
      input_positions=at,
      key_positions=keys,
    )
    assert_close(got, wanted)

  def test_lengths_beyond_the_keys(self):
    """More tokens than there are keys are refused."""
    config, params, x = setting('gqa')
    with self.assertRaisesRegex(ValueError, rf'lengths from 1 to 9 .*{T}\]'):
      keys_values(config, params, x, lengths=[1] * (B - 1) + [9])


class ImplementationTest(oracles.X64TestCase):
  @parameterized.product(
    kind=('gqa', 'mla'), options=({'capacity': 9}, {'window': 4})
  )
  def test_by_blocks(self, kind, options):
    """Over a cache blocks give what all scores at once give without one."""
    config, params, x = setting(kind)
    cache = poisoned(init_cache(config, B, dtype=jnp.float64, **options))
    call = jax.jit(
      functools.partial(
        attention.apply,
        config,
        mask=masks.causal(),
        implementation='blockwise',
      )
    )
    first, cache = call(params, x[:, :5], cache=cache)
    last, _ = call(params, x[:, 5:6], cache=cache)
    mask = masks.window(3, 0) if 'window' in options else masks.causal()
    wanted = whole(config, params, x, mask)
    assert_close((first, last), (wanted[:, :5], wanted[:, 5:6]))

  @parameterized.parameters('expanded', 'absorbed')
  def test_gradients_beside_empty_slots(self, form):
    """Slots never written may hold NaN, also for the parameters' gradients."""
    config, params, x = setting('mla')
    config = dataclasses.replace(config, form=form)
    cache = poisoned(init_cache(config, B, 9, jnp.float64))

    @jax.jit
    @jax.grad
    def gradient(params):
      return jnp.sum(
        attention.apply(config, params, x, cache=cache, mask=masks.causal())[0]
      )

    chex.assert_tree_all_finite(gradient(params))


class RefusedTest(parameterized.TestCase):
  @parameterized.parameters('int8', bool, 'abc')
  def test_dtypes(self, dtype):
    """A cache holds floating numbers."""
    with self.assertRaisesRegex(ValueError, 'must be a floating dtype'):
      init_cache(setting('gqa')[0], 1, 4, dtype)

  def test_a_ring_that_is_too_small(self):
    """A mask that sees further back than the ring keeps is refused."""
    config, params, x = setting('gqa', np.float32)
    cache = init_cache(config, B, window=4)
    with self.assertRaisesRegex(ValueError, 'window=4.*window=5 or more'):
      attention.apply(config, params, x, cache=cache, mask=masks.window(4, 0))


@pytest.mark.usefixtures('full_compile')
class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(1, 2)
  def test_a_step_copies_no_cache(self, rows):
    """A cache that is given away is written in place, also that of one row."""
    config = config_of('mha')
    params = params_of(config)
    cache = init_cache(config, rows, capacity=1031, dtype='float32')

    def step(x, cache):
      return attention.apply(
        config, params, x, mask=masks.causal(), cache=cache
      )

    x = jnp.ones((rows, 1, D), jnp.float32)
    program = jax.jit(step, donate_argnums=1).lower(x, cache).compile()
    text = program.as_text()
    self.assertRegex(text, rf'f32\[{rows},3,1031,2\]')
    self.assertNotRegex(text, rf'= f32\[{rows},3,1031,2\]\S* copy\(')

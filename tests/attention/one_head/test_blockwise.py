"""blockwise.attend: what is its own beside the tests of every implementation.

`small_blocks` in conftest.py makes blocks of 3 queries and 4 keys, so that
lengths of 7 and 11 are no multiples.
"""

import functools
import re
import subprocess
import sys
import textwrap
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from compiling import patched
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import assert_close, assert_same_bits, booleans, normal

from mha_jax.attention import Dropout, masks
from mha_jax.attention import multihead_attention as multihead
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.one_head import block_pairs, blockwise, exact

B, T, S, K, V = 2, 7, 11, 13, 17
SIZES = block_pairs.BlockSizes(3, 4)


def one_head(t: int = T, s: int = S, seed: int = 0):
  """q, k, v, and cotangents of the output and the log-sum-exp."""
  shapes = ((t, K), (s, K), (s, V), (t, V), (t,))
  return [normal(seed + i, *shape) for i, shape in enumerate(shapes)]


@functools.partial(jax.jit, static_argnames=('attend', 'logit_softcap'))
def value_and_grads(attend, q, k, v, d_out, d_residual, bias, **options):
  """Output, log-sum-exp and the gradients of both."""

  def outputs(q, k, v, bias):
    return attend(q, k, v, bias=bias, return_residual=True, **options)

  (out, residual), pull = jax.vjp(outputs, q, k, v, bias)
  seen = jnp.where(jnp.isfinite(residual), d_residual, 0)
  return (out, residual, *pull((d_out, seen)))


@functools.cache
def in_blocks(sizes: block_pairs.BlockSizes):
  """blockwise.attend with sizes, one function for each, so that jit knows."""
  return functools.partial(blockwise.attend, sizes=sizes)


MASKS = {
  'none': None,
  'causal': masks.causal(),
  'window': masks.window(2, 1),
  'lengths': masks.lengths([9], [5]),
  'segments': masks.segments([[0, 0, 0, 1, 1, 1, 3]], [[0] * 5 + [1] * 6]),
  'dense': masks.dense(booleans(0, T, S, share=0.3)),
  'row': masks.dense(booleans(1, 1, S)),
  'column': masks.dense(booleans(2, T, 1)),
  'and': masks.causal() & masks.lengths([5]),
  'or': masks.window(1, 0) | masks.lengths([2], [6]),
}


class ExactTest(oracles.X64TestCase):
  """Against attention with all scores at once, in float64."""

  @parameterized.parameters(
    *((mask, None) for mask in MASKS),
    *((mask, (T, S)) for mask in ('causal', 'lengths', 'dense', 'or')),
    ('causal', (1, S)),
    ('lengths', (T, 1)),
  )
  def test_same(self, mask, bias):
    """Output, log-sum-exp and gradients, also of a bias of any shape."""
    bias = None if bias is None else normal(9, *bias)
    options = {'mask': MASKS[mask], 'scale': 0.3}
    if bias is not None:
      bias[0, 0] = -np.inf
      options['logit_softcap'] = 1.5
    wanted, got = (
      value_and_grads(attend, *one_head(), bias, **options)
      for attend in (exact.attend, blockwise.attend)
    )
    finite = jax.tree.map(
      lambda x: jnp.where(jnp.isinf(x), 0, x), (got, wanted)
    )
    assert_close(*finite)
    np.testing.assert_array_equal(np.isinf(got[1]), np.isinf(wanted[1]))

  @given(
    shape=st.sampled_from(((7, 11, 7, 5), (7, 11, 2, 4), (5, 3, 1, 2))),
    data=st.data(),
  )
  def test_any_blocks_and_mask(self, shape, data):
    """Other sizes of the blocks, any mask, any positions."""
    t, s, rows, columns = shape
    allowed = data.draw(hnp.arrays(bool, (t, s)))
    positions = st.integers(-5, 20)
    at = data.draw(hnp.arrays(np.int64, t, elements=positions))
    keys = data.draw(hnp.arrays(np.int64, s, elements=positions))
    options = {
      'mask': masks.dense(allowed) & masks.causal() | masks.window(3, 0),
      'query_positions': at,
      'key_positions': keys,
    }
    inputs = one_head(t, s)
    sizes = block_pairs.BlockSizes(rows, columns)
    got = value_and_grads(in_blocks(sizes), *inputs, None, **options)
    wanted = value_and_grads(exact.attend, *inputs, None, **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)

  def test_scale_with_a_gradient(self):
    """A traced scale is folded into the queries, and has its gradient."""
    q, k, v, d_out, _ = one_head()

    def loss(attend, scale):
      return jnp.sum(attend(q, k, v, scale=scale) * d_out)

    wanted, got = (
      jax.value_and_grad(functools.partial(loss, attend))(jnp.asarray(0.3))
      for attend in (exact.attend, blockwise.attend)
    )
    assert_close(got, wanted)

  @parameterized.parameters((np.float64, 1e-12), (np.int32, 1e-5))
  def test_traced_scale(self, dtype, tolerance):
    """In the wide dtype, whatever the inputs; blind queries may hold NaN."""
    q, k, v = (np.round(3 * x).astype(dtype) for x in one_head()[:3])

    def loss(attend, scale, q):
      out = attend(q, k, v, scale=scale, mask=masks.lengths([S], [5]))
      return jnp.sum(out * out)

    blind = q.astype(np.float64)
    blind[5:] = np.nan
    for inputs in (q, blind):
      wanted, got = (
        jax.value_and_grad(functools.partial(loss, attend))(
          jnp.float32(0.02), inputs
        )
        for attend in (exact.attend, blockwise.attend)
      )
      assert_close(got, wanted, tolerance)

  def test_sizes_as_users_have_them(self):
    """Whole blocks, head by head: GQA with mask, bias and dropout."""
    shapes = ((1, 2, 600, K), (1, 1, 700, K), (1, 1, 700, V))
    q, k, v = (normal(i, *shape) for i, shape in enumerate(shapes))

    def grads(implementation):
      def loss(q, k, v, bias):
        out = multihead(
          q,
          k,
          v,
          mask=masks.causal() & masks.lengths([650]),
          bias=bias,
          dropout=Dropout(jax.random.key(0), 0.2),
          implementation=implementation,
        )
        return jnp.sum(jnp.sin(out))

      f = jax.value_and_grad(loss, (0, 1, 2, 3))
      return jax.jit(f)(q, k, v, normal(9, 1, 2, 1, 700))

    sizes = block_pairs.block_sizes.__wrapped__
    self.assertEqual(sizes(600, 700, 2), block_pairs.BlockSizes(256, 256))
    self.assertTrue(block_pairs.fits_better_alone(600, jnp.asarray(v)))
    with patched(block_pairs, block_sizes=sizes):
      got = grads('blockwise')
    assert_close(got, grads('exact'))

  @parameterized.parameters(
    (4097, 1, 4097),
    (4097, 4, 2049),
    (4097, 16, 820),
    (4097, 999, 241),
    (7, 3, 7),
  )
  def test_one_query(self, s, kv_heads, keys):
    """Blocks of as many keys each, 16,384 for all heads, or 256 of each."""
    sizes = block_pairs.block_sizes.__wrapped__(1, s, 5, kv_heads)
    self.assertEqual(sizes, block_pairs.BlockSizes(1, keys))

  def test_shard_map(self):
    """Over a mesh, with its checks of what varies on: outputs and gradients."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',))
    rows = jax.sharding.PartitionSpec('x')
    x = normal(0, B, 2, T, K)

    def run(implementation):
      def f(x, lengths):
        mask = masks.causal() & masks.lengths(lengths)
        return multihead(x, x, x, mask=mask, implementation=implementation)

      sharded = jax.shard_map(
        f, mesh=mesh, in_specs=(rows, rows), out_specs=rows
      )
      lengths = np.array([3, 7])
      return jax.jit(jax.grad(lambda x: jnp.sum(sharded(x, lengths) ** 2)))(x)

    assert_close(run('blockwise'), run('exact'))

  def test_heads_one_by_one(self):
    """A loop over rows and heads does what vmap does, with pairs of its own."""
    shapes = ((B, 6, T, K), (B, 3, S, K), (B, 3, S, V), (B, 6, T, V))
    q, k, v, cotangent = (normal(i, *x) for i, x in enumerate(shapes))
    mask = masks.lengths([9, 3]) & masks.dense(booleans(0, 1, 6, T, S))

    def run(alone: bool):
      f = functools.partial(multihead, mask=mask, implementation='blockwise')
      dropout = Dropout(jax.random.key(0), 0.3)

      def loss(q, k, v):
        return jnp.sum(f(q, k, v) * cotangent)

      with patched(block_pairs, fits_better_alone=lambda *_: alone):
        dropped = jax.jit(functools.partial(f, dropout=dropout))(q, k, v)
        return dropped, jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    assert_close(run(True), run(False))

  def test_parts_one_by_one(self):
    """Latent attention, expanded: a rotary key that all heads share."""
    q = normal(0, B, 5, T, K), normal(1, B, 5, T, 3)
    k = normal(2, B, 5, S, K), normal(3, B, 1, S, 3)
    v = normal(4, B, 5, S, V)

    def grads(implementation):
      def loss(q, k, v):
        out = multihead(q, k, v, implementation=implementation)
        return jnp.sum(jnp.sin(out))

      with patched(block_pairs, fits_better_alone=lambda *_: True):
        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    assert_close(grads('blockwise'), grads('exact'))

  def test_vmap_over_examples(self):
    """Gradients by example, as head importance wants them."""
    q, k, v, d_out, _ = one_head()
    many = np.stack([q, 2 * q, -q])
    lengths = np.array([[11], [4], [7]])

    def gradient(attend, q, length):
      def loss(q):
        out = attend(q, k, v, mask=masks.lengths(length))
        return jnp.sum(out * d_out)

      return jax.grad(loss)(q)

    wanted, got = (
      jax.jit(jax.vmap(functools.partial(gradient, attend)))(many, lengths)
      for attend in (exact.attend, blockwise.attend)
    )
    assert_close(got, wanted)

  def test_weights_are_refused(self):
    """And the message names what has them."""
    q, k, v = normal(0, T, K), normal(1, S, K), normal(2, S, V)
    with self.assertRaisesRegex(ValueError, 'return_weights=True: .* exact'):
      blockwise.attend(q, k, v, return_weights=True)

  @parameterized.parameters((0, S), (T, 0), (0, 0))
  def test_nothing_to_attend(self, t, s):
    """Zeros, as the exact form gives."""
    q, k, v = normal(0, t, K), normal(1, s, K), normal(2, s, V)
    got = blockwise.attend(q, k, v, return_residual=True)
    wanted = exact.attend(q, k, v, return_residual=True)
    for x, y in zip(got, wanted, strict=True):
      np.testing.assert_array_equal(x, y)

  def test_another_default_device(self):
    """What is computed one by one is asked of the device that computes."""
    v = jnp.zeros((1, 1, 2048, 8))
    with mock.patch.object(block_pairs, 'default_device') as device:
      for platform, wanted in (
        ('cpu', jax.device_count() == 1),
        ('gpu', False),
      ):
        device.return_value.platform = platform
        self.assertEqual(block_pairs.fits_better_alone(2048, v), wanted)


class DerivativesTest(oracles.X64TestCase):
  def setUp(self):
    super().setUp()
    self.q, self.k, self.v, self.d_out, _ = one_head()
    self.mask = masks.lengths([9], [5]) & masks.causal()

  def loss(self, implementation, q, k, v):
    out = multihead(
      *(x[None, None] for x in (q, k, v)),
      mask=self.mask,
      logit_softcap=2.0,
      implementation=implementation,
    )
    return jnp.sum(jnp.sin(out[0, 0]) * self.d_out)

  def test_hessian_vector_products(self):
    """Forward over reverse is right, queries of nothing included."""
    vectors = [normal(20 + i, *x.shape) for i, x in enumerate(self.inputs)]

    def product(implementation):
      loss = functools.partial(self.loss, implementation)
      gradient = jax.grad(loss, (0, 1, 2))
      return jax.jit(lambda *x: jax.jvp(gradient, x, tuple(vectors))[1])(
        *self.inputs
      )

    assert_close(product('blockwise'), product('exact'))

  @property
  def inputs(self):
    return self.q, self.k, self.v

  def test_forward_mode_is_refused(self):
    """And the message names what can do it."""
    loss = functools.partial(self.loss, 'blockwise')
    with self.assertRaisesRegex(TypeError, "implementation='exact'"):
      jax.jvp(loss, self.inputs, self.inputs)

  @parameterized.parameters(False, True)
  def test_reverse_over_reverse_is_refused(self, jit):
    """Also under jit."""
    loss = functools.partial(self.loss, 'blockwise')

    def norm(q, k, v):
      return jnp.sum(jax.grad(loss)(q, k, v) ** 2)

    f = jax.grad(norm)
    with self.assertRaisesRegex(ValueError, "(?s)implementation='exact'.*jvp"):
      (jax.jit(f) if jit else f)(*self.inputs)

  def test_checkpoint(self):
    """Under jax.checkpoint the gradient is the same."""
    loss = functools.partial(self.loss, 'blockwise')
    plain = jax.jit(jax.grad(loss))(*self.inputs)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(*self.inputs)
    assert_close(again, plain)


class DropoutTest(parameterized.TestCase):
  @parameterized.parameters((5, 2), (40, 70))
  def test_same_bits_whatever_the_blocks(self, rows, columns):
    """The same weights are dropped as with all scores at once."""
    t, s = (7, 11) if rows < 8 else (64, 70)
    q, k, v, d_out, _ = (x.astype(np.float32) for x in one_head(t, s))
    dropout = Dropout(jax.random.key(5), 0.4)
    sizes = block_pairs.BlockSizes(rows, columns)

    def grads(attend):
      def loss(q, k, v):
        return jnp.sum(attend(q, k, v, dropout=dropout) * d_out)

      return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    got = grads(functools.partial(blockwise.attend, sizes=sizes))
    assert_close(got, grads(exact.attend), 1e-5)

  @parameterized.parameters(0, 31, 45)
  def test_bits_of_a_part(self, start):
    """The bits of a part are those of the whole."""
    dropout = Dropout(jax.random.key(0), 0.4)
    whole = dropout.keep(Axis(100), Axis(90))
    part = dropout.keep(
      Axis(50, None, jnp.asarray(start)), Axis(41, None, jnp.asarray(7))
    )
    np.testing.assert_array_equal(part, whole[start : start + 50, 7:48])


def blocks_of(allowed: np.ndarray) -> np.ndarray:
  """Which blocks of an array of booleans hold a True, by a loop."""
  rows, columns = range(0, T, SIZES.queries), range(0, S, SIZES.keys)
  return np.array(
    [
      [
        np.any(allowed[i : i + SIZES.queries, j : j + SIZES.keys])
        for j in columns
      ]
      for i in rows
    ]
  )


class PairsTest(parameterized.TestCase):
  """Which pairs of blocks are computed."""

  def test_positions_at_the_limits(self):
    """Sentinels of padding do not wrap around, nor hide their neighbours."""
    limits = np.iinfo(np.int32)
    at = np.arange(T, dtype=np.int32)
    at[1], at[5] = limits.min, limits.max
    keys = np.arange(S, dtype=np.int32) - 3
    keys[2] = limits.min
    q, k, v = (x.astype(np.float32) for x in one_head()[:3])
    options = {
      'query_positions': jnp.asarray(at),
      'key_positions': jnp.asarray(keys),
    }
    allowed = np.abs(at[:, None].astype(float) - keys) <= 2
    for attend in (exact.attend, blockwise.attend):
      got = attend(q, k, v, mask=masks.window(2, 2), **options)
      assert_close(got, exact.attend(q, k, v, mask=allowed), 1e-5)

  @parameterized.parameters(*MASKS)
  def test_masks_tell_their_blocks(self, name):
    """No pair that is needed is left out; these masks leave out all others."""
    mask = MASKS[name]
    allowed = np.ones((T, S), bool)
    if mask is not None:
      allowed = np.asarray(mask.array(T, S))[0, 0]
    queries, keys = Blocks(T, SIZES.queries), Blocks(S, SIZES.keys)
    peeled = jax.tree.map(lambda x: x[0, 0], mask)
    touching = np.asarray(block_pairs.touches(peeled, queries, keys))
    np.testing.assert_array_equal(touching, blocks_of(allowed))
    pairs = block_pairs.as_pairs(jnp.asarray(touching))
    found = zip(*np.nonzero(touching), strict=True)
    count = int(pairs.count)
    listed = zip(pairs.queries[:count], pairs.keys[:count], strict=True)
    self.assertEqual(
      [(int(i), int(j)) for i, j in listed], [*map(tuple, found)]
    )

  @given(
    at=hnp.arrays(np.int32, T, elements=st.integers(-9, 30)),
    keys=hnp.arrays(np.int32, S, elements=st.integers(-9, 30)),
    segments=hnp.arrays(np.int32, T, elements=st.integers(0, 3)),
    others=hnp.arrays(np.int32, S, elements=st.integers(0, 3)),
    left=st.integers(0, 9),
  )
  def test_never_too_few(self, at, keys, segments, others, left):
    """Whatever the positions and segments."""
    column = others[None]
    for mask in (
      masks.causal(),
      masks.window(left, 2),
      masks.segments(segments[None], column),
      masks.window(left, 0) | masks.segments(segments[None], column),
    ):
      peeled = jax.tree.map(lambda x: x[0, 0], mask)
      allowed = peeled.evaluate(
        Axis(T, jnp.asarray(at)), Axis(S, jnp.asarray(keys))
      )
      queries = Blocks(T, SIZES.queries, jnp.asarray(at))
      touching = block_pairs.touches(
        peeled, queries, Blocks(S, SIZES.keys, jnp.asarray(keys))
      )
      needed = blocks_of(np.asarray(allowed))
      self.assertFalse(np.any(needed & ~np.asarray(touching)), mask)

  def test_counts(self):
    """Causal: half the pairs; a window: a band; ragged rows: each its own."""
    blocks = Blocks(64, 8), Blocks(64, 8)

    def count(mask):
      return int(block_pairs.as_pairs(block_pairs.touches(mask, *blocks)).count)

    self.assertEqual(count(None), 64)
    self.assertEqual(count(masks.causal()), 36)
    self.assertEqual(count(masks.window(8, 0) & masks.causal()), 8 + 7)

  @parameterized.parameters(False, True)
  def test_what_is_skipped_is_not_computed(self, alone):
    """Rows and heads have lists of their own in a loop, one for all in vmap."""
    seen = []
    whole = blockwise.of_head

    def of_head(qs, ks, v, scores, pairs, sizes):
      jax.debug.callback(lambda count: seen.append(int(count)), pairs.count)
      return whole(qs, ks, v, scores, pairs, sizes)

    x = normal(0, B, 1, 8, K)
    with (
      patched(blockwise, of_head=of_head),
      patched(block_pairs, fits_better_alone=lambda *_: alone),
    ):
      multihead(x, x, x, mask=masks.lengths([8, 3]), implementation='blockwise')
    jax.effects_barrier()
    # 3 blocks of queries; 2 blocks of 4 keys hold 8 keys, one holds 3.
    self.assertEqual(sorted(set(seen)), [3, 6] if alone else [6])


@pytest.mark.usefixtures('full_compile')
class MemoryTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_no_array_has_all_scores(self, gradient):
    """No array of the compiled program is t by s."""
    t, s = 29, 37
    q, k, v, _, _ = (x.astype(np.float32) for x in one_head(t, s))

    def loss(attend, q, k, v):
      mask = masks.causal() & masks.lengths([31])
      return jnp.sum(attend(q, k, v, mask=mask))

    for attend, found in ((blockwise.attend, False), (exact.attend, True)):
      f = functools.partial(loss, attend)
      f = jax.grad(f, (0, 1, 2)) if gradient else f
      text = jax.jit(f).lower(q, k, v).compile().as_text()
      self.assertEqual(bool(re.search(rf'\[(\d+,)*{t},{s}\]', text)), found)

  def test_a_long_sequence_under_a_limit(self):
    """Forward and backward of 2 heads at 16,384 tokens: below 1 GiB.

    The scores of one head alone would be as much.
    """
    program = textwrap.dedent("""
      import pathlib
      import jax, jax.numpy as jnp
      from mha_jax.attention import masks, multihead_attention
      x = jax.random.normal(jax.random.key(0), (1, 2, 16384, 64))
      def loss(q, k, v):
        return jnp.sum(multihead_attention(q, k, v, mask=masks.causal()) ** 2)
      jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(x, x, x))
      for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith('VmHWM'):  # the peak of the resident set, in KiB
          print(line.split()[1])
    """)
    run = subprocess.run(
      [sys.executable, '-c', program],
      capture_output=True,
      text=True,
      check=True,
    )
    self.assertLess(int(run.stdout) * 1024, 2**30)


class InertTest(parameterized.TestCase):
  @parameterized.parameters(np.nan, np.inf)
  def test_keys_in_skipped_and_mixed_blocks(self, bad):
    """Unused keys, in blocks that are computed and in others."""
    q, k, v, d_out, _ = (x.astype(np.float32) for x in one_head())
    results = []
    for filler in (bad, 0.0):
      k[6:], v[6:] = filler, filler
      grads = value_and_grads(
        blockwise.attend,
        q,
        k,
        v,
        d_out,
        d_out[:, 0],
        None,
        mask=masks.lengths([6]),
      )
      results.append(grads)
    chex.assert_tree_all_finite(results[0])
    assert_same_bits(*results)

"""Masks: what they allow, how they combine, where they travel."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import assert_close, assert_same_bits, attention, booleans, normal

import mha_jax.linen as linen
from mha_jax import attention as attention_layer
from mha_jax import dot_product_attention
from mha_jax.attention import (
  GroupedConfig,
  attend,
  init_table,
  masks,
  multihead_attention,
)

B, H, T, S = 2, 5, 3, 7
CONFIG = GroupedConfig(d_model=2, num_heads=1)
PARAMS = init_table(CONFIG.table, jax.random.key(0))
DENSE_SHAPES = (
  (T, S),
  (H, T, S),
  (B, 1, 1, S),
  (B, 1, T, S),
  (1, 1, T, S),
  (B, H, T, S),
  (1, H, 1, S),
  (B, 1, T, 1),
  (1, 1, 1, 1),
  (S,),
  (),
)


def whole(mask: masks.Mask, shape=(B, H, T, S)) -> np.ndarray:
  """What a mask draws for every batch row and head, as booleans."""
  b, h, t, s = shape
  return np.array(
    [
      [
        [[x == '■' for x in line.split()] for line in text.split('\n')]
        for head in range(h)
        if (text := mask.draw(t, s, batch=row, head=head))
      ]
      for row in range(b)
    ]
  )


class DrawTest(parameterized.TestCase):
  """The exact text of a drawing."""

  def test_causal(self):
    """A query sees its own position and those before."""
    self.assertEqual(
      masks.causal().draw(3, 5), '■ · · · ·\n■ ■ · · ·\n■ ■ ■ · ·'
    )

  def test_lengths(self):
    """The first keys of each row, another number in each row."""
    mask = masks.lengths([2, 0, 4])
    self.assertEqual(mask.draw(2, 3), '■ ■ ·\n■ ■ ·')
    self.assertEqual(mask.draw(2, 3, batch=1), '· · ·\n· · ·')
    self.assertEqual(mask.draw(2, 3, batch=2, head=3), '■ ■ ■\n■ ■ ■')

  def test_dense(self):
    """A drawing per row and head; one head's array is drawn as it is."""
    array = [[True, False, True], [False, False, True]]
    self.assertEqual(masks.dense(array).draw(2, 3), '■ · ■\n· · ■')
    two = np.stack([array, np.logical_not(array)])
    self.assertEqual(masks.dense(two).draw(2, 3, head=1), '· ■ ·\n■ ■ ·')

  def test_window(self):
    """So many before, so many after; None: all."""
    self.assertEqual(masks.window(1, 0).draw(3, 4), '■ · · ·\n■ ■ · ·\n· ■ ■ ·')
    self.assertEqual(masks.window(0, 2).draw(3, 4), '■ ■ ■ ·\n· ■ ■ ■\n· · ■ ■')
    self.assertEqual(
      masks.window(None, 0).draw(3, 4), masks.causal().draw(3, 4)
    )
    self.assertEqual(masks.window(None, None).draw(1, 2), '■ ■')

  def test_segments(self):
    """A query sees its own segment, wherever it stands."""
    packed = masks.segments([[0, 0, 1], [5, 3, 5]])
    self.assertEqual(packed.draw(3, 3), '■ ■ ·\n■ ■ ·\n· · ■')
    self.assertEqual(packed.draw(3, 3, batch=1), '■ · ■\n· ■ ·\n■ · ■')
    crossed = masks.segments([[1, 0]], [[0, 1, 1]])
    self.assertEqual(crossed.draw(2, 3), '· ■ ■\n■ · ·')

  def test_query_lengths(self):
    """Later queries see nothing; keys and queries may have lengths alone."""
    both = masks.lengths([2], [1])
    self.assertEqual(both.draw(2, 3), '■ ■ ·\n· · ·')
    self.assertEqual(masks.lengths(None, [1]).draw(2, 3), '■ ■ ■\n· · ·')

  def test_all_of(self):
    """Those that are given, at once; none is no mask."""
    got = masks.all_of(None, masks.causal(), [[True, False]], None)
    self.assertEqual(got.draw(2, 2), '■ ·\n■ ·')
    self.assertIsNone(masks.all_of(None, None))

  def test_and_or(self):
    """The intersection and the union."""
    causal, short = masks.causal(), masks.lengths([2])
    self.assertEqual((causal & short).draw(3, 3), '■ · ·\n■ ■ ·\n■ ■ ·')
    self.assertEqual((causal | short).draw(3, 3), '■ ■ ·\n■ ■ ·\n■ ■ ■')

  def test_precedence(self):
    """As for booleans, & binds more strongly than |."""
    corner = masks.dense([[False, False, True]])
    mask = corner | masks.causal() & masks.lengths([1])
    self.assertEqual(mask.draw(3, 3), '■ · ■\n■ · ■\n■ · ■')


class ArrayTest(parameterized.TestCase):
  def test_array(self):
    """(b, h, t, s), of size 1 where rows or heads share."""
    self.assertEqual(masks.causal().array(3, 5).shape, (1, 1, 3, 5))
    dense = booleans(0, H, T, S)
    mask = masks.dense(dense) & masks.lengths([2, 5])
    wanted = dense & (np.arange(S) < np.array([2, 5])[:, None, None, None])
    np.testing.assert_array_equal(mask.array(T, S), wanted)
    with self.assertRaisesRegex(ValueError, r'mask .* = \(2, 5, 9, 7\)'):
      mask.array(9, S)


class CombineTest(parameterized.TestCase):
  @parameterized.parameters(*DENSE_SHAPES)
  def test_dense_broadcasts(self, *shape):
    """A dense mask of any of these shapes means its broadcast."""
    array = booleans(0, *shape)
    wanted = np.broadcast_to(array, (B, H, T, S))
    np.testing.assert_array_equal(whole(masks.dense(array)), wanted)

  @given(
    left=hnp.arrays(bool, (B, 1, T, S)),
    right=hnp.arrays(bool, (H, 1, S)),
    lengths=hnp.arrays(np.int32, (B,), elements=st.integers(0, S + 2)),
  )
  def test_algebra(self, left, right, lengths):
    """& and | of masks are those of their booleans."""
    a, b, c = masks.dense(left), masks.dense(right), masks.lengths(lengths)
    short = (np.arange(S) < lengths[:, None])[:, None, None]
    past = np.tri(T, S, dtype=bool)
    np.testing.assert_array_equal(
      whole((a | b) & c), (left | right) & short & np.ones((H, T, 1), bool)
    )
    np.testing.assert_array_equal(
      whole(masks.causal() & a | b & c),
      np.broadcast_to(past & left | right & short, (B, H, T, S)),
    )

  @given(
    left=st.one_of(st.none(), st.integers(0, S)),
    right=st.one_of(st.none(), st.integers(0, S)),
    numbers=hnp.arrays(np.int32, (B, T + S), elements=st.integers(0, 2)),
    first=hnp.arrays(np.int32, (B, T), elements=st.integers(-5, S + 5)),
    lengths=hnp.arrays(np.int32, (2, B), elements=st.integers(0, S)),
  )
  def test_against_loops(self, left, right, numbers, first, lengths):
    """Window, segments and lengths, in a product of all, with positions."""
    segments = masks.segments(numbers[:, :T], numbers[:, T:])
    mask = masks.window(left, right) & (segments | masks.lengths(*lengths))
    wanted = np.zeros((B, 1, T, S), bool)
    for b, t, s in np.ndindex(B, T, S):
      ahead = s - first[b, t]
      near = left is None or -ahead <= left
      near = near and (right is None or ahead <= right)
      same = numbers[b, t] == numbers[b, T + s]
      short = s < lengths[0, b] and t < lengths[1, b]
      wanted[b, 0, t, s] = near and (same or short)
    q = np.zeros((B, H, T, 2), np.float32)
    k = np.zeros((B, 1, S, 2), np.float32)
    _, weights = multihead_attention(
      q, k, k, mask=mask, query_positions=first, return_weights=True
    )
    np.testing.assert_array_equal(
      weights > 0, np.broadcast_to(wanted, weights.shape)
    )

  def test_numbers_of_flax_helpers(self):
    """Nonzero may attend; masks, booleans and None come back as they are."""
    got = masks.from_numbers([[0.0, 1.0, 2.0]])
    self.assertEqual(got.dtype, jnp.bool_)
    np.testing.assert_array_equal(got, [[False, True, True]])
    for same in (None, masks.causal(), jnp.array([True, False])):
      self.assertIs(masks.from_numbers(same), same)


class TravelTest(parameterized.TestCase):
  """Masks as arguments of transformed functions."""

  def setUp(self):
    super().setUp()
    self.qkv = tuple(
      normal(i, B, H, length, 2).astype(np.float32)
      for i, length in enumerate((T, S, S))
    )

  def wanted(self, allowed):
    return attention(*self.qkv, allowed=allowed).out

  def test_jit(self):
    """A mask is a pytree: new values do not compile anew."""
    traces = []

    @jax.jit
    def f(mask):
      traces.append(mask)
      return multihead_attention(*self.qkv, mask=mask)

    for seed in range(3):
      array, lengths = booleans(seed, H, T, S), np.array([seed, seed + 2])
      got = f(masks.dense(array) & masks.lengths(lengths))
      short = np.arange(S) < lengths[:, None, None, None]
      assert_close(got, self.wanted(array & short), 1e-5)
    self.assertLen(traces, 1)

  def test_vmap(self):
    """vmap over masks is attention with each of them."""
    arrays = booleans(0, 3, B, 1, T, S)
    stacked = jax.vmap(masks.dense)(arrays)
    got = jax.vmap(lambda m: multihead_attention(*self.qkv, mask=m))(stacked)
    for i, array in enumerate(arrays):
      assert_close(got[i], self.wanted(array), 1e-5)

  @parameterized.parameters(
    masks.lengths([2, 5]),
    masks.lengths([3, 0], [2, 1]),
    masks.segments(1 * booleans(0, B, T), 1 * booleans(1, B, S)),
    masks.dense(booleans(0, B, 1, 1, S)),
    masks.dense(booleans(0, B, H, T, S)),
    masks.causal() & masks.lengths([2, 5])
    | masks.dense(booleans(0, B, H, T, S)) & masks.window(0, 2),
  )
  def test_taken_apart_by_vmap(self, mask):
    """Mapped over its batch rows a mask is that of a row."""
    wanted = multihead_attention(*self.qkv, mask=mask)
    array = mask.array(T, S)

    def one_row(q, k, v, mask):
      out = multihead_attention(*(x[None] for x in (q, k, v)), mask=mask)
      return out[0], mask.array(T, S)[0]

    got = jax.vmap(one_row)(*self.qkv, mask)
    assert_close(got[0], wanted, 1e-6)
    np.testing.assert_array_equal(got[1], array)

  def test_taken_apart_twice(self):
    """And over its heads it is that of a head."""
    mask = masks.dense(booleans(0, B, H, T, S)) | masks.causal()
    wanted = multihead_attention(*self.qkv, mask=mask)

    def one_head(q, k, v, mask):
      x = [x[None, None] for x in (q, k, v)]
      out = multihead_attention(*x, mask=mask)[0, 0]
      return out, mask.array(T, S)[0, 0], attend(q, k, v, mask=mask)

    got = jax.vmap(jax.vmap(one_head))(*self.qkv, mask)
    np.testing.assert_array_equal(got[1], mask.array(T, S))
    for out in (got[0], got[2]):
      assert_close(out, wanted, 1e-6)

  def test_layer_under_vmap(self):
    """A layer without a batch, mapped over inputs and mask."""
    x, mask = normal(0, 3, 5, 2), masks.causal() & masks.lengths([2, 3, 4])

    def f(x, mask):
      return attention_layer.apply(CONFIG, PARAMS, x, mask=mask)

    assert_close(jax.vmap(f)(x, mask), f(x, mask), 1e-5)

  def test_scan(self):
    """Masks ride through lax.scan."""
    lengths = jnp.array([[1, 2], [5, 7]])
    stacked = jax.vmap(masks.lengths)(lengths)

    def step(carry, mask):
      return carry, multihead_attention(*self.qkv, mask=mask)

    _, got = jax.lax.scan(step, None, stacked)
    for i in range(2):
      short = np.arange(S) < np.asarray(lengths)[i][:, None, None, None]
      assert_close(got[i], self.wanted(short), 1e-5)

  def test_lists_and_numpy(self):
    """Nested lists serve as well as arrays."""
    array = booleans(0, T, S)
    got = multihead_attention(*self.qkv, mask=array.tolist())
    assert_same_bits(got, multihead_attention(*self.qkv, mask=array))
    got = multihead_attention(*self.qkv, mask=masks.lengths([3, 5]))
    same = masks.lengths(np.array([3, 5]))
    assert_same_bits(got, multihead_attention(*self.qkv, mask=same))


class PositionsTest(parameterized.TestCase):
  """Masks compare positions, where they are given."""

  def setUp(self):
    super().setUp()
    self.qkv = tuple(
      normal(i, B, H, length, 2).astype(np.float32)
      for i, length in enumerate((T, S, S))
    )

  @parameterized.parameters(True, False)
  def test_causal_goes_by_position(self, per_row: bool):
    """Query positions shift causality; key positions may be in any order."""
    at_q = np.array([[4, 0, 9], [2, 1, 3]])
    at_k = np.array([[3, 0, 4, 8, 1, 7, 5], [6, 5, 4, 3, 2, 1, 0]])
    if not per_row:
      at_q, at_k = at_q[:1], at_k[:1]
    got = multihead_attention(
      *self.qkv,
      mask=masks.causal(),
      query_positions=at_q if per_row else at_q[0],
      key_positions=at_k if per_row else at_k[0].tolist(),
    )
    allowed = at_k[:, None, None, :] <= at_q[:, None, :, None]
    assert_close(got, attention(*self.qkv, allowed=allowed).out, 1e-5)

  def test_continuation(self):
    """The last queries of a sequence see all that is before them."""
    got = multihead_attention(
      *self.qkv, mask=masks.causal(), query_positions=np.arange(S - T, S)
    )
    allowed = np.tri(T, S, S - T, dtype=bool)
    assert_close(got, attention(*self.qkv, allowed=allowed).out, 1e-5)

  @parameterized.parameters('uint8', 'uint32', 'int8', 'int64')
  def test_any_integers(self, dtype):
    """Narrow and unsigned positions do not wrap around."""
    at = np.array([0, 60, 100])
    q, k, v = (x[:, :, :3] for x in self.qkv)
    got = multihead_attention(
      q,
      k,
      v,
      mask=masks.window(60, 60),
      query_positions=at.astype(dtype),
      key_positions=(at - (100 if dtype == 'int8' else 0)).astype(dtype),
    )
    behind = at - (100 if dtype == 'int8' else 0)
    allowed = np.abs(behind - at[:, None]) <= 60
    assert_close(got, attention(q, k, v, allowed=allowed).out, 1e-5)

  def test_lengths_and_dense_go_by_column(self):
    """Positions do not move a dense mask or lengths."""
    mask = masks.lengths([3, 5]) & masks.dense(booleans(0, T, S))
    positions = {
      'query_positions': np.arange(T) + 11,
      'key_positions': np.arange(S)[::-1].copy(),
    }
    assert_same_bits(
      multihead_attention(*self.qkv, mask=mask, **positions),
      multihead_attention(*self.qkv, mask=mask),
    )


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: masks.dense([[0.0, 1.0]]), r'mask has dtype float32.*mask != 0'),
    (lambda: masks.dense(np.ones((1,) * 6, bool)), r'mask of shape .*most 4'),
    (lambda: masks.dense(np.ones((1,) * 5, bool)), r'mask of shape .*most 4'),
    (lambda: masks.lengths(3), r'lengths .*\(b,\), got int.* of shape \(\)'),
    (lambda: masks.window(-1, 0), r'left=-1 must be an integer and lie in'),
    (lambda: masks.window(0, 1.5), r'right=1.5 must be an integer'),
    (lambda: masks.segments([0, 1]), r'queries .*\(b, t\), got int'),
    (
      lambda: masks.segments([[0]], [[0.5]]),
      r'keys must be integers.*got float32',
    ),
    (
      lambda: masks.lengths(None, 1),
      r'query_lengths .*\(b,\), got int32 of shape \(\)',
    ),
    (lambda: masks.lengths([2.5]), r'lengths must be integers.*got float32'),
  )
  def test_bad_masks(self, make, message):
    """What is no mask is refused with its dtype or shape."""
    with self.assertRaisesRegex(ValueError, message):
      make()

  @parameterized.parameters('__and__', '__or__')
  def test_arrays_combine(self, operator: str):
    """Booleans and Flax's 0/1 numbers do; an additive mask is refused."""
    combine = getattr(masks.causal(), operator)
    allowed = booleans(0, 3, 5)
    wanted = combine(masks.dense(allowed)).draw(3, 5)
    self.assertEqual(combine(allowed).draw(3, 5), wanted)
    self.assertEqual(combine(allowed.astype(np.float32)).draw(3, 5), wanted)
    with self.assertRaisesRegex(ValueError, 'additive values as bias='):
      combine(np.where(allowed, 0, -np.inf))
    with self.assertRaisesRegex(ValueError, 'not with None'):
      combine(None)

  @parameterized.parameters('numpy', 'jax')
  def test_either_side(self, kind):
    """An array on the left is as good as on the right."""
    allowed = booleans(0, 3, 5)
    array = jnp.asarray(allowed) if kind == 'jax' else allowed
    for a, b in (
      (array & masks.causal(), masks.causal() & array),
      (array | masks.causal(), masks.causal() | array),
    ):
      self.assertEqual(a.draw(3, 5), b.draw(3, 5))

  def test_draw_what_is_not_there(self):
    """A batch row or head past the end is refused; a shared one is drawn."""
    mask = masks.lengths([1, 2])
    self.assertEqual(mask.draw(1, 2, head=7), '■ ·')
    with self.assertRaisesRegex(ValueError, 'batch=2 must be .*in .0, 1.'):
      mask.draw(1, 2, batch=2)

  @parameterized.parameters(
    lambda mask, x: attention_layer.apply(CONFIG, PARAMS, x, mask=mask),
    lambda mask, x: dot_product_attention(*[x[:, :, None]] * 3, mask=mask),
    lambda mask, x: linen.Attention(CONFIG).init(
      jax.random.key(0), x, mask=mask
    ),
  )
  def test_the_call_forgotten_everywhere(self, call):
    """masks.causal for masks.causal(), through layers and shells."""
    x = np.ones((1, 3, 2), np.float32)
    with self.assertRaisesRegex(ValueError, r'call it, as masks.causal\(\)'):
      call(masks.causal, x)

  def test_mapped_over_another_axis(self):
    """What jax.vmap left of a mask is no longer what it was made for."""
    q = np.ones((B, 3, T, 2), np.float32)

    def f(q, mask):
      return multihead_attention(*[q[:, None]] * 3, mask=mask)

    mask = masks.dense(booleans(0, B, 3, T, T))
    with self.assertRaisesRegex(
      ValueError, r'mask of shape \(1, 2, 3, 3\) .*vmap.*in_axes=0'
    ):
      jax.vmap(f, in_axes=1)(q, mask)

  def test_no_tokens(self):
    """Segments of length 0 are segments."""
    self.assertEqual(masks.segments(np.zeros((2, 0), int)).array(0, 0).size, 0)

  def test_python_and_would_drop_a_mask(self):
    """`and` and `or` give one operand alone, so they raise."""
    with self.assertRaisesRegex(ValueError, 'combine with & and |'):
      masks.causal() and masks.lengths([3])

  def test_the_call_forgotten(self):
    """masks.causal for masks.causal()."""
    x = np.ones((2, 1, 3, 1), np.float32)
    with self.assertRaisesRegex(ValueError, r'call it, as masks.causal\(\)'):
      multihead_attention(x, x, x, mask=masks.causal)

  @parameterized.parameters('left', 'right')
  def test_combined_masks_are_checked(self, side: str):
    """A wrong shape is found inside & and |."""
    wrong, causal = masks.lengths([1, 2, 3]), masks.causal()
    x = np.ones((2, 1, 3, 1), np.float32)
    for mask in (
      (wrong & causal, wrong | causal)
      if side == 'left'
      else (causal & wrong, causal | wrong)
    ):
      with self.assertRaisesRegex(ValueError, r'lengths of shape \(3, 1\)'):
        multihead_attention(x, x, x, mask=mask)


class NarrowNumbersTest(parameterized.TestCase):
  @parameterized.parameters(2**32, 1e-50)
  def test_nonzero_may_attend(self, number):
    """Also what float32 or int32 would make zero."""
    array = np.array([[number, 0]])
    got = masks.algebra.from_numbers(array)
    np.testing.assert_array_equal(got, [[True, False]])

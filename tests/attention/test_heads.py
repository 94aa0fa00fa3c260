"""multihead_attention: who shares what, in every implementation.

Every implementation of the core goes through the same tests: they take it as
a parameter, from the table in heads.py.
"""

import ast
import functools
import inspect
import itertools
import math
import re
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
from oracles import (
  ROUNDING,
  assert_close,
  assert_same_bits,
  booleans,
  normal,
  reduce_to,
)

from mha_jax.attention import (
  Dropout,
  heads,
  implementations,
  masks,
  multihead_attention,
)
from mha_jax.attention.one_head import block_pairs

IMPLEMENTATIONS = implementations.OURS
WITHOUT_WEIGHTS = ('blockwise',)


def combinations(kinds, *others):
  """All kinds for exact; for the others GQA alone, which has all of it."""
  full = itertools.product(kinds, *others, ('exact',))
  rest = tuple(x for x in IMPLEMENTATIONS if x != 'exact')
  return [*full, *itertools.product(('gqa',), *others, rest)]


B, T, S, K, V = 2, 7, 11, 13, 17
HEADS = {'mha': (5, 5), 'gqa': (15, 3), 'mqa': (5, 1)}


def inputs(h: int, n: int, seed: int = 0, dtype=np.float64):
  """q, k, v heads first, and a cotangent of the output."""
  shapes = ((B, h, T, K), (B, n, S, K), (B, n, S, V), (B, h, T, V))
  return [normal(seed + i, *x).astype(dtype) for i, x in enumerate(shapes)]


def lengths_array(lengths) -> np.ndarray:
  """(b,) lengths as booleans (b, 1, 1, s)."""
  return np.arange(S) < np.asarray(lengths)[:, None, None, None]


def closed_bias(seed: int, *shape: int) -> np.ndarray:
  """A bias with -inf in a fifth of the places."""
  return np.where(booleans(seed, *shape, share=0.2), -np.inf, normal(1, *shape))


CASES = {
  # mask, the same as an array, bias, scale, softcap
  'plain': (lambda h: (None, True, None, None, None)),
  'causal': (
    lambda h: (masks.causal(), np.tri(T, S, dtype=bool)) + (None,) * 3
  ),
  'lengths_scale': (
    lambda h: (masks.lengths([5, 0]), lengths_array([5, 0]), None, 0.3, None)
  ),
  'per_head': (lambda h: (x := booleans(0, B, h, T, S), x, None, None, None)),
  'bias': (lambda h: (None, True, closed_bias(0, h, T, S), None, None)),
  'all': (
    lambda h: (
      masks.dense(x := booleans(0, B, 1, T, S)) & masks.lengths([9, 4])
      | masks.dense(y := booleans(1, h, 1, S, share=0.2)),
      x & lengths_array([9, 4]) | y,
      closed_bias(2, B, 1, 1, S),
      1.7,
      2.5,
    )
  ),
}


@functools.partial(jax.jit, static_argnames=('logit_softcap', 'implementation'))
def value_and_grads(q, k, v, cotangent, mask, bias, **options):
  """Output, weights and the gradients of q, k, v and the bias.

  The weights are None where the implementation never has them as a whole.
  """
  weighs = options.get('implementation') not in WITHOUT_WEIGHTS

  def loss(q, k, v, bias):
    got = multihead_attention(
      q, k, v, mask=mask, bias=bias, return_weights=weighs, **options
    )
    out, weights = got if weighs else (got, None)
    return jnp.sum(out * cotangent), (out, weights)

  over = (0, 1, 2) if bias is None else (0, 1, 2, 3)
  grads, (out, weights) = jax.grad(loss, over, has_aux=True)(q, k, v, bias)
  return (out, weights, *grads)


class LoopTest(oracles.X64TestCase):
  @parameterized.parameters(*combinations(tuple(HEADS), tuple(CASES)))
  def test_against_the_loop(self, kind, case, implementation):
    """Output, weights and gradients in float64, to rounding."""
    h, n = HEADS[kind]
    mask, allowed, bias, scale, softcap = CASES[case](h)
    q, k, v, cotangent = inputs(h, n)
    got = value_and_grads(
      q,
      k,
      v,
      cotangent,
      mask,
      bias,
      scale=scale,
      logit_softcap=softcap,
      implementation=implementation,
    )
    out, weights, *grads, dbias = oracles.attention(
      q,
      k,
      v,
      allowed=allowed,
      bias=0.0 if bias is None else bias,
      scale=scale,
      softcap=softcap,
      cotangent=cotangent,
    )
    wanted = [out, weights, *grads]
    if bias is not None:
      wanted.append(reduce_to(dbias, bias.shape))
    for a, b in zip(got, wanted, strict=True):
      if a is not None:
        self.assertEqual(a.dtype, jnp.float64)
        assert_close(a, b)

  @given(
    mask=hnp.arrays(bool, (B, 15, T, S)),
    q=hnp.arrays(np.float64, (B, 15, T, K), elements=st.floats(-3, 3)),
    v=hnp.arrays(np.float64, (B, 3, S, V), elements=st.floats(-3, 3)),
    lengths=hnp.arrays(np.int32, (B,), elements=st.integers(0, S)),
  )
  def test_any_mask(self, mask, q, v, lengths):
    """GQA with any mask and values, causal and lengths beside it."""
    k, cotangent = inputs(15, 3)[1::2]
    got = value_and_grads(
      q,
      k,
      v,
      cotangent,
      (masks.dense(mask) | masks.causal()) & masks.lengths(lengths),
      None,
    )
    allowed = (mask | np.tri(T, S, dtype=bool)) & lengths_array(lengths)
    wanted = oracles.attention(q, k, v, allowed=allowed, cotangent=cotangent)
    for a, b in zip(got, wanted[:5], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)

  @parameterized.parameters(
    (T, S), (15, T, S), (B, 1, 1, S), (B, 1, T, S), (1, 1, T, S), (1, 15, 1, S)
  )
  def test_broadcast_shapes(self, *shape):
    """A dense mask and a bias of any broadcast shape."""
    mask, bias = booleans(0, *shape), normal(1, *shape)
    q, k, v, _ = inputs(15, 3)
    got = multihead_attention(q, k, v, mask=mask, bias=bias)
    wanted = oracles.attention(q, k, v, allowed=mask, bias=bias).out
    assert_close(got, wanted)

  def test_gqa_is_mha_with_repeated_heads(self):
    """Query heads of a group are neighbours, as in jnp.repeat."""
    q, k, v, _ = inputs(15, 3)
    got = multihead_attention(q, k, v)
    repeated = (np.repeat(x, 5, axis=1) for x in (k, v))
    assert_close(got, multihead_attention(q, *repeated))
    tiled = (np.tile(x, (1, 5, 1, 1)) for x in (k, v))
    wrong = multihead_attention(q, *tiled)
    self.assertGreater(oracles.relative_error(got, wrong), 1e-2)

  def test_scale_has_a_gradient(self):
    """scale may be a traced array."""
    q, k, v, _ = inputs(5, 1)

    def loss(scale):
      return jnp.sum(multihead_attention(q, k, v, scale=scale) ** 2)

    def by_loop(scale):
      return np.sum(oracles.attention(q, k, v, scale=scale).out ** 2)

    wanted = (by_loop(0.3 + 1e-6) - by_loop(0.3 - 1e-6)) / 2e-6
    self.assertAlmostEqual(float(jax.grad(loss)(0.3) / wanted), 1, places=7)


class JaxNnTest(parameterized.TestCase):
  """Against jax.nn.dot_product_attention, whose layout is (b, t, h, k)."""

  @parameterized.product(
    dtype=('float32', 'bfloat16'),
    kind=tuple(HEADS),
    implementation=IMPLEMENTATIONS,
  )
  def test_same(self, dtype, kind, implementation):
    """Output and gradients, with mask and bias."""
    h, n = HEADS[kind]
    q, k, _, _ = inputs(h, n)
    v, cotangent = normal(2, B, n, S, K), normal(3, B, h, T, K)
    q, k, v, cotangent = (jnp.asarray(x, dtype) for x in (q, k, v, cotangent))
    mask = booleans(0, B, h, T, S) | np.eye(T, S, dtype=bool)
    bias = jnp.asarray(normal(1, 1, h, T, S), dtype)
    array = mask & np.tri(T, S, dtype=bool)

    @jax.jit
    def ours(q, k, v, bias):
      return multihead_attention(
        q,
        k,
        v,
        mask=masks.dense(mask) & masks.causal(),
        bias=bias,
        implementation=implementation,
      )

    @jax.jit
    def theirs(q, k, v, bias):
      swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
      out = jax.nn.dot_product_attention(
        swap(q), swap(k), swap(v), bias=bias, mask=jnp.asarray(array)
      )
      return swap(out)

    got, back = jax.vjp(ours, q, k, v, bias)
    wanted, their_back = jax.vjp(theirs, q, k, v, bias)
    self.assertEqual(got.dtype, jnp.dtype(dtype))
    tolerance = 2e-6 if dtype == 'float32' else 2e-2
    assert_close(
      (got, back(cotangent)), (wanted, their_back(cotangent)), tolerance
    )


class ContractsTest(parameterized.TestCase):
  @parameterized.product(kind=tuple(HEADS), implementation=IMPLEMENTATIONS)
  def test_nothing_to_attend_to(self, kind, implementation):
    """Exact zeros, never NaN, weights requested or not."""
    h, n = HEADS[kind]
    q, k, v, cotangent = inputs(h, n, dtype=np.float32)
    mask = booleans(0, B, h, T, S)
    bias = normal(1, B, h, T, S).astype(np.float32)
    mask[0, 1, 2] = mask[1, 0, 4] = mask[1, 4] = False
    bias[0, 3, 5] = -np.inf
    empty = ~np.any(mask & (bias != -np.inf), axis=-1)
    out, weights, dq, dk, dv, dbias = value_and_grads(
      q, k, v, cotangent, mask, bias, implementation=implementation
    )
    found = {'out': out, 'p': weights, 'dq': dq, 'db': dbias}
    for name, x in found.items():
      rows = np.zeros(0) if x is None else np.asarray(x)[empty]
      np.testing.assert_array_equal(rows, np.zeros_like(rows), err_msg=name)
    chex.assert_tree_all_finite((dk, dv))
    plain = multihead_attention(
      q, k, v, mask=mask, bias=bias, implementation=implementation
    )
    np.testing.assert_array_equal(np.asarray(plain)[empty], 0)
    # What stands in such a query does not matter, not even to k and v.
    again = value_and_grads(
      np.where(empty[..., None], np.nan, q).astype(np.float32),
      k,
      v,
      np.where(empty[..., None], 5.0, cotangent).astype(np.float32),
      mask,
      bias,
      implementation=implementation,
    )
    assert_same_bits((again[0], *again[3:5]), (out, dk, dv))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_a_row_without_keys(self, implementation):
    """A batch row of length 0 gives zeros and no gradient."""
    q, k, v, cotangent = inputs(15, 3, dtype=np.float32)
    k[1] = v[1] = np.nan
    got = value_and_grads(
      q,
      k,
      v,
      cotangent,
      masks.lengths([S, 0]),
      None,
      implementation=implementation,
    )
    for x in jax.tree.leaves(got):
      np.testing.assert_array_equal(np.asarray(x)[1], 0)
      chex.assert_tree_all_finite(x)

  @parameterized.parameters(
    *combinations(
      tuple(HEADS),
      (np.nan, -np.inf),
      ('mask', 'lengths', 'bias', 'causal'),
    )
  )
  def test_inert_keys(self, kind, bad, where, implementation):
    """What no query may attend to may hold NaN: as if it held zeros."""
    h, n = HEADS[kind]
    q, k, v, cotangent = inputs(h, n, dtype=np.float32)
    mask, bias = None, None
    inert = np.zeros((B, n, S), bool)
    if where == 'mask':
      mask = booleans(0, B, h, T, S)
      inert = booleans(1, B, n, S, share=0.3)
      mask &= ~np.repeat(inert, h // n, axis=1)[:, :, None]
    elif where == 'lengths':
      mask = masks.lengths([7, 3])
      inert[0, :, 7:] = inert[1, :, 3:] = True
    elif where == 'bias':
      bias = normal(0, 1, 1, T, S).astype(np.float32)
      bias[..., 4] = bias[..., 9] = -np.inf
      inert[..., 4] = inert[..., 9] = True
    else:
      mask, inert[..., T:] = masks.causal(), True
    results = []
    for filler in (bad, 0.0):
      k[inert], v[inert] = filler, filler
      results.append(
        value_and_grads(
          q, k, v, cotangent, mask, bias, implementation=implementation
        )
      )
    chex.assert_tree_all_finite(results[0])
    assert_same_bits(*results)
    self.assertFalse(np.any(np.asarray(results[0][3])[inert]))
    self.assertFalse(np.any(np.asarray(results[0][4])[inert]))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_keys_used_by_one_head_of_a_group(self, implementation):
    """Heads of a group with other masks: what one uses is not silenced."""
    q, k, v, cotangent = inputs(15, 3, dtype=np.float32)
    mask = booleans(0, 1, 15, T, S)
    mask[:, :, :, 6] = False
    mask[:, 7, 2, 6] = True  # only head 7, in the middle group, uses key 6
    k[:, 0, 6] = v[:, 2, 6] = np.nan
    got = value_and_grads(
      q, k, v, cotangent, mask, None, implementation=implementation
    )
    chex.assert_tree_all_finite(got)
    k[:, 0, 6] = v[:, 2, 6] = 0
    wanted = oracles.attention(q, k, v, allowed=mask, cotangent=cotangent)
    for a, b in zip(got, wanted[:5], strict=True):
      if a is not None:
        assert_close(a, b, 2e-6)
    self.assertTrue(np.all(np.asarray(got[4])[:, 1, 6] != 0))

  @parameterized.product(
    dtype=('float32', 'bfloat16'), implementation=IMPLEMENTATIONS
  )
  def test_strict_promotion(self, dtype, implementation):
    """Everything on, under strict dtype and rank promotion."""
    q, k, v, cotangent = (jnp.asarray(x, dtype) for x in inputs(15, 3))
    with (
      jax.numpy_dtype_promotion('strict'),
      jax.numpy_rank_promotion('raise'),
    ):
      weighs = implementation not in WITHOUT_WEIGHTS

      def loss(q, k, v, bias, scale):
        got = multihead_attention(
          q,
          k,
          v,
          mask=masks.causal() & masks.lengths([5, 9]) | masks.dense([[True]]),
          bias=bias,
          scale=scale,
          logit_softcap=3.0,
          query_positions=np.arange(T) + 3,
          key_positions=np.tile(np.arange(S), (B, 1)),
          dropout=Dropout(jax.random.key(0), 0.3),
          return_weights=weighs,
          implementation=implementation,
        )
        for x in jax.tree.leaves(got):
          self.assertEqual(x.dtype, jnp.dtype(dtype))
        return jnp.sum((got[0] if weighs else got) * cotangent)

      bias = jnp.asarray(normal(1, 15, T, S), dtype)
      f = jax.grad(loss, (0, 1, 2, 3))
      grads = jax.eval_shape(f, q, k, v, bias, 0.3)
    chex.assert_type(jax.tree.leaves(grads), jnp.dtype(dtype))

  @parameterized.product(masked=(False, True), implementation=IMPLEMENTATIONS)
  def test_bfloat16_accumulates_in_float32(self, masked, implementation):
    """Better than bfloat16 throughout, over 211 keys."""
    q, k, v = (
      jnp.asarray(size * normal(i, 1, 2, length, 13), jnp.bfloat16)
      for i, (size, length) in enumerate(((5, 7), (1, 211), (1, 211)))
    )
    mask = booleans(0, 7, 211) if masked else None
    wanted = oracles.attention(q, k, v, allowed=True if mask is None else mask)
    weighs = implementation not in WITHOUT_WEIGHTS
    got = multihead_attention(
      q,
      k,
      v,
      mask=mask,
      return_weights=weighs,
      implementation=implementation,
    )
    got, weights = got if weighs else (got, None)
    self.assertEqual(got.dtype, jnp.bfloat16)
    scores = jnp.einsum('bhtk,bhsk->bhts', q, k) * jnp.bfloat16(13**-0.5)
    if masked:
      scores = jnp.where(mask[None, None], scores, -jnp.inf)
    low = jnp.einsum('bhts,bhsk->bhtk', jax.nn.softmax(scores, axis=-1), v)
    error = oracles.relative_error(got, wanted.out)
    self.assertLess(error, 6e-3)
    self.assertLess(error, oracles.relative_error(low, wanted.out) / 4)
    if weighs:
      self.assertEqual(weights.dtype, jnp.bfloat16)
      np.testing.assert_allclose(
        np.asarray(weights, np.float64), wanted.weights, rtol=2**-7, atol=1e-9
      )

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_extras_do_not_lower_precision(self, implementation):
    """float32 with a float64-born scale and list inputs stays float32."""
    q, k, v, _ = inputs(5, 5, dtype=np.float32)
    got = multihead_attention(
      q.tolist(), k.tolist(), v.tolist(), implementation=implementation
    )
    self.assertEqual(got.dtype, jnp.float32)
    assert_same_bits(
      got, multihead_attention(q, k, v, implementation=implementation)
    )


@pytest.mark.usefixtures('full_compile')
class AskingTest(parameterized.TestCase):
  @parameterized.product(
    kind=tuple(HEADS), implementation=IMPLEMENTATIONS, jit=(False, True)
  )
  def test_asking_changes_nothing(self, kind, implementation, jit):
    """Weights returned or not, dropout at rate 0: the same bits."""
    h, n = HEADS[kind]
    q, k, v, _ = inputs(h, n, dtype=np.float32)
    mask = masks.causal() & masks.lengths([5, 9])

    def f(**options):
      call = functools.partial(
        multihead_attention, implementation=implementation, **options
      )
      return (jax.jit(call) if jit else call)(q, k, v, mask=mask)

    plain = f()
    off = Dropout(jax.random.key(0), 0.0)
    if implementation not in WITHOUT_WEIGHTS:
      assert_same_bits(f(return_weights=True)[0], plain)
    assert_same_bits(f(dropout=off), plain)


P = 3
PARTS = {
  # query heads, heads of the two key parts and of the values
  'mha': (5, (5, 5), 5),
  'expanded': (5, (5, 1), 5),
  'groups': (15, (3, 1), 3),
  'absorbed': (5, (1, 1), 1),
  'shared_values': (5, (5, 1), 1),
  'shared_keys': (5, (1, 1), 5),
}


class PartsTest(oracles.X64TestCase):
  """Queries and keys in two parts whose scores add."""

  def arrays(self, case: str):
    h, (n, shared), values = PARTS[case]
    qs = normal(0, B, h, T, K), normal(1, B, h, T, P)
    ks = normal(2, B, n, S, K), normal(3, B, shared, S, P)
    return qs, ks, normal(4, B, values, S, V), normal(5, B, h, T, V)

  @parameterized.product(
    case=tuple(PARTS), masked=(False, True), implementation=IMPLEMENTATIONS
  )
  def test_is_concatenation(self, case, masked, implementation):
    """Outputs, weights and gradients are those of the parts side by side."""
    qs, ks, v, cotangent = self.arrays(case)
    h = qs[0].shape[1]
    n = max(x.shape[1] for x in (*ks, v))
    mask = booleans(0, B, h, T, S) if masked else None
    weighs = implementation not in WITHOUT_WEIGHTS

    def loss(qs, ks, v):
      got = multihead_attention(
        qs,
        ks,
        v,
        mask=mask,
        return_weights=weighs,
        implementation=implementation,
      )
      out, weights = got if weighs else (got, None)
      return jnp.sum(out * cotangent), (out, weights)

    f = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    (dqs, dks, dv), got = f(qs, ks, v)
    q = np.concatenate(qs, -1)
    k = np.concatenate(
      [np.broadcast_to(x, (B, n, *x.shape[2:])) for x in ks], -1
    )
    wanted = oracles.attention(
      q,
      k,
      np.broadcast_to(v, (B, n, S, V)),
      allowed=True if mask is None else mask,
      cotangent=cotangent,
    )
    assert_close(got[0], wanted.out)
    if weighs:
      assert_close(got[1], wanted.weights)
    assert_close(dqs, (wanted.dq[..., :K], wanted.dq[..., K:]))
    wanted_dks = (wanted.dk[..., :K], wanted.dk[..., K:])
    for x, whole, shape in zip(
      (*dks, dv), (*wanted_dks, wanted.dv), (*ks, v), strict=True
    ):
      assert_close(x, reduce_to(whole, shape.shape))

  @parameterized.product(implementation=IMPLEMENTATIONS)
  def test_nan_in_an_unused_part(self, implementation):
    """A key that nobody may attend to is inert in all its parts, and back."""
    qs, ks, v, _ = self.arrays('expanded')
    call = functools.partial(
      multihead_attention,
      mask=masks.lengths([4, 9]),
      implementation=implementation,
    )
    f = jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(call(*x))), (0, 1, 2))
    wanted = f(qs, ks, v)
    nan = [x.copy() for x in ks]
    for x in nan:
      x[0, :, 4:], x[1, :, 9:] = np.nan, np.inf
    assert_same_bits(f(qs, tuple(nan), v), wanted)

  @parameterized.parameters(
    (
      lambda q, k, v: (q[:1], k, v),
      r'q has head dimension 13 and k \(13, 3\)',
    ),
    (
      lambda q, k, v: (q, k[::-1], v),
      r'q has head dim.*\(13, 3\) and k \(3, 13\)',
    ),
    (lambda q, k, v: ((), (), v), r'q has head dimension \(\)'),
    (
      lambda q, k, v: ((q[0], q[1][:, :, :2]), k, v),
      r'the parts of q have shapes .*must agree in \(b, h, t\)',
    ),
    (
      lambda q, k, v: (q, (k[0], k[1][..., :2, :]), v),
      r'k of shape \(2, 1, 2, 3\).*check batch, heads and length',
    ),
    (
      lambda q, k, v: (q, (k[0], np.repeat(k[1], 2, 1)), v),
      r'k of shape \(2, 2, 11, 3\).*n = 1 where all share',
    ),
  )
  def test_bad_parts(self, change, message):
    """Parts that do not fit each other are refused."""
    qs, ks, v, _ = self.arrays('expanded')
    with self.assertRaisesRegex(ValueError, f'(?s){message}'):
      multihead_attention(*change(qs, ks, v))


def element_counts(hlo: str) -> dict[int, str]:
  """The number of elements of every array in a program, with its text."""
  shapes = re.findall(r'\b[a-z]+\d*\w*\[([\d,]+)\]', hlo)
  return {math.prod(int(x) for x in s.split(',')): s for s in shapes}


def compiled_text(f, *arguments) -> str:
  return jax.jit(f).lower(*arguments).compile().as_text()


NO_REPEAT_CASES = {
  'plain': {},
  'causal': {'mask': masks.causal()},
  'lengths': {'mask': masks.lengths([4, 9])},
  'per_head_mask': {'mask': booleans(0, B, 15, T, S)},
  'per_head_bias': {'bias': normal(0, 15, T, S).astype(np.float32)},
  'all': {
    'mask': masks.causal() & masks.dense(booleans(0, B, 15, T, S)),
    'bias': normal(0, B, 15, T, S).astype(np.float32),
    'logit_softcap': 3.0,
    'query_positions': np.arange(T) + 4,
    'return_weights': True,
  },
}


@pytest.mark.usefixtures('full_compile')
class NoRepeatTest(parameterized.TestCase):
  """K and V are never repeated: no array of the program is as large.

  b, n, g, t, s, k, v are distinct primes, so that no other product has as
  many elements as K or V expanded to all query heads.
  """

  b, n, g, t, s, k, v = 2, 3, 5, 7, 11, 13, 17
  h = n * g

  def found(self, attention, gradient: bool, **options) -> dict[str, str]:
    """The expanded arrays that a program holds."""
    b, h, n, t, s, k, v = (getattr(self, x) for x in 'bhntskv')
    q, key, value = (
      normal(0, *x).astype(np.float32)
      for x in ((b, h, t, k), (b, n, s, k), (b, n, s, v))
    )

    def forward(q, key, value):
      return attention(q, key, value, **options)

    def loss(q, key, value):
      out = forward(q, key, value)
      return jnp.sum(jnp.sin(out[0] if isinstance(out, tuple) else out))

    f = jax.grad(loss, (0, 1, 2)) if gradient else forward
    counts = element_counts(compiled_text(f, q, key, value))
    self.assertIn(b * h * t * v, counts)  # the outputs are seen
    self.assertIn(b * n * s * k, counts)  # and so is K
    expanded = {'K': b * h * s * k, 'V': b * h * s * v}
    return {x: counts[y] for x, y in expanded.items() if y in counts}

  @parameterized.parameters(
    *itertools.product(NO_REPEAT_CASES, ((False, 'exact'), (True, 'exact'))),
    *itertools.product(NO_REPEAT_CASES, ((False, 'blockwise'),)),
  )
  def test_not_repeated(self, case, chosen):
    """Neither forward nor backward holds an expanded K or V.

    By blocks, the gradients of K and V are kept by query head until the end.
    """
    (gradient, implementation), options = chosen, NO_REPEAT_CASES[case]
    if implementation in WITHOUT_WEIGHTS:
      options = options | {'return_weights': False}
    attention = functools.partial(
      multihead_attention, implementation=implementation
    )
    self.assertEmpty(self.found(attention, gradient, **options))

  @parameterized.parameters(False, True)
  def test_the_check_has_teeth(self, gradient):
    """jnp.repeat is caught, of either array."""

    def repeated(q, k, v):
      k, v = (jnp.repeat(x, self.g, axis=1) for x in (k, v))
      return multihead_attention(q, k, v)

    found = self.found(repeated, gradient)
    self.assertEqual(set(found), {'K', 'V'})


class InAxesTest(parameterized.TestCase):
  def test_source(self):
    """heads.py maps leading axes alone: no vmap names an out_axes."""
    calls = [
      node
      for module in (heads, block_pairs)
      for node in ast.walk(ast.parse(inspect.getsource(module)))
      if isinstance(node, ast.Call)
      and ast.unparse(node.func) in ('jax.vmap', 'mapping')
    ]
    self.assertLen(calls, 4)
    for call in calls:
      self.assertContainsSubset([x.arg for x in call.keywords], ['in_axes'])

  @parameterized.product(kind=tuple(HEADS), implementation=IMPLEMENTATIONS)
  def test_run_time(self, kind, implementation):
    """The axes that reach jax.vmap are 0 or None, and K has its own."""
    h, n = HEADS[kind]
    q, k, v, _ = inputs(h, n, dtype=np.float32)
    seen, vmap = [], jax.vmap

    def record(f, in_axes=0, **options):
      mapped = vmap(f, in_axes=in_axes, **options)

      def call(*arrays):
        if [x.shape[-1] for x in arrays[:3] if x.ndim > 1] == [K, K, V]:
          seen.append(tuple(in_axes[:3]))
        return mapped(*arrays)

      return call

    f = functools.partial(
      multihead_attention,
      mask=masks.causal() & masks.lengths([3, 5]),
      bias=normal(0, h, 1, S).astype(np.float32),
      dropout=Dropout(jax.random.key(0), 0.5),
      implementation=implementation,
    )
    with patched(jax, vmap=record):
      jax.eval_shape(f, q, k, v)
    rows, kv_heads, group = (0, 0, 0), (0, 0, 0), (0, None, None)
    wanted = {
      'mha': [rows, kv_heads],  # a group of one needs no vmap
      'gqa': [rows, kv_heads, group],
      'mqa': [rows, group],  # and neither does one key/value head
    }
    self.assertEqual(seen, wanted[kind])


class ErrorsTest(parameterized.TestCase):
  """Bad calls: a ValueError with the name, the value and the remedy."""

  q, k, v, _ = inputs(15, 3, dtype=np.float32)

  @parameterized.parameters(
    ({'k': k[:, :2], 'v': v[:, :2]}, '2 heads', 'must divide the 15 heads'),
    ({'k': k[:, :, 1:]}, r'k of shape \(2, 3, 10, 13\)', 'check .*length'),
    ({'v': v[:1]}, r'v of shape \(1, 3, 11, 17\)', 'check batch'),
    ({'q': q[0]}, r'q of shape \(15, 7, 13\)', r'must be \(b, h, t, k\)'),
    ({'k': v}, 'head dimension 13 and k 17', 'must agree'),
    ({'mask': np.ones((T, S + 1), bool)}, r'mask of shape .*12\)', 'give each'),
    ({'mask': np.ones((3, T, S), bool)}, r'mask of shape .*3, 7', 'give each'),
    ({'mask': np.ones((T, S))}, 'mask has dtype float32', 'mask != 0'),
    ({'mask': masks.lengths([1, 2, 3])}, r'lengths of shape \(3, 1\)', '= .2,'),
    ({'bias': np.ones((T, S), bool)}, 'bias has dtype bool', 'as mask='),
    ({'bias': np.ones((T, S), int)}, 'bias has dtype int32', 'as floats'),
    ({'bias': np.ones((T, 3))}, r'bias of shape \(1, 1, 7, 3\)', 'give each'),
    ({'bias': np.ones((1,) * 5)}, r'bias of shape \(1, 1, 1, 1, 1\)', 'give'),
    (
      {'logit_softcap': -2.0},
      'logit_softcap=-2.0',
      'must be positive and finite; None',
    ),
    (
      {'logit_softcap': np.nan},
      'logit_softcap=nan',
      'must be positive and finite; None',
    ),
    ({'implementation': 'fast'}, "implementation='fast'", "use one of.*'auto'"),
    ({'query_positions': np.ones(T)}, 'query_positions must be integers', 'f'),
    ({'query_positions': np.arange(S)}, r'query_positions .*\(2, 7\)', '11'),
    (
      {'key_positions': np.ones((3, S), int)},
      r'key_positions .*\(2, 11\)',
      '3',
    ),
    ({'key_positions': np.int32(3)}, r'key_positions .*\(2, 11\)', r'\(\)'),
  )
  def test_bad_calls(self, changes, value, remedy):
    """And no product or softmax is taken before."""
    arguments = {'q': self.q, 'k': self.k, 'v': self.v} | changes
    q, k, v = (arguments.pop(x) for x in 'qkv')
    forbidden = mock.Mock(side_effect=AssertionError('computed'))
    with (
      mock.patch.object(jnp, 'einsum', forbidden),
      mock.patch.object(jax.nn, 'softmax', forbidden),
      self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'),
    ):
      multihead_attention(q, k, v, **arguments)

  def test_rounding_is_tight(self):
    """The float64 comparisons above ask for 1e-12."""
    self.assertEqual(ROUNDING, 1e-12)

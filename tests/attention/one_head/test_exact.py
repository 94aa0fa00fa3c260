"""attend, one head: the specification, against the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import assert_close, assert_same_bits, booleans, normal

from mha_jax.attention import Dropout, attend, masks
from mha_jax.attention.axes import Axis

T, S, K, V = 5, 7, 3, 11


def inputs(seed: int = 0):
  """q, k, v of one head and a cotangent of the output."""
  shapes = ((T, K), (S, K), (S, V), (T, V))
  return [normal(seed + i, *shape) for i, shape in enumerate(shapes)]


def loop(q, k, v, cotangent, **options) -> oracles.Attention:
  """The oracle on one head."""
  full = oracles.attention(
    *(x[None, None] for x in (q, k, v)), cotangent=cotangent, **options
  )
  return oracles.Attention(*(x[0, 0] for x in full))


@functools.partial(jax.jit, static_argnames=('logit_softcap',))
def value_and_grads(q, k, v, cotangent, mask, bias, scale, logit_softcap=None):
  """Output, weights and the gradients of all inputs."""

  def loss(q, k, v, bias):
    out, weights = attend(
      q,
      k,
      v,
      mask=mask,
      bias=bias,
      scale=scale,
      logit_softcap=logit_softcap,
      return_weights=True,
    )
    return jnp.sum(out * cotangent), (out, weights)

  grads, (out, weights) = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(
    q, k, v, bias
  )
  return oracles.Attention(out, weights, *grads)


class AttendTest(oracles.X64TestCase):
  @given(
    mask=hnp.arrays(bool, (T, S)),
    closed=hnp.arrays(bool, (T, S)),
    bias=hnp.arrays(np.float64, (T, S), elements=st.floats(-5, 5)),
    scale=st.floats(-2, 2),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    seed=st.integers(0, 99),
  )
  def test_against_the_loop(self, mask, closed, bias, scale, softcap, seed):
    """Output, weights and gradients, whatever mask, bias, scale and cap."""
    q, k, v, cotangent = inputs(seed)
    bias = np.where(closed, -np.inf, bias)
    got = value_and_grads(q, k, v, cotangent, mask, bias, scale, softcap)
    wanted = loop(
      q,
      k,
      v,
      cotangent,
      allowed=mask,
      bias=bias,
      scale=scale,
      softcap=softcap,
    )
    for name, a, b in zip(got._fields, got, wanted, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name)

  def test_defaults(self):
    """scale is 1 / sqrt(k); without a mask all keys count."""
    q, k, v, cotangent = inputs()
    out, weights = attend(q, k, v, return_weights=True)
    wanted = loop(q, k, v, cotangent)
    assert_close(out, wanted.out)
    assert_close(weights, wanted.weights)
    assert_close(np.sum(weights, -1), np.ones(T))

  @parameterized.parameters((T, S), (1, S), (T, 1), (1, 1), (S,), (1, 1, T, S))
  def test_broadcast(self, *shape):
    """Mask and bias broadcast to (t, s), leading ones included."""
    q, k, v, cotangent = inputs()
    mask, bias = booleans(0, *shape), normal(1, *shape)
    if mask.ndim == 1:
      mask = mask[None]
    wanted = loop(q, k, v, cotangent, allowed=mask, bias=bias)
    got = attend(q, k, v, mask=mask, bias=bias, return_weights=True)
    np.testing.assert_allclose(got[0], wanted.out, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(got[1], wanted.weights, rtol=1e-11, atol=1e-13)

  def test_masks_and_positions(self):
    """A Mask is evaluated from the positions."""
    q, k, v, cotangent = inputs()
    at_q, at_k = np.array([6, 0, 3, 9, 2]), np.arange(S)[::-1].copy()
    got = attend(
      q,
      k,
      v,
      mask=masks.causal() & masks.lengths([5]),
      query_positions=at_q,
      key_positions=at_k.tolist(),
    )
    allowed = (at_k <= at_q[:, None]) & (np.arange(S) < 5)
    assert_close(got, loop(q, k, v, cotangent, allowed=allowed).out)

  def test_large_scores(self):
    """Scores of 1e4 do not overflow."""
    q, k, v, cotangent = inputs()
    got = attend(q * 100, k * 100, v)
    assert_close(got, loop(q * 100, k * 100, v, cotangent).out)

  def test_lists(self):
    """Nested lists and integers are welcome."""
    q, k, v, _ = inputs()
    assert_same_bits(
      attend(q.tolist(), k.tolist(), v.tolist()), attend(q, k, v)
    )
    whole = np.arange(6).reshape(2, 3)
    got = attend(whole, whole, whole)
    wanted = attend(*(whole.astype(got.dtype),) * 3)
    assert_same_bits(got, wanted)


class ContractsTest(parameterized.TestCase):
  def test_nothing_to_attend_to(self):
    """Such a row gives exact zeros, in output, weights and gradients."""
    q, k, v, cotangent = (x.astype(np.float32) for x in inputs())
    mask, bias = booleans(0, T, S), normal(0, T, S).astype(np.float32)
    mask[1], mask[3], bias[4] = False, False, -np.inf
    got = value_and_grads(q, k, v, cotangent, mask, bias, 0.7, 2.0)
    for name in ('out', 'weights', 'dq', 'dbias'):
      rows = np.asarray(getattr(got, name))[[1, 3, 4]]
      np.testing.assert_array_equal(rows, np.zeros_like(rows), err_msg=name)
    without = value_and_grads(
      q[[0, 2]],
      k,
      v,
      cotangent[[0, 2]],
      mask[[0, 2]],
      bias[[0, 2]],
      0.7,
      2.0,
    )
    assert_close((got.dk, got.dv), (without.dk, without.dv), 1e-6)
    assert_close(got.out[np.array([0, 2])], without.out, 1e-6)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_inert_keys(self, bad: float):
    """A key that no query may attend to may hold anything."""
    q, k, v, cotangent = (x.astype(np.float32) for x in inputs())
    mask, bias = booleans(0, T, S), normal(0, T, S).astype(np.float32)
    mask[:, 2], bias[:, 5] = False, -np.inf
    results = []
    for filler in (bad, 0.0):
      k[[2, 5]] = v[[2, 5]] = filler
      results.append(value_and_grads(q, k, v, cotangent, mask, bias, 0.7, 2.0))
    assert_same_bits(*results)
    for name, x in zip(results[0]._fields, results[0], strict=True):
      self.assertTrue(np.all(np.isfinite(x)), name)
    self.assertFalse(np.any(np.asarray(results[0].dk)[[2, 5]]))

  def test_no_keys_at_all(self):
    """A query finds nothing in an empty source: zeros, as for any such row."""
    q = np.ones((T, K), np.float32)
    out, weights = attend(
      q,
      np.ones((0, K), np.float32),
      np.ones((0, V), np.float32),
      return_weights=True,
    )
    self.assertEqual(weights.shape, (T, 0))
    assert_same_bits(out, np.zeros((T, V), np.float32))

  def test_asking_changes_nothing(self):
    """Weights returned, dropout at rate 0: the same bits."""
    q, k, v, _ = (x.astype(np.float32) for x in inputs())
    options = {'mask': booleans(0, T, S), 'bias': normal(0, T, S)}
    options['bias'] = options['bias'].astype(np.float32)
    plain = attend(q, k, v, **options)
    off = Dropout(jax.random.key(0), 0.0)
    assert_same_bits(attend(q, k, v, return_weights=True, **options)[0], plain)
    assert_same_bits(attend(q, k, v, dropout=off, **options), plain)

  def test_weights_are_before_dropout(self):
    """The weights returned are those of the softmax."""
    q, k, v, _ = (x.astype(np.float32) for x in inputs())
    dropout = Dropout(jax.random.key(0), 0.5)
    plain = attend(q, k, v, return_weights=True)
    dropped = attend(q, k, v, dropout=dropout, return_weights=True)
    assert_same_bits(dropped[1], plain[1])
    self.assertFalse(np.array_equal(dropped[0], plain[0]))
    kept = np.where(
      dropout.keep(Axis(T), Axis(S)), np.asarray(plain[1]) / 0.5, 0
    )
    assert_close(dropped[0], kept @ v, 1e-5)


class ErrorsTest(parameterized.TestCase):
  q, k, v, _ = (x.astype(np.float32) for x in inputs())

  @parameterized.parameters(
    ({'q': v}, r'q has head dimension 11 and k 3; they must agree'),
    ({'v': q}, r'k has length 7 and v 5; they must agree'),
    ({'q': q[None]}, r'q of shape \(1, 5, 3\) must be.*multihead_attention'),
    ({'k': k[0]}, r'k of shape \(3,\) must be \(length, features\)'),
    ({'mask': np.ones((T, S))}, r'mask has dtype float32.*mask != 0'),
    ({'mask': np.ones((S, T), bool)}, r'mask.* of shape .*7, 5\).*give'),
    ({'mask': np.ones((2, T, S), bool)}, r'mask.* of shape .*2, 5, 7\)'),
    ({'bias': np.ones((S, T), np.float32)}, r'bias of shape \(7, 5\)'),
    ({'bias': np.ones((2, T, S), np.float32)}, r'bias of shape \(2, 5, 7\)'),
    ({'bias': np.ones((T, S), bool)}, r'bias has dtype bool.*mask='),
    (
      {'logit_softcap': 0.0},
      r'logit_softcap=0.0 must be positive and finite; None',
    ),
    (
      {'logit_softcap': -1.0},
      r'logit_softcap=-1.0 must be positive and finite; None',
    ),
    (
      {'logit_softcap': np.nan},
      r'logit_softcap=nan must be positive and finite; None',
    ),
    (
      {'query_positions': np.ones(T)},
      r'query_positions must be integers.*float32',
    ),
    ({'key_positions': np.arange(T)}, r'key_positions .*\(7,\), got .*\(5,\)'),
  )
  def test_bad_calls(self, changes, message):
    """A ValueError with the name, the value and the remedy."""
    if 'mask' not in changes and 'key_positions' in changes:
      changes = {'mask': masks.causal()} | changes
    arguments = {'q': self.q, 'k': self.k, 'v': self.v} | changes
    with self.assertRaisesRegex(ValueError, message):
      attend(**arguments)

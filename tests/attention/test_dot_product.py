"""dot_product_attention: jax.nn's signature, layout and results."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, assert_same_bits, booleans, normal

from mha_jax import dot_product_attention
from mha_jax.attention import Dropout, masks, multihead_attention

B, T, S, H, N, K, V = 2, 7, 11, 6, 3, 5, 13


def inputs(*batch: int, v: int = V, dtype=np.float64):
  """Queries, keys and values, heads last but one."""
  shapes = ((T, H, K), (S, N, K), (S, N, v))
  return [
    normal(i, *batch, *shape).astype(dtype) for i, shape in enumerate(shapes)
  ]


class SignatureTest(parameterized.TestCase):
  def test_takes_all_that_jax_nn_takes(self):
    """Names, order, kinds and defaults; ours are keywords that follow."""
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    for name, wanted in theirs.items():
      self.assertIn(name, ours)
      self.assertEqual(ours[name].kind, wanted.kind, name)
      self.assertEqual(ours[name].default, wanted.default, name)
    positional = [
      name
      for name, p in ours.items()
      if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    self.assertEqual(positional, list(theirs)[: len(positional)])
    for name in ours.keys() - theirs.keys():
      self.assertEqual(ours[name].kind, inspect.Parameter.KEYWORD_ONLY)


class JaxNnTest(parameterized.TestCase):
  """Against jax.nn.dot_product_attention, where it has the feature."""

  @parameterized.parameters(
    {},
    {'is_causal': True},
    {'scale': 0.3},
    {'mask': booleans(0, B, 1, T, S) | np.eye(T, S, dtype=bool)},
    {'mask': booleans(1, 1, H, T, S) | np.eye(T, S, dtype=bool)},
    {'bias': normal(2, B, H, T, S).astype(np.float32)},
    {'key_value_seq_lengths': np.array([3, 9])},
    {
      'query_seq_lengths': np.array([5, 2]),
      'key_value_seq_lengths': np.array([11, 4]),
    },
    {'local_window_size': 4},
    {'local_window_size': (3, 5)},
    {'local_window_size': (6, 0), 'is_causal': True},
    {'implementation': 'xla'},
    {'return_residual': True},
    {'return_residual': True, 'is_causal': True},
  )
  def test_same(self, **options):
    """Output (and residual) in float32, and the gradients."""
    q, k, v = inputs(B, v=K, dtype=np.float32)

    def run(attention):
      def loss(q, k, v):
        out = attention(q, k, v, **options)
        return jnp.sum(jnp.sin(jax.tree.leaves(out)[0])), out

      f = jax.grad(loss, (0, 1, 2), has_aux=True)
      grads, out = jax.jit(f)(q, k, v)
      return out, grads

    wanted, their_grads = run(jax.nn.dot_product_attention)
    got, grads = run(dot_product_attention)
    if 'query_seq_lengths' in options:
      keep = np.arange(T) < np.array([5, 2])[:, None]
      np.testing.assert_array_equal(got[~keep], 0)
      got, wanted = got[keep], wanted[keep]
    else:
      assert_close(grads, their_grads, 1e-5)
    assert_close(got, wanted, 1e-5)

  def test_no_batch_dimension(self):
    """(t, h, k), as jax.nn takes it, and its (1, 1, t, s) masks."""
    q, k, v = (x[0] for x in inputs(1, v=K, dtype=np.float32))
    past = np.tri(T, S, dtype=bool)[None, None]
    assert_same_bits(
      dot_product_attention(q, k, v, mask=past),
      dot_product_attention(q, k, v, is_causal=True),
    )
    got = dot_product_attention(q, k, v, is_causal=True)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    assert_close(got, wanted, 1e-5)


class LoopTest(oracles.X64TestCase):
  @parameterized.parameters((), (3,), (2, 3))
  def test_batch_dimensions(self, *batch):
    """Several, with masks, biases and positions for each; float64 loops."""
    q, k, v = inputs(*batch)
    mask = booleans(0, *batch, H, T, S)
    bias = normal(1, *batch, 1, T, S)
    out, weights, residual = dot_product_attention(
      q, k, v, bias, mask, return_weights=True, return_residual=True
    )
    flat = [np.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2) for x in (q, k, v)]
    wanted = oracles.attention(
      *flat,
      allowed=mask.reshape(-1, H, T, S),
      bias=bias.reshape(-1, 1, T, S),
    )
    self.assertEqual(out.shape, (*batch, T, H, V))
    self.assertEqual(residual.shape, (*batch, T, H))
    assert_close(np.swapaxes(out.reshape(-1, T, H, V), 1, 2), wanted.out)
    assert_close(weights.reshape(-1, H, T, S), wanted.weights)

  def test_the_least_float64_bias(self):
    """Beside float32 inputs it is -inf: the query attends to nothing."""
    q, k, v = (jnp.asarray(x, jnp.float32) for x in inputs(B))
    bias = np.zeros((T, S))
    bias[1] = np.finfo(np.float64).min
    out = dot_product_attention(q, k, v, bias)
    np.testing.assert_array_equal(out[:, 1], 0)
    self.assertTrue(np.all(np.isfinite(out)))

  def test_a_window_in_narrow_integers(self):
    """NumPy's do not wrap around when negated."""
    q, k, v = inputs(B)
    narrow = np.array([2, 0], np.uint8)
    assert_same_bits(
      dot_product_attention(q, k, v, local_window_size=narrow),
      dot_product_attention(q, k, v, local_window_size=(2, 0)),
    )

  def test_residual(self):
    """The log of the denominator; -inf where there is nothing."""
    q, k, v = inputs(B)
    mask = masks.lengths([4, 0])
    _, got = dot_product_attention(q, k, v, mask=mask, return_residual=True)
    k = np.repeat(k, H // N, axis=2)
    scores = np.einsum('bthk,bshk->bths', q, k) / np.sqrt(K)
    wanted = np.log(np.sum(np.exp(scores[0, ..., :4]), axis=-1))
    assert_close(got[0], wanted)
    np.testing.assert_array_equal(got[1], -np.inf)

  def test_residual_gradient(self):
    """d lse / d scores are the weights; a query of nothing gives zeros."""
    q, k, v = inputs(B)

    def total(q):
      _, weights, residual = dot_product_attention(
        q,
        k,
        v,
        mask=masks.lengths([4, 0]),
        return_weights=True,
        return_residual=True,
      )
      return jnp.sum(jnp.where(residual == -jnp.inf, 0, residual)), weights

    got, weights = jax.grad(total, has_aux=True)(jnp.asarray(q))
    k = np.repeat(k, H // N, axis=2) / np.sqrt(K)
    wanted = np.einsum('bhts,bshk->bthk', weights, k)
    assert_close(got, wanted)
    np.testing.assert_array_equal(got[1], 0)

  @given(
    window=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    causal=st.booleans(),
    lengths=st.lists(st.integers(0, S), min_size=B, max_size=B),
    shift=st.integers(-3, 3),
  )
  def test_options_compose(self, window, causal, lengths, shift):
    """Window, causality and lengths are one mask, by positions and columns."""
    q, k, v = inputs(B)
    got = dot_product_attention(
      q,
      k,
      v,
      is_causal=causal,
      local_window_size=window,
      key_value_seq_lengths=lengths,
      query_positions=np.arange(T) + shift,
    )
    ahead = np.arange(S) - (np.arange(T) + shift)[:, None]
    allowed = (ahead >= -window[0]) & (ahead <= window[1])
    allowed &= (ahead <= 0) | (not causal)
    short = np.arange(S) < np.array(lengths)[:, None, None, None]
    wanted = oracles.attention(
      *(np.swapaxes(x, 1, 2) for x in (q, k, v)), allowed=allowed & short
    ).out
    assert_close(got, np.swapaxes(wanted, 1, 2), oracles.ROUNDING * 10)

  def test_is_the_core(self):
    """Dropout, softcap and weights are those of multihead_attention."""
    q, k, v = inputs(B)
    options = {
      'dropout': Dropout(jax.random.key(0), 0.4),
      'logit_softcap': 2.0,
      'return_weights': True,
    }
    out, weights = dot_product_attention(q, k, v, **options)
    first = [np.swapaxes(x, 1, 2) for x in (q, k, v)]
    wanted_out, wanted = multihead_attention(*first, **options)
    assert_same_bits(weights, wanted)
    assert_same_bits(out, jnp.swapaxes(wanted_out, 1, 2))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'query': np.ones((T, K))}, r'query of shape \(7, 5\)', 'heads, features'),
    (
      {'key': np.ones((1, S, N, K))},
      r'key of shape \(1, 11',
      r'batch .*\(2,\)',
    ),
    (
      {'local_window_size': (1, 2, 3)},
      r'local_window_size=\(1, 2, 3\)',
      'left',
    ),
    ({'local_window_size': -1}, 'left=-1', 'lie in'),
    ({'implementation': 'fast'}, "implementation='fast'", 'use one of'),
    ({'query_seq_lengths': [1.5]}, 'query_lengths must be int', 'float32'),
    ({'mask': np.ones((T, S))}, 'mask has dtype float', 'as bias='),
  )
  def test_bad_calls(self, changes, value, remedy):
    """A ValueError with the name, the value and the remedy."""
    q, k, v = inputs(B, dtype=np.float32)
    arguments = {'query': q, 'key': k, 'value': v} | changes
    with self.assertRaisesRegex(ValueError, f'(?s){value}.*{remedy}'):
      dot_product_attention(**arguments)

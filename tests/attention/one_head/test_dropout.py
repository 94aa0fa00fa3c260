"""Dropout: how often, how scaled, how independent, and always the same."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_close, assert_same_bits, normal

from mha_jax.attention import Dropout, attend, multihead_attention
from mha_jax.attention.axes import Axis
from mha_jax.attention.implementations import OURS
from mha_jax.attention.one_head.dropout import TILE

B, H, T, S = 3, 5, 37, 41


def kept_weights(seed: int, rate: float, implementation: str = 'auto'):
  """The dropped weights of uniform attention: v is the unit matrix."""
  q = jnp.zeros((B, H, T, 2))
  k = jnp.zeros((B, H, S, 2))
  v = jnp.broadcast_to(jnp.eye(S), (B, H, S, S))
  dropout = Dropout(jax.random.key(seed), rate)
  out = multihead_attention(
    q, k, v, dropout=dropout, implementation=implementation
  )
  return np.asarray(out, np.float64) * S


class DropoutTest(parameterized.TestCase):
  @parameterized.product(rate=(0.1, 0.5, 0.9), implementation=OURS)
  def test_rate_and_scale(self, rate: float, implementation: str):
    """A weight is 0, or its value over 1 - rate, as often as it should be."""
    weights = kept_weights(0, rate, implementation)
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=1e-5)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    self.assertAlmostEqual(np.mean(~kept), rate, delta=4 * deviation)

  def test_independent_everywhere(self):
    """Batch rows, heads, queries, keys and tiles draw their own bits."""
    kept = kept_weights(0, 0.5) != 0
    slices = {
      'row': [kept[i].ravel() for i in range(B)],
      'head': [kept[:, i].ravel() for i in range(H)],
      'query': [kept[:, :, i].ravel() for i in range(T)],
      'key': [kept[:, :, :, i].ravel() for i in range(S)],
      'tile': [
        kept[:, :, i : i + 5, j : j + 9].ravel()
        for i in (0, TILE)
        for j in (0, TILE)
      ],
    }
    for axis, parts in slices.items():
      for i, a in enumerate(parts):
        for b in parts[:i]:
          # Fair coins agree half the time: 6 standard errors.
          delta = 6 * 0.5 / np.sqrt(a.size)
          self.assertAlmostEqual(np.mean(a == b), 0.5, delta=delta, msg=axis)

  def test_key_decides(self):
    """The same key gives the same bits, another key others."""
    first, again = kept_weights(0, 0.3), kept_weights(0, 0.3)
    np.testing.assert_array_equal(first, again)
    self.assertFalse(np.array_equal(first, kept_weights(1, 0.3)))

  @parameterized.parameters((1, 1), (5, 41), (37, 3), (32, 32), (33, 70))
  def test_tiles(self, t: int, s: int):
    """A shorter call keeps the bits of a longer one: tiles are fixed."""
    dropout = Dropout(jax.random.key(0), 0.4)
    full = dropout.keep(Axis(2 * TILE + 6), Axis(2 * TILE + 7))
    part = dropout.keep(Axis(t), Axis(s))
    self.assertEqual(part.shape, (t, s))
    np.testing.assert_array_equal(part, full[:t, :s])

  @parameterized.product(implementation=OURS)
  def test_heads_are_attend_with_their_keys(self, implementation: str):
    """Each head does what attend does with that head's key."""
    q, k, v = (
      normal(i, 2, n, length, 3).astype(np.float32)
      for i, (n, length) in enumerate(((4, T), (2, S), (2, S)))
    )
    dropout = Dropout(jax.random.key(0), 0.3)
    got = multihead_attention(
      q, k, v, dropout=dropout, implementation=implementation
    )
    keys = dropout.per_head(2, 4).key

    @jax.jit
    def one_head(q, k, v, key):
      return attend(q, k, v, dropout=Dropout(key, 0.3))

    for b in range(2):
      for h in range(4):
        head = one_head(q[b, h], k[b, h // 2], v[b, h // 2], keys[b, h])
        assert_close(got[b, h], head, 1e-5)

  def test_key_forms(self):
    """A typed key, its raw words and NumPy words are one key."""
    key = jax.random.key(3)
    raw = jax.random.key_data(key)
    x = normal(0, 1, 2, 7, 3).astype(np.float32)
    results = [
      multihead_attention(x, x, x, dropout=Dropout(form, 0.5))
      for form in (key, raw, np.asarray(raw))
    ]
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])

  @parameterized.product(implementation=OURS)
  def test_gradients(self, implementation: str):
    """Forward and backward drop the same weights."""
    q, k, v = (
      normal(i, 1, 2, length, 3).astype(np.float32)
      for i, length in enumerate((5, 7, 7))
    )
    dropout = Dropout(jax.random.key(0), 0.4)

    @jax.jit
    def loss(q, k, v):
      out = multihead_attention(
        q, k, v, dropout=dropout, implementation=implementation
      )
      return jnp.sum(out), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    _, weights = multihead_attention(q, k, v, return_weights=True)
    keys = dropout.per_head(1, 2).key
    kept = np.stack(
      [
        np.asarray(Dropout(keys[0, h], 0.4).keep(Axis(5), Axis(7)))
        for h in range(2)
      ]
    )
    used = np.asarray(weights, np.float64)[0] * kept / 0.6
    assert_close(out[0], used @ v[0], 1e-5)
    assert_close(grads[2][0], np.sum(used, 1)[..., None] * np.ones(3), 1e-5)
    p = np.asarray(weights, np.float64)[0]
    grad_p = np.sum(v[0], -1)[:, None, :] * kept / 0.6
    grad_s = p * (grad_p - np.sum(p * grad_p, -1, keepdims=True)) / np.sqrt(3)
    assert_close(grads[0][0], grad_s @ k[0], 1e-5)
    assert_close(grads[1][0], np.swapaxes(grad_s, 1, 2) @ q[0], 1e-5)

  def test_under_jit_and_vmap(self):
    """Keys are arguments: jit compiles once, vmap gives each its bits."""
    x = normal(0, 1, 2, 7, 3).astype(np.float32)

    @jax.jit
    def f(key):
      return multihead_attention(x, x, x, dropout=Dropout(key, 0.5))

    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.vmap(f)(keys)
    for i in range(3):
      assert_close(mapped[i], f(keys[i]), 1e-5)
    self.assertGreater(oracles.relative_error(mapped[0], mapped[1]), 1e-2)

  @parameterized.parameters(-0.1, 1.0, 1.5, float('nan'), float('inf'))
  def test_bad_rates(self, rate: float):
    """The rate lies in [0, 1)."""
    with self.assertRaisesRegex(
      ValueError, rf'dropout rate={rate} must lie in \[0, 1\); 0 turns'
    ):
      Dropout(jax.random.key(0), rate)

"""Independent oracles: float64 NumPy, loops, gradients derived by hand.

Nothing here imports mha_jax.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from absl.testing import parameterized

ROUNDING = 1e-12
"""The relative error that float64 rounding may cause."""


class X64TestCase(parameterized.TestCase):
  """A test case whose arrays are float64."""

  def setUp(self) -> None:
    super().setUp()
    self.enter_context(jax.enable_x64(True))


def normal(seed: int, *shape: int) -> np.ndarray:
  """Random normal float64 numbers."""
  return np.random.default_rng([seed, *shape]).standard_normal(shape)


def booleans(seed: int, *shape: int, share: float = 0.6) -> np.ndarray:
  """Random booleans, True with probability `share`."""
  return np.random.default_rng([seed, *shape]).random(shape) < share


def relative_error(got: Any, wanted: Any) -> float:
  """max |got - wanted| / max |wanted|."""
  got = np.asarray(got).astype(np.float64)
  wanted = np.asarray(wanted).astype(np.float64)
  if got.shape != wanted.shape:
    raise AssertionError(f'shape {got.shape}, wanted {wanted.shape}')
  error, size = np.max(np.abs(got - wanted)), np.max(np.abs(wanted))
  return float(error / (size or 1e-300))


def assert_close(got: Any, wanted: Any, tolerance: float = ROUNDING) -> None:
  """Every leaf of two trees agrees up to a relative error."""
  got_leaves, got_tree = jax.tree_util.tree_flatten_with_path(got)
  wanted_leaves, wanted_tree = jax.tree_util.tree_flatten_with_path(wanted)
  if got_tree != wanted_tree:
    raise AssertionError(f'tree {got_tree}, wanted {wanted_tree}')
  for (path, a), (_, b) in zip(got_leaves, wanted_leaves, strict=True):
    error = relative_error(a, b)
    if not error <= tolerance:
      where = jax.tree_util.keystr(path)
      raise AssertionError(f'leaf {where}: error {error} > {tolerance}')


def assert_same_bits(got: Any, wanted: Any) -> None:
  """Every leaf of two trees is equal, bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, got, wanted)


def softmax(x: np.ndarray) -> np.ndarray:
  """exp(x) / sum exp(x) of a vector."""
  e = np.exp(x - np.max(x))
  return e / np.sum(e)


class Attention(NamedTuple):
  """Output, weights, and the gradients of sum(out * cotangent)."""

  out: np.ndarray
  weights: np.ndarray
  dq: np.ndarray
  dk: np.ndarray
  dv: np.ndarray
  dbias: np.ndarray  # (b, h, t, s)


def attention(
  q: Any,
  k: Any,
  v: Any,
  *,
  allowed: Any = True,
  bias: Any = 0.0,
  scale: float | None = None,
  softcap: float | None = None,
  cotangent: Any = 1.0,
) -> Attention:
  """Attention row by row: q (b, h, t, k), k (b, n, s, k), v (b, n, s, v).

  Head i reads key/value head i // (h / n). A query with no allowed key gives
  zeros. The gradients follow from the chain rule, by hand.
  """
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  (b, h, t, width), (n, s) = q.shape, k.shape[1:3]
  allowed = np.broadcast_to(allowed, (b, h, t, s))
  bias = np.broadcast_to(np.asarray(bias, np.float64), (b, h, t, s))
  allowed = allowed & (bias != -np.inf)
  cotangent = np.broadcast_to(cotangent, (b, h, t, v.shape[-1]))
  scale = 1 / np.sqrt(width) if scale is None else scale
  out = np.zeros((b, h, t, v.shape[-1]))
  weights, dbias = np.zeros((b, h, t, s)), np.zeros((b, h, t, s))
  dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
  for i in range(b):
    for j in range(h):
      head = j // (h // n)
      for row in range(t):
        keys = np.flatnonzero(allowed[i, j, row])
        if not keys.size:
          continue
        scores, slopes = np.zeros(keys.size), np.full(keys.size, scale)
        for at, key in enumerate(keys):
          scores[at] = scale * np.dot(q[i, j, row], k[i, head, key])
          if softcap is not None:
            bounded = np.tanh(scores[at] / softcap)
            scores[at] = softcap * bounded
            slopes[at] *= 1 - bounded**2
        p = softmax(scores + bias[i, j, row, keys])
        weights[i, j, row, keys] = p
        out[i, j, row] = p @ v[i, head, keys]
        grad_out = cotangent[i, j, row]
        grad_p = v[i, head, keys] @ grad_out
        grad_scores = p * (grad_p - np.dot(p, grad_p))
        dbias[i, j, row, keys] = grad_scores
        dv[i, head, keys] += np.outer(p, grad_out)
        dq[i, j, row] = (slopes * grad_scores) @ k[i, head, keys]
        dk[i, head, keys] += np.outer(slopes * grad_scores, q[i, j, row])
  return Attention(out, weights, dq, dk, dv, dbias)


def reduce_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """The gradient of a broadcast: sums x down to `shape`."""
  padded = (1,) * (x.ndim - len(shape)) + tuple(shape)
  axes = tuple(i for i, size in enumerate(padded) if size == 1)
  return np.sum(x, axis=axes, keepdims=True).reshape(shape)


def rotate(
  x: np.ndarray, positions: np.ndarray, theta: float, layout: str
) -> np.ndarray:
  """RoPE by complex multiplication: pairs (x_i, y_i) as x_i + i y_i."""
  x = np.asarray(x, np.float64)
  half = x.shape[-1] // 2
  if layout == 'half':
    first, second = np.arange(half), np.arange(half) + half
  else:
    first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
  frequencies = np.array([theta ** (-2 * i / (2 * half)) for i in range(half)])
  turn = np.exp(1j * np.asarray(positions)[..., None] * frequencies)
  z = (x[..., first] + 1j * x[..., second]) * turn
  out = np.empty_like(x)
  out[..., first], out[..., second] = z.real, z.imag
  return out


def norm(x: np.ndarray, scale: np.ndarray, kind: str) -> np.ndarray:
  """LayerNorm without bias, or RMSNorm, over the last axis."""
  if kind == 'layer':
    x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def layer(
  params: Any,
  inputs_q: Any,
  inputs_k: Any = None,
  inputs_v: Any = None,
  *,
  kind: str | None = None,
  rope: tuple[float, str] | None = None,
  positions: tuple[Any, Any] | None = None,
  gates: Any = 1.0,
  **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
  """A whole attention layer on (b, t, d): output and weights."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = np.asarray(inputs_q, np.float64)
  y = x if inputs_k is None else np.asarray(inputs_k, np.float64)
  z = y if inputs_v is None else np.asarray(inputs_v, np.float64)

  def heads(name: str, a: np.ndarray) -> np.ndarray:
    kernel = p[name]['kernel']
    out = np.tensordot(a, kernel, axes=(2, 0)) + p[name].get('bias', 0.0)
    return np.moveaxis(out, 2, 1)

  q, k, v = heads('query', x), heads('key', y), heads('value', z)
  if kind is not None:
    q = norm(q, p['query_ln']['scale'], kind)
    k = norm(k, p['key_ln']['scale'], kind)
  if rope is not None:
    at_q, at_k = positions or (np.arange(x.shape[1]), np.arange(y.shape[1]))
    at_q, at_k = (np.atleast_2d(at)[:, None] for at in (at_q, at_k))
    q, k = rotate(q, at_q, *rope), rotate(k, at_k, *rope)
  result = attention(q, k, v, **options)
  out = result.out * np.reshape(np.broadcast_to(gates, q.shape[1]), (-1, 1, 1))
  merged = np.tensordot(out, p['out']['kernel'], axes=((1, 3), (0, 1)))
  return merged + p['out'].get('bias', 0.0), result.weights


def latent(
  params: Any,
  inputs_q: Any,
  inputs_k: Any = None,
  *,
  theta: float = 10_000.0,
  layout: str = 'half',
  positions: tuple[Any, Any] | None = None,
  gates: Any = 1.0,
  **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
  """Latent attention on (b, t, d): output and weights, keys concatenated."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = np.asarray(inputs_q, np.float64)
  y = x if inputs_k is None else np.asarray(inputs_k, np.float64)
  t, s = x.shape[1], y.shape[1]
  at_q, at_k = positions or (np.arange(t), np.arange(s))
  at_q, at_k = (np.atleast_2d(at)[:, None] for at in (at_q, at_k))

  def down(name: str, a: np.ndarray) -> np.ndarray:
    return a @ p[name]['kernel'] + p[name].get('bias', 0.0)

  def up(name: str, a: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.tensordot(a, p[name]['kernel'], axes=(2, 0)), 2, 1)

  def normed(name: str, a: np.ndarray) -> np.ndarray:
    return norm(a, p[name]['scale'], 'rms') if name in p else a

  if 'query_down' in p:
    x = normed('query_norm', down('query_down', x))
  c = normed('key_norm', down('key_down', y))
  q, k, v = up('query', x), up('key', c), up('value', c)
  if 'key_rope' in p:
    w = rotate(up('query_rope', x), at_q, theta, layout)
    u = rotate(down('key_rope', y)[:, None], at_k, theta, layout)
    u = np.broadcast_to(u, (*k.shape[:3], u.shape[-1]))
    q, k = np.concatenate([q, w], -1), np.concatenate([k, u], -1)
  result = attention(q, k, v, **options)
  out = result.out * np.reshape(np.broadcast_to(gates, q.shape[1]), (-1, 1, 1))
  merged = np.tensordot(out, p['out']['kernel'], axes=((1, 3), (0, 1)))
  return merged + p['out'].get('bias', 0.0), result.weights


def tied(
  params: Any,
  inputs_q: Any,
  inputs_k: Any = None,
  *,
  rope: tuple[float, str] | None = None,
  positions: tuple[Any, Any] | None = None,
  gates: Any = 1.0,
  **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
  """Grouped-tied attention on (b, t, d): keys are half of the values."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = np.asarray(inputs_q, np.float64)
  y = x if inputs_k is None else np.asarray(inputs_k, np.float64)
  at_q, at_k = positions or (np.arange(x.shape[1]), np.arange(y.shape[1]))
  at_q, at_k = (np.atleast_2d(at)[:, None] for at in (at_q, at_k))
  q, w, v = (
    np.moveaxis(np.tensordot(a, p[name]['kernel'], axes=(2, 0)), 2, 1)
    for name, a in (('query', x), ('query_rope', x), ('value', y))
  )
  u = (y @ p['key_rope']['kernel'])[:, None]
  if rope is not None:
    w, u = rotate(w, at_q, *rope), rotate(u, at_k, *rope)
  half = v.shape[-1] // 2
  u = np.broadcast_to(u, (*v.shape[:3], half))
  q, k = np.concatenate([q, w], -1), np.concatenate([v[..., :half], u], -1)
  result = attention(q, k, v, **options)
  out = result.out * np.reshape(np.broadcast_to(gates, q.shape[1]), (-1, 1, 1))
  merged = np.tensordot(out, p['out']['kernel'], axes=((1, 3), (0, 1)))
  return merged, result.weights


def random_params(config: Any, seed: int = 0, dtype: Any = np.float64) -> Any:
  """Random parameters for every row of a config's table."""
  return {
    name: {
      parameter: normal(seed + 10 * i + j, *shape).astype(dtype) / 2
      for j, (parameter, shape) in enumerate(row.shapes.items())
    }
    for i, (name, row) in enumerate(config.table.items())
  }

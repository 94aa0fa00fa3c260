"""`jax.nn.dot_product_attention`'s signature and layout over our core."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_jax.attention import heads, masks, shapes
from mha_jax.attention.notation import Array

IMPLEMENTATIONS = {'xla': 'exact'}
"""What names of `jax.nn` stand for; any other is one of ours."""


def dot_product_attention(
  query: Any,
  key: Any,
  value: Any,
  bias: Any = None,
  mask: Any = None,
  *,
  scale: float | Array | None = None,
  is_causal: bool = False,
  query_seq_lengths: Any = None,
  key_value_seq_lengths: Any = None,
  local_window_size: Any = None,
  implementation: str | None = None,
  return_residual: bool = False,
  logit_softcap: float | None = None,
  query_positions: Any = None,
  key_positions: Any = None,
  dropout: Any = None,
  return_weights: bool = False,
) -> Any:
  """Attention of h query heads over n key/value heads, heads last but one.

  A drop-in for `jax.nn.dot_product_attention`, with our contracts: a query that
  may attend to nothing gets zeros, scores are float32 at least.

  Args:
    query: (..., t, h, k); leading dimensions are batch dimensions.
    key: (..., s, n, k); n divides h.
    value: (..., s, n, v).
    bias: added to the scores, broadcasts to (..., h, t, s).
    mask: a `Mask`, or booleans that broadcast to (..., h, t, s); True may
      attend.
    scale: multiplies q k^T; None: 1 / sqrt(k).
    is_causal: whether a query attends to its own position and before only.
    query_seq_lengths: (b,) tokens; later queries get zeros. None: all.
    key_value_seq_lengths: (b,) tokens; later keys are not attended to.
    local_window_size: (left, right) tokens that a query sees around it, or one
      number for both; None: all.
    implementation: None or 'auto': ours to choose; 'xla': the exact form; else
      as in `multihead_attention`.
    return_residual: whether to return the log of the softmax's denominator
      (..., t, h) too, differentiable (`jax.nn` stops its gradient).
    logit_softcap: bound on the scores, see `multihead_attention`.
    query_positions: (..., t) or (t,) integers for masks; None: 0 .. t-1.
    key_positions: (..., s) or (s,) likewise.
    dropout: a `Dropout`; None: off.
    return_weights: whether to return the weights (..., h, t, s) too, before
      dropout.

  Returns:
    (..., t, h, v); with return_weights or return_residual a tuple of it and
    what was asked for, in this order.

  Raises:
    ValueError: shapes do not fit, or an option is unknown.
  """
  q, k, v = (jnp.asarray(x) for x in (query, key, value))
  for name, x in (('query', q), ('key', k), ('value', v)):
    if x.ndim < 3 or x.shape[:-3] != q.shape[:-3]:
      raise ValueError(
        f'{name} of shape {x.shape} must be (..., length, heads, features) '
        f"with the query's batch dimensions {q.shape[:-3]}"
      )
  batch, t, s = q.shape[:-3], q.shape[-3], k.shape[-3]
  lengths = (key_value_seq_lengths, query_seq_lengths)
  mask = masks.all_of(
    shapes.fold('mask', mask, batch),
    masks.causal() if is_causal else None,
    masks.lengths(*lengths) if any(x is not None for x in lengths) else None,
    _window(local_window_size),
  )
  out = heads.multihead_attention(
    *(_heads_first(x) for x in (q, k, v)),
    mask=mask,
    bias=shapes.fold('bias', bias, batch),
    scale=scale,
    logit_softcap=logit_softcap,
    query_positions=shapes.positions(
      'query_positions', query_positions, batch, t
    ),
    key_positions=shapes.positions('key_positions', key_positions, batch, s),
    dropout=dropout,
    return_weights=return_weights,
    return_residual=return_residual,
    implementation='auto'
    if implementation is None
    else IMPLEMENTATIONS.get(implementation, implementation),
  )
  o, *asked = out if return_weights or return_residual else (out,)
  asked = [jnp.reshape(x, (*batch, *x.shape[1:])) for x in asked]
  if return_residual:
    asked[-1] = jnp.swapaxes(asked[-1], -1, -2)
  o = jnp.swapaxes(o, 1, 2)
  o = jnp.reshape(o, (*batch, *o.shape[1:]))
  return (o, *asked) if asked else o


def _heads_first(x: Array) -> Array:
  """(..., length, heads, features) -> (b, heads, length, features)."""
  flat = jnp.reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))
  return jnp.swapaxes(flat, 1, 2)


def _window(size: Any) -> masks.Mask | None:
  """The mask of a window (left, right), or of one number for both."""
  if size is None or np.ndim(size) == 0:
    return None if size is None else masks.window(size, size)
  if len(size) != 2:
    raise ValueError(
      f'local_window_size={size} must be (left, right) or one number for both'
    )
  return masks.window(*size)

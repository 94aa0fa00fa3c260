"""Attention of one head with all scores at once: the specification.

  weights = softmax(softcap(scale q k^T) + bias) over the keys that may be
            attended to
  out     = dropout(weights) v

Scores and softmax are taken in float32 (float64 for float64 inputs). A query
that may attend to nothing gets zeros. A key that no query may attend to is
inert, and so is a query that may attend to no key: they may hold NaN.

Source: Vaswani et al. 2017, section 3.2.1; softcap: Gemma 2 (2024), section 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks, masks
from mha_jax.attention.dropout import Dropout
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.notation import Array, Bool, Float, Shaped


def attend(
  q: Any,
  k: Any,
  v: Any,
  *,
  mask: Any = None,
  bias: Any = None,
  scale: float | Array | None = None,
  logit_softcap: float | None = None,
  query_positions: Any = None,
  key_positions: Any = None,
  dropout: Dropout | None = None,
  used: Array | None = None,
  return_weights: bool = False,
) -> Any:
  """Attention of one head: q (t, k), k (s, k), v (s, v) -> (t, v).

  Args:
    q: queries (t, k).
    k: keys (s, k).
    v: values (s, v).
    mask: a `Mask` or booleans that broadcast to (t, s); True may attend.
    bias: added to the scores, broadcasts to (t, s); -inf may not attend.
    scale: multiplies q k^T; None: 1 / sqrt(k).
    logit_softcap: c > 0 bounds the scaled scores to (-c, c) as c tanh(x / c),
      before bias and mask; None: no bound.
    query_positions: (t,) integers for masks; None: 0 .. t-1.
    key_positions: (s,) integers for masks; None: 0 .. s-1.
    dropout: a `Dropout` with this head's key.
    used: (s,) booleans, the keys that some query may attend to, where more
      heads than this one share k and v; None: as this head's mask says.
    return_weights: whether to return the weights (t, s) too, before dropout.

  Returns:
    The output (t, v) in the inputs' common dtype; with return_weights the pair
    of output and weights.

  Raises:
    ValueError: shapes do not fit, or the mask is not boolean.
  """
  q, k, v = (jnp.asarray(x) for x in (q, k, v))
  _check_shapes(q, k, v)
  checks.softcap(logit_softcap)
  check_scale(scale)
  dtype = compute_dtype(None, q, k, v)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  t, s = q.shape[0], k.shape[0]
  query_positions = masks.as_positions('query_positions', query_positions, (t,))
  key_positions = masks.as_positions('key_positions', key_positions, (s,))
  bias = masks.as_bias(bias, (t, s), 'ts')
  allowed = allowed_pairs(
    masks.as_mask(mask),
    bias,
    masks.Axis(t, query_positions),
    masks.Axis(s, key_positions),
  )
  if allowed is not None:
    used = jnp.any(allowed, axis=0) if used is None else used
    k, v = silence(k, used), silence(v, used)
    q = silence(q, jnp.any(allowed, axis=1))
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  weights = _weights(q, k, allowed, bias, scale, logit_softcap)
  kept = weights if dropout is None else dropout.apply(weights)
  out = jnp.einsum(
    'ts,sv->tv', kept.astype(dtype), v, preferred_element_type=weights.dtype
  ).astype(dtype)
  return (out, weights.astype(dtype)) if return_weights else out


def allowed_pairs(
  mask: masks.Mask | None,
  bias: Float[Array, '#t #s'] | None,
  queries: masks.Axis,
  keys: masks.Axis,
) -> Bool[Array, 't s'] | None:
  """Which query may attend to which key, by mask and bias; None: all."""
  allowed = None if mask is None else mask.evaluate(queries, keys)
  if bias is not None:
    finite = bias != -jnp.inf
    allowed = finite if allowed is None else allowed & finite
  if allowed is None:
    return None
  shape = (queries.size, keys.size)
  checks.broadcast('mask', allowed.shape, shape, 'ts')
  return jnp.broadcast_to(allowed, shape)


def silence(
  x: Shaped[Array, 'length features'], used: Bool[Array, ' length']
) -> Shaped[Array, 'length features']:
  """Puts zeros where a query or key is not used: NaN there does no harm."""
  return jnp.where(used[:, None], x, 0)


def _weights(
  q: Float[Array, 't k'],
  k: Float[Array, 's k'],
  allowed: Bool[Array, 't s'] | None,
  bias: Float[Array, '#t #s'] | None,
  scale: float | Array,
  logit_softcap: float | None,
) -> Float[Array, 't s']:
  """The attention weights, in float32 at least; rows of nothing are zeros."""
  wide = wide_dtype(q.dtype)
  scores = jnp.einsum('tk,sk->ts', q, k, preferred_element_type=wide)
  scores = scores * jnp.asarray(scale, wide)
  if logit_softcap is not None:
    scores = logit_softcap * jnp.tanh(scores / logit_softcap)
  if bias is not None:
    scores = scores + bias.astype(wide)
  if allowed is None:
    return jax.nn.softmax(scores, axis=-1)
  empty = ~jnp.any(allowed, axis=-1, keepdims=True)
  scores = jnp.where(allowed, scores, jnp.where(empty, 0, -jnp.inf))
  return jnp.where(empty, 0, jax.nn.softmax(scores, axis=-1))


def check_scale(scale: Any) -> None:
  """Raises a ValueError unless the scale is one number, or None."""
  if scale is not None and np.shape(scale) != ():
    raise ValueError(
      f'scale of shape {np.shape(scale)} must be one number; scale q or k for '
      'more'
    )


def _check_shapes(q: Array, k: Array, v: Array) -> None:
  """Raises a ValueError unless q (t, k), k (s, k), v (s, v) fit."""
  for name, x in (('q', q), ('k', k), ('v', v)):
    if x.ndim != 2:
      raise ValueError(
        f'{name} of shape {x.shape} must be (length, features): attend works '
        'on one head; use multihead_attention for (b, h, t, k)'
      )
  if q.shape[1] < 1:
    raise ValueError(f'q of shape {q.shape} must have a head dimension >= 1')
  if q.shape[1] != k.shape[1]:
    raise ValueError(
      f'q has head dimension {q.shape[1]} and k {k.shape[1]}; they must agree'
    )
  if k.shape[0] != v.shape[0]:
    raise ValueError(
      f'k has length {k.shape[0]} and v {v.shape[0]}; they must agree'
    )

"""Attention of one head with all scores at once: the specification.

  weights = softmax(softcap(scale q k^T) + bias) over the keys that may be
            attended to
  out     = dropout(weights) v

A query and key may come in parts whose scores add, q k^T = sum_i q_i k_i^T, as
latent attention has them; nothing is concatenated.

Scores and softmax are taken in float32 (float64 for float64 inputs). A query
that may attend to nothing gets zeros. A key that no query may attend to is
inert, and so is a query that may attend to no key: they may hold NaN.

Source: Vaswani et al. 2017, section 3.2.1; softcap: Gemma 2 (2024), section 2.
"""

import functools
import operator
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.axes import Axis
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import (
  Array,
  ArrayLike,
  Bool,
  Float,
  Parts,
  Shaped,
)
from mha_jax.attention.one_head.dropout import Dropout
from mha_jax.attention.scores import (
  AskedOptions,
  Scores,
  ScoresOptions,
  checked_scores,
)


class Attended(NamedTuple):
  """The results of attention: its output, and what else was asked for."""

  out: Array  # (t, v)
  weights: Array | None = None  # (t, s), before dropout
  residual: Array | None = None  # (t,), log of the softmax's denominator

  def as_asked(self) -> Any:
    """The output alone, or a tuple of it and what else there is."""
    extra = [x for x in (self.weights, self.residual) if x is not None]
    return (self.out, *extra) if extra else self.out


@overload
def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  return_weights: Literal[False] = False,
  return_residual: Literal[False] = False,
  **options: Unpack[ScoresOptions],
) -> Array: ...
@overload
def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  return_weights: Literal[True],
  return_residual: bool = False,
  **options: Unpack[ScoresOptions],
) -> tuple[Array, ...]: ...
@overload
def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  return_weights: bool = False,
  return_residual: Literal[True],
  **options: Unpack[ScoresOptions],
) -> tuple[Array, ...]: ...
@overload
def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  return_weights: bool = False,
  return_residual: bool = False,
  **options: Unpack[ScoresOptions],
) -> Any: ...


def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  mask: Mask | ArrayLike | None = None,
  bias: ArrayLike | None = None,
  scale: float | Array | None = None,
  logit_softcap: float | None = None,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  dropout: Dropout | None = None,
  return_weights: bool = False,
  return_residual: bool = False,
) -> Any:
  """Attends with one head: q (t, k), k (s, k), v (s, v) -> (t, v).

  Args:
    q: queries (t, k), or a tuple of parts (t, k_i).
    k: keys (s, k), or a tuple of as many parts (s, k_i).
    v: values (s, v).
    mask: a `Mask` or booleans that broadcast to (t, s); True may attend.
    bias: added to the scores, broadcasts to (t, s); -inf may not attend.
    scale: multiplies q k^T; None: 1 / sqrt(k), with k = sum k_i.
    logit_softcap: c > 0 bounds the scaled scores to (-c, c) as c tanh(x / c),
      before bias and mask; None: no bound.
    query_positions: (t,) integers for masks; None: 0 .. t-1.
    key_positions: (s,) integers for masks; None: 0 .. s-1.
    dropout: a `Dropout` with this head's key.
    return_weights: whether to return the weights (t, s) too, before dropout.
    return_residual: whether to return the log of the softmax's denominator (t,)
      too, in float32 at least; -inf for a query of nothing.

  Returns:
    The output (t, v) in the inputs' common dtype; with return_weights or
    return_residual a tuple of it and what was asked for, in this order.

  Raises:
    ValueError: shapes do not fit, or the mask is not boolean.
  """
  qs, ks, v, scores = checked_head(
    q,
    k,
    v,
    mask=mask,
    bias=bias,
    scale=scale,
    logit_softcap=logit_softcap,
    query_positions=query_positions,
    key_positions=key_positions,
    dropout=dropout,
    return_weights=return_weights,
    return_residual=return_residual,
  )
  return _compiled(qs, ks, v, scores).as_asked()


def checked_head(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  **options: Unpack[AskedOptions],
) -> tuple[Parts, Parts, Array, Scores]:
  """Makes arrays and `Scores` of the arguments of `attend`.

  Raises:
    ValueError: they do not fit.
  """
  qs, ks, v = as_parts(q), as_parts(k), jnp.asarray(v)
  _check_shapes(qs, ks, v)
  shape = (qs[0].shape[0], v.shape[0])
  return (
    qs,
    ks,
    v,
    checked_scores(shape, compute_dtype(None, *qs, *ks, v), **options),
  )


def of_head(
  qs: tuple[Shaped[Array, 't _'], ...],
  ks: tuple[Shaped[Array, 's _'], ...],
  v: Shaped[Array, 's v'],
  scores: Scores,
  used: Bool[Array, ' s'] | None = None,
) -> Attended:
  """Attends with one head, all arguments checked.

  Args:
    qs, ks: the parts of the queries and of the keys.
    v: the values.
    scores: all that belongs to the scores.
    used: for heads that share k and v: the keys that a query of any of them may
      attend to, all others are silenced; None: as this head's mask says.
  """
  dtype = compute_dtype(None, *qs, *ks, v)
  queries = Axis(qs[0].shape[0], scores.query_positions)
  keys = Axis(v.shape[0], scores.key_positions)
  allowed = allowed_pairs(scores.mask, scores.bias, queries, keys)
  if allowed is not None:
    used = jnp.any(allowed, axis=0) if used is None else used
    asking = jnp.any(allowed, axis=1)
    qs = tuple(silence(q, asking) for q in qs)
  if used is not None:
    ks, v = tuple(silence(k, used) for k in ks), silence(v, used)
  qs, ks, v = jax.tree.map(lambda x: x.astype(dtype), (qs, ks, v))
  scale = scores.scale_for(qs)
  logits = bounded(products(qs, ks), scale, scores.logit_softcap)
  logits = logits if scores.bias is None else logits + scores.bias
  if allowed is not None:
    logits = jnp.where(allowed, logits, -jnp.inf)
  weights = _softmax(logits, allowed)
  kept = weights
  if scores.dropout is not None:
    kept = scores.dropout.apply(weights, queries, keys)
  out = jnp.einsum(
    'ts,sv->tv', kept.astype(dtype), v, preferred_element_type=weights.dtype
  ).astype(dtype)
  return Attended(
    out,
    weights.astype(dtype) if scores.return_weights else None,
    jax.nn.logsumexp(logits, axis=-1) if scores.return_residual else None,
  )


# Compiled, so that -inf stays inside under jax_debug_infs.
_compiled = jax.jit(of_head)


def as_parts(x: ArrayLike | tuple[ArrayLike, ...]) -> Parts:
  """A query or key as a tuple of parts; an array is the only part."""
  parts = x if isinstance(x, tuple) else (x,)
  return tuple(jnp.asarray(part) for part in parts)


def allowed_pairs(
  mask: Mask | None,
  bias: Float[Array, '#t #s'] | None,
  queries: Axis,
  keys: Axis,
) -> Bool[Array, 't s'] | None:
  """True where mask and bias let a query attend to a key; None: everywhere."""
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


def products(
  qs: tuple[Float[Array, 't _'], ...], ks: tuple[Float[Array, 's _'], ...]
) -> Float[Array, 't s']:
  """sum_i q_i k_i^T, in float32 at least."""
  wide = wide_dtype(qs[0].dtype)
  parts = [
    jnp.einsum('tk,sk->ts', q, k, preferred_element_type=wide)
    for q, k in zip(qs, ks, strict=True)
  ]
  return functools.reduce(operator.add, parts)


def bounded(
  sums: Float[Array, 't s'],
  scale: float | Array,
  logit_softcap: float | None,
) -> Float[Array, 't s']:
  """softcap(scale q k^T) of the products' sums q k^T."""
  scaled = sums * jnp.asarray(scale, sums.dtype)
  if logit_softcap is None:
    return scaled
  return logit_softcap * jnp.tanh(scaled / logit_softcap)


def _softmax(
  scores: Float[Array, 't s'], allowed: Bool[Array, 't s'] | None
) -> Float[Array, 't s']:
  """The weights; a row that may attend to nothing is zeros."""
  if allowed is None:
    return jax.nn.softmax(scores, axis=-1)
  empty = ~jnp.any(allowed, axis=-1, keepdims=True)
  weights = jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1)
  return jnp.where(empty, 0, weights)


def _check_shapes(qs: Parts, ks: Parts, v: Array) -> None:
  """Raises a ValueError unless q (t, k), k (s, k), v (s, v) fit."""
  for name, parts in (('q', qs), ('k', ks), ('v', (v,))):
    for x in parts:
      if x.ndim != 2:
        raise ValueError(
          f'{name} of shape {x.shape} must be (length, features): attend works '
          'on one head; use multihead_attention for (b, h, t, k)'
        )
  checks.widths(qs, ks)
  if any(q.shape[0] != qs[0].shape[0] for q in qs):
    raise ValueError(
      f'the parts of q have lengths {[q.shape[0] for q in qs]}; they must agree'
    )
  for k in ks:
    if k.shape[0] != v.shape[0]:
      raise ValueError(
        f'k has length {k.shape[0]} and v {v.shape[0]}; they must agree'
      )

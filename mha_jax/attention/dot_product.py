"""`jax.nn.dot_product_attention`'s signature and layout over our core."""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np

from mha_jax.attention import heads, masks, shapes
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import Array, ArrayLike
from mha_jax.attention.one_head.dropout import Dropout

IMPLEMENTATIONS: dict[str | None, str] = {None: 'auto', 'xla': 'exact'}
"""Our implementations for the names of `jax.nn`; any other is one of ours."""


class DotProductOptions(TypedDict, total=False):
  """The options that leave the kind of the result as it is."""

  scale: float | Array | None
  is_causal: bool
  query_seq_lengths: ArrayLike | None
  key_value_seq_lengths: ArrayLike | None
  local_window_size: int | tuple[int, int] | None
  implementation: str | None
  logit_softcap: float | None
  query_positions: ArrayLike | None
  key_positions: ArrayLike | None
  dropout: Dropout | None


@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  *,
  return_weights: Literal[False] = False,
  return_residual: Literal[False] = False,
  **options: Unpack[DotProductOptions],
) -> Array: ...
@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  *,
  return_weights: Literal[True],
  return_residual: bool = False,
  **options: Unpack[DotProductOptions],
) -> tuple[Array, ...]: ...
@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  *,
  return_weights: bool = False,
  return_residual: Literal[True],
  **options: Unpack[DotProductOptions],
) -> tuple[Array, ...]: ...
@overload
def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  *,
  return_weights: bool = False,
  return_residual: bool = False,
  **options: Unpack[DotProductOptions],
) -> Any: ...


def dot_product_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  *,
  scale: float | Array | None = None,
  is_causal: bool = False,
  query_seq_lengths: ArrayLike | None = None,
  key_value_seq_lengths: ArrayLike | None = None,
  local_window_size: int | tuple[int, int] | None = None,
  implementation: str | None = None,
  return_residual: bool = False,
  logit_softcap: float | None = None,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  dropout: Dropout | None = None,
  return_weights: bool = False,
) -> Any:
  """Attends with h query heads to n key/value heads, heads last but one.

  A drop-in for `jax.nn.dot_product_attention`: the same signature and layout,
  with our contracts. A query that may attend to nothing gets zeros, scores are
  float32 at least, and long sequences go by blocks of keys.

    from mha_jax import dot_product_attention

    out = dot_product_attention(query, key, value, is_causal=True)
    out, weights = dot_product_attention(
      query, key, value, mask=masks.window(255, 0), return_weights=True
    )

  It differs from `jax.nn` in this: `implementation` also takes our names,
  values may be of another width, dropout and weights are there, and the
  residual has a gradient. On GPUs and TPUs 'auto' takes the fused kernels that
  JAX ships for the calls in which they keep these contracts; a name that cannot
  serve a call raises, and says why.

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
  q, k, v = _arrays(query=query, key=key, value=value)
  batch, t, s = shapes.batch_of(q, 3), q.shape[-3], k.shape[-3]
  lengths = (key_value_seq_lengths, query_seq_lengths)
  mask = masks.all_of(
    batch.of_scores('mask', mask),
    masks.causal() if is_causal else None,
    masks.lengths(*lengths) if any(x is not None for x in lengths) else None,
    _window(local_window_size),
  )
  ours = IMPLEMENTATIONS.get(implementation) or str(implementation)
  out = heads.multihead_attention(
    *(jnp.swapaxes(batch.merge(x), 1, 2) for x in (q, k, v)),
    mask=mask,
    bias=batch.of_scores('bias', bias),
    scale=scale,
    logit_softcap=logit_softcap,
    query_positions=batch.of_tokens('query_positions', query_positions, t),
    key_positions=batch.of_tokens('key_positions', key_positions, s),
    dropout=dropout,
    return_weights=return_weights,
    return_residual=return_residual,
    implementation=ours,
  )
  o, *more = out if return_weights or return_residual else (out,)
  more = [batch.split(x) for x in more]
  if return_residual:
    more[-1] = jnp.swapaxes(more[-1], -1, -2)
  o = batch.split(jnp.swapaxes(o, 1, 2))
  return (o, *more) if more else o


def _arrays(**inputs: ArrayLike) -> list[Array]:
  """Makes arrays of the inputs; a ValueError unless their batches agree."""
  arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
  batch = arrays['query'].shape[:-3]
  for name, x in arrays.items():
    if x.ndim < 3 or x.shape[:-3] != batch:
      raise ValueError(
        f'{name} of shape {x.shape} must be (..., length, heads, features) '
        f"with the query's batch dimensions {batch}"
      )
  return [*arrays.values()]


def _window(size: int | tuple[int, int] | None) -> Mask | None:
  """Makes the mask of a window (left, right), or of one number for both."""
  if size is None:
    return None
  both = isinstance(size, tuple | list | np.ndarray)
  sides = tuple(size) if both else (size, size)  # type: ignore[arg-type]
  if len(sides) != 2:
    raise ValueError(
      f'local_window_size={size} must be (left, right) or one number for both'
    )
  return masks.window(*sides)

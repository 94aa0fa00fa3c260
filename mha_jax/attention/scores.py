"""All that belongs to the scores of a call, beside its queries and keys."""

import dataclasses
import numbers
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks, masks
from mha_jax.attention.constants import as_array
from mha_jax.attention.dtypes import wide_dtype
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import Array, ArrayLike
from mha_jax.attention.one_head.dropout import Dropout, check_dropout
from mha_jax.attention.pytrees import pytree


@pytree
class Scores:
  """All that turns products of queries and keys into weights.

  weights = softmax(softcap(scale q k^T) + bias) over the pairs that the mask
  allows; dropout is applied to them.

  It is checked once, at a public entry; a layer adds its cache's mask and
  positions, a variant its scale and softcap. Leaves lead with (b, h), of size 1
  where rows or heads share them; `heads` takes off an axis with each map, so
  that inside a head they have the shapes below.
  """

  mask: Mask | None = None
  bias: Any = None  # (#t, #s), float32 at least
  query_positions: Any = None  # (t,)
  key_positions: Any = None  # (s,)
  dropout: Dropout | None = None  # its key leads with (b, h) only in `heads`
  scale: Any = None  # (), for all heads; None: 1 / sqrt(k)
  logit_softcap: float | None = dataclasses.field(
    default=None, metadata={'static': True}
  )
  return_weights: bool = dataclasses.field(
    default=False, metadata={'static': True}
  )
  return_residual: bool = dataclasses.field(
    default=False, metadata={'static': True}
  )

  def scale_for(self, qs: tuple[Array, ...]) -> float | Array:
    """Returns the scale, or 1 / sqrt(k), k = sum k_i over a query's parts."""
    if self.scale is not None:
      return self.scale
    return float(sum(q.shape[-1] for q in qs) ** -0.5)

  def of_pairs(self) -> 'Scores':
    """Keeps only the part that decides who may attend to whom."""
    return dataclasses.replace(self, dropout=None, scale=None)


class ScoresOptions(TypedDict, total=False):
  """The options of `multihead_attention` that belong to the scores."""

  mask: Mask | ArrayLike | None
  bias: ArrayLike | None
  scale: float | Array | None
  logit_softcap: float | None
  query_positions: ArrayLike | None
  key_positions: ArrayLike | None
  dropout: Dropout | None


class AskedOptions(ScoresOptions, total=False):
  """The same, and the further results that are asked for."""

  return_weights: bool
  return_residual: bool


def checked_scores(
  shape: tuple[Any, ...],
  dtype: Any,
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
) -> Scores:
  """Makes the value from a user's arguments, see `multihead_attention`.

  Args:
    shape: of the scores: (b, h, t, s), or (t, s) of one head.
    dtype: the dtype that is computed in.

  Raises:
    ValueError: an argument does not fit.
  """
  *lead, t, s = shape
  check_scale(scale)
  checks.softcap(logit_softcap)
  check_dropout(dropout)
  letters = 'bhts' if lead else 'ts'
  bias = checks.as_bias(bias, shape, letters)
  return Scores(
    mask=_as_mask(mask, shape),
    # Before -inf is looked for: the least float64 is -inf in float32.
    bias=None if bias is None else bias.astype(wide_dtype(dtype)),
    query_positions=_positions('query_positions', query_positions, lead, t),
    key_positions=_positions('key_positions', key_positions, lead, s),
    dropout=None if dropout is None or dropout.rate == 0 else dropout,
    scale=float(scale) if isinstance(scale, numbers.Rational) else scale,
    logit_softcap=None if logit_softcap is None else float(logit_softcap),
    return_weights=return_weights,
    return_residual=return_residual,
  )


def check_scale(scale: Any) -> None:
  """Raises a ValueError unless the scale is one real number, or None."""
  number = isinstance(scale, numbers.Real) or hasattr(scale, 'dtype')
  if scale is not None and not (number or isinstance(scale, list | tuple)):
    raise ValueError(f'scale={scale!r} must be a real number, or None')
  if isinstance(scale, str) or np.shape(scale) != ():
    what = repr(scale) if isinstance(scale, str) else f'shape {np.shape(scale)}'
    raise ValueError(
      f'scale of {what} must be one number; scale q or k for more'
    )


def _as_mask(mask: Any, shape: tuple[Any, ...]) -> Mask | None:
  """Makes a Mask that fits, with leaves (b, h, ...) where scores have them."""
  mask = masks.as_mask(mask)
  if mask is None:
    return None
  mask = jax.tree.map(as_array, mask)
  if len(shape) == 2:
    return mask  # the function of one head checks what it evaluates to
  whole = mask.with_batch()
  try:
    whole.check(shape)
  except ValueError as error:
    ranks = [[x.ndim for x in jax.tree.leaves(m)] for m in (mask, whole)]
    if ranks[0] == ranks[1]:
      raise
    raise ValueError(
      f'{error}. jax.vmap took axes of this mask; its leaves lead with (b, h): '
      'map batch rows with in_axes=0, and then heads, with 0 again'
    ) from None
  return whole


def _positions(
  name: str, positions: ArrayLike | None, lead: list[Any], size: Any
) -> Array | None:
  """Makes positions (b, 1, size) or (1, 1, size), of one head (size,)."""
  if not lead:
    return checks.as_positions(name, positions, (size,))
  array = checks.as_positions(
    name, positions, (lead[0], size), (1, size), (size,)
  )
  if array is None:
    return None
  rows = 1 if array.ndim == 1 else array.shape[0]
  return jnp.reshape(array, (rows, 1, size))

"""What q, k, v and what belongs to their scores must be, heads first."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks, masks
from mha_jax.attention.checks import as_bias, as_positions, fit_rank
from mha_jax.attention.constants import as_array
from mha_jax.attention.notation import Array, Parts


def check_shapes(
  qs: Parts, ks: Parts, v: Array
) -> tuple[int, int, int, int, int]:
  """The sizes b, h, t, n, s; a ValueError where the shapes do not fit."""
  for name, parts, letters in (
    ('q', qs, '(b, h, t, k)'),
    ('k', ks, '(b, n, s, k)'),
    ('v', (v,), '(b, n, s, v)'),
  ):
    for x in parts:
      if x.ndim != 4:
        raise ValueError(f'{name} of shape {x.shape} must be {letters}')
  checks.widths(qs, ks)
  b, h, t = qs[0].shape[:3]
  if any(q.shape[:3] != (b, h, t) for q in qs):
    raise ValueError(
      f'the parts of q have shapes {[q.shape for q in qs]}; they must agree '
      'in (b, h, t)'
    )
  n, s = max(x.shape[1] for x in (*ks, v)), v.shape[2]
  for k in ks:
    heads = {k.shape[1], v.shape[1]}
    if not heads <= {1, n} or (k.shape[0], v.shape[0], k.shape[2]) != (b, b, s):
      raise ValueError(
        f'k of shape {k.shape} and v of shape {v.shape} must be (b, n, s, ...) '
        f"with q's b={b}, or n = 1 where all share; check batch, heads and "
        'length'
      )
  if n < 1 or h % n:
    raise ValueError(
      f'k and v have {n} heads, which must divide the {h} heads of q; heads '
      'come second: (b, n, s, k)'
    )
  return b, h, t, n, s


def check_pairs(
  mask: Any, bias: Any, shape: tuple[int, int, int, int]
) -> tuple[masks.Mask | None, Array | None]:
  """Mask and bias as a Mask and a 4-D array that fit scores (b, h, t, s).

  Raises:
    ValueError: they do not broadcast, or have the wrong dtype.
  """
  mask = jax.tree.map(as_array, masks.as_mask(mask))
  if mask is not None:
    mask = _check_mask(mask, shape)
  return mask, as_bias(bias, shape, 'bhts')


def _check_mask(
  mask: masks.Mask, shape: tuple[int, int, int, int]
) -> masks.Mask:
  """The mask with leaves (b, h, ...); a ValueError unless it fits."""
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


def per_row(name: str, positions: Any, b: int, size: int) -> Array | None:
  """Positions as (b, 1, length) or (1, 1, length): shared by the heads."""
  array = as_positions(name, positions, (b, size), (1, size), (size,))
  if array is None:
    return None
  return jnp.reshape(array, (math.prod(array.shape[:-1]), 1, size))


def one_batch(x: Array) -> Array:
  """(..., length, features) -> (b, length, features)."""
  return jnp.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


def fold(name: str, array: Any, batch: tuple[int, ...]) -> Any:
  """A mask or bias (..., h, t, s) as (b, h, t, s); a Mask as it is."""
  if array is None or isinstance(array, masks.Mask | str):
    return array  # what is no mask is refused where masks are joined
  if checks.is_function(array):
    return array
  array = jnp.asarray(array)
  lead = array.shape[:-3]
  if len(batch) == 1 or not lead:
    return array
  full = fit_rank(lead, len(batch))
  fits = len(full) == len(batch) and all(
    size in (1, whole) for size, whole in zip(full, batch, strict=True)
  )
  if not fits:
    raise ValueError(
      f'{name} of shape {array.shape} does not broadcast to (..., h, t, s) '
      f'with batch dimensions {batch}; give each its size or 1'
    )
  array = jnp.reshape(array, (*full, *array.shape[-3:]))
  array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
  return jnp.reshape(array, (math.prod(batch), *array.shape[-3:]))


def positions(
  name: str, positions: Any, batch: tuple[int, ...], size: int
) -> Array | None:
  """Positions (..., length) or (length,) as (b, length) or (1, length)."""
  array = as_positions(name, positions, (*batch, size), (1, size), (size,))
  if array is None:
    return None
  return jnp.reshape(array, (math.prod(array.shape[:-1]), size))

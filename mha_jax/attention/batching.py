"""Any number of batch dimensions as one, and what belongs to them."""

import math
from typing import Any

import jax.numpy as jnp

from mha_jax.attention import checks, masks
from mha_jax.attention.arguments import as_positions, fit_rank
from mha_jax.attention.notation import Array


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

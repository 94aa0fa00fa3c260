"""From what users pass beside q, k and v to arrays: bias and positions."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.notation import Array

ArrayLike = Any
"""An array, a NumPy array or a nested list of numbers."""


def as_bias(
  bias: ArrayLike | None, shape: tuple[int, ...], letters: str
) -> Array | None:
  """A bias as an array with all dimensions of the scores; None stays None."""
  if bias is None:
    return None
  array = jnp.asarray(bias)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(
      f'bias has dtype {array.dtype}, but a bias is added to the scores; pass '
      'booleans as mask=, numbers as floats'
    )
  full = (1,) * (len(shape) - array.ndim) + array.shape
  while 4 >= len(full) > len(shape) and full[0] == 1:
    full = full[1:]
  checks.broadcast('bias', full, shape, letters)
  return jnp.reshape(array, full)


def as_positions(
  name: str, positions: ArrayLike | None, *shapes: tuple[int, ...]
) -> Array | None:
  """Positions as an integer array of one of the shapes; None stays None."""
  if positions is None:
    return None
  array = jnp.asarray(positions)
  if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape not in shapes:
    wanted = ' or '.join(str(shape) for shape in dict.fromkeys(shapes))
    raise ValueError(
      f'{name} must be integers of shape {wanted}, got {array.dtype} of shape '
      f'{array.shape}'
    )
  if isinstance(positions, np.ndarray) and positions.size:
    limits, low, high = jnp.iinfo(array.dtype), positions.min(), positions.max()
    if low < limits.min or high > limits.max:
      raise ValueError(
        f'{name} from {low} to {high} do not fit {array.dtype}; use smaller '
        'ones, or JAX_ENABLE_X64=1'
      )
  return array

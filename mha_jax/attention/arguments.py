"""From what users pass beside q, k and v to arrays: bias and positions."""

import math
from collections.abc import Callable
from typing import Any

import jax
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
  full = array.shape if array.ndim > 4 else fit_rank(array.shape, len(shape))
  checks.broadcast('bias', full, shape, letters)
  return opaque(jnp.reshape(array, full))


CONSTANT_ELEMENTS = 2**16
"""Elements of an array, from which on XLA takes none for a constant."""


def opaque(array: Array) -> Array:
  """The same array, which XLA does not look into while it compiles.

  Where a mask or bias is a constant of the program, XLA would compute all that
  follows from it by its slow interpreter.
  """
  if not all(isinstance(size, int) for size in array.shape):
    return array  # symbolic, and so no constant
  small = math.prod(array.shape) < CONSTANT_ELEMENTS
  return array if small else jax.lax.optimization_barrier(array)


def fit_rank(shape: tuple[int, ...], ndim: int) -> tuple[int, ...]:
  """A shape with leading ones added, or dropped where they are, to ndim."""
  shape = (1,) * (ndim - len(shape)) + shape
  extra = len(shape) - ndim
  return shape[extra:] if shape[:extra] == (1,) * extra else shape


def as_positions(
  name: str, positions: ArrayLike | None, *shapes: tuple[int, ...]
) -> Array | None:
  """Positions as an integer array of one of the shapes; None stays None."""
  if positions is None:
    return None
  wanted = ' or '.join(str(shape) for shape in dict.fromkeys(shapes))
  return as_integers(name, positions, wanted, lambda shape: shape in shapes)


def as_integers(
  name: str, values: ArrayLike, wanted: str, fits: Callable[[Any], bool]
) -> Array:
  """Integers in JAX's default dtype, in which they can be subtracted.

  Args:
    name: the argument.
    values: integers of any dtype.
    wanted: the shape, for the message.
    fits: whether a shape will do.
  """
  array = jnp.asarray(values)
  if not jnp.issubdtype(array.dtype, jnp.integer) or not fits(array.shape):
    raise ValueError(
      f'{name} must be integers of shape {wanted}, got {array.dtype} of shape '
      f'{array.shape}'
    )
  dtype = jax.dtypes.canonicalize_dtype(jnp.int_)
  if isinstance(values, np.ndarray) and values.size:
    limits, low, high = jnp.iinfo(dtype), values.min(), values.max()
    if low < limits.min or high > limits.max:
      raise ValueError(
        f'{name} from {low} to {high} do not fit {dtype}; use smaller ones, or '
        'JAX_ENABLE_X64=1'
      )
  return opaque(array).astype(dtype)

"""Checks of arguments: a ValueError names argument, value and remedy."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention.constants import as_array, opaque
from mha_jax.attention.notation import Array, ArrayLike, Parts


def plain(value: Any) -> Any:
  """A Python number for an array of one that is known, as jnp.float32(0.1).

  Anything else comes back as it is.
  """
  array = isinstance(value, np.generic | np.ndarray | jax.Array)
  if not array or isinstance(value, jax.core.Tracer) or np.shape(value) != ():
    return value
  for kind, number in (
    (jnp.bool_, bool),
    (jnp.integer, int),
    (jnp.floating, float),
  ):
    if jnp.issubdtype(value.dtype, kind):
      return number(value)
  return value


def is_function(value: Any) -> bool:
  """Tells whether a function stands where an array should.

  Flax's variables are arrays that can be called.
  """
  return callable(value) and not hasattr(value, 'shape')


def plain_fields(config: Any) -> None:
  """Makes the numbers among the fields of a frozen dataclass Python's own."""
  for field in dataclasses.fields(config):
    value = plain(getattr(config, field.name))
    object.__setattr__(config, field.name, value)


def positive(name: str, value: Any) -> None:
  """Raises a ValueError unless the value is a positive 32-bit integer."""
  if not (_is_whole(value) and 1 <= value < 2**31):
    raise ValueError(
      f'{name}={value!r} must be a positive integer, and below 2^31'
      f'{_if_traced(value)}'
    )


def real(name: str, value: Any, low: int | float, high: int | float) -> None:
  """Raises a ValueError unless the value is a number in [low, high]."""
  if not (_is_real(value) and low <= value <= high):
    raise ValueError(
      f'{name}={value!r} must lie in [{low}, {high}]{_if_traced(value)}'
    )


def whole(name: str, value: Any, low: int, high: int) -> None:
  """Raises a ValueError unless the value is an integer in [low, high]."""
  if not (_is_whole(value) and low <= value <= high):
    raise ValueError(
      f'{name}={value!r} must be an integer and lie in [{low}, {high}]'
      f'{_if_traced(value)}'
    )


def known_range(
  name: str, values: Any, low: int, high: int, remedy: str = ''
) -> None:
  """Raises a ValueError unless all values, where known, lie in [low, high]."""
  if isinstance(values, jax.core.Tracer) or np.size(values) == 0:
    return
  # NumPy's array: within a jitted function JAX's own would be traced.
  known = np.asarray(values)
  least, most = int(known.min()), int(known.max())
  if least < low or most > high:
    raise ValueError(
      f'{name} from {least} to {most} must lie in [{low}, {high}]{remedy}'
    )


def divides(part: str, small: int, whole: str, large: int) -> None:
  """Raises a ValueError that names the nearest divisors."""
  if large % small == 0:
    return
  low = [x for x in range(1, math.isqrt(large) + 1) if large % x == 0]
  divisors = low + [large // x for x in reversed(low)]
  below = [x for x in divisors if x < small][-1:]
  above = [x for x in divisors if x > small][:1]
  nearest = ', '.join(str(x) for x in below + above)
  raise ValueError(
    f'{part}={small} must divide {whole}={large}; nearest: {nearest}'
  )


def rate(name: str, value: Any) -> None:
  """Raises a ValueError unless 0 <= value < 1."""
  if not (_is_real(value) and 0 <= value < 1):
    raise ValueError(
      f'{name}={value!r} must lie in [0, 1); 0 turns dropout off'
      f'{_if_traced(value)}'
    )


def softcap(logit_softcap: Any) -> None:
  """Raises a ValueError unless the bound is positive and a float32, or None."""
  logit_softcap = plain(logit_softcap)
  if logit_softcap is None:
    return
  most = float(np.finfo(np.float32).max)
  if not (_is_real(logit_softcap) and 0 < logit_softcap <= most):
    raise ValueError(
      f'logit_softcap={logit_softcap!r} must be positive and finite; None '
      f'turns it off{_if_traced(logit_softcap)}'
    )


def yes_or_no(name: str, value: Any) -> None:
  """Raises a ValueError unless the value is True or False, or 1 or 0."""
  if not isinstance(value, int) or value not in (0, 1):
    raise ValueError(f'{name}={value!r} must be True or False')


def hashable(name: str, value: Any) -> None:
  """Raises a ValueError unless the value can be a part of a config."""
  try:
    hash(value)
  except TypeError as error:
    raise ValueError(
      f'{name}={value!r} must be a plain value or a tuple, since a config is '
      'hashed'
    ) from error


def even(name: str, size: int) -> None:
  """Raises a ValueError for an odd number of rotary features."""
  if size % 2:
    nearest = ', '.join(str(x) for x in (size - 1, size + 1) if x > 0)
    raise ValueError(f'{name}={size} must be even for RoPE; nearest: {nearest}')


def broadcast(
  name: str, got: tuple[int, ...], wanted: tuple[int, ...], letters: str
) -> None:
  """Raises unless every dimension is 1 or as wanted."""
  if len(got) != len(wanted) or any(
    g not in (1, w) for g, w in zip(got, wanted, strict=True)
  ):
    raise ValueError(
      f'{name} of shape {got} does not broadcast to ({", ".join(letters)}) = '
      f'{wanted}; give each dimension its size or 1'
    )


def widths(qs: Parts, ks: Parts) -> None:
  """Raises a ValueError unless queries and keys have parts of equal widths."""
  widths = [tuple(x.shape[-1] for x in parts) for parts in (qs, ks)]
  if min(widths[0], default=0) < 1:
    raise ValueError(f'q has head dimension {widths[0]}; it must be >= 1')
  if widths[0] != widths[1]:
    q, k = (x[0] if len(x) == 1 else x for x in widths)
    raise ValueError(f'q has head dimension {q} and k {k}; they must agree')


def as_bias(
  bias: ArrayLike | None, shape: tuple[int, ...], letters: str
) -> Array | None:
  """A bias as an array with all dimensions of the scores; None stays None."""
  if bias is None:
    return None
  array = as_array(bias)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(
      f'bias has dtype {array.dtype}, but a bias is added to the scores; pass '
      'booleans as mask=, numbers as floats'
    )
  full = array.shape if array.ndim > 4 else fit_rank(array.shape, len(shape))
  broadcast('bias', full, shape, letters)
  return jnp.reshape(array, full)


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


def _if_traced(value: Any) -> str:
  """Says what to do where a number is not known yet."""
  if not isinstance(value, jax.core.Tracer):
    return ''
  return '; it is traced: let it be a static argument, or a Python number'


def _is_whole(value: Any) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not isinstance(value, bool)

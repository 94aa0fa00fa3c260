"""The dtype to compute in, the one to accumulate in, and the precision."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention.notation import Array


def compute_dtype(dtype: Any, *arrays: Array) -> Any:
  """Returns the dtype to compute in: `dtype`, or the arrays' floating one.

  Raises:
    ValueError: the dtype is no floating one, or an array is complex.
  """
  if dtype is not None:
    try:
      floating = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
      floating = False
    if not floating:
      raise ValueError(
        f'dtype={dtype!r} must be a floating dtype, for instance jnp.bfloat16'
      )
    return dtype
  common = jnp.result_type(*arrays)
  if jnp.issubdtype(common, jnp.complexfloating):
    raise ValueError(
      f'inputs of dtype {common} are complex; pass real and imaginary part as '
      'features'
    )
  return common if jnp.issubdtype(common, jnp.floating) else jnp.float32


def wide_dtype(dtype: Any) -> Any:
  """Returns the dtype to accumulate in: float64 for float64, else float32."""
  return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def matmul_precision(
  precision: Any,
) -> contextlib.AbstractContextManager[None]:
  """A context in which every product has a precision.

  Args:
    precision: a `jax.lax.Precision`, or what `jax.default_matmul_precision`
      takes; None: as that is set.

  Raises:
    ValueError: it is none of these.
  """
  if precision is None:
    return contextlib.nullcontext()
  preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
  name = precision.name if preset else precision
  with contextlib.suppress(ValueError):  # what names a Precision, by any name
    name = jax.lax.Precision(precision).name.lower()
  try:
    return jax.default_matmul_precision(name)
  except ValueError as error:
    raise ValueError(
      f'precision={precision!r} must be one jax.lax.Precision for both '
      "operands, or a string such as 'highest'"
    ) from error

"""Which dtype to compute in, and which to accumulate in."""

from typing import Any

import jax.numpy as jnp

from mha_jax.attention.notation import Array


def compute_dtype(dtype: Any, *arrays: Array) -> Any:
  """The dtype to compute in: `dtype`, or the arrays' common floating one.

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
  """The dtype to accumulate in: float64 for float64, else float32."""
  return jnp.float64 if dtype == jnp.float64 else jnp.float32

"""Which dtype to compute in, and which to accumulate in."""

from typing import Any

import jax.numpy as jnp

from mha_jax.attention.notation import Array


def compute_dtype(dtype: Any, *arrays: Array) -> Any:
  """The dtype to compute in: `dtype`, or the arrays' common inexact one."""
  if dtype is None:
    dtype = jnp.result_type(*arrays)
  return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def wide_dtype(dtype: Any) -> Any:
  """The dtype to accumulate in: float64 for float64, else float32."""
  return jnp.float64 if dtype == jnp.float64 else jnp.float32

"""Large arrays that a program holds as constants: masks and biases.

A jitted function that closes over an array makes it a part of its program. XLA
would compute all that follows from it by its slow interpreter, and takes time
to copy it. So a constant that has two values, as masks and additive masks have,
becomes a bit an element, and no constant is looked into.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention.notation import Array, ArrayLike

LARGE = 2**16
"""Constants of so many elements are packed into bits."""


def as_array(values: ArrayLike) -> Array:
  """Does as `jnp.asarray`, and makes a constant of a program small."""
  array = values if isinstance(values, jax.Array) else np.asarray(values)
  if not _is_constant(array):
    return opaque(jnp.asarray(values))
  known = np.asarray(array)
  low, high = known.min(), known.max()
  ones = known == high
  if not np.all(ones | (known == low)):
    return opaque(jnp.asarray(values))
  bits = opaque(jnp.asarray(np.packbits(ones, bitorder='little')))
  spread = jnp.unpackbits(bits, count=known.size, bitorder='little')
  return jnp.where(
    jnp.reshape(spread, known.shape) == 1, jnp.asarray(high), jnp.asarray(low)
  )


def opaque(array: Array) -> Array:
  """Returns the array, hidden from XLA's interpreter while it compiles."""
  if not all(isinstance(size, int) for size in array.shape):
    return array  # symbolic, and so no constant
  small = array.size < LARGE // 8  # bytes of the smallest one that is packed
  return array if small else jax.lax.optimization_barrier(array)


def _is_constant(array: Array | np.ndarray) -> bool:
  """Tells whether a large array, known and on one device, enters a program."""
  if isinstance(array, jax.core.Tracer) or math.prod(array.shape) < LARGE:
    return False
  if isinstance(array, jax.Array) and len(array.devices()) > 1:
    return False
  return isinstance(jnp.zeros(()), jax.core.Tracer)  # within a jitted function

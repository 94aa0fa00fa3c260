"""The shapes of a call: heads first, and any number of batch dimensions."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mha_jax.attention import checks, masks
from mha_jax.attention.notation import Array, ArrayLike, Parts
from mha_jax.attention.sharded_rows import batch_sharding, merged_sharding


def sizes_of(qs: Parts, ks: Parts, v: Array) -> tuple[int, int, int, int, int]:
  """Reads off the sizes b, h, t, n, s.

  Raises:
    ValueError: the shapes do not fit.
  """
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


@dataclasses.dataclass(frozen=True)
class Batch:
  """Any number of batch dimensions, taken as the rows of one.

  Args:
    sizes: of the batch dimensions.
    sharding: of the dimensions as they were, where merging them moves data.
  """

  sizes: tuple[int, ...]
  sharding: NamedSharding | None = None

  @property
  def rows(self) -> int:
    return math.prod(self.sizes)

  def merge(self, x: Array) -> Array:
    """Merges the batch dimensions: (..., *rest) -> (b, *rest)."""
    n = len(self.sizes)
    if n == 1:
      return x
    sharding = merged_sharding(x, n)
    return jnp.reshape(x, (self.rows, *x.shape[n:]), out_sharding=sharding)

  def split(self, x: Array) -> Array:
    """Undoes `merge`: (b, *rest) -> (..., *rest), sharded as the batch was."""
    if len(self.sizes) == 1:
      return x
    shape = (*self.sizes, *x.shape[1:])
    return jnp.reshape(x, shape, out_sharding=self.sharding)

  def of_scores(self, name: str, array: Any) -> Any:
    """A mask or bias (..., h, t, s) as (b, h, t, s); a Mask as it is."""
    if array is None or isinstance(array, masks.Mask | str):
      return array  # what is no mask is refused where masks are joined
    if checks.is_function(array):
      return array
    if len(self.sizes) == 1 or np.ndim(array) < 4:
      return array
    array = jnp.asarray(array)
    full = checks.fit_rank(array.shape[:-3], len(self.sizes))
    fits = len(full) == len(self.sizes) and all(
      size in (1, whole) for size, whole in zip(full, self.sizes, strict=True)
    )
    if not fits:
      raise ValueError(
        f'{name} of shape {array.shape} does not broadcast to (..., h, t, s) '
        f'with batch dimensions {self.sizes}; give each its size or 1'
      )
    array = jnp.reshape(array, (*full, *array.shape[-3:]))
    array = jnp.broadcast_to(array, (*self.sizes, *array.shape[-3:]))
    return self.merge(array)

  def of_tokens(
    self, name: str, positions: ArrayLike | None, size: int
  ) -> Array | None:
    """Positions (..., length) or (length,) as (b, length) or (1, length)."""
    shapes = (*self.sizes, size), (1, size), (size,)
    array = checks.as_positions(name, positions, *shapes)
    if array is None:
      return None
    if array.ndim == len(self.sizes) + 1 and array.shape[:-1] == self.sizes:
      return self.merge(array)
    return jnp.reshape(array, (1, size))


def batch_of(x: Array, trailing: int) -> Batch:
  """The batch dimensions of an array: all but the last so many."""
  n = x.ndim - trailing
  return Batch(x.shape[:n], batch_sharding(x, n))

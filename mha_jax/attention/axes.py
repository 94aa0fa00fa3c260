"""The two axes of the scores: whole, cut, and split into blocks."""

import dataclasses

import jax
import jax.numpy as jnp

from mha_jax.attention.notation import Array, Bool, Int
from mha_jax.attention.pytrees import pytree


@pytree
class Axis:
  """The tokens along one axis of the scores, or a part of them.

  Args:
    size: the number of tokens.
    positions: the positions of all tokens of the call; None: 0, 1, 2, ...
    start: the row or column of the call that the part starts at; None: the
      axis is whole.
  """

  size: int = dataclasses.field(metadata={'static': True})
  positions: Array | None = None  # (all,)
  start: Array | None = None  # ()

  @property
  def begin(self) -> Array:
    """The row or column of the first token."""
    return jnp.zeros((), int) if self.start is None else self.start

  def indices(self) -> Int[Array, ' size']:
    """The row or column of each token."""
    return self.begin + jnp.arange(self.size)

  def position_of_each(self) -> Int[Array, ' size']:
    if self.positions is None:
      return self.indices()
    return self.cut(self.positions)

  def cut(self, x: Array, axis: int = 0) -> Array:
    """The part of an array along an axis; one of size 1 is shared."""
    if self.start is None or x.shape[axis] == 1:
      return x
    return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

  def put(self, x: Array, part: Array) -> Array:
    """The array with its part along the first axis replaced."""
    return jax.lax.dynamic_update_slice_in_dim(x, part, self.begin, 0)


@pytree
class Blocks:
  """An axis in blocks of equal size; the last one may be short.

  Args:
    size: the number of tokens of the axis.
    block: the number of tokens of a block, at most `size`.
    positions: the tokens' positions; None: 0, 1, 2, ...
  """

  size: int = dataclasses.field(metadata={'static': True})
  block: int = dataclasses.field(metadata={'static': True})
  positions: Array | None = None  # (size,)

  @property
  def count(self) -> int:
    return -(-self.size // self.block)

  def axis(self, index: Array) -> Axis:
    """One block; a short one reaches back into the block before."""
    start = jnp.minimum(index * self.block, self.size - self.block)
    return Axis(self.block, self.positions, start)

  def own(self, index: Array) -> Array | None:
    """(block,) which tokens of `axis(index)` are its own; None: all."""
    if self.size % self.block == 0:
      return None
    return self.axis(index).indices() >= index * self.block

  def indices(self) -> tuple[Array, Array]:
    """The first and last row or column of each block."""
    first = jnp.arange(self.count) * self.block
    return first, jnp.minimum(first + self.block, self.size) - 1

  def spans(self, x: Int[Array, ' size']) -> tuple[Array, Array]:
    """The least and the greatest of an array in each block."""
    rest = self.count * self.block - self.size
    rows = jnp.reshape(jnp.pad(x, (0, rest), mode='edge'), (-1, self.block))
    return jnp.min(rows, axis=1), jnp.max(rows, axis=1)

  def any(self, x: Bool[Array, '#size _']) -> Bool[Array, '#blocks _']:
    """True where any row of a block is; a shared row stays one."""
    if x.shape[0] == 1:
      return x
    rest = self.count * self.block - self.size
    rows = jnp.pad(x, ((0, rest), (0, 0)))
    return jnp.any(jnp.reshape(rows, (-1, self.block, x.shape[1])), axis=1)

  def position_spans(self) -> tuple[Array, Array]:
    """The least and the greatest position in each block."""
    if self.positions is None:
      return self.indices()
    return self.spans(self.positions)

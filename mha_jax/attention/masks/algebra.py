"""Masks as booleans by coordinates, composed with & and |.

A `Mask` is a small frozen pytree that is evaluated from the coordinates of
queries and keys, whole or by block. Array leaves lead with (b, h), size 1 where
they do not vary; `heads.py` peels off one axis per vmap, so that inside a head
a dense mask is (t, s). The kinds are in `masks`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.checks import fit_rank
from mha_jax.attention.constants import as_array
from mha_jax.attention.notation import Array, ArrayLike, Bool
from mha_jax.attention.pytrees import pytree


class Mask:
  """A condition on queries and keys; the kinds are in `masks`.

  One's own is a `pytrees.pytree` with `evaluate`, which must depend on its
  fields alone, and `touches` where blocks can be skipped. Array leaves lead
  with (b, h), size 1 where they do not vary; `leaf_ndim` more dimensions, all
  leaves alike, are left inside a head:

    @pytree
    class SameColour(Mask):
      colours: Any  # (b, 1, s)
      leaf_ndim = 1

      def evaluate(self, queries, keys):
        row = jnp.reshape(self.colours, (-1,))
        return queries.cut(row)[:, None] == keys.cut(row)[None, :]
  """

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    """True where a query may attend to a key, for one batch row and head."""
    raise NotImplementedError

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, '#query_blocks #key_blocks']:
    """False where no query of block i may attend to any key of block j.

    For one batch row and head. True is always safe: such a pair of blocks is
    computed, any other is skipped.
    """
    del queries, keys
    return jnp.ones((1, 1), bool)

  def check(self, shape: tuple[int, int, int, int]) -> None:
    """Raises a ValueError unless the mask fits scores (b, h, t, s)."""

  leaf_ndim = 0  # dimensions of a leaf inside a head

  def with_batch(self) -> 'Mask':
    """The mask with leaves (b, h, ...), also where `jax.vmap` took axes.

    It takes the first ones: what is left of a leaf belongs to all batch rows of
    the call, and to all heads where it was mapped twice.
    """

    def whole(leaf: Array) -> Array:
      missing = 2 + self.leaf_ndim - jnp.ndim(leaf)
      return (
        leaf if missing < 1 else jnp.reshape(leaf, (1,) * missing + leaf.shape)
      )

    return jax.tree.map(whole, self)

  def __and__(self, other: 'Mask') -> 'Mask':
    return And(self, _operand(other))

  def __or__(self, other: 'Mask') -> 'Mask':
    return Or(self, _operand(other))

  __rand__, __ror__ = __and__, __or__
  __array_ufunc__ = None  # NumPy arrays leave & and | to the mask

  @property
  def by_position(self) -> bool:
    """True where it compares positions."""
    return False

  @property
  def by_column(self) -> bool:
    """True where it goes by the columns of the call."""
    return not self.by_position

  def __bool__(self) -> bool:
    raise ValueError('masks combine with & and |, not with `and` and `or`')

  def draw(self, t: int, s: int, batch: int = 0, head: int = 0) -> str:
    """The mask of one batch row and head as text.

    Args:
      t: the number of queries, a line each.
      s: the number of keys, a column each.
      batch: the batch row to draw.
      head: the head to draw.

    Returns:
      ■ where a query may attend to a key, · where it may not.
    """

    allowed = np.asarray(self.array(t, s))
    for name, index, size in zip(
      ('batch', 'head'), (batch, head), allowed.shape, strict=False
    ):
      if size > 1:
        checks.whole(name, index, 0, size - 1)
    rows = allowed[batch % allowed.shape[0], head % allowed.shape[1]]
    return '\n'.join(' '.join('■' if x else '·' for x in row) for row in rows)

  def array(self, t: int, s: int) -> Bool[Array, '_ _ t s']:
    """The mask as booleans (b, h, t, s), b and h of size 1 where shared."""
    mask = self.with_batch()
    leaves = jax.tree.leaves(mask)
    sizes = [max((x.shape[i] for x in leaves), default=1) for i in (0, 1)]
    mask.check((sizes[0], sizes[1], t, s))

    def spread(leaf: Array) -> Array:
      return jnp.broadcast_to(leaf, (*sizes, *leaf.shape[2:]))

    def one(mask: Mask) -> Array:
      return jnp.broadcast_to(mask.evaluate(Axis(t), Axis(s)), (t, s))

    if not leaves:
      return one(mask)[None, None]
    return jax.vmap(jax.vmap(one))(jax.tree.map(spread, mask))


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
  """Two masks, to be combined."""

  left: Mask
  right: Mask

  @property
  def by_position(self) -> bool:
    return self.left.by_position or self.right.by_position

  @property
  def by_column(self) -> bool:
    return self.left.by_column or self.right.by_column

  def with_batch(self) -> Mask:
    left, right = self.left.with_batch(), self.right.with_batch()
    return dataclasses.replace(self, left=left, right=right)

  def check(self, shape: tuple[int, int, int, int]) -> None:
    self.left.check(shape)
    self.right.check(shape)


@pytree
class And(_Pair):
  """Both masks allow it."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    left = self.left.evaluate(queries, keys)
    return left & self.right.evaluate(queries, keys)

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, '#query_blocks #key_blocks']:
    left = self.left.touches(queries, keys)
    return left & self.right.touches(queries, keys)


@pytree
class Or(_Pair):
  """Either mask allows it."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    left = self.left.evaluate(queries, keys)
    return left | self.right.evaluate(queries, keys)

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, '#query_blocks #key_blocks']:
    left = self.left.touches(queries, keys)
    return left | self.right.touches(queries, keys)


@pytree
class Dense(Mask):
  """A boolean array: True may attend."""

  allowed: Any  # (b, h, t, s), inside a head (t, s)

  leaf_ndim = 2

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    return keys.cut(queries.cut(self._of_one_head()), axis=1)

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, '#query_blocks #key_blocks']:
    rows = queries.any(self._of_one_head())
    return jnp.swapaxes(keys.any(jnp.swapaxes(rows, 0, 1)), 0, 1)

  def _of_one_head(self) -> Bool[Array, '#t #s']:
    check_peeled('mask', self.allowed.shape, 2)
    return jnp.reshape(self.allowed, self.allowed.shape[-2:])

  def check(self, shape: tuple[int, int, int, int]) -> None:
    checks.broadcast('mask', self.allowed.shape, shape, 'bhts')


def check_peeled(name: str, shape: tuple[int, ...], ndim: int) -> None:
  """Raises where more than the last ndim dimensions vary."""
  if any(size != 1 for size in shape[: len(shape) - ndim]):
    raise ValueError(
      f'{name} of shape {shape} varies over batch rows or heads, but attend '
      'works on one head; use multihead_attention'
    )


def dense(allowed: ArrayLike) -> Mask:
  """True where a query may attend to a key.

  Args:
    allowed: booleans that broadcast to (b, h, t, s).

  Raises:
    ValueError: not boolean, or more than four dimensions.
  """
  array = as_array(allowed)
  if array.dtype != jnp.bool_:
    raise ValueError(
      f'mask has dtype {array.dtype}, but a mask is boolean, True may attend; '
      'pass additive values as bias=, or compare: mask != 0'
    )
  if array.ndim > 4:
    raise ValueError(
      f'mask of shape {array.shape} must have at most 4 dimensions, that '
      'broadcast to (b, h, t, s)'
    )
  return Dense(jnp.reshape(array, fit_rank(array.shape, 4)))


def _operand(other: Any) -> Mask:
  """A Mask from what stands on the other side of & or |."""
  if other is None:
    raise ValueError('a Mask combines with a Mask or an array, not with None')
  mask = as_mask(from_numbers(other))
  assert mask is not None
  return mask


def as_mask(mask: Mask | ArrayLike | None) -> Mask | None:
  """A Mask from what users pass as `mask=`: a Mask, a boolean array or None."""
  if checks.is_function(mask):
    raise ValueError(f'mask={mask} is a function; call it, as masks.causal()')
  if isinstance(mask, str):
    raise ValueError(
      f'mask={mask!r} is a string; pass a mask, as masks.causal()'
    )
  return mask if mask is None or isinstance(mask, Mask) else dense(mask)


def all_of(*masks: Mask | ArrayLike | None) -> Mask | None:
  """All of the masks at once; None: no condition."""
  given = [x for x in map(as_mask, masks) if x is not None]
  return functools.reduce(And, given) if given else None


def from_numbers(mask: Mask | ArrayLike | None) -> Mask | ArrayLike | None:
  """A boolean array from Flax's mask helpers' 0/1 numbers.

  Nonzero may attend. Masks, booleans and None come back as they are.

  Raises:
    ValueError: a number is negative or NaN, as in additive masks (where the
      values are known, that is, outside of jit).
  """
  no_array = isinstance(mask, Mask | str) or checks.is_function(mask)
  if mask is None or no_array:
    return mask  # what is no mask is refused where masks are joined
  array: Any = mask if hasattr(mask, 'dtype') else jnp.asarray(mask)
  if array.dtype == jnp.bool_:
    return array
  known = not isinstance(array, jax.core.Tracer)
  if known and not np.all(np.asarray(array) >= 0):
    raise ValueError(
      'mask holds negative numbers or NaN, but nonzero may attend; pass '
      'additive values as bias=, or mask == 0'
    )
  if isinstance(array, np.ndarray):
    return as_array(array != 0)  # before JAX makes it narrower
  return as_array(array) != 0

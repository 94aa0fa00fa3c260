"""The kinds of masks: causal and window, lengths and segments."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.checks import as_integers
from mha_jax.attention.masks.algebra import And, Mask, check_peeled
from mha_jax.attention.notation import Array, ArrayLike, Bool, Int
from mha_jax.attention.pytrees import pytree


@pytree
class Causal(Mask):
  """A query may attend to keys at its own position and before."""

  by_position = True

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, 't s']:
    key, query = keys.position_of_each(), queries.position_of_each()
    return key[None, :] <= query[:, None]

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, 'query_blocks key_blocks']:
    (_, last), (first, _) = queries.position_spans(), keys.position_spans()
    return first[None, :] <= last[:, None]


@pytree
class Window(Mask):
  """A query may attend to keys at most so far before and after it."""

  left: int | None = dataclasses.field(metadata={'static': True})
  right: int | None = dataclasses.field(metadata={'static': True})

  by_position = True

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, 't s']:
    key, query = keys.position_of_each(), queries.position_of_each()
    return self._near((query, query), (key, key))

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, 'query_blocks key_blocks']:
    return self._near(queries.position_spans(), keys.position_spans())

  def _near(
    self, queries: tuple[Array, Array], keys: tuple[Array, Array]
  ) -> Bool[Array, '_ _']:
    """True where spans (least, greatest) of queries and keys come near."""
    (first, last), (least, most) = queries, keys
    near = jnp.ones((first.size, least.size), bool)
    limits = jnp.iinfo(first.dtype)  # where positions would wrap
    if self.left is not None:
      low = jnp.maximum(first, limits.min + self.left) - self.left
      near = near & (most[None, :] >= low[:, None])
    if self.right is not None:
      high = jnp.minimum(last, limits.max - self.right) + self.right
      near = near & (least[None, :] <= high[:, None])
    return near


@pytree
class Lengths(Mask):
  """Only the first keys, and only the first queries, of a row take part."""

  keys: Any  # (b, h), inside a head (); None: all
  queries: Any  # likewise

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    rows = _before('query_lengths', queries.indices(), self.queries)
    columns = _before('lengths', keys.indices(), self.keys)
    return rows[:, None] & columns[None, :]

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, 'query_blocks key_blocks']:
    rows = _before('query_lengths', queries.indices()[0], self.queries)
    columns = _before('lengths', keys.indices()[0], self.keys)
    return rows[:, None] & columns[None, :]

  def check(self, shape: tuple[int, int, int, int]) -> None:
    for name, array in (
      ('lengths', self.keys),
      ('query_lengths', self.queries),
    ):
      if array is not None:
        checks.broadcast(name, array.shape, shape[:2], 'bh')


def _before(
  name: str, indices: Int[Array, ' size'], length: Any
) -> Bool[Array, ' size']:
  """True for the rows or columns before a length; None: for all."""
  if length is None:
    return jnp.ones(indices.shape, bool)
  check_peeled(name, length.shape, 0)
  return indices < jnp.reshape(length, (1,))


@pytree
class Segments(Mask):
  """A query may attend to the keys of its own segment."""

  queries: Any  # (b, h, t), inside a head (t,)
  keys: Any  # (b, h, s), inside a head (s,)

  leaf_ndim = 1

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, 't s']:
    row, column = self._of_one_head()
    return queries.cut(row)[:, None] == keys.cut(column)[None, :]

  def touches(
    self, queries: Blocks, keys: Blocks
  ) -> Bool[Array, 'query_blocks key_blocks']:
    row, column = self._of_one_head()
    (low, high), (least, most) = queries.spans(row), keys.spans(column)
    return (low[:, None] <= most[None, :]) & (high[:, None] >= least[None, :])

  def _of_one_head(self) -> tuple[Int[Array, ' t'], Int[Array, ' s']]:
    for array in (self.queries, self.keys):
      check_peeled('segments', array.shape, 1)
    row = jnp.reshape(self.queries, self.queries.shape[-1:])
    return row, jnp.reshape(self.keys, self.keys.shape[-1:])

  def check(self, shape: tuple[int, int, int, int]) -> None:
    b, _, t, s = shape
    for name, array, size in (
      ('queries', self.queries, t),
      ('keys', self.keys, s),
    ):
      fits = array.ndim == 3 and array.shape[0] in (1, b)
      if not fits or array.shape[2] != size:
        raise ValueError(
          f'segments: {name} of shape {array.shape[::2]} must be (b, length) '
          f'= ({b}, {size})'
        )


def reach(mask: Mask | None) -> tuple[int | None, int | None] | None:
  """Returns how far a query sees back and ahead, (left, right).

  None in the place of either: without end.

  None where the mask is more than causal and windows joined by &.
  """
  if mask is None:
    return None, None
  if isinstance(mask, Causal):
    return None, 0
  if isinstance(mask, Window):
    return mask.left, mask.right
  if not isinstance(mask, And):
    return None
  one, other = reach(mask.left), reach(mask.right)
  if one is None or other is None:
    return None
  left, right = (
    min((x for x in side if x is not None), default=None)
    for side in zip(one, other, strict=True)
  )
  return left, right


def causal() -> Mask:
  """A query may attend to keys at its own position and before."""
  return Causal()


def window(left: Any, right: Any) -> Mask:
  """A query at position i may attend to positions i - left to i + right.

  `window(1023, 0)` is causal attention to the last 1024 tokens, the query's own
  included.

  Args:
    left: how many tokens back, a number or None: all.
    right: how many tokens ahead, likewise.
  """
  for name, side in (('left', left), ('right', right)):
    if side is not None:
      checks.whole(name, checks.plain(side), 0, 2**31 - 1)
  return Window(*(None if x is None else int(x) for x in (left, right)))


def lengths(
  lengths: ArrayLike | None, query_lengths: ArrayLike | None = None
) -> Mask:
  """Only the first `lengths[b]` keys of batch row b may be attended to.

  Args:
    lengths: (b,) or (...) integers, tokens; None: all keys.
    query_lengths: likewise; later queries attend to nothing. None: all.
  """
  keys, queries = (
    None if array is None else _integers(name, array)[:, None]
    for name, array in (('lengths', lengths), ('query_lengths', query_lengths))
  )
  return Lengths(keys, queries)


def segments(queries: ArrayLike, keys: ArrayLike | None = None) -> Mask:
  """A query may attend to the keys that have its segment number.

  For sequences packed into one row, and for padding with a number of its own.

  Args:
    queries: (b, t) or (..., t) integers, the segment of each query.
    keys: (b, s) or (..., s) likewise of each key; None: `queries`.
  """
  keys = queries if keys is None else keys
  query_segments = _integers('queries', queries, 't')
  key_segments = _integers('keys', keys, 's')
  return Segments(query_segments[:, None], key_segments[:, None])


def _integers(name: str, values: ArrayLike, *letters: str) -> Array:
  """Integers (..., *letters), batch dimensions as one: (b, *letters)."""
  ndim = len(letters)
  wanted = f'({", ".join(("b", *letters))}{"" if letters else ","})'
  array = as_integers(name, values, wanted, lambda shape: len(shape) > ndim)
  batch = array.shape[: array.ndim - ndim]
  return jnp.reshape(array, (math.prod(batch), *array.shape[len(batch) :]))

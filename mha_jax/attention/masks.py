"""Masks: which query may attend to which key.

A `Mask` is a small frozen pytree that is evaluated from coordinates, whole or
by block, and composed with `&` and `|`:

  >>> print(masks.causal().draw(3, 4))
  ■ · · ·
  ■ ■ · ·
  ■ ■ ■ ·

`causal` compares positions, where a token stands in its sequence; `dense` and
`lengths` go by the row and column of the call. Without `input_positions` the
two are the same. Where the inputs have several batch dimensions, b counts the
rows of all of them.

Array leaves lead with (b, h), size 1 where they do not vary. `heads.py` peels
off one axis per vmap, so that inside a head a dense mask is (t, s).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Bool, Int

ArrayLike = Any
"""An array, a NumPy array or a nested list of numbers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Axis:
  """The tokens along one axis of the scores.

  Args:
    size: the number of tokens.
    positions: their positions; None: 0, 1, 2, ...
  """

  size: int = dataclasses.field(metadata={'static': True})
  positions: Array | None = None  # (size,)

  def position_of_each(self) -> Int[Array, ' size']:
    return jnp.arange(self.size) if self.positions is None else self.positions


class Mask:
  """What all masks can do; see `causal`, `lengths` and `dense`."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    """True where a query may attend to a key, for one batch row and head."""
    raise NotImplementedError

  def check(self, shape: tuple[int, int, int, int]) -> None:
    """Raises a ValueError unless the mask fits scores (b, h, t, s)."""

  def __and__(self, other: 'Mask') -> 'Mask':
    return And(self, _operand(other))

  def __or__(self, other: 'Mask') -> 'Mask':
    return Or(self, _operand(other))

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

    def pick(leaf: Array) -> Array:
      b, h = min(batch, leaf.shape[0] - 1), min(head, leaf.shape[1] - 1)
      return leaf[b, h]

    single = jax.tree.map(pick, self)
    allowed = single.evaluate(Axis(t), Axis(s))
    checks.broadcast('mask', allowed.shape, (t, s), 'ts')
    allowed = np.broadcast_to(allowed, (t, s))
    return '\n'.join(
      ' '.join('■' if x else '·' for x in row) for row in allowed
    )


def _operand(other: Any) -> Mask:
  """A Mask from what stands on the other side of & or |."""
  if other is None:
    raise ValueError('a Mask combines with a Mask or an array, not with None')
  mask = as_mask(from_numbers(other))
  assert mask is not None
  return mask


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
  """Two masks, to be combined."""

  left: Mask
  right: Mask

  def check(self, shape: tuple[int, int, int, int]) -> None:
    self.left.check(shape)
    self.right.check(shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(_Pair):
  """Both masks allow it."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    left = self.left.evaluate(queries, keys)
    return left & self.right.evaluate(queries, keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(_Pair):
  """Either mask allows it."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    left = self.left.evaluate(queries, keys)
    return left | self.right.evaluate(queries, keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
  """A query may attend to keys at its own position and before."""

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, 't s']:
    key, query = keys.position_of_each(), queries.position_of_each()
    return key[None, :] <= query[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
  """Only the first `lengths` keys of a row may be attended to."""

  lengths: Any  # (b, h), inside a head ()

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '1 s']:
    del queries
    _check_peeled('lengths', self.lengths.shape, 0)
    return jnp.arange(keys.size)[None, :] < jnp.reshape(self.lengths, (1, 1))

  def check(self, shape: tuple[int, int, int, int]) -> None:
    checks.broadcast('lengths', self.lengths.shape[:1], shape[:1], 'b')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(Mask):
  """A boolean array: True may attend."""

  allowed: Any  # (b, h, t, s), inside a head (t, s)

  def evaluate(self, queries: Axis, keys: Axis) -> Bool[Array, '#t #s']:
    _check_peeled('mask', self.allowed.shape, 2)
    return jnp.reshape(self.allowed, self.allowed.shape[-2:])

  def check(self, shape: tuple[int, int, int, int]) -> None:
    checks.broadcast('mask', self.allowed.shape, shape, 'bhts')


def _check_peeled(name: str, shape: tuple[int, ...], ndim: int) -> None:
  """Raises where more than the last ndim dimensions vary."""
  if any(size != 1 for size in shape[: len(shape) - ndim]):
    raise ValueError(
      f'{name} of shape {shape} varies over batch rows or heads, but attend '
      'works on one head; use multihead_attention'
    )


def causal() -> Mask:
  """A query may attend to keys at its own position and before."""
  return Causal()


def lengths(lengths: ArrayLike) -> Mask:
  """Only the first `lengths[b]` keys of batch row b may be attended to.

  Args:
    lengths: (b,) integers, tokens.
  """
  array = jnp.asarray(lengths)
  if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(
      f'lengths must be integers of shape (b,), got {array.dtype} of shape '
      f'{array.shape}; pass the number of valid keys of each batch row'
    )
  return Lengths(array[:, None])


def dense(allowed: ArrayLike) -> Mask:
  """True where a query may attend to a key.

  Args:
    allowed: booleans that broadcast to (b, h, t, s).

  Raises:
    ValueError: not boolean, or more than four dimensions.
  """
  array = jnp.asarray(allowed)
  if array.dtype != jnp.bool_:
    raise ValueError(
      f'mask has dtype {array.dtype}, but a mask is boolean, True may attend; '
      'pass additive values as bias=, or compare: mask != 0'
    )
  if not 2 <= array.ndim <= 4:
    raise ValueError(
      f'mask of shape {array.shape} must have 2 to 4 dimensions that broadcast '
      'to (b, h, t, s)'
    )
  return Dense(jnp.reshape(array, (1,) * (4 - array.ndim) + array.shape))


def as_mask(mask: Mask | ArrayLike | None) -> Mask | None:
  """A Mask from what users pass as `mask=`: a Mask, a boolean array or None."""
  if callable(mask):
    raise ValueError(f'mask={mask} is a function; call it, as masks.causal()')
  return mask if mask is None or isinstance(mask, Mask) else dense(mask)


def from_numbers(mask: Mask | ArrayLike | None) -> Mask | ArrayLike | None:
  """A boolean array from Flax's mask helpers' 0/1 numbers.

  Nonzero may attend. Masks, booleans and None come back as they are.

  Raises:
    ValueError: a number is negative or NaN, as in additive masks (where the
      values are known, that is, outside of jit).
  """
  if mask is None or isinstance(mask, Mask) or callable(mask):
    return mask
  array = jnp.asarray(mask)
  if array.dtype == jnp.bool_:
    return array
  known = not isinstance(mask, jax.core.Tracer)
  if known and not np.all(np.asarray(mask) >= 0):
    raise ValueError(
      'mask holds negative numbers or NaN, but nonzero may attend; pass '
      'additive values as bias=, or mask == 0'
    )
  return array != 0


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
  full = (1,) * (len(shape) - array.ndim) + array.shape
  while 4 >= len(full) > len(shape) and full[0] == 1:
    full = full[1:]
  checks.broadcast('bias', full, shape, letters)
  return jnp.reshape(array, full)


def as_positions(
  name: str, positions: ArrayLike | None, *shapes: tuple[int, ...]
) -> Array | None:
  """Positions as an integer array of one of the shapes; None stays None."""
  if positions is None:
    return None
  array = jnp.asarray(positions)
  if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape not in shapes:
    wanted = ' or '.join(str(shape) for shape in dict.fromkeys(shapes))
    raise ValueError(
      f'{name} must be integers of shape {wanted}, got {array.dtype} of shape '
      f'{array.shape}'
    )
  if isinstance(positions, np.ndarray) and positions.size:
    limits, low, high = jnp.iinfo(array.dtype), positions.min(), positions.max()
    if low < limits.min or high > limits.max:
      raise ValueError(
        f'{name} from {low} to {high} do not fit {array.dtype}; use smaller '
        'ones, or JAX_ENABLE_X64=1'
      )
  return array

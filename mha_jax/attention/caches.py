"""Caches of past tokens: frozen pytrees that grow by `extend`.

Entries are a variant's own, keys and values or a latent, heads first:
(b, heads, slots, features). Every batch row has a length of its own. A new
token's position is the number of tokens before it in its row; padding (False
in `valid`) takes no position and no slot.

  KVCache      a slot for each position, up to a capacity
  LatentCache  the same for latent attention
  WindowCache  a ring that holds the last `window` positions
  StaticCache  what cross-attention attends to, projected once

Writing past the capacity raises where the lengths are known. Where they are
traced, what is stored stays, the length still advances, and the row's outputs
are NaN from then on: see `overflowed`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.dtypes import compute_dtype
from mha_jax.attention.notation import Array, DTypeLike
from mha_jax.attention.pytrees import pytree
from mha_jax.attention.sharded_rows import rows_alike
from mha_jax.attention.variants.config import AttentionConfig, check_config

Entries = tuple[Array, ...]


@pytree
class View:
  """The keys that the queries of a call may attend to.

  Args:
    entries: arrays (b, heads, s, features).
    positions: (b, s) or (1, s), the position of each key.
    usable: (b, s) or (1, s), False for slots that hold no token.
  """

  entries: Any  # (b, heads, s, features) each
  positions: Any  # (b, s) or (1, s)
  usable: Any  # likewise


@pytree
class Cache:
  """The part that all caches share.

  Args:
    entries: arrays (b, heads, slots, features).
    lengths: (b,) tokens that each row has been given.
  """

  entries: Any  # (b, heads, slots, features) each
  lengths: Any  # (b,)

  @property
  def slots(self) -> int:
    return self.entries[0].shape[2]

  @property
  def nbytes(self) -> int:
    """The bytes of all entries."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.entries)

  @property
  def nbytes_per_token(self) -> int:
    """The bytes of a slot of one row."""
    return self.nbytes // (self.entries[0].shape[0] * self.slots)

  @property
  def window(self) -> int | None:
    """The tokens that a query sees, its own included; None: all before it."""
    return None

  @property
  def overflowed(self) -> Array:
    """(b,) True for rows that were given more than they can hold."""
    return jnp.zeros(self.lengths.shape, bool)

  def positions(self, t: int, valid: Array | None = None) -> Array:
    """The positions (b, t) of the next t tokens, of which some are padding."""
    return self.lengths[:, None] + _ordinals(t, valid)

  def check_room(self, t: int, valid: Array | None = None) -> None:
    """Raises a ValueError for a row past its capacity, where that is known."""

  def extend(
    self, new: Entries, valid: Array | None = None
  ) -> tuple['Cache', View]:
    """Appends entries.

    Args:
      new: arrays (b, heads, t, features).
      valid: (b, t) False for padding, left or right; None: all are tokens.

    Returns:
      The new cache, and what the t queries may attend to.

    Raises:
      ValueError: a row would hold more than the capacity.
    """
    raise NotImplementedError


@pytree
class KVCache(Cache):
  """A slot for each position, up to the capacity."""

  @property
  def overflowed(self) -> Array:
    return self.lengths > self.slots

  def check_room(self, t: int, valid: Array | None = None) -> None:
    if isinstance(self.lengths, jax.core.Tracer):
      return
    after = self.lengths + _counts(t, valid)
    if isinstance(after, jax.core.Tracer):
      return
    before, after = np.asarray(self.lengths), np.asarray(after)
    full = np.flatnonzero(after > self.slots)
    if full.size:
      row = int(full[0])
      raise ValueError(
        f'cache row {row} holds {before[row]} tokens of capacity={self.slots} '
        f'and cannot take {after[row] - before[row]} more; make it with a '
        f'capacity of {after.max()} or more'
      )

  def extend(
    self, new: Entries, valid: Array | None = None
  ) -> tuple[Cache, View]:
    t = new[0].shape[2]
    self.check_room(t, valid)
    lengths = self.lengths + _counts(t, valid)
    fits = (lengths <= self.slots)[:, None]
    write = fits if valid is None else fits & valid
    slots = jnp.where(write, self.positions(t, valid), self.slots)
    entries = _write(self.entries, new, slots)
    positions = jnp.arange(self.slots)[None, :]
    view = View(entries, positions, positions < lengths[:, None])
    return dataclasses.replace(self, entries=entries, lengths=lengths), view


@pytree
class LatentCache(KVCache):
  """Latents and rotary keys of latent attention: r + p elements a token."""


@pytree
class WindowCache(Cache):
  """A ring of `window` slots: position i lies in slot i mod window.

  It never overflows; a query sees the last `window` positions, its own
  included, whatever the split into calls.
  """

  @property
  def window(self) -> int:
    return self.slots

  def held(self, lengths: Array) -> Array:
    """(b, slots) the position in each slot; negative where there is none."""
    last = lengths[:, None] - 1
    return last - (last - jnp.arange(self.slots)[None, :]) % self.slots

  def extend(
    self, new: Entries, valid: Array | None = None
  ) -> tuple[Cache, View]:
    t = new[0].shape[2]
    positions = self.positions(t, valid)
    lengths = self.lengths + _counts(t, valid)
    write = positions >= lengths[:, None] - self.slots  # only the last ones
    write = write if valid is None else write & valid
    slots = jnp.where(write, positions % self.slots, self.slots)
    entries = _write(self.entries, new, slots)
    after = dataclasses.replace(self, entries=entries, lengths=lengths)
    if t == 1:
      held = self.held(lengths)
      return after, View(entries, held, held >= 0)
    # A chunk's first queries see what its last ones overwrite.
    held = self.held(self.lengths)
    past, new = rows_alike((self.entries, new))
    both = tuple(
      jnp.concatenate([old, x.astype(old.dtype)], axis=2)
      for old, x in zip(past, new, strict=True)
    )
    fresh = jnp.ones(positions.shape, bool) if valid is None else valid
    return after, View(
      both,
      jnp.concatenate([held, positions], axis=1),
      jnp.concatenate([held >= 0, fresh], axis=1),
    )


@pytree
class StaticCache(Cache):
  """The entries of the whole other sequence, for cross-attention.

  Args:
    entries: arrays (b, heads, slots, features).
    lengths: (b,) tokens of each row.
    given_positions: (b, s) or (1, s) of the keys; None: 0 .. s-1.
  """

  given_positions: Any = None  # (b, s) or (1, s)

  def view(self) -> View:
    slots = jnp.arange(self.slots)[None, :]
    given = self.given_positions
    positions = slots if given is None else given
    return View(self.entries, positions, slots < self.lengths[:, None])


def init_cache(
  config: AttentionConfig,
  batch_size: int,
  capacity: int | None = None,
  dtype: DTypeLike = jnp.float32,
  *,
  window: int | None = None,
) -> Cache:
  """An empty cache for a config, without any parameters.

  Args:
    config: the attention.
    batch_size: rows b.
    capacity: tokens that a row can hold; None with a window.
    dtype: of the entries.
    window: the slots of a ring (`WindowCache`) instead; None: no ring.

  Raises:
    ValueError: both or neither of capacity and window are given, or a size is
      not positive.
  """
  check_config(config)
  if isinstance(batch_size, tuple | list):
    *batch, t, _ = (1, 1, *batch_size)
    raise ValueError(
      f"batch_size={batch_size!r} is a shape, as Flax's init_cache takes it; "
      f'write cache = init_cache({math.prod(batch)}, {t}) for so many rows and '
      'tokens, and pass it as cache='
    )
  if (capacity is None) == (window is None):
    raise ValueError(
      f'capacity={capacity} and window={window}: give one of the two, the '
      'tokens that a row can hold or how far back it sees'
    )
  batch_size = checks.plain(batch_size)
  checks.positive('batch_size', batch_size)
  slots = checks.plain(capacity if window is None else window)
  checks.positive('capacity' if window is None else 'window', slots)
  dtype = compute_dtype(dtype)
  if window is not None:
    kind: type[Cache] = WindowCache
  else:
    kind = LatentCache if config.keeps_latent else KVCache
  entries = tuple(
    jnp.zeros((batch_size, heads, slots, features), dtype)
    for heads, features in config.entry_shapes
  )
  return kind(entries, jnp.zeros(batch_size, jnp.int32))


def check_cache(config: AttentionConfig, cache: Any, batch: int) -> None:
  """Raises a ValueError unless a cache fits the config and the batch."""
  if not isinstance(cache, Cache):
    raise ValueError(
      f'cache of type {type(cache).__name__} must be a cache, as init_cache '
      'makes it, or None; flax.serialization restores into one: '
      'from_bytes(init_cache(...), data)'
    )
  shapes = [jnp.shape(x) for x in cache.entries]
  if any(len(shape) != 4 for shape in shapes):
    raise ValueError(
      f'cache has entries of shapes {shapes}, which must be (b, heads, slots, '
      'features); if jax.vmap took b away, put it back: jax.tree.map('
      'lambda x: x[None], cache)'
    )
  got = [(b, heads, features) for b, heads, _, features in shapes]
  wanted = [(batch, *shape) for shape in config.entry_shapes]
  if got != wanted:
    raise ValueError(
      f'cache has entries (b, heads, features) {got}, but config and inputs '
      f'ask for {wanted}; was it made for another config or batch size?'
    )
  if jnp.shape(cache.lengths) != (batch,):
    raise ValueError(
      f'cache has lengths of shape {jnp.shape(cache.lengths)}, but the inputs '
      f'have {batch} rows'
    )


def _ordinals(t: int, valid: Array | None) -> Array:
  """Counts the tokens before each one: (b, t) or (1, t)."""
  if valid is None:
    return jnp.arange(t)[None, :]
  return jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid.astype(jnp.int32)


def _counts(t: int, valid: Array | None) -> Any:
  """Counts the tokens that each row is given."""
  return t if valid is None else jnp.sum(valid, axis=1, dtype=jnp.int32)


def _write(entries: Entries, new: Entries, slots: Array) -> Entries:
  """Puts token j of row b into slots[b, j]; a slot past the end: nowhere."""
  if slots.size == 1:
    # XLA would take a single write for a slice, write it once into what is kept
    # and once into what is attended to, and copy the cache for it: a second
    # token, which goes nowhere, makes it a scatter, 5 times as fast.
    slots = jnp.pad(
      slots, ((0, 0), (0, 1)), constant_values=entries[0].shape[2]
    )
    new = tuple(jnp.concatenate([x, x], axis=2) for x in new)
  entries, new, slots = rows_alike((entries, new, slots))

  def of_row(old: Array, x: Array, slots: Array) -> Array:
    return old.at[:, slots].set(x.astype(old.dtype), mode='drop')

  return tuple(
    jax.vmap(of_row)(old, x, slots) for old, x in zip(entries, new, strict=True)
  )

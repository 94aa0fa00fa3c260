"""Dropout on attention weights, the same in every implementation.

The scores of one head are covered by fixed tiles of TILE x TILE entries, and
each tile draws its bits from a key of its own, so that the bit of a weight
depends on its row and column alone, not on how many are drawn with it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.axes import Axis
from mha_jax.attention.notation import Array, Bool, Int
from mha_jax.attention.pytrees import pytree

TILE = 32


@pytree
class Dropout:
  """Drops each attention weight with probability `rate`, scales the rest.

    weight -> weight / (1 - rate) with probability 1 - rate, else 0

  Args:
    key: a random key.
    rate: in [0, 1).

  Raises:
    ValueError: the rate is outside [0, 1) or not a number.
  """

  key: Any  # (b, h) inside heads.py, () in one head
  rate: float = dataclasses.field(metadata={'static': True})

  def __post_init__(self) -> None:
    rate = checks.plain(self.rate)
    checks.rate('dropout rate', rate)
    object.__setattr__(self, 'rate', float(rate))

  def per_head(self, b: int, h: int) -> 'Dropout':
    """An independent key for each of b batch rows and h heads."""
    key = jnp.asarray(self.key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
      key = jax.random.wrap_key_data(key)
    return Dropout(jax.random.split(key, (b, h)), self.rate)

  def keep(self, queries: Axis, keys: Axis) -> Bool[Array, 't s']:
    """True for the weights of one head that stay."""
    (row, rows), (column, columns) = _tiles(queries), _tiles(keys)

    def tile(i: Array, j: Array) -> Array:
      key = jax.random.fold_in(jax.random.fold_in(self.key, i), j)
      return jax.random.bernoulli(key, 1 - self.rate, (TILE, TILE))

    line = jax.vmap(tile, in_axes=(None, 0))
    grid = jax.vmap(line, in_axes=(0, None))
    tiles = grid(rows, columns)
    shape = (rows.size * TILE, columns.size * TILE)
    bits = jnp.reshape(jnp.swapaxes(tiles, 1, 2), shape)
    sizes = (queries.size, keys.size)
    return jax.lax.dynamic_slice(bits, (row, column), sizes)

  def apply(self, weights: Array, queries: Axis, keys: Axis) -> Array:
    """Drops from the weights (t, s) of one head."""
    kept = self.keep(queries, keys)
    return jnp.where(kept, weights / (1 - self.rate), 0)


def _tiles(axis: Axis) -> tuple[Any, Int[Array, ' _']]:
  """Returns an axis' start in its first tile, and the tiles that cover it."""
  if axis.start is None:
    return 0, jnp.arange(-(-axis.size // TILE))
  count = 1 + -(-(axis.size - 1) // TILE)  # wherever it starts
  return axis.start % TILE, axis.start // TILE + jnp.arange(count)


def check_dropout(dropout: Any) -> None:
  """Raises a ValueError unless it is a Dropout with a key, or None."""
  if dropout is not None and not isinstance(dropout, Dropout):
    raise ValueError(
      f'dropout={dropout!r} must be a Dropout, as Dropout(key, 0.1), or None'
    )
  if dropout is not None and not hasattr(dropout.key, 'dtype'):
    raise ValueError(
      f'dropout.key={dropout.key!r} must be a random key, as jax.random.key(0)'
    )

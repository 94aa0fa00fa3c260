"""The pairs of blocks that meet, and the sizes of blocks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention.axes import Blocks
from mha_jax.attention.devices import default_device
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import Array, Bool
from mha_jax.attention.pytrees import pytree
from mha_jax.attention.sharded_rows import is_whole


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Queries and keys of a block, in tokens."""

  queries: int
  keys: int


@pytree
class BlockPairs:
  """The pairs of blocks of queries and of keys that meet, as a list.

  Args:
    queries: index of the block of queries of each pair.
    keys: index of the block of keys.
    count: how many of the pairs count; the rest is padding.
  """

  queries: Any  # (pairs,)
  keys: Any  # (pairs,)
  count: Any  # ()


def block_sizes(
  t: int, s: int, group: int = 1, kv_heads: int = 1
) -> BlockSizes:
  """Chooses fast sizes, see docs/decisions.md, "Blocks and thresholds".

  Args:
    t: queries.
    s: keys.
    group: query heads that are computed together, over the same keys.
    kv_heads: key/value heads of all rows. The blocks of a single query have
      the more keys the fewer there are, and all blocks as many.
  """
  if not isinstance(kv_heads, int):
    kv_heads = 64  # of a symbolic number of rows: 256 keys
  queries = max(1, min(t, 512 // min(group, 4)))
  if t != 1:
    return BlockSizes(queries, max(1, min(s, 256)))
  count = -(-s // max(256, 16384 // kv_heads))
  return BlockSizes(queries, max(1, -(-s // max(1, count))))


def fits_better_alone(t: int, v: Array) -> bool:
  """Tells whether heads are computed one by one, not side by side.

  On a CPU the blocks of one head fit its cache; elsewhere, and for few queries,
  more at a time is faster. A loop over rows that lie on several devices would
  bring them together, but within `jax.shard_map` each device has its own.
  """
  if t < 128 or default_device().platform != 'cpu':
    return False
  return is_whole(v)


def touches(
  mask: Mask | None, queries: Blocks, keys: Blocks
) -> Bool[Array, 'query_blocks key_blocks']:
  """True where a block of queries may attend to a block of keys."""
  allowed = jnp.ones((1, 1), bool)
  if mask is not None:
    allowed = mask.touches(queries, keys)
  return jnp.broadcast_to(allowed, (queries.count, keys.count))


def as_pairs(touching: Bool[Array, 'query_blocks key_blocks']) -> BlockPairs:
  """Lists the True entries, by block of queries."""
  # Of a constant, on several devices, jaxlib 0.10 aborts while it compiles.
  touching = jax.lax.optimization_barrier(touching)
  i, j = jnp.nonzero(touching, size=touching.size, fill_value=0)
  return BlockPairs(i, j, jnp.sum(touching))

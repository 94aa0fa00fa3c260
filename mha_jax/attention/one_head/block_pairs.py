"""Which blocks of queries meet which blocks of keys, and how large they are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import masks
from mha_jax.attention.axes import Blocks
from mha_jax.attention.each import each
from mha_jax.attention.notation import Array, Bool
from mha_jax.attention.pytrees import pytree
from mha_jax.attention.sharded_rows import is_one_devices

OF_MASKS = ('mask', 'query_positions', 'key_positions')
"""What a mask is evaluated from."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
  """Queries and keys of a block, in tokens."""

  queries: int
  keys: int


@pytree
class BlockPairs:
  """Which blocks of queries meet which blocks of keys, as a list.

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
  """Fast sizes, see docs/decisions.md, "Blocks and thresholds".

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
  """Whether heads with t queries are computed one by one, not side by side.

  On a CPU the blocks of one head fit its cache; elsewhere, and for few queries,
  more at a time is faster. A loop over rows that lie on several devices would
  bring them together, but within `jax.shard_map` each device has its own.
  """
  if t < 128 or jax.default_backend() != 'cpu':
    return False
  return is_one_devices(v) or jax.device_count() == 1


def touches(
  mask: masks.Mask | None, queries: Blocks, keys: Blocks
) -> Bool[Array, 'query_blocks key_blocks']:
  """Which blocks of queries may attend to which blocks of keys."""
  allowed = jnp.ones((1, 1), bool)
  if mask is not None:
    allowed = mask.touches(queries, keys)
  return jnp.broadcast_to(allowed, (queries.count, keys.count))


def as_pairs(touching: Bool[Array, 'query_blocks key_blocks']) -> BlockPairs:
  """The True entries as a list, by block of queries."""
  # Of a constant, on several devices, jaxlib 0.10 aborts while it compiles.
  touching = jax.lax.optimization_barrier(touching)
  i, j = jnp.nonzero(touching, size=touching.size, fill_value=0)
  return BlockPairs(i, j, jnp.sum(touching))


def of_heads(
  extras: dict[str, Any], queries: Blocks, keys: Blocks, by_head: bool
) -> BlockPairs:
  """The pairs of blocks to compute; leaves lead with (b, n, 1) or (1, 1, 1).

  Args:
    extras: what masks go by.
    queries: the blocks of queries, keys: those of keys.
    by_head: whether each batch row and key/value head has a list of its own. A
      loop under `jax.vmap` has to have one for all.
  """

  def of_one(extras: dict[str, Any]) -> Array:
    return touches(
      extras['mask'],
      dataclasses.replace(queries, positions=extras['query_positions']),
      dataclasses.replace(keys, positions=extras['key_positions']),
    )

  def per_head(extras: dict[str, Any]) -> Array:
    return jnp.any(each(of_one, extras), axis=0, keepdims=True)

  def per_row(extras: dict[str, Any]) -> Array:
    return each(per_head, extras)

  touching = each(per_row, {name: extras[name] for name in OF_MASKS})
  if not by_head:
    touching = jnp.any(touching, axis=(0, 1), keepdims=True)
  return jax.vmap(jax.vmap(jax.vmap(as_pairs)))(touching)

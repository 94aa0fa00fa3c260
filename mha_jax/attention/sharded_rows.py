"""Batch rows over the devices of an explicit mesh.

In an explicit mesh an array's type says how it is sharded. Rows of a batch do
not depend on each other, so each device computes its own, within
`jax.shard_map`, by the code that one device runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mha_jax.attention.notation import Array


def rows_over_devices(function: Callable[[Any], Any], call: Any) -> Any:
  """Applies a function of batch rows, on each device to the rows it has.

  Args:
    function: takes `call` and returns arrays (b, ...).
    call: a pytree with arrays (b, ...), of which some may be sharded over the
      rows, arrays (1, ...) that all rows share, and scalars.

  Returns:
    What the function returns, sharded as the rows of the first sharded array.
  """
  split = _sharded(call)
  if split is None:
    with _explicit_mesh(call):
      return function(call)
  axes, b = _row_axes(split), split.shape[0]
  mapped = jax.shard_map(
    function,
    mesh=jax.typeof(split).sharding.mesh,
    in_specs=(
      jax.tree.map(
        lambda x: PartitionSpec(axes) if _has_rows(x, b) else PartitionSpec(),
        call,
      ),
    ),
    out_specs=PartitionSpec(axes),
    axis_names=set(axes),
  )
  return mapped(rows_alike(call))


def rows_alike(tree: Any) -> Any:
  """Shards arrays (b, ...) over their rows as the first that is so sharded.

  Outside of explicit meshes, and where none is sharded over its rows, they come
  back as they are.
  """
  return tree if _sharded(tree) is None else _reshard_rows(tree)


@jax.jit  # an array that is on no mesh yet can only enter one with others
def _reshard_rows(tree: Any) -> Any:
  split = _sharded(tree)
  axes, b = _row_axes(split), split.shape[0]
  mesh = jax.typeof(split).sharding.mesh

  def alike(x: Array) -> Array:
    now = [*jax.typeof(x).sharding.spec]
    spec = [_without(axes, dimension) for dimension in now]
    if _has_rows(x, b):
      spec[0] = axes
    if spec == now or (spec[1:] == now[1:] and _row_axes(x) == axes):
      return x
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

  return jax.tree.map(alike, tree)


def in_shard_map(x: Array) -> bool:
  """Tells whether an array is one device's part, within `jax.shard_map`."""
  return AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types


def is_whole(x: Array) -> bool:
  """Tells whether one device has all of an array, where it is traced."""
  if jax.device_count() == 1:
    return True
  mesh = jax.typeof(x).sharding.mesh
  kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
  return in_shard_map(x) and all(
    kind is AxisType.Manual or size == 1 for kind, size in kinds
  )


def batch_sharding(x: Any, n: int) -> NamedSharding | None:
  """The sharding of the first n dimensions, where a later one is sharded.

  None where merging them into one, and splitting that, needs no help.
  """
  sharding = jax.typeof(x).sharding
  if all(dimension is None for dimension in sharding.spec[1:n]):
    return None
  return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:n]))


def merged_sharding(x: Any, n: int) -> NamedSharding | None:
  """The sharding of x when its first n dimensions have become one."""
  if batch_sharding(x, n) is None:
    return None
  sharding = jax.typeof(x).sharding
  axes = [a for dimension in sharding.spec[:n] for a in _names(dimension)]
  spec = PartitionSpec(tuple(axes), *sharding.spec[n:])
  return NamedSharding(sharding.mesh, spec)


@contextlib.contextmanager
def _explicit_mesh(tree: Any) -> Iterator[None]:
  """Within the block, new arrays are on the explicit mesh of the tree's."""
  meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
  mesh = next((x for x in meshes if AxisType.Explicit in x.axis_types), None)
  if mesh is None or not jax.sharding.get_abstract_mesh().empty:
    yield
    return
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def _without(axes: tuple[str, ...], dimension: Any) -> Any:
  """A dimension's part of a PartitionSpec, without some mesh axes."""
  if isinstance(dimension, tuple):
    return tuple(x for x in dimension if x not in axes) or None
  return None if dimension in axes else dimension


def _sharded(tree: Any) -> Any:
  """The first array that is sharded over its rows."""
  return next((x for x in jax.tree.leaves(tree) if _row_axes(x)), None)


def _row_axes(x: Any) -> tuple[str, ...]:
  """The mesh axes that the rows are sharded on; (): none."""
  spec = jax.typeof(x).sharding.spec
  return _names(spec[0]) if len(spec) else ()


def _names(dimension: Any) -> tuple[str, ...]:
  """The mesh axes in a dimension's part of a PartitionSpec."""
  if dimension is None:
    return ()
  return dimension if isinstance(dimension, tuple) else (dimension,)


def _has_rows(x: Any, b: int) -> bool:
  return x.ndim > 0 and x.shape[0] == b

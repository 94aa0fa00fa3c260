"""Frozen dataclasses of arrays: what caches, masks and their like share."""

import contextlib
import dataclasses
import json
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import export

T = TypeVar('T')


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[T]) -> type[T]:
  """Makes a class a frozen dataclass and a pytree, once for all its uses.

  Fields are children, but those with `metadata={'static': True}`, which must be
  numbers, strings or None. Two are equal where class, static fields and all
  leaves are: arrays by dtype, shape and values (a NaN equals itself alone),
  traced ones, whose values nobody knows, by identity. Equal ones have one hash.
  `jax.export` serialises functions that take or return them.
  """
  cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
  cls.__eq__, cls.__hash__ = _equal, _hash  # type: ignore[assignment]
  jax.tree_util.register_dataclass(cls)
  with contextlib.suppress(ValueError):  # of a module that is loaded again
    export.register_pytree_node_serialization(
      cls,
      serialized_name=f'{cls.__module__}.{cls.__qualname__}',
      serialize_auxdata=lambda static: json.dumps(static).encode(),
      deserialize_auxdata=json.loads,
    )
  return cls


def _equal(one: Any, other: Any) -> Any:
  if type(one) is not type(other):
    return NotImplemented
  trees: list[Any] = [jax.tree.structure(x) for x in (one, other)]
  if trees[0] != trees[1]:
    return False
  return all(map(_same, jax.tree.leaves(one), jax.tree.leaves(other)))


def _hash(tree: Any) -> int:
  leaves, structure = jax.tree.flatten(tree)
  kinds = ((np.shape(x), getattr(x, 'dtype', None)) for x in leaves)
  return hash((structure, *kinds))


def _same(a: Any, b: Any) -> bool:
  """Tells whether two leaves are known to be one value of one kind."""
  if a is b:
    return True
  if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
    return False
  kinds = [(np.shape(x), getattr(x, 'dtype', None)) for x in (a, b)]
  if kinds[0] != kinds[1]:
    return False
  if jax.dtypes.issubdtype(kinds[0][1], jax.dtypes.prng_key):
    a, b = jax.random.key_data(a), jax.random.key_data(b)
  return np.array_equal(a, b)

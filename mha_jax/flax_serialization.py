"""Caches and masks as state dicts: `flax.serialization` knows them.

  data = flax.serialization.to_bytes(cache)
  cache = flax.serialization.from_bytes(layer.init_cache(2, 32), data)

A state dict is `{name: {field: state}}`; the name is the class and what is
static in it. As in Flax, a target tells structure, shapes and dtypes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization

from mha_jax.attention import caches
from mha_jax.attention.masks import algebra, kinds

KINDS = (
  caches.KVCache,
  caches.LatentCache,
  caches.WindowCache,
  caches.StaticCache,
  kinds.Causal,
  kinds.Window,
  kinds.Lengths,
  kinds.Segments,
  algebra.Dense,
  algebra.And,
  algebra.Or,
)


def _fields(tree: Any, static: bool) -> dict[str, Any]:
  return {
    field.name: getattr(tree, field.name)
    for field in dataclasses.fields(tree)
    if field.metadata.get('static', False) == static
  }


def _name(tree: Any) -> str:
  """The class with its static fields: KVCache, Window(left=3, right=None)."""
  static = [f'{name}={x!r}' for name, x in _fields(tree, static=True).items()]
  name = type(tree).__name__
  return f'{name}({", ".join(static)})' if static else name


def _to_state(tree: Any) -> dict[str, Any]:
  fields = _fields(tree, static=False)
  return {
    _name(tree): {
      name: serialization.to_state_dict(x) for name, x in fields.items()
    }
  }


def _from_state(target: Any, state: Any) -> Any:
  """The saved arrays in the target's place; a ValueError if they do not fit."""
  name, fields = _name(target), _fields(target, static=False)
  saved = state.get(name) if isinstance(state, Mapping) else None
  if not isinstance(saved, Mapping) or set(saved) != set(fields):
    found = list(state) if isinstance(state, Mapping) else type(state).__name__
    raise ValueError(
      f'{found} was saved, but the target is {name} of {list(fields)}; restore '
      'into one that is made as the saved one was'
    )
  restored = {
    field: jax.tree.map(
      jnp.asarray, serialization.from_state_dict(x, saved[field], name=field)
    )
    for field, x in fields.items()
  }
  got, wanted = _kinds(restored), _kinds(fields)
  for path in got | wanted:
    if got.get(path) != wanted.get(path):
      raise ValueError(
        f'{path} of {name} was saved as {got.get(path)}, but the target has '
        f'{wanted.get(path)}; make it with the sizes and dtype of the saved one'
      )
  return dataclasses.replace(target, **restored)


def _kinds(fields: dict[str, Any]) -> dict[str, str]:
  """The dtype and shape of each leaf, by its path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): (
      f'{x.dtype}{list(x.shape)}'
    )
    for path, x in jax.tree.leaves_with_path(fields)
  }


for kind in KINDS:
  serialization.register_serialization_state(kind, _to_state, _from_state)

"""One function of a part, mapped over the leading axis of many arrays."""

from collections.abc import Callable
from typing import Any

import jax

from mha_jax.attention.notation import Array


def each(
  function: Callable[..., Any], *args: Any, one_by_one: bool = False
) -> Any:
  """Maps over the leading axis of every leaf; one of size 1 is shared.

  Args:
    function: takes args without their leading axis.
    args: what to map over.
    one_by_one: a loop in place of `jax.vmap`, so that what is computed at a
      time fits a processor's cache.
  """
  leaves, tree = jax.tree.flatten(args)
  in_axes = [None if x.shape[0] == 1 else 0 for x in leaves]
  leaves = [x[0] if x.shape[0] == 1 else x for x in leaves]

  def of_leaves(*leaves: Array) -> Any:
    return function(*jax.tree.unflatten(tree, leaves))

  if 0 not in in_axes:
    return jax.tree.map(lambda x: x[None], of_leaves(*leaves))
  mapping = _loop if one_by_one else jax.vmap
  return mapping(of_leaves, in_axes=in_axes)(*leaves)


def _loop(
  function: Callable[..., Any], in_axes: list[int | None]
) -> Callable[..., Any]:
  """`jax.vmap` of arrays, one after the other."""

  def mapped(*arrays: Array) -> Any:
    pairs = list(zip(arrays, in_axes, strict=True))

    def step(parts: list[Array]) -> Any:
      rest = iter(parts)
      return function(*(x if axis is None else next(rest) for x, axis in pairs))

    return jax.lax.map(step, [x for x, axis in pairs if axis == 0])

  return mapped

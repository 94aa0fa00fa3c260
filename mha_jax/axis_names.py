"""Axis names of parameters: more than dimensions are refused, fewer told."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from mha_jax.attention.projections import Table


def check(name: str, names: Any, shape: tuple[int, ...]) -> None:
  """Raises a ValueError for more axis names than dimensions."""
  names = _names_of(names)
  if len(names) > len(shape):
    raise ValueError(
      f'{name}: {len(names)} axis names {names} for a parameter of shape '
      f'{shape}; give one per dimension, or none and take them from '
      'config.table[...].logical_axes'
    )


def warn_of_short(table: Table, names: Mapping[str, Any]) -> None:
  """Warns, once, of parameters with fewer axis names than dimensions.

  As in Flax, what is left out is None. Its kernels are 3-D as ours, and the one
  initialiser of all of them names other dimensions in `out` than in `query`.

  Args:
    table: the rows of the module.
    names: by row, the axis names by parameter; None: none.
  """
  short = []
  for row, parameters in names.items():
    for parameter, given in parameters.items():
      found = _names_of(given)
      axes = table[row].logical_axes[parameter]
      if 0 < len(found) < len(axes):
        full = found + (None,) * (len(axes) - len(found))
        short.append(f'{row}.{parameter} ({", ".join(axes)}) gets {full}')
  if short:
    warn_once(
      'fewer axis names than dimensions, the others get None, as in Flax: '
      f'{"; ".join(short)}. Write these in full, or name all dimensions: '
      'kernel_init= those of query, out_kernel_init= and out_bias_init= those '
      'of out'
    )


@functools.cache
def warn_once(message: str) -> None:
  """Warns where the message is new to this process."""
  warnings.warn(message, stacklevel=3)


def _names_of(sharding: Any) -> tuple[Any, ...]:
  """The names in what Flax takes for a sharding; () where there are none."""
  sharding = getattr(sharding, 'sharding', sharding)  # of a Format
  names = getattr(sharding, 'spec', sharding)  # of a NamedSharding
  known = isinstance(names, tuple | list | jax.sharding.PartitionSpec)
  return tuple(names) if known else ()

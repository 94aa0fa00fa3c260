"""The table that a variant is: the name of each row, and the row."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention.notation import Array, DTypeLike
from mha_jax.attention.projections.rows import Initializer, Params, Row

Table = Mapping[str, Row]
"""A variant: the name of each parameter group and the row it is."""

ParamsByRow = Mapping[str, Params]
"""The parameters of a table: `{row: {parameter: array}}`."""


def init_table(
  table: Any,
  key: Array,
  initializers: Mapping[str, Initializer] = MappingProxyType({}),
  dtype: DTypeLike = jnp.float32,
) -> dict[str, dict[str, Array]]:
  """Draws the parameters of every row: `{name: {parameter: array}}`."""
  if not isinstance(table, Mapping):
    raise ValueError(
      f'table={table!r} must be a table of rows; pass config.table'
    )
  keys = jax.random.split(key, len(table))
  return {
    name: row.init(key, initializers, dtype)
    for key, (name, row) in zip(keys, table.items(), strict=True)
  }


def check_params(table: Table, params: Any) -> None:
  """Raises a ValueError unless the parameters are those of the table."""
  if not isinstance(params, Mapping):
    raise ValueError(
      f'params of type {type(params).__name__} must be a dict by row: '
      f'{sorted(table)}'
    )
  for name, row in table.items():
    row.check(name, params.get(name))
  if extra := sorted(set(params) - set(table)):
    raise ValueError(
      f'params has {extra}, which the config does not ask for; it asks for '
      f'{sorted(table)}'
    )


def as_params(table: Table, params: Any) -> dict[str, dict[str, Array]]:
  """Makes arrays of the parameters of a table, which are checked."""
  check_params(table, params)
  return {
    row: {name: jnp.asarray(params[row][name]) for name in table[row].shapes}
    for row in table
  }


def num_params(table: Table) -> int:
  """The number of parameters of a variant."""
  return sum(row.num_params for row in table.values())

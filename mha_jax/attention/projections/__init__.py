"""The rows of a variant's table, which own no parameters but apply them."""

from mha_jax.attention.projections.norms import Norm
from mha_jax.attention.projections.rows import (
  INITIALIZERS,
  Initializer,
  Params,
  Projection,
  Row,
)
from mha_jax.attention.projections.table import (
  ParamsByRow,
  Table,
  as_params,
  check_params,
  init_table,
  num_params,
)

__all__ = [
  'INITIALIZERS',
  'Initializer',
  'Norm',
  'Params',
  'ParamsByRow',
  'Projection',
  'Row',
  'Table',
  'as_params',
  'check_params',
  'init_table',
  'num_params',
]

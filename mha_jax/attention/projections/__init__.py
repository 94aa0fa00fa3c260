"""What multiplies parameters: the rows of a variant's table."""

from mha_jax.attention.projections.norms import Norm
from mha_jax.attention.projections.rows import (
  INITIALIZERS,
  Initializer,
  Params,
  Projection,
  Row,
)
from mha_jax.attention.projections.table import (
  Table,
  check_params,
  init_table,
  num_params,
)

__all__ = [
  'INITIALIZERS',
  'Initializer',
  'Norm',
  'Params',
  'Projection',
  'Row',
  'Table',
  'check_params',
  'init_table',
  'num_params',
]

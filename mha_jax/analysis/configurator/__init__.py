"""Which heads a new decoder should have: a recommendation for a budget."""

from mha_jax.analysis.configurator.choice import (
  LOSSES,
  POINT,
  STRAY,
  Choice,
  axes,
  best_of,
  body,
  choose,
  pareto,
)
from mha_jax.analysis.configurator.demand import (
  HEAD_DIMS,
  OBJECTIVES,
  USABLE,
  Demand,
)
from mha_jax.analysis.configurator.quality import (
  LOW_RANK_LOSS,
  QUALITY_SOURCE,
  quality,
)

__all__ = [
  'HEAD_DIMS',
  'LOSSES',
  'LOW_RANK_LOSS',
  'OBJECTIVES',
  'POINT',
  'QUALITY_SOURCE',
  'STRAY',
  'USABLE',
  'Choice',
  'Demand',
  'axes',
  'best_of',
  'body',
  'choose',
  'pareto',
  'quality',
]

"""Attention as pure functions: from one head to whole modules.

`attend` is one head, `multihead_attention` maps it over heads, `grouped` adds
the projections of MHA, GQA and MQA.
"""

from mha_jax.attention import grouped, masks
from mha_jax.attention.dropout import Dropout
from mha_jax.attention.exact import attend
from mha_jax.attention.grouped import GroupedConfig
from mha_jax.attention.heads import multihead_attention
from mha_jax.attention.masks import Mask
from mha_jax.attention.norms import Norm
from mha_jax.attention.projections import (
  Projection,
  init_table,
  num_params,
)
from mha_jax.attention.rope import Rope, layout_permutation

__all__ = [
  'Dropout',
  'GroupedConfig',
  'Mask',
  'Norm',
  'Projection',
  'Rope',
  'attend',
  'grouped',
  'init_table',
  'layout_permutation',
  'masks',
  'multihead_attention',
  'num_params',
]

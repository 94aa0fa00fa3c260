"""Attention as pure functions: from one head to whole layers.

`attend` is one head, `multihead_attention` maps it over heads, `apply` adds the
projections of a variant, told by its config.
"""

from mha_jax.attention import masks
from mha_jax.attention.caches import (
  KVCache,
  LatentCache,
  StaticCache,
  WindowCache,
  init_cache,
)
from mha_jax.attention.heads import implementation_of, multihead_attention
from mha_jax.attention.layer import apply, keys_values
from mha_jax.attention.masks.kinds import Mask
from mha_jax.attention.one_head.dropout import Dropout
from mha_jax.attention.one_head.exact import attend
from mha_jax.attention.positions.rope import Rope, layout_permutation
from mha_jax.attention.positions.scaling import (
  LinearScaling,
  Llama3Scaling,
  YarnScaling,
)
from mha_jax.attention.projections import (
  Norm,
  Projection,
  Row,
  init_table,
  num_params,
)
from mha_jax.attention.variants.config import AttentionConfig
from mha_jax.attention.variants.grouped import GroupedConfig
from mha_jax.attention.variants.latent import LatentConfig
from mha_jax.attention.variants.tied import TiedConfig

__all__ = [
  'AttentionConfig',
  'Dropout',
  'GroupedConfig',
  'KVCache',
  'LatentCache',
  'LatentConfig',
  'LinearScaling',
  'Llama3Scaling',
  'Mask',
  'Norm',
  'Projection',
  'Rope',
  'Row',
  'StaticCache',
  'TiedConfig',
  'WindowCache',
  'YarnScaling',
  'apply',
  'attend',
  'implementation_of',
  'init_cache',
  'init_table',
  'keys_values',
  'layout_permutation',
  'masks',
  'multihead_attention',
  'num_params',
]

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
from mha_jax.attention.config import AttentionConfig
from mha_jax.attention.dropout import Dropout
from mha_jax.attention.exact import attend
from mha_jax.attention.grouped import GroupedConfig
from mha_jax.attention.heads import implementation_of, multihead_attention
from mha_jax.attention.latent import LatentConfig
from mha_jax.attention.layer import apply, keys_values
from mha_jax.attention.masks import Mask
from mha_jax.attention.norms import Norm
from mha_jax.attention.projections import (
  Projection,
  Row,
  init_table,
  num_params,
)
from mha_jax.attention.rope import Rope, layout_permutation
from mha_jax.attention.rope_scaling import (
  LinearScaling,
  Llama3Scaling,
  YarnScaling,
)
from mha_jax.attention.tied import TiedConfig

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

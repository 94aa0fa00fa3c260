"""Shapes for exercise 2: parameters and KV cache of MHA, GQA, MQA and MLA.

  python -m experiments.kv_cache                                  (10 s)
  python -m experiments.kv_cache --config=configs/kv_cache.py:llama3_70b  (4 s)

The default is the lesson's tiny layer: d_model = 64, 8 heads, 2048 tokens. At
its sizes MQA has 43.75 % fewer attention parameters than MHA and a cache of an
eighth, 64 KiB for 512 KiB. Variants: tiny, and published shapes (gpt2,
llama3_8b, llama3_70b, mistral_7b, deepseek_v2_lite, deepseek_v2, deepseek_v3),
whose rows come from formulas alone: nothing is allocated.

Fields:
  d_model: width of the residual stream.
  num_heads: query heads.
  head_dim: features of a head; None: d_model / num_heads.
  num_layers: layers that numbers are sums over.
  kv_heads: key/value heads of the GQA rows, with commas between; empty: none.
  ranks: latent ranks of the MLA rows, likewise.
  qk_rope_head_dim: rotary features of MLA.
  v_head_dim: features of MLA's value heads; None: head_dim.
  q_lora_rank: rank of MLA's query latent; None: none.
  window: slots of a ring cache; None: all tokens are kept.
  length: tokens in the cache.
  batch_size: sequences.
  dtype: of cache and parameters, bfloat16, float16 or float32.
  decode_steps: steps that are timed; 0: nothing is allocated or run.
  repeats: times that they are timed.
"""

from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import base
from mha_jax.analysis.costs.published import published
from mha_jax.attention import LatentConfig

PUBLISHED = (
  'gpt2',
  'llama3_8b',
  'llama3_70b',
  'mistral_7b',
  'deepseek_v2_lite',
  'deepseek_v2',
  'deepseek_v3',
)
VARIANTS = {
  'tiny': 'seconds long, to see that all works',
  **dict.fromkeys(PUBLISHED, 'the published shape, by formulas alone'),
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of exercise 2.

  Args:
    variants: 'tiny' or a published shape; empty: the lesson's layer.
  """
  base.one_variant(variants, VARIANTS)
  config = ConfigDict(
    {
      'name': f'kv_cache-{variants}' if variants else 'kv_cache',
      'd_model': 64,
      'num_heads': 8,
      'head_dim': config_dict.placeholder(int),
      'num_layers': 1,
      'kv_heads': '4,2',
      'ranks': '4,8,16,32',
      'qk_rope_head_dim': 4,
      'v_head_dim': config_dict.placeholder(int),
      'q_lora_rank': config_dict.placeholder(int),
      'window': config_dict.placeholder(int),
      'length': 2048,
      'batch_size': 1,
      'dtype': 'bfloat16',
      'decode_steps': 64,
      'repeats': 5,
    }
  )
  if variants == 'tiny':
    config.update({'length': 16, 'decode_steps': 4, 'repeats': 1})
    config.update({'kv_heads': '2', 'ranks': '8'})
  if variants in PUBLISHED:
    config.update(_shape(variants))
  return config


def _shape(name: str) -> dict[str, Any]:
  """A published shape; nothing is allocated, and no step is run."""
  layers = published(name).shape.layers
  attention = layers[0].attention
  shape: dict[str, Any] = {
    'd_model': attention.d_model,
    'num_heads': attention.num_heads,
    'num_layers': len(layers),
    'decode_steps': 0,
    'qk_rope_head_dim': 64,
  }
  if isinstance(attention, LatentConfig):
    return shape | {
      'head_dim': attention.qk_nope_head_dim,
      'v_head_dim': attention.v_head_dim,
      'q_lora_rank': attention.q_lora_rank,
      'ranks': str(attention.kv_lora_rank),
      'kv_heads': '8',
    }
  n = attention.entry_shapes[0][0]
  kv_heads = '4' if n == attention.num_heads else str(n)
  return shape | {'ranks': '', 'kv_heads': kv_heads, 'window': layers[0].window}

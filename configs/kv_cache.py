"""Shapes for exercise 2: parameters and KV cache of MHA, GQA, MQA and MLA.

  python -m experiments.kv_cache                                  (10 s)
  python -m experiments.kv_cache --config=configs/kv_cache.py:llama3_70b  (4 s)

The default is the lesson's tiny layer: d_model = 64, 8 heads, 2048 tokens. At
its sizes MQA has 43.75 % fewer attention parameters than MHA and a cache of an
eighth, 64 KiB for 512 KiB. Variants: tiny, and published shapes (gpt2,
llama3_8b, llama3_70b, mistral_7b, deepseek_v2_lite, deepseek_v2, deepseek_v3),
whose rows come from formulas alone: nothing is allocated.
"""

from ml_collections import ConfigDict, config_dict

PUBLISHED = {
  # From the models' released configs.
  'gpt2': {'d_model': 768, 'num_heads': 12, 'num_layers': 12},
  'llama3_8b': {
    'd_model': 4096,
    'num_heads': 32,
    'num_layers': 32,
    'kv_heads': '8',
  },
  'llama3_70b': {
    'd_model': 8192,
    'num_heads': 64,
    'num_layers': 80,
    'kv_heads': '8',
  },
  'mistral_7b': {
    'd_model': 4096,
    'num_heads': 32,
    'num_layers': 32,
    'kv_heads': '8',
    'window': 4096,
  },
  'deepseek_v2_lite': {'d_model': 2048, 'num_heads': 16, 'num_layers': 27},
  'deepseek_v2': {
    'd_model': 5120,
    'num_heads': 128,
    'num_layers': 60,
    'q_lora_rank': 1536,
  },
  'deepseek_v3': {
    'd_model': 7168,
    'num_heads': 128,
    'num_layers': 61,
    'q_lora_rank': 1536,
  },
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of exercise 2.

  Args:
    variants: 'tiny' or a published shape; empty: the lesson's layer.
  """
  known = ('', 'tiny', *PUBLISHED)
  if variants not in known:
    raise ValueError(f'variant {variants!r} must be one of {known}')
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
    shape = PUBLISHED[variants]
    config.update({'decode_steps': 0, 'ranks': '512', 'qk_rope_head_dim': 64})
    if variants.startswith('deepseek'):
      config.update({'head_dim': 128, 'v_head_dim': 128, 'kv_heads': '8'})
    else:
      config.update({'ranks': '', 'kv_heads': '4'})
    config.update(shape)
  return config

"""The demand that `experiments.configure_heads` answers; its flags override it.

  python -m experiments.configure_heads                               (2 s)
  python -m experiments.configure_heads --config=configs/configure_heads.py:tiny

The default asks for 1.3 B parameters that decode 16 sequences of 32,768 tokens
on an H100; it gets 32 heads of 64, 8 of them with keys and values. `tiny` asks
for 10 M parameters.
"""

from ml_collections import ConfigDict, config_dict

from configs import base

VARIANTS = {'tiny': '10 M parameters'}


def get_config(variants: str = '') -> ConfigDict:
  """The demand.

  Args:
    variants: 'tiny' or empty.
  """
  chosen = base.variants(variants, VARIANTS)
  config = ConfigDict(
    {
      'name': '-'.join(['configure_heads', *chosen]),
      'params': '1.3B',
      'seq_len': '32k',
      'hardware': 'h100',
      'devices': 1,
      'batch': 16,
      'latency_ms': config_dict.placeholder(float),
      'param_dtype': config_dict.placeholder(str),
      'kv_dtype': config_dict.placeholder(str),
      'split': 'heads',
      'objective': 'quality',
      'vocab_size': 128_256,
      'head_dim': config_dict.placeholder(int),
      'model': config_dict.placeholder(str),
    }
  )
  if 'tiny' in chosen:
    config.update({'params': '10M', 'seq_len': '1k', 'vocab_size': 256})
  return config

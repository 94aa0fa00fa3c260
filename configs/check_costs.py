"""Sizes of the decoders whose decoding step is predicted and measured.

  python -m experiments.check_costs    (15 s)

The argument after a colon: tiny.

Fields:
  d_model: width of the residual stream.
  num_heads: query heads.
  num_layers: layers.
  length: tokens in the cache.
  batch_size: sequences decoded at once.
  rounds: times that each model is run, in turn.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = {'tiny': 'seconds long, to see that all works'}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the variants named."""
  chosen = base.variants(variants, VARIANTS)
  config = ConfigDict(
    {
      'name': '-'.join(['check_costs', *chosen]),
      'd_model': 1024,
      'num_heads': 16,
      'num_layers': 4,
      'length': 4096,
      'batch_size': 1,
      'rounds': 15,
    }
  )
  if 'tiny' in chosen:
    config.update({'d_model': 16, 'num_heads': 4, 'num_layers': 1})
    config.update({'length': 32, 'rounds': 1})
  return config

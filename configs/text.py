"""Bytes of text: two layers of attention with MLPs.

  python -m experiments.train --config=configs/text.py               (3 min)
  python -m experiments.train --config=configs/text.py --config.task.path=FILE

The default text is 38 of Shakespeare's plays (extra `text`), four of which are
set apart for validation; a path names a UTF-8 file or a folder of them. A loss
is in nats: divide by ln 2 for bits per byte. The argument after a colon: tiny.
"""

from ml_collections import ConfigDict, config_dict

from configs import base

VARIANTS = {'tiny': 'seconds long, to see that all works'}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the variants named, joined by commas."""
  chosen = base.variants(variants, VARIANTS)
  config = base.get_config()
  config.name = '-'.join(['text', *chosen])
  config.task = ConfigDict(
    {
      'kind': 'text',
      'length': 128,
      'path': config_dict.placeholder(str),
      'validation_fraction': 0.1,
    }
  )
  config.model.update({'num_layers': 2, 'mlp_dim': 256})
  config.train.update(
    {
      'steps': 1000,
      'batch_size': 16,
      'steps_per_dispatch': 50,
      'eval_batches': 16,
    }
  )
  if 'tiny' in chosen:
    base.make_tiny(config)
    config.task.length = 8
  return config

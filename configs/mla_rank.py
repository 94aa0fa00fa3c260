"""Exercise 3: a small LM for MLA's ranks, on text or on the copy task.

  python -m experiments.mla_rank
  python -m experiments.mla_rank --config=configs/mla_rank.py:copy
  python -m experiments.mla_rank --config=configs/mla_rank.py:full

Time for each of --learning_rates: 3, 2 and 30 minutes.
Two layers, d_model = 64, 8 heads of 8, MLPs of 256. The text is bytes of plays
(extra `text`; --config.task.path=FILE for another). The argument after a colon
picks variants, joined by commas.
"""

from ml_collections import ConfigDict

from configs import base, copy_task, text

VARIANTS = {
  'tiny': 'copying 4 symbols, seconds long',
  'copy': 'copying 32 symbols of 32 instead of text',
  'full': '600 steps for 200',
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the variants named, joined by commas."""
  chosen = base.variants(variants, VARIANTS)
  if 'full' in chosen and 'tiny' in chosen:
    raise ValueError(f'config variants {chosen}: full or tiny, not both')
  on_text = 'copy' not in chosen and 'tiny' not in chosen
  config = text.get_config() if on_text else copy_task.get_config()
  kind = 'text' if on_text else 'copy'
  config.name = '-'.join([kind, *(x for x in chosen if x != 'copy')])
  config.model.update({'num_layers': 2, 'num_heads': 8, 'mlp_dim': 256})
  if on_text:
    config.task.length = 64
    config.train.update({'steps': 200, 'batch_size': 16})
  else:
    config.train.update({'steps': 300, 'batch_size': 32})
  if 'full' in chosen:
    config.train.update({'steps': 600, 'steps_per_dispatch': 50})
  if 'tiny' in chosen:
    base.make_tiny(config)
    config.model.update({'num_heads': 2, 'mlp_dim': 8})
    config.task.update({'length': 4, 'num_symbols': 4})
  return config

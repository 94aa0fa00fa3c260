"""Looking something up: associative recall, and induction.

  python -m experiments.train --config=configs/recall.py            (40 s)
  python -m experiments.train --config=configs/recall.py:induction  (60 s)
  python -m experiments.sweep_heads --config=configs/recall.py

Two layers of attention, no MLP. Recall reads 8 pairs of a key and a value and
answers 8 keys: accuracy 1.0 with RoPE, 0.3 to 0.4 with learned positions or
with 32 keys and values. Induction continues random tokens that repeat after 16
to 32: accuracy 0.95.
The argument after a colon picks variants, joined by commas.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = {
  'tiny': 'seconds long, to see that all works',
  'induction': 'random tokens that repeat, instead of pairs to recall',
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the variants named, joined by commas."""
  chosen = base.variants(variants, VARIANTS)
  config = base.get_config()
  config.name = '-'.join(['recall', *chosen])
  config.model.num_layers = 2
  config.train.update({'steps': 1000, 'steps_per_dispatch': 50})
  if 'induction' in chosen:
    config.task = ConfigDict(
      {
        'kind': 'induction',
        'length': 64,
        'num_symbols': 64,
        'min_period': 16,
        'max_period': 32,
      }
    )
  else:
    config.model.positions = 'rope'
    config.train.update({'steps': 2000, 'steps_per_dispatch': 100})
    config.task = ConfigDict(
      {
        'kind': 'recall',
        'num_pairs': 8,
        'num_queries': 8,
        'num_keys': 16,
        'num_values': 16,
      }
    )
  if 'tiny' in chosen:
    base.make_tiny(config)
    if 'induction' in chosen:
      config.task.update({'length': 8, 'min_period': 2, 'max_period': 4})
    else:
      config.task.update({'num_pairs': 2, 'num_queries': 2})
  return config

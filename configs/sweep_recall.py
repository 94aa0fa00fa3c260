"""Associative recall for attentions of several widths, as in Zoology.

  python -m experiments.sweep_recall
  python -m experiments.sweep_recall --config=configs/sweep_recall.py:full
  python -m experiments.sweep_recall --d_model=16,32 --pairs=4 \
    --learning_rates=0.01,0.03

Time, estimated from 20 steps each: 35 minutes, 6 hours and 6 minutes, of which
compiling each model takes some 20 seconds.
Two layers of attention with RoPE, no MLP. model.d_model and task.num_pairs are
the largest of the sweep, which goes there by doubling from 16 and from 4; there
are twice as many keys and as many values as pairs.
The argument after a colon picks variants, joined by commas.
"""

from ml_collections import ConfigDict

from configs import base, recall

VARIANTS = {
  'tiny': 'seconds long, to see that all works',
  'full': 'up to d_model = 128 and 16 pairs, 3000 steps',
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the variants named, joined by commas."""
  chosen = base.variants(variants, VARIANTS)
  if 'full' in chosen and 'tiny' in chosen:
    raise ValueError(f'config variants {chosen}: full or tiny, not both')
  config = recall.get_config('tiny' if 'tiny' in chosen else '')
  config.name = '-'.join(['recall', *chosen])
  if 'tiny' in chosen:
    return config
  config.train.update({'steps': 1000, 'batch_size': 16})
  if 'full' in chosen:
    config.model.d_model = 128
    config.task.update({'num_pairs': 16, 'num_queries': 16})
    config.task.update({'num_keys': 32, 'num_values': 32})
    config.train.steps = 3000
  return config

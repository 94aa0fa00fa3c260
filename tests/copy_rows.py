"""Rows of experiments.copy_heads, made by hand."""

import copy

import numpy as np

from experiments.reports import copying as reports


def row(n_heads: int, scale: str, ends, attention=0.9, cost=0.5) -> dict:
  """A row whose seeds reach the threshold at the steps `ends`."""
  shape = (len(ends), n_heads)
  head_dim = 64 // n_heads
  return {
    'n_heads': n_heads,
    'head_dim': head_dim,
    'scale': scale,
    'score_scale': head_dim**-0.5 if scale == 'sqrt' else float(scale),
    'seeds': list(range(len(ends))),
    'learning_rate': 0.01,
    'rates': [rate(0.01, [0.01] * len(ends), ends)],
    'attention': np.full(shape, attention).tolist(),
    'accuracy': [1.0] * len(ends),
    'accuracy_without': np.full(shape, 1 - cost).tolist(),
    'snapshots': [0, 50],
    'rank': np.full((2, *shape), 2.0).tolist(),
    'margin': np.full((2, *shape), 3.0).tolist(),
    'margin_std': np.full((2, *shape), 1.0).tolist(),
  }


def rate(learning_rate: float, final, ends) -> dict:
  """Losses at a rate that fall below the threshold at the steps `ends`."""
  losses = [[1.0] * (end - 1) + [0.01] * (51 - end) for end in ends]
  return {'learning_rate': learning_rate, 'final_loss': final, 'loss': losses}


def distinct() -> dict:
  """Two heads and three seeds, of which no two numbers are alike.

  The slow rate has the least loss, the fast one the fewest steps; the head
  with the greatest margin at the end is 1, 0, 1 by seed, and the other one
  before.
  """
  slow = rate(0.01, [0.01, 0.02, 0.04], (41, 43, 47))
  fast = rate(0.1, [0.1, 0.2, 0.3], (11, 12, 14))
  return row(2, 'sqrt', (1, 1, 1)) | {
    'rates': [slow, fast],
    'seeds': [5, 6, 7],
    'attention': [[0.05, 0.9], [0.8, 0.3], [0.7, 0.6]],
    'accuracy': [0.99, 0.97, 0.94],
    'accuracy_without': [[0.985, 0.5], [0.4, 0.965], [0.3, 0.939]],
    'rank': [
      [[11.0, 12.0], [13.0, 14.5], [15.0, 17.0]],
      [[1.0, 2.0], [3.0, 4.5], [5.0, 7.0]],
    ],
    'margin': [
      [[-1.0, -1.5], [-2.0, -1.75], [-3.0, -3.5]],
      [[1.0, 2.0], [7.0, 3.0], [4.0, 5.0]],
    ],
    'margin_std': [
      [[0.9, 0.8], [0.95, 0.85], [0.97, 0.87]],
      [[0.1, 0.2], [0.7, 0.3], [0.4, 0.5]],
    ],
  }


def diverge(one: dict, seed: int, since: int = 1) -> dict:
  """The row with a seed without numbers from a snapshot on."""
  one = copy.deepcopy(one)
  heads = one['n_heads']
  for x in one['rates']:
    x['final_loss'][seed] = None
    x['loss'][seed] = [1.0] + [None] * 49
  one['attention'][seed] = [None] * heads
  one['accuracy'][seed] = 0.1
  one['accuracy_without'][seed] = [0.1] * heads
  for name in reports.ENDS:
    for numbers in one[name][since:]:
      numbers[seed] = [None] * heads
  return one

"""Reports a sweep over head counts in numbers and words, and rows of CSVs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util
from rich import box
from rich.table import Table

Summary = dict[str, Any]

CAPTION = (
  'median and range over seeds; final loss and accuracy on evaluation batches; '
  'steps/s of all seeds together'
)


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a config as columns of a CSV, such as model.num_heads."""
  return dict(traverse_util.flatten_dict(config, sep='.'))


def summarise(row: dict[str, Any], threshold: float) -> Summary:
  """One line of the table: medians and ranges over seeds.

  Args:
    row: a finished point, see `points.train_point`.
    threshold: the loss that steps are counted to.
  """
  steps = [steps_to(losses, threshold) for losses in row['loss']]
  return {
    'n_heads': row['n_heads'],
    'head_dim': row['head_dim'],
    'params': row['params'],
    'seeds': len(row['seeds']),
    'steps': len(row['loss'][0]),
    **spread('final_loss', row['final_loss']),
    **spread('final_accuracy', row['final_accuracy']),
    **spread('steps_to_threshold', steps),
    'steps_per_s': row['steps_per_s'],
  }


def steps_to(losses: Sequence[float], threshold: float) -> float:
  """Steps until the batch loss is below the threshold; inf: never."""
  below = np.flatnonzero(np.asarray(losses) < threshold)
  return float(below[0] + 1) if below.size else math.inf


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
  """Median, least and greatest.

  Between a number and infinity the median is infinity: half never get there.
  """
  ordered = sorted(values)
  return {
    f'{name}_median': float(np.median(ordered)),
    f'{name}_min': ordered[0],
    f'{name}_max': ordered[-1],
  }


def table(
  summaries: Sequence[Summary],
  failed: Sequence[dict[str, Any]],
  threshold: float,
) -> Table:
  """The summaries as a table: the median, and below it the range over seeds."""
  columns = (
    'n_heads',
    'head_dim',
    'params',
    'final loss',
    'accuracy',
    f'steps to\nloss < {threshold:g}',
    'steps/s',
  )
  result = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), caption=CAPTION)
  for name in columns:
    result.add_column(name, justify='right')
  for s in summaries:
    speed = s['steps_per_s']
    result.add_row(
      str(s['n_heads']),
      str(s['head_dim']),
      f'{s["params"]:,}',
      median_range(s, 'final_loss', '.4f', '\n'),
      median_range(s, 'final_accuracy', '.2f', '\n'),
      median_range(s, 'steps_to_threshold', '.0f', '\n'),
      '-' if speed is None else f'{speed:.1f}',
    )
  for row in failed:
    cells = [str(row['n_heads']), str(row['head_dim'])]
    result.add_row(*cells, *['failed'] * (len(columns) - len(cells)))
  return result


def verdict(summaries: Sequence[Summary], threshold: float) -> str:
  """One sentence: do more heads help, plateau or hurt, in speed and in the end?

  Ranges over seeds that overlap are a plateau, and so are final losses that
  all lie below the threshold.
  """
  if len(summaries) < 2:
    return 'One head count alone shows no trend; pass more to --n_heads.'
  if any(s['seeds'] < 2 for s in summaries):
    return 'One seed alone has no spread to hold a trend against; pass --seeds.'
  steps, loss = 'steps_to_threshold', 'final_loss'
  solved = all(s[f'{loss}_max'] < threshold for s in summaries)
  end = 'plateau' if solved else _trend(summaries, loss)
  note = 'all solve it; ' if solved else ''
  losses = _examples(summaries, loss, '.4f')
  ends = f'{end} in the end ({note}final loss {losses})'
  if all(math.isinf(s[f'{steps}_min']) for s in summaries):
    return (
      f'More heads {ends}; no head count reaches loss < {threshold:g}, so '
      'nothing is said of speed.'
    )
  return (
    f'More heads {_trend(summaries, steps)} in speed (steps to loss < '
    f'{threshold:g}: {_examples(summaries, steps, ".0f")}) and {ends}.'
  )


def _trend(summaries: Sequence[Summary], name: str) -> str:
  """Says what more heads do to a number that is better small."""
  best = _best(summaries, name)
  alike = [
    s['n_heads'] for s in summaries if _effect(best, s, name) == 'plateau'
  ]
  to_best = _effect(summaries[0], best, name)
  from_best = _effect(best, summaries[-1], name)
  if to_best == 'help':
    more = (
      ''
      if from_best == 'plateau' and len(alike) == 1
      else (f' up to {alike[0]}, then {from_best}')
    )
    return f'help{more}'
  if from_best == 'hurt':
    return (
      'hurt' if len(alike) == 1 else f'plateau up to {alike[-1]}, then hurt'
    )
  return 'plateau'


def _best(summaries: Sequence[Summary], name: str) -> Summary:
  return min(summaries, key=lambda s: s[f'{name}_median'])


def _effect(fewer: Summary, more: Summary, name: str) -> str:
  """Says what the step from fewer heads to more does to the number."""
  if fewer[f'{name}_max'] < more[f'{name}_min']:
    return 'hurt'
  return 'help' if fewer[f'{name}_min'] > more[f'{name}_max'] else 'plateau'


def _examples(summaries: Sequence[Summary], name: str, form: str) -> str:
  """The number at the fewest heads, at the best head count and at the most."""
  chosen = (summaries[0], _best(summaries, name), summaries[-1])
  texts = [
    f'{median_range(s, name, form)} with {s["n_heads"]} '
    f'head{"" if s["n_heads"] == 1 else "s"}'
    for s in chosen
  ]
  return ', '.join(dict.fromkeys(texts))


def median_range(summary: Summary, name: str, form: str, gap: str = ' ') -> str:
  """Median (least-greatest), of signed numbers (least to greatest)."""
  median, low, high = (
    'never' if math.isinf(x) else format(x, form)
    for x in (summary[f'{name}_{part}'] for part in ('median', 'min', 'max'))
  )
  to = ' to ' if form.startswith('+') else '-'
  return median if low == high else f'{median}{gap}({low}{to}{high})'

"""Reports a sweep over head counts in numbers and words, and rows of CSVs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import traverse_util
from rich import box
from rich.table import Table

from experiments.reports import statistics
from experiments.reports.statistics import Best, median_range, number, spread

CAPTION = (
  'median and range over seeds, each number at the learning rate (lr) that is '
  'best for it; final loss and accuracy on evaluation batches'
)


@dataclasses.dataclass(frozen=True)
class Summary:
  """A head count at its best learning rates.

  Args:
    n_heads: the head count.
    final: the row with the least final loss.
    speed: the row with the fewest steps to the threshold.
    worst: the greatest loss before training, which a seed that diverged counts
      as.
    line: of tables and CSVs: medians and ranges over seeds.
  """

  n_heads: int
  final: Best
  speed: Best
  worst: float
  line: dict[str, Any]


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of a config as columns of a CSV, such as model.num_heads."""
  return dict(traverse_util.flatten_dict(config, sep='.'))


def final_losses(row: Mapping[str, Any]) -> list[float]:
  """The losses on validation batches, by seed; inf: diverged."""
  return [number(x) for x in row['final_loss']]


def summarise(rows: Sequence[dict[str, Any]], threshold: float) -> Summary:
  """Chooses the best learning rates of one head count.

  Args:
    rows: finished points, one for each learning rate, see `points.train_group`.
    threshold: the loss that steps are counted to.
  """
  final = statistics.best_rate(rows, final_losses)
  speed = statistics.best_rate(
    rows, lambda row: [steps_to(x, threshold) for x in row['loss']]
  )
  row = final.row
  line = {
    'n_heads': row['n_heads'],
    'head_dim': row['head_dim'],
    'params': row['params'],
    'seeds': len(row['seeds']),
    'steps': len(row['loss'][0]),
    'learning_rates': ' '.join(f'{x["learning_rate"]:g}' for x in rows),
    'learning_rate': final.learning_rate,
    **spread('final_loss', final.values),
    **spread('final_accuracy', row['final_accuracy']),
    'speed_learning_rate': speed.learning_rate,
    **spread('steps_to_threshold', speed.values),
    'steps_per_s': row['steps_per_s'],
  }
  return Summary(row['n_heads'], final, speed, loss_before(rows), line)


def loss_before(rows: Sequence[Mapping[str, Any]]) -> float:
  """The greatest loss on a batch before training, of all rates and seeds."""
  return max(number(losses[0]) for row in rows for losses in row['loss'])


def steps_to(losses: Sequence[float | None], threshold: float) -> float:
  """Steps until the batch loss is below the threshold; inf: never."""
  below = np.flatnonzero(np.asarray(losses, float) < threshold)
  return float(below[0] + 1) if below.size else math.inf


def table(summaries: Sequence[Summary], threshold: float) -> Table:
  """The summaries as a table: the median, and below it the range over seeds."""
  columns = (
    'n_heads',
    'head_dim',
    'params',
    'lr',
    'final loss',
    'accuracy',
    'lr',
    f'steps to\nloss < {threshold:g}',
  )
  result = Table(box=box.SIMPLE_HEAD, padding=0, caption=CAPTION)
  for name in columns:
    result.add_column(name, justify='right')
  for line in (x.line for x in summaries):
    never = math.isinf(line['steps_to_threshold_min'])
    result.add_row(
      str(line['n_heads']),
      str(line['head_dim']),
      f'{line["params"]:,}',
      f'{line["learning_rate"]:g}',
      median_range(line, 'final_loss', '.4f', '\n', 'diverged'),
      median_range(line, 'final_accuracy', '.2f', '\n'),
      '' if never else f'{line["speed_learning_rate"]:g}',
      median_range(line, 'steps_to_threshold', '.0f', '\n'),
    )
  return result


def verdict(summaries: Sequence[Summary], threshold: float) -> str:
  """One sentence: do more heads help, plateau or hurt, in speed and in the end?

  Head counts whose difference, seed by seed, has an interval around 0 are a
  plateau, and so are final losses that all lie below the threshold.
  """
  if len(summaries) < 2:
    return 'One head count alone shows no trend; pass more to --n_heads.'
  lines = [x.line for x in summaries]
  if any(line['seeds'] < 2 for line in lines):
    return 'One seed alone has no spread to hold a trend against; pass --seeds.'
  solved = all(line['final_loss_max'] < threshold for line in lines)
  end = 'plateau' if solved else _trend(summaries, 'final')
  note = 'all solve it; ' if solved else ''
  losses = _examples(summaries, 'final', 'final_loss', '.4f')
  ends = f'{end} in the end ({note}final loss {losses})'
  if all(math.isinf(line['steps_to_threshold_min']) for line in lines):
    return (
      f'More heads {ends}; no head count reaches loss < {threshold:g}, so '
      'nothing is said of speed.'
    )
  steps = _examples(summaries, 'speed', 'steps_to_threshold', '.0f')
  return (
    f'More heads {_trend(summaries, "speed")} in speed (steps to loss < '
    f'{threshold:g}: {steps}) and {ends}.'
  )


def rates(summaries: Sequence[Summary]) -> str:
  """Says which learning rates were tried, and whose best is the last one."""
  lines = [x.line for x in summaries]
  each = [{float(x) for x in line['learning_rates'].split()} for line in lines]
  tried = sorted(set.union(*each))
  text = f'Learning rates tried: {", ".join(f"{x:g}" for x in tried)}.'
  if fewer := [
    str(line['n_heads'])
    for line, own in zip(lines, each, strict=True)
    if len(own) < len(tried)
  ]:
    text += f' Not all of them finished for n_heads={",".join(fewer)}.'
  found: dict[str, list[str]] = {}
  for words, bests in (
    ('final loss', [x.final for x in summaries]),
    ('speed', [x.speed for x in summaries]),
  ):
    for advice in dict.fromkeys(x.advice for x in bests if x.advice):
      heads = [
        str(x.n_heads)
        for x, best in zip(summaries, bests, strict=True)
        if best.advice == advice
      ]
      found.setdefault(f'for n_heads={",".join(heads)} {advice}', []).append(
        words
      )
  for advice, judged_by in found.items():
    text += f' By {" and ".join(judged_by)}, {advice}.'
  return text


def _trend(summaries: Sequence[Summary], by: str) -> str:
  """Says what more heads do to a number that is better small."""
  best = _best(summaries, by)
  alike = [s.n_heads for s in summaries if _effect(best, s, by) == 'plateau']
  first, last = alike[0], alike[-1]
  parts = []
  if first > summaries[0].n_heads:
    parts.append(('help', first))
  if last > first:
    parts.append(('plateau', last))
  if last < summaries[-1].n_heads:
    parts.append(('hurt', summaries[-1].n_heads))
  *before, (end, _) = parts
  between = [str(s.n_heads) for s in summaries if first < s.n_heads < last]
  worse = [x for x in between if int(x) not in alike]
  return (
    ''.join(f'{word} up to {upper}, then ' for word, upper in before)
    + end
    + f' (but {" and ".join(worse)} {"are" if worse[1:] else "is"} worse)'
    * bool(worse)
  )


def _best(summaries: Sequence[Summary], by: str) -> Summary:
  return min(summaries, key=lambda s: np.median(sorted(getattr(s, by).values)))


def _effect(fewer: Summary, more: Summary, by: str) -> str:
  """Says what the step from fewer heads to more does to the number."""
  steps = by == 'speed'
  worst = fewer.line['steps'] + 1 if steps else max(fewer.worst, more.worst)
  found = statistics.difference(
    getattr(more, by).values, getattr(fewer, by).values, worst
  )
  return ('plateau', 'hurt', 'help')[found.sign]


def _examples(
  summaries: Sequence[Summary], by: str, name: str, form: str
) -> str:
  """The number at the fewest heads, at the best head count and at the most."""
  chosen = (summaries[0], _best(summaries, by), summaries[-1])
  texts = [
    f'{median_range(s.line, name, form)} with {s.n_heads} '
    f'head{"" if s.n_heads == 1 else "s"}'
    for s in chosen
  ]
  return ', '.join(dict.fromkeys(texts))

"""Reports what heads do in the copy task: roles, ranks, margins and steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from experiments.reports import head_counts, statistics
from experiments.reports.statistics import median_range, spread

THRESHOLD = 0.05  # the loss (nats) that speed is measured to
CARRIES, IDLE = 0.5, 0.1
"""Attention to the source above which a head carries the copy, and below which
it is idle."""
COST = 0.01
"""The accuracy that is lost without a head that does something."""
ROLES = ('carries', 'spare', 'idle', 'other')
ENDS = ('rank', 'margin', 'margin_std')
"""The numbers of heads that are told at the end."""
SQRT = 'sqrt'
"""The scale 1 / sqrt(head_dim)."""

CAPTION = (
  'median and range over seeds at the learning rate (lr) that is best for the '
  f'final loss. carry: heads whose attention to the source is > {CARRIES} and '
  f'whose removal alone costs {COST} of accuracy; spare: as much attention, '
  f'and less lost; idle: < {IDLE}, and less lost; other: the rest; '
  'rank: effective, of the scores of positions, mean over heads; log odds: of '
  'the right source by positions alone, mean over answers, of the best head; '
  'heads, rank and log odds without seeds that diverged; '
  'steps at the rate that is best for them'
)


@dataclasses.dataclass(frozen=True)
class Summary:
  """A head count at a scale.

  Args:
    row: what was recorded.
    steps: to the threshold, at the learning rate with the fewest.
    heads: a line of each head and seed, see `heads_of`.
    line: of tables and CSVs: medians and ranges over seeds.
  """

  row: Mapping[str, Any]
  steps: statistics.Best
  heads: Sequence[dict[str, Any]]
  line: dict[str, Any]


def at_end(row: Mapping[str, Any], name: str) -> np.ndarray:
  """The last snapshot of a number, (seeds, h); nan: it is not finite."""
  return np.asarray(row[name][-1], float)


def diverged(row: Mapping[str, Any]) -> np.ndarray:
  """Whether a seed ends without some of its numbers, (seeds,)."""
  ends = [at_end(row, name) for name in ENDS]
  numbers = np.concatenate([*ends, np.asarray(row['attention'], float)], axis=1)
  found: np.ndarray = ~np.all(np.isfinite(numbers), axis=1)
  return found


def best_heads(row: Mapping[str, Any]) -> np.ndarray:
  """The head with the greatest margin at the end, by seed."""
  margin = at_end(row, 'margin')
  found: np.ndarray = np.argmax(np.nan_to_num(margin, nan=-np.inf), axis=1)
  return found


def heads_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
  """What each head of each seed does at the end."""
  lines = []
  ends, gone = {name: at_end(row, name) for name in ENDS}, diverged(row)
  for (i, head), attention in np.ndenumerate(
    np.asarray(row['attention'], float)
  ):
    without = row['accuracy_without'][i][head]
    cost = row['accuracy'][i] - without
    lines.append(
      {
        'n_heads': row['n_heads'],
        'scale': row['scale'],
        'learning_rate': row['learning_rate'],
        'seed': row['seeds'][i],
        'head': head,
        'attention_to_source': attention,
        'accuracy': row['accuracy'][i],
        'accuracy_without': without,
        'role': 'diverged' if gone[i] else role(attention, cost),
        **{name: float(end[i, head]) for name, end in ends.items()},
      }
    )
  return lines


def role(attention: float, cost: float) -> str:
  """'carries', 'spare', 'idle' or, between them, 'other'.

  A spare head attends to the source, and the others do without it.

  Args:
    attention: to the source.
    cost: the accuracy that is lost without the head.
  """
  if attention > CARRIES:
    return 'carries' if cost >= COST else 'spare'
  return 'idle' if attention < IDLE and cost < COST else 'other'


def summarise(row: Mapping[str, Any]) -> Summary:
  """The numbers of a head count at a scale."""
  final = statistics.best_rate(row['rates'], head_counts.final_losses)
  steps = statistics.best_rate(
    row['rates'],
    lambda x: [head_counts.steps_to(y, THRESHOLD) for y in x['loss']],
  )
  heads, gone = heads_of(row), diverged(row)
  roles = np.asarray([x['role'] for x in heads]).reshape(len(gone), -1)
  best = best_heads(row)[:, None]
  by_seed = {name: np.sum(roles == name, axis=1) for name in ROLES}
  by_seed['rank'] = at_end(row, 'rank').mean(axis=1)
  for name in ('margin', 'margin_std'):
    end = at_end(row, name)
    by_seed[name] = np.take_along_axis(end, best, axis=1)[:, 0]
  of_heads = {
    part: x
    for name, values in by_seed.items()
    for part, x in spread(name, values[~gone].tolist() or [math.nan]).items()
  }
  line = {
    **{x: row[x] for x in ('n_heads', 'head_dim', 'scale', 'score_scale')},
    'seeds': len(row['seeds']),
    'diverged': int(gone.sum()),
    'steps': len(row['rates'][0]['loss'][0]),
    'learning_rate': final.learning_rate,
    **spread('final_loss', final.values),
    **spread('accuracy', row['accuracy']),
    **of_heads,
    'speed_learning_rate': steps.learning_rate,
    **spread('steps_to_threshold', steps.values),
    'advice': final.advice,
    'speed_advice': steps.advice,
  }
  return Summary(row, steps, heads, line)


def table(summaries: Sequence[Summary]) -> Table:
  """The summaries as a table, a head count at a scale a row."""
  result = Table(box=box.SIMPLE_HEAD, padding=0, caption=CAPTION)
  columns = ('heads x\nfeatures', 'scale', 'lr', 'final loss', 'carry')
  more = (
    'spare',
    'idle',
    'other',
    'rank',
    'log odds',
    'lr',
    f'steps to\nloss < {THRESHOLD:g}',
  )
  for name in (*columns, *more):
    result.add_column(name, justify='right')
  for line in (x.line for x in summaries):
    never = math.isinf(line['steps_to_threshold_min'])
    result.add_row(
      f'{line["n_heads"]} x {line["head_dim"]}',
      line['scale'],
      f'{line["learning_rate"]:g}',
      median_range(line, 'final_loss', '.4f', '\n', 'diverged'),
      *(shown(line, name, '.3g', '\n') for name in ROLES),
      shown(line, 'rank', '.1f', '\n'),
      shown(line, 'margin', '+.1f', '\n'),
      '' if never else f'{line["speed_learning_rate"]:g}',
      median_range(line, 'steps_to_threshold', '.0f', '\n'),
    )
  return result


def shown(line: Mapping[str, Any], name: str, form: str, gap: str = ' ') -> str:
  """Median and range over the seeds that did not diverge, if there are any."""
  if line['diverged'] == line['seeds']:
    return 'diverged'
  return median_range(line, name, form, gap)


def usual(summaries: Sequence[Summary]) -> list[Summary]:
  """Those at the usual scale; where it was not tried, at the first one."""
  scales = [x.line['scale'] for x in summaries]
  scale = SQRT if SQRT in scales else scales[0]
  return [x for x in summaries if x.line['scale'] == scale]


def name_of(line: Mapping[str, Any]) -> str:
  """A head count at a scale, of a row or a line, in words."""
  return f'n_heads={line["n_heads"]} at scale {line["scale"]}'

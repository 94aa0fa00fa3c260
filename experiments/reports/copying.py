"""Reports what heads do in the copy task: roles, ranks, margins and scales."""

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
ROLES = ('carries', 'spare', 'idle')
SQRT = 'sqrt'
"""The scale 1 / sqrt(head_dim)."""

CAPTION = (
  'median and range over seeds at the learning rate (lr) that is best for the '
  f'final loss. carry: heads whose attention to the source is > {CARRIES} and '
  f'without which {COST} of accuracy is lost; spare: as much attention, and '
  f'less lost; idle: < {IDLE}, and less lost; '
  'rank: effective, of the scores of positions, mean over heads; log odds: of '
  'the right source by positions alone, mean over answers, of the best head; '
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
  """The last snapshot of a number, (seeds, h)."""
  return np.asarray(row[name][-1], float)


def best_heads(row: Mapping[str, Any]) -> np.ndarray:
  """The head with the greatest margin at the end, by seed."""
  margin = at_end(row, 'margin')
  found: np.ndarray = np.argmax(np.nan_to_num(margin, nan=-np.inf), axis=1)
  return found


def heads_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
  """What each head of each seed does at the end."""
  lines = []
  ends = {name: at_end(row, name) for name in ('rank', 'margin', 'margin_std')}
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
        'role': role(attention, cost),
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
  heads = heads_of(row)
  counts = {
    name: [
      sum(x['role'] == name for x in heads if x['seed'] == seed)
      for seed in row['seeds']
    ]
    for name in ROLES
  }
  best = best_heads(row)[:, None]
  margin, deviation = (
    np.take_along_axis(at_end(row, name), best, axis=1)[:, 0].tolist()
    for name in ('margin', 'margin_std')
  )
  line = {
    **{x: row[x] for x in ('n_heads', 'head_dim', 'scale', 'score_scale')},
    'seeds': len(row['seeds']),
    'steps': len(row['rates'][0]['loss'][0]),
    'learning_rate': final.learning_rate,
    **spread('final_loss', final.values),
    **{k: x for name in ROLES for k, x in spread(name, counts[name]).items()},
    **spread('rank', at_end(row, 'rank').mean(axis=1).tolist()),
    **spread('margin', margin),
    **spread('margin_std', deviation),
    'speed_learning_rate': steps.learning_rate,
    **spread('steps_to_threshold', steps.values),
    'advice': final.advice,
  }
  return Summary(row, steps, heads, line)


def table(summaries: Sequence[Summary]) -> Table:
  """The summaries as a table, a head count at a scale a row."""
  result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION)
  columns = ('heads x\nfeatures', 'scale', 'lr', 'final loss', 'carry')
  more = (
    'spare',
    'idle',
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
      *(median_range(line, name, '.0f', '\n') for name in ROLES),
      median_range(line, 'rank', '.1f', '\n'),
      median_range(line, 'margin', '+.1f', '\n'),
      '' if never else f'{line["speed_learning_rate"]:g}',
      median_range(line, 'steps_to_threshold', '.0f', '\n'),
    )
  return result


def plain(summaries: Sequence[Summary]) -> list[Summary]:
  """Those at the usual scale; where it was not tried, at the first one."""
  scales = [x.line['scale'] for x in summaries]
  scale = SQRT if SQRT in scales else scales[0]
  return [x for x in summaries if x.line['scale'] == scale]


def verdicts(summaries: Sequence[Summary]) -> list[str]:
  """What follows from the numbers, a sentence a question."""
  usual = plain(summaries)
  scale = usual[0].line['scale']
  return [
    f'At scale {scale} the copy is carried by '
    f'{_each(usual, "carries", ".0f", " of {n_heads}")} heads; spare are '
    f'{_each(usual, "spare", ".0f", " of {n_heads}")}, idle '
    f'{_each(usual, "idle", ".0f", " of {n_heads}")}.',
    'At the end the scores of positions have an effective rank of '
    f'{_each(usual, "rank", ".1f", " with {head_dim} features a head")}.',
    'By positions alone the best head gives the right source log odds of '
    f'{_each(usual, "margin", "+.1f", " with {head_dim} features")}; a weight '
    'of 0.99 takes +4.6.',
    _speed(usual),
    *_scales(summaries, usual),
  ]


def advice(summaries: Sequence[Summary]) -> list[str]:
  """Names the models whose best learning rate is the last of those tried."""
  found: dict[str, list[str]] = {}
  for line in (x.line for x in summaries):
    if line['advice']:
      name = f'n_heads={line["n_heads"]} at scale {line["scale"]}'
      found.setdefault(line['advice'], []).append(name)
  return [f'For {", ".join(names)} {x}.' for x, names in found.items()]


def _each(summaries: Sequence[Summary], name: str, form: str, of: str) -> str:
  """A number of each head count, in words."""
  return ', '.join(
    median_range(x.line, name, form) + of.format(**x.line) for x in summaries
  )


def _speed(usual: Sequence[Summary]) -> str:
  """The most heads against the fewest."""
  if len(usual) < 2:
    return 'One head count alone shows no trend; pass more to --heads.'
  most, fewest = usual[-1].line, usual[0].line
  return (
    f'Steps to loss < {THRESHOLD:g}, {most["n_heads"]} heads of '
    f'{most["head_dim"]} features against {fewest["n_heads"]} of '
    f'{fewest["head_dim"]}: {_compared(usual[-1], usual[0])}.'
  )


def _scales(
  summaries: Sequence[Summary], usual: Sequence[Summary]
) -> list[str]:
  """The fastest other scale of each head count against the usual one."""
  parts = []
  for one in usual:
    others = [
      x
      for x in summaries
      if x.line['n_heads'] == one.line['n_heads'] and x is not one
    ]
    if others:
      best = min(others, key=lambda x: x.line['steps_to_threshold_median'])
      parts.append(
        f'{one.line["head_dim"]} features, {best.line["score_scale"]:.3g} '
        f'against {one.line["score_scale"]:.3g}: {_compared(best, one)}'
      )
  if not parts:
    return []
  what = f'Steps at the fastest other scale against {usual[0].line["scale"]}'
  return [f'{what} (the fastest by its median): {"; ".join(parts)}.']


def _compared(one: Summary, other: Summary) -> str:
  """How many steps one takes more than another, seed by seed."""
  if all(math.isinf(x.line['steps_to_threshold_min']) for x in (one, other)):
    return 'neither gets there'
  worst = one.line['steps'] + 1
  found = statistics.difference(one.steps.values, other.steps.values, worst)
  word = ('not told apart', 'slower', 'faster')[found.sign]
  return f'{found.in_words("+.0f")}, {word}'

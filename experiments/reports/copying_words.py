"""Says in sentences what heads do in the copy task, and how fast it is learned.

The numbers are those of `experiments.reports.copying`.
"""

import math
from collections.abc import Sequence

from experiments.reports import statistics
from experiments.reports.copying import (
  CARRIES,
  COST,
  IDLE,
  ROLES,
  THRESHOLD,
  Summary,
  name_of,
  shown,
  usual,
)
from experiments.reports.statistics import median_range


def verdicts(summaries: Sequence[Summary]) -> list[str]:
  """What follows from the numbers, a sentence a question."""
  own = usual(summaries)
  roles = [_each(own, name, '.3g', ' of {n_heads}') for name in ROLES]
  accuracy = ', '.join(
    median_range(x.line, 'accuracy', '.2f') + f' with {x.line["n_heads"]}'
    for x in own
  )
  return [
    f'At scale {own[0].line["scale"]} the accuracy is {accuracy} heads. Heads '
    f'that attend > {CARRIES} to the source and whose removal alone costs '
    f'{COST} of accuracy are {roles[0]}; spare (as much attention, less lost) '
    f'are {roles[1]}, idle (< {IDLE}, less lost) {roles[2]}, other '
    f'{roles[3]}.',
    'At the end the scores of positions have an effective rank of '
    f'{_each(own, "rank", ".1f", " with {head_dim} features a head")}.',
    'By positions alone the best head gives the right source log odds of '
    f'{_each(own, "margin", "+.1f", " with {head_dim} features")}; a weight '
    'of 0.99 takes +4.6.',
    _speed(own),
    *_scales(summaries, own),
    *_diverged(summaries),
  ]


def advice(summaries: Sequence[Summary]) -> list[str]:
  """Names the models whose best learning rate is the last of those tried."""
  found: dict[str, list[str]] = {}
  for line in (x.line for x in summaries):
    own = {'final loss': line['advice'], 'speed': line['speed_advice']}
    for text in dict.fromkeys(filter(None, own.values())):
      by = ' and '.join(name for name, x in own.items() if x == text)
      found.setdefault(f'by {by} {text}', []).append(name_of(line))
  return [f'For {", ".join(names)} {x}.' for x, names in found.items()]


def _each(summaries: Sequence[Summary], name: str, form: str, of: str) -> str:
  """A number of the heads of each head count, in words."""
  return ', '.join(
    shown(x.line, name, form) + of.format(**x.line) for x in summaries
  )


def _diverged(summaries: Sequence[Summary]) -> list[str]:
  """Counts the seeds that have no numbers of heads."""
  parts = [
    f'{x.line["diverged"]} of {x.line["seeds"]} seeds with {name_of(x.line)}'
    for x in summaries
    if x.line['diverged']
  ]
  if not parts:
    return []
  return [
    f'Diverged: {", ".join(parts)}; they count in losses, accuracies and '
    'steps, and are left out of roles, ranks and log odds.'
  ]


def _speed(own: Sequence[Summary]) -> str:
  """The most heads against the fewest."""
  if len(own) < 2:
    return 'One head count alone shows no trend; pass more to --heads.'
  most, fewest = own[-1].line, own[0].line
  return (
    f'Steps to loss < {THRESHOLD:g}, {most["n_heads"]} heads of '
    f'{most["head_dim"]} features against {fewest["n_heads"]} of '
    f'{fewest["head_dim"]}: {_compared(own[-1], own[0])}.'
  )


def _scales(summaries: Sequence[Summary], own: Sequence[Summary]) -> list[str]:
  """The fastest other scale of each head count against the usual one."""
  parts, picked = [], False
  for one in own:
    others = [
      x
      for x in summaries
      if x.line['n_heads'] == one.line['n_heads'] and x is not one
    ]
    if others:
      best = min(others, key=lambda x: x.line['steps_to_threshold_median'])
      picked |= len(others) > 1
      parts.append(
        f'{one.line["head_dim"]} features, {best.line["score_scale"]:.3g} '
        f'(of {len(others)} tried) against {one.line["score_scale"]:.3g}: '
        f'{_compared(best, one)}'
      )
  if not parts:
    return []
  what = f'Steps at the fastest other scale against {own[0].line["scale"]}'
  note = (
    ' The fastest is picked by its median over the same seeds, which favours '
    "'faster'."
  )
  return [f'{what}: {"; ".join(parts)}.{note * picked}']


def _compared(one: Summary, other: Summary) -> str:
  """How many steps one takes more than another, seed by seed."""
  if all(math.isinf(x.line['steps_to_threshold_min']) for x in (one, other)):
    return 'neither gets there'
  worst = one.line['steps'] + 1
  found = statistics.difference(one.steps.values, other.steps.values, worst)
  word = ('not told apart', 'slower', 'faster')[found.sign]
  return f'{found.in_words("+.0f")}, {word}'

"""Reports exercise 3, ranks of a latent against MHA, in a table and in words.

A line is a model at its best learning rate, beside MHA of its rotary size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from experiments.reports import head_counts, statistics
from experiments.reports.statistics import Difference, spread

Lines = Sequence[Mapping[str, Any]]

WITHIN = (1.0, 0.1, 0.02)
"""Differences to MHA, in bits per token, that the answer asks for."""


def summarise(rows: Lines) -> list[dict[str, Any]]:
  """A line for each model at its best rate, against MHA of its rotary size.

  A difference is taken seed by seed, since seeds share batches; medians and
  ranges over seeds follow, and the mean with its interval.

  Args:
    rows: of all points, see `points.train_points`.
  """
  models: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
  for row in rows:
    if row['status'] == 'finished':
      models.setdefault((row['variant'], row['rotary']), []).append(row)
  best = {
    name: statistics.best_rate(own, _bits) for name, own in models.items()
  }
  lines = []
  for (_, rotary), one in best.items():
    mha = best.get(('MHA', rotary))
    if mha is None:
      continue
    row = one.row
    worst = head_counts.loss_before([row, mha.row]) / math.log(2)
    line = {name: row[name] for name in ('variant', 'rotary', 'rank', 'params')}
    line |= {x: row[x] for x in ('latent_norm', 'cache_elements')}
    line['cache_share'] = row['cache_elements'] / mha.row['cache_elements']
    line |= {'seeds': len(row['seeds']), 'learning_rate': one.learning_rate}
    line |= spread('bits', one.values)
    line['perplexity'] = float(np.exp2(min(line['bits_median'], 1023)))
    each = np.minimum([one.values, mha.values], worst)
    line |= spread('difference', (each[0] - each[1]).tolist())
    found = statistics.difference(one.values, mha.values, worst)
    line |= found.columns() | {'advice': one.advice}
    lines.append(line | head_counts.fields(row['config']))
  return lines


def _bits(row: Mapping[str, Any]) -> list[float]:
  """Validation losses in bits per token, by seed; inf: diverged."""
  return [x / math.log(2) for x in head_counts.final_losses(row)]


def in_words(lines: Lines) -> list[str | Table]:
  """The table of one rotary size, and what follows from it.

  Args:
    lines: see `summarise`; MHA is the first.
  """
  p, mha = lines[0]['rotary'], lines[0]
  texts: list[str | Table] = [table(lines)]
  latent = [line for line in lines if line['rank'] is not None]
  if latent:
    per_feature = latent[0]['cache_elements'] / (latent[0]['rank'] + p)
    bound = mha['cache_elements'] / per_feature / 8
    texts.append(
      f"p = {p}: MLA's cache is below 1/8 of MHA's for r + p < {bound:g}."
    )
  for norm, name in ((True, 'MLA'), (False, 'MLA without the norm')):
    if own := [line for line in latent if line['latent_norm'] == norm]:
      texts.append(_ranks(name, own))
  if mha['seeds'] < 2:
    texts.append(
      'One seed alone has no spread to tell models apart by; pass --seeds.'
    )
  else:
    same = [x['variant'] for x in lines[1:] if _sign(x) == 0]
    texts.append(f'Not told apart from MHA: {", ".join(same) or "none"}.')
  return texts + _advice(lines)


def _ranks(name: str, lines: Lines) -> str:
  """Answers exercise 3 for the ranks of one kind of MLA.

  A rank is within a difference when the whole interval lies below it.
  """
  small = [line for line in lines if line['cache_share'] < 1 / 8]
  if small:
    best = max(small, key=lambda line: line['rank'])
    found = Difference.of_line(best)
    held = 'not shown to be within'
    if found.high <= 1:
      held = 'within'
    elif found.low > 1:
      held = 'not within'
    parts = [
      f'{name}: at r = {best["rank"]} the cache is {best["cache_share"]:.3g} '
      f"of MHA's, and the loss {found.in_words()} bits from its, which is "
      f'{held} 1 bit.'
    ]
  else:
    parts = [f"{name}: no rank that was trained is below 1/8 of MHA's cache."]
  for bits in WITHIN:
    near = [x for x in lines if x['difference_high'] <= bits]
    rank = f'r = {min(x["rank"] for x in near)}' if near else 'no rank'
    unit = 'bit' if bits == 1 else 'bits'
    parts.append(f'Smallest within {bits:g} {unit}: {rank}.')
  return ' '.join(parts)


def _sign(line: Mapping[str, Any]) -> int:
  return Difference.of_line(line).sign


def _advice(lines: Lines) -> list[str]:
  """Names the models whose best rate is the last of those tried."""
  found: dict[str, list[str]] = {}
  for line in lines:
    if line['advice']:
      found.setdefault(line['advice'], []).append(line['variant'])
  return [f'For {", ".join(names)} {x}.' for x, names in found.items()]


def table(lines: Lines) -> Table:
  """The models of one rotary size, a row each."""
  p = lines[0]['rotary']
  title = f'RoPE, p = {p}' if p else 'learned positions, p = 0'
  caption = (
    'cached elements a token; bits per token and perplexity (ppl) on '
    'validation batches, medians over seeds at the best learning rate (lr); '
    'minus MHA: mean difference, seed by seed, and its '
    f'{statistics.CONFIDENCE:.0%} interval'
  )
  table = Table(
    title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption
  )
  columns = ('variant', 'params', 'cache', 'of MHA', 'lr', 'bits', 'ppl')
  for name in (*columns, 'minus MHA'):
    side = 'left' if name == 'variant' else 'right'
    table.add_column(name, justify=side)  # type: ignore[arg-type]
  for x in lines:
    table.add_row(
      x['variant'],
      f'{x["params"]:,}',
      str(x['cache_elements']),
      f'{x["cache_share"]:.2g}',
      f'{x["learning_rate"]:g}',
      f'{x["bits_median"]:.3f}',
      f'{x["perplexity"]:.2f}',
      Difference.of_line(x).in_words().replace(' (', '\n('),
    )
  return table

"""Reports the sweep over associative recall in a table and in words.

A line is a model with a width and a number of pairs, at its best learning rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from experiments.reports import head_counts, statistics
from experiments.reports.statistics import Difference, median_range, spread

Lines = Sequence[Mapping[str, Any]]

SOLVED = 0.99
"""The median accuracy from which on a model is said to recall its pairs."""
REFERENCE = 'MHA 4 heads'
"""The model that the others are compared with, at their width and pairs."""


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """A line for each model, width and number of pairs, at its best rate.

  Accuracies are compared with the reference's seed by seed, since seeds share
  batches; where the reference failed a line says nothing of the difference.

  Args:
    rows: of all points, see `points.train_points`.
  """
  models: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
  for row in rows:
    if row['status'] == 'finished':
      place = (row['pairs'], row['d_model'], row['variant'])
      models.setdefault(place, []).append(row)
  best = {
    place: statistics.best_rate(own, head_counts.final_losses)
    for place, own in models.items()
  }
  lines = []
  for (pairs, d_model, name), one in best.items():
    row = one.row
    line = {'pairs': pairs, 'd_model': d_model, 'variant': name}
    line |= {x: row[x] for x in ('params', 'cache_elements')}
    line |= {'seeds': len(row['seeds']), 'learning_rate': one.learning_rate}
    line |= spread('accuracy', row['final_accuracy'])
    line |= spread('final_loss', one.values)
    reference = best.get((pairs, d_model, REFERENCE))
    if reference is not None:
      found = statistics.difference(
        row['final_accuracy'], reference.row['final_accuracy']
      )
      line |= found.columns()
    lines.append(
      line | {'advice': one.advice} | head_counts.fields(row['config'])
    )
  return lines


def table(lines: Lines) -> Table:
  """Accuracies of models and pairs (rows) by width (columns)."""
  caption = (
    'accuracy on validation batches: median (range over seeds) at the learning '
    'rate (lr) with the least median validation loss'
  )
  result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
  result.add_column('model')
  result.add_column('pairs', justify='right')
  widths = sorted({x['d_model'] for x in lines})
  for d in widths:
    result.add_column(f'd_model\n= {d}', justify='right')
  for pairs, own in _groups(lines, 'pairs').items():
    for name, row in _groups(own, 'variant').items():
      cells = {x['d_model']: _cell(x) for x in row}
      result.add_row(name, str(pairs), *(cells.get(d, '') for d in widths))
    result.add_section()
  return result


def _cell(line: Mapping[str, Any]) -> str:
  accuracy = median_range(line, 'accuracy', '.2f')
  return f'{accuracy}\nlr {line["learning_rate"]:g}'


def answers(lines: Lines) -> list[str]:
  """Two sentences for each number of pairs: who solves it, who is alike."""
  found = []
  for pairs, own in _groups(lines, 'pairs').items():
    found.append(f'{_pairs(pairs)}: {_solved(own)}')
    if own[0]['seeds'] > 1:
      found.append(f'{_pairs(pairs)}: {_alike(own)}')
  if lines[0]['seeds'] < 2:
    found.append(
      'One seed alone has no spread to tell models apart by; pass --seeds.'
    )
  return found


def _solved(lines: Lines) -> str:
  """Names the smallest width at which each model reaches SOLVED."""
  least: dict[int, list[str]] = {}
  never = []
  for name, own in _groups(lines, 'variant').items():
    widths = [x['d_model'] for x in own if x['accuracy_median'] >= SOLVED]
    if widths:
      least.setdefault(min(widths), []).append(name)
    else:
      never.append(name)
  parts = [f'{d} ({", ".join(least[d])})' for d in sorted(least)]
  parts += [f'none tried ({", ".join(never)})'] * bool(never)
  return (
    f'the smallest d_model with a median accuracy of {SOLVED:g} or more is '
    f'{", ".join(parts)}.'
  )


def _alike(lines: Lines) -> str:
  """Names the models that are not told apart from the reference."""
  parts = []
  for d, own in sorted(_groups(lines, 'd_model').items()):
    others = [
      x for x in own if x['variant'] != REFERENCE and 'difference_mean' in x
    ]
    same = [x['variant'] for x in others if Difference.of_line(x).sign == 0]
    if others:
      every = len(same) == len(others) > 1
      names = 'all others' if every else ', '.join(same) or 'none'
      parts.append(f'{names} (d_model = {d})')
  if not parts:
    return f'nothing to compare with {REFERENCE}.'
  return f'not told apart from {REFERENCE}: {", ".join(parts)}.'


def advice(lines: Lines) -> list[str]:
  """Names the models whose best rate is the last of those tried."""
  found = []
  for text, own in _groups([x for x in lines if x['advice']], 'advice').items():
    models = [
      f'{name} ({_at(of_model)})'
      for name, of_model in _groups(own, 'variant').items()
    ]
    found.append(f'For {", ".join(models)} {text}.')
  return found


def _at(lines: Lines) -> str:
  """Says where, such as '4 pairs, d_model = 16, 32; 8 pairs, d_model = 16'."""
  return '; '.join(
    f'{_pairs(pairs)}, d_model = {", ".join(str(x["d_model"]) for x in own)}'
    for pairs, own in _groups(lines, 'pairs').items()
  )


def _pairs(count: int) -> str:
  return f'{count} pair{"s" * (count > 1)}'


def _groups(lines: Lines, name: str) -> dict[Any, list[Mapping[str, Any]]]:
  """Lines by the value of a field, in order."""
  found: dict[Any, list[Mapping[str, Any]]] = {}
  for line in lines:
    found.setdefault(line[name], []).append(line)
  return found

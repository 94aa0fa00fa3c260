"""The figure of time and memory against the peers."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, save


def benchmark(cases: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
  """Time, and memory where it was measured, against the length.

  Args:
    cases: causal attention, see `experiments.benchmark.measure`.
    path: the PNG to write.
  """
  full = [
    case
    for case in cases
    if case['setting']['heads'] == case['setting']['kv_heads']
  ]
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 7), layout='constrained')
    panels = figure.subplots(2, 2, sharex=True)
    for column, task in enumerate(('forward', 'forward and backward')):
      rows = [case for case in full if case['task'] == f'causal {task}']
      for axes, name, unit, label in (
        (panels[0][column], 'seconds', 1e-3, 'time (ms)'),
        (panels[1][column], 'peak_bytes', 2**20, 'memory of a run (MiB)'),
      ):
        _against_length(axes, rows, name, unit)
        axes.set_ylabel(label)
      panels[0][column].set_title(task, fontsize=11)
      panels[1][column].set_xlabel('tokens')
    setting = full[0]['setting']
    figure.suptitle(
      f'causal attention, {setting["heads"]} heads of {setting["head_dim"]}, '
      'medians of interleaved runs',
      fontsize=11,
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
      handles, labels, loc='outside lower center', ncols=len(labels)
    )
    save(figure, path)


def _against_length(
  axes: Axes, cases: Sequence[dict[str, Any]], name: str, unit: float
) -> None:
  """A line for each contender, on logarithmic axes."""
  lines: dict[str, list[tuple[int, float]]] = {}
  for case in cases:
    for row in case['rows']:
      if row.get(name) is not None:
        point = (case['setting']['t'], row[name] / unit)
        lines.setdefault(row['contender'], []).append(point)
  styles = zip(lines.items(), 'osD^', ('-', '-', '--', ':'), strict=False)
  for (contender, points), marker, dashes in styles:
    lengths, values = zip(*points, strict=True)
    axes.plot(lengths, values, marker=marker, ls=dashes, label=contender)
  ticks = sorted({case['setting']['t'] for case in cases})
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  axes.set_xticks(ticks, [f'{t:,}' for t in ticks], rotation=30)
  axes.minorticks_off()

"""Figure of accuracy in associative recall against width."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, save

COLUMNS = 3
"""Panels side by side, at most."""
MARKERS = 'osDPXv*<>'


def sweep_recall(
  lines: Sequence[Mapping[str, Any]], title: str, path: pathlib.Path
) -> None:
  """Accuracy against d_model, a panel for each number of pairs.

  Args:
    lines: see `experiments.reports.recall.summarise`.
    title: what was trained.
    path: the PNG to write.
  """
  pairs = sorted({line['pairs'] for line in lines})
  names = list(dict.fromkeys(line['variant'] for line in lines))
  widths = sorted({line['d_model'] for line in lines})
  columns = min(COLUMNS, len(pairs))
  rows = -(-len(pairs) // columns)
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 1 + 3.6 * rows), layout='constrained')
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, n in zip(panels.flat, pairs, strict=False):
      own = [line for line in lines if line['pairs'] == n]
      _panel(axes, own, names)
      _width_axis(axes, widths)
      axes.set_title(f'{n} pair{"s" * (n > 1)}', fontsize=11)
    for axes in panels.flat[len(pairs) :]:
      axes.set_axis_off()
    for axes in panels[:, 0]:
      axes.set_ylabel('accuracy')
    handles = {
      label: handle
      for axes in panels.flat[: len(pairs)]
      for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
      [handles[name] for name in names],
      names,
      loc='outside lower center',
      ncols=len(names),
      fontsize=9,
    )
    seeds = lines[0]['seeds']
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}, each at its best learning '
      'rate: median and range',
      fontsize=11,
    )
    save(figure, path)


def _panel(
  axes: Axes, lines: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
  """A line for each model; they stand a little apart, so that bars show."""
  for i, name in enumerate(names):
    own = sorted(
      (line for line in lines if line['variant'] == name),
      key=lambda line: line['d_model'],
    )
    if not own:
      continue
    widths = np.asarray([line['d_model'] for line in own], float)
    median, low, high = (
      np.asarray([line[f'accuracy_{part}'] for line in own])
      for part in ('median', 'min', 'max')
    )
    axes.errorbar(
      widths * 2 ** (0.05 * (i - (len(names) - 1) / 2)),
      median,
      yerr=(median - low, high - median),
      fmt=f'{MARKERS[i % len(MARKERS)]}-',
      ms=5,
      capsize=2,
      color=f'C{i}',
      label=name,
    )
  axes.set_ylim(-0.03, 1.03)


def _width_axis(axes: Axes, widths: Sequence[int]) -> None:
  """The same in every panel, also where a model is missing."""
  axes.set_xscale('log', base=2)
  axes.set_xticks(widths, [str(d) for d in widths])
  axes.minorticks_off()
  axes.set_xlim(widths[0] / 1.25, widths[-1] * 1.25)
  axes.set_xlabel('d_model')

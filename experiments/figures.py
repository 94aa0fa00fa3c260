"""Figures of the experiments, drawn without a display."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mha_jax.tasks import Task

STYLE: Any = {
  'font.size': 11,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.alpha': 0.3,
  'legend.frameon': False,
}


def sweep_heads(
  rows: Sequence[dict[str, Any]],
  summaries: Sequence[dict[str, Any]],
  threshold: float,
  task: Task,
  path: pathlib.Path,
) -> None:
  """Loss curves and steps to the threshold, by head count.

  Args:
    rows: finished points, see `experiments.sweep_heads.train_seeds`.
    summaries: of the same points, see `experiments.reports.summarise`.
    threshold: the loss (nats) that speed is measured to.
    task: whose name and length go into the title.
    path: the PNG to write.
  """
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 4.2), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _loss_curves(left, rows, threshold)
    _steps_to_threshold(right, rows, summaries, threshold)
    seeds = len(rows[0]['seeds'])
    figure.suptitle(
      f'{type(task).__name__}, sequences of {task.max_len} tokens, '
      f'{seeds} seeds: median, and range over seeds',
      fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _loss_curves(
  axes: Axes, rows: Sequence[dict[str, Any]], threshold: float
) -> None:
  colors = mpl.colormaps['viridis'](np.linspace(0, 0.9, len(rows)))
  for row, color in zip(rows, colors, strict=True):
    losses = np.asarray(row['loss'])
    steps = np.arange(1, losses.shape[1] + 1)
    axes.fill_between(
      steps, losses.min(0), losses.max(0), color=color, alpha=0.25, lw=0
    )
    axes.plot(
      steps, np.median(losses, axis=0), color=color, label=row['n_heads']
    )
  axes.axhline(threshold, color='0.4', ls='--', lw=1)
  axes.annotate(
    f'{threshold:g}',
    (1, threshold),
    xycoords=('axes fraction', 'data'),
    xytext=(-2, 3),
    textcoords='offset points',
    ha='right',
    color='0.4',
  )
  axes.set(xlabel='step', ylabel='training loss (nats per token)', yscale='log')
  axes.set_xlim(left=0)
  axes.legend(title='n_heads', ncols=2)


def _steps_to_threshold(
  axes: Axes,
  rows: Sequence[dict[str, Any]],
  summaries: Sequence[dict[str, Any]],
  threshold: float,
) -> None:
  """Medians with ranges; what never gets there is a triangle at the top."""
  budget = len(rows[0]['loss'][0])
  heads = [s['n_heads'] for s in summaries]
  name = 'steps_to_threshold'
  median, low, high = (
    np.minimum([s[f'{name}_{part}'] for s in summaries], budget)
    for part in ('median', 'min', 'max')
  )
  axes.errorbar(
    heads,
    median,
    yerr=(median - low, high - median),
    marker='o',
    capsize=4,
    color='C0',
  )
  never = [s['n_heads'] for s in summaries if np.isinf(s[f'{name}_max'])]
  if never:
    axes.plot(
      never,
      [budget] * len(never),
      ls='none',
      marker='^',
      ms=9,
      color='C3',
      label=f'not every seed within {budget} steps',
    )
    axes.legend()
  axes.set_xscale('log', base=2)
  axes.set_xticks(heads, [str(h) for h in heads])
  axes.minorticks_off()
  axes.set_ylim(bottom=0)
  axes.set(xlabel='n_heads', ylabel=f'steps to loss < {threshold:g}')

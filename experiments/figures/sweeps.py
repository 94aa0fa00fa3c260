"""Figures of the sweep over head counts, one curve or a study."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, legend_above, save


def sweep_heads(
  rows: Sequence[dict[str, Any]],
  summaries: Sequence[dict[str, Any]],
  threshold: float,
  title: str,
  path: pathlib.Path,
) -> None:
  """Loss curves and steps to the threshold, by head count.

  Args:
    rows: finished points, see `experiments.harness.points.train_point`.
    summaries: of the same points, see `experiments.reports.summarise`.
    threshold: the loss (nats) that speed is measured to.
    title: what was trained.
    path: the PNG to write.
  """
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 4.4), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _loss_curves(left, rows, threshold)
    _steps_to_threshold(right, summaries, threshold)
    seeds = len(rows[0]['seeds'])
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range', fontsize=11
    )
    save(figure, path)


@dataclasses.dataclass(frozen=True)
class Curve:
  """The points of one curve of a study.

  Args:
    panel: the setting that it is drawn in.
    label: its name in the legend.
    summaries: see `experiments.reports.summarise`.
  """

  panel: str
  label: str
  summaries: Sequence[dict[str, Any]]


def study(
  curves: Sequence[Curve], threshold: float, title: str, path: pathlib.Path
) -> None:
  """Final loss above steps to the threshold, by head count, panel by panel.

  Args:
    curves: in order; those of a panel share its axes.
    threshold: the loss (nats) that speed is measured to.
    title: what was trained.
    path: the PNG to write.
  """
  panels = list(dict.fromkeys(curve.panel for curve in curves))
  rows = -(-len(panels) // 2)
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 5.4 * rows), layout='constrained')
    axes = figure.subplots(2 * rows, 2, squeeze=False)
    for panel, place in zip(panels, np.ndindex(rows, 2), strict=False):
      row, column = place
      pair = axes[2 * row][column], axes[2 * row + 1][column]
      own = [curve for curve in curves if curve.panel == panel]
      _study_panel(pair, own, panel)
      pair[0].set_ylabel('final loss (nats)')
      pair[1].set_ylabel(f'steps to loss < {threshold:g}')
    if len(panels) % 2:
      axes[-2][1].set_axis_off()
      axes[-1][1].set_axis_off()
    seeds = curves[0].summaries[0]['seeds']
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range; triangle: '
      'a seed never gets there\nin the steps given (dashed)',
      fontsize=11,
    )
    save(figure, path)


def _study_panel(
  axes: tuple[Axes, Axes], curves: Sequence[Curve], title: str
) -> None:
  """Final loss above steps to the threshold."""
  heads = sorted({s['n_heads'] for c in curves for s in c.summaries})
  for one, name in zip(axes, ('final_loss', 'steps_to_threshold'), strict=True):
    for i, curve in enumerate(curves):
      _median_and_range(one, curve, name, f'C{i}')
    one.set_xscale('log', base=2)
    one.set_xticks(heads, [str(h) for h in heads])
    one.minorticks_off()
  upper, lower = axes
  upper.set_yscale('log')
  budget = max(c.summaries[0]['steps'] for c in curves)
  lower.set_ylim(0, 1.05 * budget)
  lower.axhline(budget, color='0.4', ls='--', lw=1)
  lower.set_xlabel('n_heads')
  short = max(len(curve.label) for curve in curves) < 12
  legend_above(upper, title=title, fontsize=9, ncols=1 + short)


def _median_and_range(
  axes: Axes,
  curve: Curve,
  name: str,
  color: str,
  never_color: str | None = None,
  never_label: str | None = None,
) -> None:
  """Medians with ranges; a triangle at the budget where a seed never ends.

  A median that is infinite is not drawn.
  """
  budget = curve.summaries[0]['steps']
  heads = np.asarray([s['n_heads'] for s in curve.summaries])
  median, low, high = (
    np.asarray([s[f'{name}_{part}'] for s in curve.summaries])
    for part in ('median', 'min', 'max')
  )
  known, never = np.isfinite(median), np.isinf(high)
  top = np.where(never, budget, high)
  axes.errorbar(
    heads[known],
    median[known],
    yerr=(median[known] - low[known], top[known] - median[known]),
    marker='o',
    ms=5,
    capsize=3,
    color=color,
    label=curve.label,
  )
  if never.any():
    axes.plot(
      heads[never],
      np.full(never.sum(), budget),
      ls='none',
      marker='^',
      color=never_color or color,
      label=never_label,
    )


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
  if min(np.min(row['loss']) for row in rows) < threshold:
    axes.axhline(threshold, color='0.4', ls='--', lw=1)
    axes.annotate(
      f'loss {threshold:g}',
      (0, threshold),
      xycoords=('axes fraction', 'data'),
      xytext=(4, 3),
      textcoords='offset points',
      color='0.3',
    )
  axes.set(xlabel='step', ylabel='training loss (nats per token)', yscale='log')
  axes.set_xlim(left=0)
  legend_above(axes, title='n_heads', ncols=min(len(rows), 6))


def _steps_to_threshold(
  axes: Axes, summaries: Sequence[dict[str, Any]], threshold: float
) -> None:
  """Medians with ranges; a triangle where a seed never gets there."""
  heads = [s['n_heads'] for s in summaries]
  curve = Curve('', 'median and range', summaries)
  never = f'not every seed within {summaries[0]["steps"]} steps'
  _median_and_range(axes, curve, 'steps_to_threshold', 'C0', 'C3', never)
  if np.isinf([s['steps_to_threshold_max'] for s in summaries]).any():
    legend_above(axes)
  axes.set_xscale('log', base=2)
  axes.set_xticks(heads, [str(h) for h in heads])
  axes.minorticks_off()
  axes.set_ylim(bottom=0)
  axes.set(xlabel='n_heads', ylabel=f'steps to loss < {threshold:g}')

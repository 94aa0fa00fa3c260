"""Figures of the sweep over head counts, one curve or a study."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.figures.style import STYLE, legend_above, save
from experiments.reports.head_counts import Summary

MARKERS = 'osDPXv*<>'
"""Of the learning rates, in order; a triangle upwards says never."""


@dataclasses.dataclass(frozen=True)
class Curve:
  """The head counts of one curve.

  Args:
    panel: the setting that it is drawn in.
    label: its name in the legend.
    summaries: of its head counts.
  """

  panel: str
  label: str
  summaries: Sequence[Summary]


def sweep_heads(
  curve: Curve, threshold: float, title: str, path: pathlib.Path
) -> None:
  """Loss curves and steps to the threshold, by head count.

  Args:
    curve: the head counts, each drawn at its best learning rates.
    threshold: the loss (nats) that speed is measured to.
    title: what was trained.
    path: the PNG to write.
  """
  lines = [x.line for x in curve.summaries]
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 4.6), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _loss_curves(left, curve.summaries, threshold)
    _median_and_range(
      right,
      dataclasses.replace(curve, label=''),
      'steps_to_threshold',
      'C0',
      _rates([curve]),
    )
    _head_count_axis(right, [line['n_heads'] for line in lines])
    right.set_ylim(0, 1.06 * _top(lines))
    right.set_ylabel(f'steps to loss < {threshold:g}')
    legend_above(right, handles=_rate_legend([curve]), ncols=2)
    figure.suptitle(f'{title}, {_seeds(lines)}: median and range', fontsize=11)
    save(figure, path)


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
      _study_panel(pair, own, panel, _rates(curves))
      pair[0].set_ylabel('final loss (nats)')
      pair[1].set_ylabel(f'steps to loss < {threshold:g}')
    if len(panels) % 2:
      axes[-2][1].set_axis_off()
      axes[-1][1].set_axis_off()
    figure.legend(
      handles=_rate_legend(curves),
      loc='outside lower center',
      fontsize=9,
      ncols=6,
    )
    lines = [curves[0].summaries[0].line]
    figure.suptitle(
      f'{title}, {_seeds(lines)}: median and range, every point at its best\n'
      'learning rate; dashed: the steps that were taken',
      fontsize=11,
    )
    save(figure, path)


def _study_panel(
  axes: tuple[Axes, Axes],
  curves: Sequence[Curve],
  title: str,
  rates: Sequence[float],
) -> None:
  """Final loss above steps to the threshold."""
  heads = sorted({s.n_heads for c in curves for s in c.summaries})
  for one, name in zip(axes, ('final_loss', 'steps_to_threshold'), strict=True):
    for i, curve in enumerate(curves):
      _median_and_range(one, curve, name, f'C{i}', rates)
    _head_count_axis(one, heads)
  upper, lower = axes
  upper.set_yscale('log')
  budgets = [curve.summaries[0].line['steps'] for curve in curves]
  lower.set_ylim(0, 1.06 * max(budgets))
  for i, budget in enumerate(budgets):
    shared = budgets.count(budget) > 1
    color = '0.4' if shared else f'C{i}'
    lower.axhline(budget, color=color, ls='--', lw=1, zorder=0)
  short = max(len(curve.label) for curve in curves) < 12
  legend_above(upper, title=title, fontsize=9, ncols=1 + short)


def _head_count_axis(axes: Axes, heads: Sequence[int]) -> None:
  axes.set_xscale('log', base=2)
  axes.set_xticks(heads, [str(h) for h in heads])
  axes.minorticks_off()
  axes.set_xlabel('n_heads')


def _seeds(lines: Sequence[dict[str, Any]]) -> str:
  count = lines[0]['seeds']
  return f'{count} seed{"s" * (count > 1)}'


def _top(lines: Sequence[dict[str, Any]]) -> float:
  """The greatest number of steps that a curve shows."""
  most = [line['steps_to_threshold_max'] for line in lines]
  return max(min(x, line['steps']) for x, line in zip(most, lines, strict=True))


def _rates(curves: Sequence[Curve]) -> list[float]:
  """All learning rates that were tried."""
  return sorted(
    {
      float(rate)
      for curve in curves
      for x in curve.summaries
      for rate in x.line['learning_rates'].split()
    }
  )


def _rate_legend(curves: Sequence[Curve]) -> list[Line2D]:
  """A marker for each learning rate, and one where a seed never got there."""
  named = [
    (marker, f'rate {rate:g}')
    for marker, rate in zip(MARKERS, _rates(curves), strict=False)
  ]
  lines = [x.line for curve in curves for x in curve.summaries]
  ends = ('steps_to_threshold_max', 'final_loss_max')
  if any(np.isinf(line[end]) for line in lines for end in ends):
    named.append(('^', 'a seed never gets there'))
  return [
    Line2D([], [], ls='none', marker=marker, color='0.3', label=label)
    for marker, label in named
  ]


def _median_and_range(
  axes: Axes, curve: Curve, name: str, color: str, rates: Sequence[float]
) -> None:
  """Medians with ranges; a triangle where a seed never gets there.

  It stands at the steps that were taken, or at the loss before training. The
  marker tells the learning rate. A median that is infinite is not drawn.
  """
  lines = [s.line for s in curve.summaries]
  speed = name == 'steps_to_threshold'
  ceiling = max(
    line['steps'] if speed else summary.worst
    for line, summary in zip(lines, curve.summaries, strict=True)
  )
  heads = np.asarray([line['n_heads'] for line in lines])
  median, low, high = (
    np.asarray([line[f'{name}_{part}'] for line in lines])
    for part in ('median', 'min', 'max')
  )
  known, never = np.isfinite(median), np.isinf(high)
  top = np.where(never, ceiling, high)
  axes.errorbar(
    heads[known],
    median[known],
    yerr=(median[known] - low[known], top[known] - median[known]),
    capsize=3,
    color=color,
    label=curve.label,
  )
  of = 'speed_' if speed else ''
  chosen = np.asarray([line[f'{of}learning_rate'] for line in lines])
  for marker, rate in zip(MARKERS, rates, strict=False):
    here = known & (chosen == rate)
    axes.plot(
      heads[here], median[here], ls='none', marker=marker, ms=6, color=color
    )
  if never.any():
    axes.plot(
      heads[never],
      np.full(never.sum(), ceiling),
      ls='none',
      marker='^',
      color=color,
    )


def _loss_curves(
  axes: Axes, summaries: Sequence[Summary], threshold: float
) -> None:
  """Training losses, each head count at the rate of its least final loss."""
  colors = mpl.colormaps['viridis'](np.linspace(0, 0.9, len(summaries)))
  every = [np.asarray(x.final.row['loss'], float) for x in summaries]
  # What is not finite lies above all that is, off the axis.
  every = [np.nan_to_num(x, nan=np.inf, posinf=np.inf) for x in every]
  known = np.concatenate([x[np.isfinite(x)] for x in every])
  least = known.min(initial=np.inf)
  top = known.max(initial=least)
  for summary, losses, color in zip(summaries, every, colors, strict=True):
    steps = np.arange(1, losses.shape[1] + 1)
    low, high = (np.minimum(x, top) for x in (losses.min(0), losses.max(0)))
    axes.fill_between(steps, low, high, color=color, alpha=0.25, lw=0)
    rate = summary.final.learning_rate
    gone = int(np.isinf(summary.final.values).sum())
    of = f', {gone} of {len(losses)} diverged' * bool(gone)
    axes.plot(
      steps,
      np.median(losses, axis=0),
      color=color,
      label=f'{summary.n_heads} (rate {rate:g}{of})',
    )
  if least < threshold:
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
  legend_above(axes, title='n_heads', ncols=min(len(summaries), 3))

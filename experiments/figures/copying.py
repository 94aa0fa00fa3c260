"""The figure of what heads do in the copy task."""

import pathlib
from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, legend_above, save
from experiments.reports import copying
from experiments.reports.copying import CARRIES, COST, IDLE, THRESHOLD, Summary

SURE = float(np.log(0.99 / 0.01))
"""The log odds of a weight of 0.99."""


def copy_heads(
  summaries: Sequence[Summary], title: str, path: pathlib.Path
) -> None:
  """Attention by head, rank and log odds by step, and speed by scale.

  Args:
    summaries: of each head count and scale; the first three panels are of the
      usual scale.
    title: the setting.
    path: the PNG to write.
  """
  usual = copying.usual(summaries)
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 8.4), layout='constrained')
    (attention, rank), (margin, speed) = figure.subplots(2, 2)
    _attention(attention, usual)
    _over_steps(rank, usual, lambda x: _snapshots(x, 'rank').mean(axis=2))
    rank.set_ylabel('effective rank of\nthe position scores')
    rank.set_ylim(bottom=0)
    _over_steps(margin, usual, _best_margin)
    margin.axhline(SURE, color='0.4', ls='--', lw=1)
    margin.set_ylabel('log odds of the right source\nby positions, best head')
    _speed(speed, summaries)
    seeds = usual[0].line['seeds']
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range\n'
      f'all but the last panel at scale {usual[0].line["scale"]}; dashed in '
      'the third: a weight of 0.99',
      fontsize=11,
    )
    save(figure, path)


def _attention(axes: Axes, usual: Sequence[Summary]) -> None:
  """A dot for each head, a column for each seed; hollow: nothing is lost."""
  ticks, start = [], 0.0
  for i, summary in enumerate(usual):
    seeds = list(dict.fromkeys(x['seed'] for x in summary.heads))
    for head in summary.heads:
      lost = head['accuracy'] - head['accuracy_without'] >= COST
      axes.plot(
        start + seeds.index(head['seed']),
        head['attention_to_source'],
        marker='o',
        ms=6,
        color=f'C{i}',
        mfc=f'C{i}' if lost else 'none',
        ls='none',
      )
    ticks.append(start + (len(seeds) - 1) / 2)
    start += len(seeds) + 1
  for height in (CARRIES, IDLE):
    axes.axhline(height, color='0.4', ls=':', lw=1)
  names = [str(x.line['n_heads']) for x in usual]
  axes.set_xticks(ticks, names)
  axes.set(xlabel='n_heads; a column a seed', ylim=(-0.03, 1.03))
  axes.set_ylabel('attention to the source')
  axes.set_title(
    f'filled: {COST} of accuracy is lost without the head', fontsize=9
  )


def _snapshots(summary: Summary, name: str) -> np.ndarray:
  """(snapshots, seeds, h) of a number."""
  return np.asarray(summary.row[name], float)


def _best_margin(summary: Summary) -> np.ndarray:
  """(snapshots, seeds): of the head whose margin is greatest at the end."""
  best = copying.best_heads(summary.row)[None, :, None]
  margin = _snapshots(summary, 'margin')
  return np.take_along_axis(margin, best, axis=2)[..., 0]


def _over_steps(
  axes: Axes,
  usual: Sequence[Summary],
  values_of: Callable[[Summary], np.ndarray],
) -> None:
  """Median and range at every snapshot, over the seeds that did not diverge."""
  for i, summary in enumerate(usual):
    line, steps = summary.line, summary.row['snapshots']
    values = values_of(summary)[:, ~copying.diverged(summary.row)]
    label = f'{line["n_heads"]} x {line["head_dim"]}'
    if line['diverged']:
      label += f', {line["diverged"]} of {line["seeds"]} diverged'
    if not values.size:
      values = np.full((len(steps), 1), np.nan)  # named, and not drawn
    color = f'C{i}'
    axes.plot(
      steps, np.median(values, axis=1), marker='o', ms=4, c=color, label=label
    )
    axes.fill_between(
      steps, values.min(1), values.max(1), color=color, alpha=0.2, lw=0
    )
  axes.set_xlabel('step')
  legend_above(axes, title='n_heads x head_dim', fontsize=9, ncols=3)


def _speed(axes: Axes, summaries: Sequence[Summary]) -> None:
  """Steps to the threshold against the scale; a star: 1 / sqrt(head_dim)."""
  budget = summaries[0].line['steps']
  for i, h in enumerate(dict.fromkeys(x.line['n_heads'] for x in summaries)):
    own = [x.line for x in summaries if x.line['n_heads'] == h]
    own.sort(key=lambda line: line['score_scale'])
    scales = [line['score_scale'] for line in own]
    low, median, high = (
      np.minimum([line[f'steps_to_threshold_{x}'] for line in own], budget)
      for x in ('min', 'median', 'max')
    )
    axes.errorbar(
      scales,
      median,
      yerr=(median - low, high - median),
      capsize=3,
      color=f'C{i}',
      label=str(own[0]['head_dim']),
    )
    for x, y, line in zip(scales, median, own, strict=True):
      never = np.isinf(line['steps_to_threshold_median'])
      usual = line['scale'] == copying.SQRT
      marker = '^' if never else '*' if usual else 'o'
      size = 12 if usual else 6
      axes.plot(x, y, marker=marker, ms=size, color=f'C{i}', ls='none')
  every = sorted({float(f'{x.line["score_scale"]:.3g}') for x in summaries})
  axes.set_xscale('log')
  axes.set_xticks(every, [f'{x:g}' for x in every], rotation=45)
  axes.minorticks_off()
  axes.set_xlabel('scale of the scores; star: 1 / sqrt(head_dim)')
  axes.set_ylabel(f'steps to loss < {THRESHOLD:g}; triangle: never')
  axes.set_ylim(0, 1.1 * budget)
  legend_above(axes, title='head_dim', fontsize=9, ncols=3)

"""Figures of the experiments, drawn without a display."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
  title: str,
  path: pathlib.Path,
) -> None:
  """Loss curves and steps to the threshold, by head count.

  Args:
    rows: finished points, see `experiments.sweep_heads.train_seeds`.
    summaries: of the same points, see `experiments.reports.summarise`.
    threshold: the loss (nats) that speed is measured to.
    title: what was trained.
    path: the PNG to write.
  """
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 4.4), layout='constrained')
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _loss_curves(left, rows, threshold)
    _steps_to_threshold(right, rows, summaries, threshold)
    seeds = len(rows[0]['seeds'])
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range', fontsize=11
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
  _legend_above(axes, title='n_heads', ncols=min(len(rows), 6))


def _steps_to_threshold(
  axes: Axes,
  rows: Sequence[dict[str, Any]],
  summaries: Sequence[dict[str, Any]],
  threshold: float,
) -> None:
  """Medians with ranges; a triangle where a seed never gets there."""
  budget = len(rows[0]['loss'][0])
  heads = np.asarray([s['n_heads'] for s in summaries])
  median, low, high = (
    np.asarray([s[f'steps_to_threshold_{part}'] for s in summaries])
    for part in ('median', 'min', 'max')
  )
  known = np.isfinite(median)
  top = np.minimum(high, budget)
  axes.errorbar(
    heads[known],
    median[known],
    yerr=(median[known] - low[known], top[known] - median[known]),
    marker='o',
    capsize=4,
  )
  never = np.isinf(high)
  if never.any():
    axes.plot(
      heads[never],
      np.full(never.sum(), budget),
      ls='none',
      marker='^',
      ms=9,
      color='C3',
      label=f'not every seed within {budget} steps',
    )
    _legend_above(axes)
  axes.set_xscale('log', base=2)
  axes.set_xticks(heads, [str(h) for h in heads])
  axes.minorticks_off()
  axes.set_ylim(bottom=0)
  axes.set(xlabel='n_heads', ylabel=f'steps to loss < {threshold:g}')


def _legend_above(axes: Axes, **kwargs: Any) -> None:
  """A legend that no curve can run through."""
  axes.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), **kwargs)


def kv_cache(
  rows: Sequence[dict[str, Any]], title: str, path: pathlib.Path
) -> None:
  """Cache bytes and parameters of each variant, as shares of MHA's.

  Args:
    rows: see `experiments.kv_cache.main`; the first is MHA.
    title: the setting.
    path: the PNG to write.
  """
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(10, 4.4), layout='constrained')
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row['variant'] for row in rows]
    for axes, share, label in (
      (left, [row['cache_share'] for row in rows], 'KV cache'),
      (right, [1 - row['params_drop'] for row in rows], 'attention parameters'),
    ):
      bars = axes.barh(names, share, color='#4c72b0')
      axes.bar_label(bars, [f'{x:.1%}' for x in share], padding=4)
      axes.set_xlabel(f'{label}, share of MHA')
      axes.set_xlim(0, 1.2 * max(share))
      axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
      axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
      axes.grid(axis='y', visible=False)
      axes.set_axisbelow(True)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


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
    figure.savefig(path, dpi=150)


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

"""Figures of the experiments, drawn without a display."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mha_jax.analysis import probing
from mha_jax.analysis.candidates import Demand
from mha_jax.analysis.configurator import MQA_LOSS, Choice, quality
from mha_jax.analysis.costs import ModelShape, cache_bytes, counted
from mha_jax.analysis.published import Published
from mha_jax.analysis.roofline import decode_step
from mha_jax.analysis.rules import Costed

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
    rows: finished points, see `experiments.points.train_seeds`.
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
    figure.savefig(path, dpi=150)


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
  _legend_above(upper, title=title, fontsize=9, ncols=1 + short)


def _median_and_range(axes: Axes, curve: Curve, name: str, color: str) -> None:
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
  axes.plot(
    heads[never],
    np.full(never.sum(), budget),
    ls='none',
    marker='^',
    color=color,
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


def mla_rank(
  lines: Sequence[dict[str, Any]], title: str, path: pathlib.Path
) -> None:
  """Loss against cache, both relative to MHA.

  Args:
    lines: see `experiments.mla_rank.summarise`.
    title: the setting.
    path: the PNG to write.
  """
  rotary = list(dict.fromkeys(line['rotary'] for line in lines))
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(5.2 * len(rotary), 4.8), layout='constrained')
    panels = figure.subplots(1, len(rotary), squeeze=False, sharey=True)[0]
    for axes, p in zip(panels, rotary, strict=True):
      own = [line for line in lines if line['rotary'] == p]
      latent = [line for line in own if line['rank'] is not None]
      others = [line for line in own if line['rank'] is None]
      _difference(axes, latent, 'MLA', 'o-')
      for i, line in enumerate(others, 1):
        _difference(axes, [line], line['variant'], 's', f'C{i}')
      for line in latent:
        axes.annotate(
          ('r = ' if line is latent[0] else '') + str(line['rank']),
          (line['cache_share'], 0.97),
          xycoords=('data', 'axes fraction'),
          ha='center',
          color='C0',
          fontsize=9,
        )
      axes.axvline(1 / 8, ymax=0.95, color='0.4', ls='--', lw=1, zorder=0)
      axes.margins(y=0.12)
      axes.axhline(0, color='0.4', lw=1, zorder=0)
      axes.set_xscale('log', base=2)
      axes.xaxis.set_major_formatter(
        lambda x, _: f'1/{1 / x:g}' if x < 1 else f'{x:g}'
      )
      positions = f'RoPE, p = {p}' if p else 'learned positions, p = 0'
      axes.set_title(positions, fontsize=11)
      axes.set_xlabel("cached elements a token, share of MHA's")
      axes.legend(
        loc='upper center', bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9
      )
    panels[0].set_ylabel("validation loss minus MHA's (bits per token)")
    seeds = lines[0]['seeds']
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range', fontsize=11
    )
    figure.savefig(path, dpi=150)


def _difference(
  axes: Axes,
  lines: Sequence[dict[str, Any]],
  label: str,
  style: str,
  color: str = 'C0',
) -> None:
  median, low, high = (
    np.asarray([line[f'difference_{part}'] for line in lines])
    for part in ('median', 'min', 'max')
  )
  axes.errorbar(
    [line['cache_share'] for line in lines],
    median,
    yerr=(median - low, high - median),
    fmt=style,
    capsize=3,
    label=label,
    color=color,
  )


def probe_heads(
  maps: Sequence[Any],
  rows: Sequence[dict[str, Any]],
  divergences: Sequence[Any],
  title: str,
  path: pathlib.Path,
) -> None:
  """The first example's maps, what heads have in common, and the rollout.

  Args:
    maps: (b, h, t, t) of each layer.
    rows: of each head, see `experiments.probe_heads.score`.
    divergences: (h, h) of each layer, in bits.
    title: the setting.
    path: the PNG to write.
  """
  columns = max(layer.shape[1] for layer in maps) + 2
  rollouts = [probing.rollout(maps[: i + 1]) for i in range(len(maps))]
  with mpl.rc_context(STYLE | {'axes.grid': False}):
    size = (1.7 * columns + 0.6, 2.25 * len(maps) + 0.5)
    figure = Figure(figsize=size, layout='constrained')
    axes = figure.subplots(len(maps), columns, squeeze=False)
    for axis in axes.flat:
      axis.set_axis_off()
    for row in rows:
      layer, head = row['layer'], row['head']
      name = f'\n{row["name"]}' if row['name'] else ''
      _map(axes[layer][head], maps[layer][0, head], f'{layer}.{head}{name}')
    for layer, line in enumerate(axes):
      _map(line[-2], divergences[layer], 'JS divergence\nof heads')
      _map(line[-1], rollouts[layer][0], f'rollout to\nlayer {layer}')
    image = axes[0][0].images[0]
    figure.colorbar(
      image, ax=axes, shrink=0.6, label='weight; divergence in bits'
    )
    figure.suptitle(
      f'{title}\nan example: queries down, keys across; darker is more',
      fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _map(axes: Axes, values: Any, title: str) -> None:
  axes.set_axis_on()
  axes.imshow(np.asarray(values), cmap='Blues', vmin=0, vmax=1)
  axes.set_xticks([])
  axes.set_yticks([])
  axes.set_title(title, fontsize=9)


def prune_heads(
  curves: Sequence[dict[str, Any]], title: str, path: pathlib.Path
) -> None:
  """Loss against the share of heads that is gone, by order.

  Args:
    curves: see `experiments.prune_heads.removal_curves`.
    title: the setting.
    path: the PNG to write.
  """
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(7, 4.4), layout='constrained')
    axes = figure.subplots()
    for name, marker in (('random', 'o'), ('importance', 's'), ('oracle', 'D')):
      own = [row for row in curves if row['order'] == name]
      shares = sorted({row['share'] for row in own})
      losses = [[x['loss'] for x in own if x['share'] == s] for s in shares]
      median = [np.median(x) for x in losses]
      (line,) = axes.plot(shares, median, marker=marker, ms=5, label=name)
      axes.fill_between(
        shares,
        [min(x) for x in losses],
        [max(x) for x in losses],
        color=line.get_color(),
        alpha=0.15,
        lw=0,
      )
    axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    axes.set(xlabel='heads removed', ylabel='loss (nats per token)')
    axes.legend(title='order')
    seeds = len({row['seed'] for row in curves})
    figure.suptitle(
      f'{title}, {seeds} seed{"s" * (seeds > 1)}: median and range', fontsize=11
    )
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


def configure_heads(
  choice: Choice, models: Sequence[Published], path: pathlib.Path
) -> None:
  """Cache a token against the time of a decode step.

  Args:
    choice: the recommendation and what else there is.
    models: three published ones to mark.
    path: the PNG to write.
  """
  demand = choice.best.demand
  with mpl.rc_context(STYLE):
    figure = Figure(figsize=(8, 5.6), layout='constrained')
    axes = figure.subplots()
    feasible = [
      _cache_and_step(x.candidate.shape, demand) for x in choice.feasible
    ]
    marked = [_cache_and_step(model.shape, demand) for model in models]
    x, y = zip(*feasible, strict=True)
    axes.scatter(x, y, s=9, c='0.82', label='feasible')
    dots = _strategies(axes, choice)
    for model, at, marker in zip(models, marked, 'Dsv', strict=True):
      axes.plot(*at, marker, mfc='w', mec='C3', ms=8, label=model.name)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', base=2)
    times = [y for _, y in feasible + marked]
    low, high = min(times), max(times)
    room = (high / low) ** 0.2  # for the labels below
    axes.set_ylim(low / max(room, 1.6), max(1.15 * high, 2.5 * low))
    for axis in (axes.xaxis, axes.yaxis):
      axis.set_major_formatter(lambda x, _: f'{x:.4g}')
    axes.set_xlabel('KV cache (KiB a token, all layers)')
    axes.set_ylabel('decode step, by roofline (ms)')
    figure.colorbar(dots, label='points lost to multi-head (proxy)')
    figure.legend(loc='outside lower center', ncols=4, fontsize=10)
    figure.suptitle(
      f'{counted(demand.params)} parameters, {demand.seq_len:,} tokens, batch '
      f'{demand.batch}, {demand.devices} x {demand.hardware.name}',
      fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _cache_and_step(shape: ModelShape, demand: Demand) -> tuple[float, float]:
  """KiB of a token's cache, on average over a sequence, and ms of a step."""
  length, dtype = demand.seq_len, demand.cache_dtype
  cache = cache_bytes(shape, length, dtype=dtype) / length
  step = decode_step(shape, demand.place, length, demand.batch)
  return cache / 1024, step.seconds * 1e3


def _strategies(axes: Axes, choice: Choice) -> Any:
  """Dots coloured by the proxy, rings on the front, a star on the best."""

  def at(x: Costed) -> tuple[float, float]:
    return _cache_and_step(x.candidate.shape, x.demand)

  front, rows = choice.front, choice.strategies
  axes.scatter(
    [at(x)[0] for x in front],
    [at(x)[1] for x in front],
    s=220,
    facecolors='none',
    edgecolors='C0',
    linewidths=2,
    label='Pareto front',
  )
  dots = axes.scatter(
    [at(x)[0] for x in rows],
    [at(x)[1] for x in rows],
    s=60,
    c=[-quality(x.candidate.attention) for x in rows],
    cmap='viridis_r',
    vmin=0,
    vmax=MQA_LOSS,
    edgecolors='k',
    zorder=3,
    label='strategies',
  )
  for x in rows:
    axes.annotate(
      x.candidate.strategy,
      at(x),
      xytext=(8, -11),
      textcoords='offset points',
      rotation=-35,
      rotation_mode='anchor',
      fontsize=10,
    )
  axes.plot(
    *at(choice.best), 'r*', ms=20, mec='k', zorder=2.9, label='recommended'
  )
  return dots

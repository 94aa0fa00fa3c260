"""Figures of cache against parameters and against loss."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, save
from experiments.reports.statistics import CONFIDENCE


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
    save(figure, path)


def mla_rank(
  lines: Sequence[dict[str, Any]], title: str, path: pathlib.Path
) -> None:
  """Loss against cache, both relative to MHA.

  Args:
    lines: see `experiments.reports.latent_ranks.summarise`.
    title: the setting.
    path: the PNG to write.
  """
  rotary = list(dict.fromkeys(line['rotary'] for line in lines))
  with mpl.rc_context(STYLE):
    width = max(7.5, 5.2 * len(rotary))
    figure = Figure(figsize=(width, 4.8), layout='constrained')
    panels = figure.subplots(1, len(rotary), squeeze=False, sharey=True)[0]
    for axes, p in zip(panels, rotary, strict=True):
      own = [line for line in lines if line['rotary'] == p]
      latent = [line for line in own if line['rank'] is not None]
      others = [line for line in own if line['rank'] is None]
      plain = [line for line in latent if not line['latent_norm']]
      normed = [line for line in latent if line['latent_norm']]
      _difference(axes, normed, 'MLA', 'o-')
      if plain:
        _difference(axes, plain, 'MLA, no norm', 'o--', 'C9')
      for i, line in enumerate(others, 1):
        _difference(axes, [line], line['variant'], 's', f'C{i}')
      for line in normed:
        axes.annotate(
          ('r = ' if line is normed[0] else '') + str(line['rank']),
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
      f'{title}\n{seeds} seed{"s" * (seeds > 1)}, each model at its best '
      f'learning rate: mean and {CONFIDENCE:.0%} interval',
      fontsize=11,
    )
    save(figure, path)


def _difference(
  axes: Axes,
  lines: Sequence[dict[str, Any]],
  label: str,
  style: str,
  color: str = 'C0',
) -> None:
  mean, low, high = (
    np.asarray([line[f'difference_{part}'] for line in lines])
    for part in ('mean', 'low', 'high')
  )
  axes.errorbar(
    [line['cache_share'] for line in lines],
    mean,
    yerr=(mean - low, high - mean),
    fmt=style,
    capsize=3,
    label=label,
    color=color,
  )

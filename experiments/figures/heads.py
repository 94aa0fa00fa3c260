"""Figures of what heads attend to, and of the loss without them."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from experiments.figures.style import STYLE, save
from mha_jax.analysis import probing


def probe_heads(
  maps: Sequence[jax.Array],
  rows: Sequence[dict[str, Any]],
  divergences: Sequence[jax.Array],
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
    save(figure, path)


def _map(axes: Axes, values: ArrayLike, title: str) -> None:
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
    save(figure, path)

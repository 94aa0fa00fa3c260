"""The figure of decoders to choose from."""

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures.style import STYLE, save
from mha_jax.analysis.configurator.choice import Choice
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.configurator.quality import MQA_LOSS, quality
from mha_jax.analysis.configurator.rules import Costed
from mha_jax.analysis.costs.counts import cache_bytes, counted
from mha_jax.analysis.costs.published import Published
from mha_jax.analysis.costs.roofline import decode_step
from mha_jax.analysis.costs.shape import ModelShape


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
    save(figure, path)


def _cache_and_step(shape: ModelShape, demand: Demand) -> tuple[float, float]:
  """KiB of a token's cache, on average over a sequence, and ms of a step."""
  length, dtype = demand.seq_len, demand.kv_dtype
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
    label='front of the strategies',
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

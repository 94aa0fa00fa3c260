"""Which heads matter: importance, ablation, and pruning for real.

  python -m experiments.prune_heads
  python -m experiments.prune_heads --run=runs/copy_task --kind=mean
  python -m experiments.prune_heads --config=configs/copy_task.py:tiny

Removes heads one after the other: by importance (Michel et al. 2019, one
gradient an example), by the oracle (the loss without each single head), and in
random orders, and draws the loss on other examples against the share that is
gone. Then prunes a share of the heads for real and holds the smaller model
against the one with gates. Trains a model for each seed first, or takes a
recorded run. Writes curves.csv, pruned.csv and prune_heads.png.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict
from rich import box
from rich.table import Table

from experiments.figures import heads as heads_figures
from experiments.harness import (
  command_line,
  folders,
  printing,
  settings,
  timing,
  trained,
)
from experiments.harness.trained import BATCH_SIZE
from experiments.reports import head_counts
from experiments.suites.case import compiled
from mha_jax.analysis import pruning
from mha_jax.attention import checks
from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.training import record

MODELS = flags.DEFINE_integer(
  'models', 3, 'models to train, seeds from train.seed on', 1, 1000
)
ORDERS = flags.DEFINE_integer(
  'random_orders', 8, 'random orders a model', 1, 10_000
)
KIND = flags.DEFINE_enum(
  'kind', 'zero', pruning.KINDS, 'what stands in place of a head'
)
SHARE = flags.DEFINE_float('share', 0.5, 'share of the heads to prune for real')

ROUNDS = 11  # times that the pruned and the whole model run


@dataclasses.dataclass(frozen=True)
class Settings:
  run: pathlib.Path | None
  config: ConfigDict
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  checks.real('--share', SHARE.value, 0, 1)
  run = trained.run_folder('models')
  trained.check_even_heads(
    settings.recorded_experiment(run)
    if run
    else trained.experiments(config, MODELS.value)[0]
  )
  name = run.name if run else config.name
  workdir = folders.named(f'prune_heads-{name}')
  asked = folders.asked(config, run=run)
  record.check_same_config(workdir, asked)
  return Settings(run, config, workdir, asked)


def main(chosen: Settings) -> int:
  with folders.kept(chosen.workdir, chosen.asked):
    return answer(chosen)


def answer(chosen: Settings) -> int:
  """Trains or loads the models, and prunes them."""
  if chosen.run is None:
    models, stopped_by = trained.train_models(
      chosen.config, MODELS.value, chosen.workdir
    )
    if stopped_by is not None:
      return command_line.exit_code(stopped_by)
  else:
    models = [trained.load(chosen.run)]
    settings.announce(x.experiment for x in models)
  curves = [row for model in models for row in removal_curves(model)]
  pruned = [prune(model) for model in models]
  report(models, curves, pruned, chosen)
  return 0


def removal_curves(model: trained.Model) -> list[dict[str, Any]]:
  """Losses after 0, 1, 2, ... heads are gone, by each order."""
  config, params = model.experiment.model, model.params
  ranked, measured = (trained.batch(model, i, BATCH_SIZE.value) for i in (0, 1))
  kind = KIND.value
  importance = pruning.head_importance(config, params, ranked, kind=kind)
  oracle, _ = pruning.ablation_losses(config, params, ranked, kind)
  keys = jax.random.split(
    jax.random.key(model.experiment.train.seed), ORDERS.value
  )
  scores = [('importance', importance), ('oracle', oracle)]
  scores += [('random', jax.random.uniform(x, oracle.shape)) for x in keys]
  rows = []
  for name, score in scores:
    order = pruning.order_by(score)
    curve = pruning.removal_curve(config, params, measured, order, kind)
    for gone, loss in enumerate(curve.tolist()):
      row = {'seed': model.experiment.train.seed, 'order': name}
      rows.append(
        row | {'gone': gone, 'share': gone / len(order), 'loss': loss}
      )
  return rows


def prune(model: trained.Model) -> dict[str, Any]:
  """The model with and without the share of least important heads."""
  config, params = model.experiment.model, model.params
  ranked, measured = (trained.batch(model, i, BATCH_SIZE.value) for i in (0, 1))
  scores = pruning.head_importance(config, params, ranked, kind=KIND.value)
  keep = pruning.keep_most(config, scores, 1 - SHARE.value)
  gates = jnp.asarray(keep, jnp.float32)
  smaller, fewer = pruning.prune_heads(config, params, list(keep))
  inputs, whole = measured.inputs, DecoderLM(config)
  runs = {
    'pruned': compiled(DecoderLM(smaller).apply, {'params': fewer}, inputs),
    'whole': compiled(whole.apply, {'params': params}, inputs),
  }
  gated = jax.jit(whole.apply)({'params': params}, inputs, head_gates=gates)
  difference: Any = jnp.abs(runs['pruned']() - gated)
  loss = jax.jit(pruning.loss_with_gates, static_argnums=0)
  none_closed = [jnp.ones(x.num_heads) for x in smaller.layers]
  seconds = timing.interleaved(runs, ROUNDS)
  assert seconds is not None  # nothing asks it to stop
  return {
    'seed': model.experiment.train.seed,
    'heads': keep.size,
    'heads_kept': int(keep.sum()),
    'loss': float(loss(config, params, measured, jnp.ones(keep.shape))),
    'loss_pruned': float(loss(smaller, fewer, measured, none_closed)),
    'error': float(jnp.max(difference) / jnp.max(jnp.abs(gated))),
    'params': _size(params),
    'params_pruned': _size(fewer),
    'cache_bytes': _bytes_per_token(config),
    'cache_bytes_pruned': _bytes_per_token(smaller),
    **timing.ratio(seconds['pruned'], seconds['whole']),
  }


def _size(params: Any) -> int:
  return sum(x.size for x in jax.tree.leaves(params))


def _bytes_per_token(config: DecoderConfig) -> int:
  caches = DecoderLM(config).init_cache(batch_size=1, capacity=1)
  return sum(cache.nbytes_per_token for cache in caches)


def report(
  models: list[trained.Model],
  curves: list[dict[str, Any]],
  pruned: list[dict[str, Any]],
  chosen: Settings,
) -> None:
  """Writes CSVs and figure; prints both tables."""
  by_seed = {x.experiment.train.seed: trained.fields(x) for x in models}
  for name, rows in (('curves', curves), ('pruned', pruned)):
    table = [row | by_seed[row['seed']] for row in rows]
    record.write_csv(chosen.workdir / f'{name}.csv', table)
  figure = chosen.workdir / 'prune_heads.png'
  name = chosen.run.name if chosen.run else chosen.config.name
  title = f'{name}, {pruned[0]["heads"]} heads, {KIND.value} ablation'
  heads_figures.prune_heads(curves, title, figure)
  printing.show(
    *map(trained.described, models),
    _curve_table(curves),
    _pruned_table(pruned),
    *share_missed(SHARE.value, pruned[0]['heads'], pruned[0]['heads_kept']),
    f'recorded in {chosen.workdir}, figure {figure}',
  )


def share_missed(share: float, heads: int, kept: int) -> list[str]:
  """A line where another share of the heads is gone than --share says."""
  asked = f'--share={share:g} of {heads} heads'
  if kept == heads and share:
    return [f'{asked} prunes nothing: one head is {1 / heads:.3g} of them']
  if kept != round((1 - share) * heads):
    return [
      f'{asked} is not reached: the query heads of a key/value head go '
      'together, and each layer keeps one such group'
    ]
  return []


def _curve_table(curves: list[dict[str, Any]]) -> Table:
  """Losses by the number of heads gone: medians and ranges."""
  caption = (
    'loss in nats on other examples than were ranked by: median and range over '
    'seeds, and for random over orders'
  )
  table = Table(caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  names = list(dict.fromkeys(row['order'] for row in curves))
  for name in ('gone', *names):
    table.add_column(name, justify='right')
  for gone in sorted({row['gone'] for row in curves}):
    cells = []
    for name in names:
      losses = [
        row['loss']
        for row in curves
        if row['gone'] == gone and row['order'] == name
      ]
      spread = head_counts.spread('loss', losses)
      cells.append(head_counts.median_range(spread, 'loss', '.3f'))
    table.add_row(str(gone), *cells)
  return table


def _pruned_table(pruned: list[dict[str, Any]]) -> Table:
  """The pruned models beside the whole ones."""
  caption = (
    'whole to pruned, a seed a row; bytes: of the cache a token; error: of '
    'the logits against the model with gates, relative; speed of forward '
    'passes, median and quartiles'
  )
  table = Table(caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  for name in ('heads', 'loss', 'params', 'bytes', 'error'):
    table.add_column(name, justify='right')
  table.add_column('times as fast', justify='right')
  for x in pruned:
    table.add_row(
      f'{x["heads"]} to {x["heads_kept"]}',
      f'{x["loss"]:.3f} to {x["loss_pruned"]:.3f}',
      f'{x["params"]:,} to {x["params_pruned"]:,}',
      f'{x["cache_bytes"]} to {x["cache_bytes_pruned"]}',
      f'{x["error"]:.1e}',
      f'{x["ratio"]:.1f} ({x["ratio_low"]:.1f}-{x["ratio_high"]:.1f})',
    )
  return table


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/recall.py:induction')

"""What heads learn: attention maps, scores with names, and what they prove.

  python -m experiments.probe_heads
  python -m experiments.probe_heads --run=runs/copy_task
  python -m experiments.probe_heads --config=configs/copy_task.py:tiny

Looks into a recorded run, or trains the model of the config first. Scores come
from mha_jax.analysis.probing, which says what each is: duplicate tokens and
prefix matching on repeated random sequences, the others on validation
examples. Beside them stands what the loss does without the head. Prints a table
and writes heads.csv, divergence.csv (between heads of a layer),
probe_heads.png and probe_heads.html, a page to look at single tokens with, into
the workdir.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
  trained,
)
from experiments.harness.trained import BATCH_SIZE
from mha_jax.analysis import page, probing, pruning
from mha_jax.tasks import Batch
from mha_jax.training import record

EXAMPLES = flags.DEFINE_integer(
  'examples', 4, 'examples on the page', lower_bound=1, upper_bound=64
)

ON_REPEATS = ('duplicate_token', 'prefix_matching')
CAUTION = (
  'A map that looks like a rule proves nothing about cause: hold every name '
  'against the loss without the head.'
)


@dataclasses.dataclass(frozen=True)
class Settings:
  run: pathlib.Path | None
  config: ConfigDict
  examples: int
  batch_size: int
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  run = trained.run_folder()
  experiment = (
    settings.recorded_experiment(run)
    if run
    else trained.experiments(config, 1)[0]
  )
  trained.check_even_heads(experiment)
  if experiment.task.max_len < 4:
    raise ValueError(
      f'task.length gives sequences of {experiment.task.max_len} tokens; a '
      'repetition needs 4'
    )
  name = run.name if run else config.name
  workdir = folders.named(f'probe_heads-{name}')
  asked = folders.asked(config, run=run)
  record.check_same_config(workdir, asked)
  sizes = (EXAMPLES.value, BATCH_SIZE.value)
  return Settings(run, config, *sizes, workdir, asked)


def main(chosen: Settings) -> int:
  with folders.kept(chosen.workdir, chosen.asked):
    return answer(chosen)


def answer(chosen: Settings) -> int:
  """Trains or loads the model, and looks into it."""
  if chosen.run is None:
    models, stopped_by = trained.train_models(chosen.config, 1, chosen.workdir)
    if stopped_by is not None:
      return command_line.exit_code(stopped_by)
    (model,) = models
  else:
    model = trained.load(chosen.run)
    settings.announce([model.experiment])
  rows = score(model, chosen.batch_size)
  report(rows, model, chosen)
  return 0


def score(model: trained.Model, batch_size: int) -> list[dict[str, Any]]:
  """A row for each head: scores, its name, and the loss without it.

  The `ablation` columns are what the loss of the validation batch gains, in
  nats, when the head's output is replaced by zero or by its mean.
  """
  config, params = model.experiment.model, model.params
  task = model.experiment.task
  batch = trained.batch(model, 0, batch_size)
  length = task.max_len // 2
  repeats = probing.repeated_tokens(
    jax.random.key(model.experiment.train.seed),
    batch_size,
    length,
    task.symbols,
  )
  again = jnp.broadcast_to(jnp.arange(2 * length) >= length, repeats.shape)
  rows = probing.head_scores(
    config, params, batch.inputs, task.separators, pruning.seen(batch)
  )
  repeated = probing.head_scores(config, params, repeats, queries=again)
  for row, on_repeats in zip(rows, repeated, strict=True):
    row |= {name: on_repeats[name] for name in ON_REPEATS}
  for kind in pruning.KINDS:
    losses, loss = pruning.ablation_losses(config, params, batch, kind)
    for row, gain in zip(rows, np.ravel(losses - loss), strict=True):
      row[f'ablation_{kind}'] = float(gain)
  for row, name in zip(rows, probing.name_heads(rows), strict=True):
    row['name'] = name
  return rows


def divergences(
  model: trained.Model, batch: Batch
) -> tuple[list[jax.Array], list[dict[str, Any]]]:
  """The divergence (h, h) of each layer's heads in bits, and as rows."""
  maps = probing.attention_maps(
    model.experiment.model, model.params, batch.inputs
  )
  queries = pruning.seen(batch)
  layers = [probing.js_divergence(x, queries) for x in maps]
  rows = [
    {'layer': layer, 'head': i, 'other': j, 'bits': float(x[i, j])}
    for layer, x in enumerate(layers)
    for i, j in np.ndindex(x.shape)
  ]
  return layers, rows


def effect(
  name: str, rows: list[dict[str, Any]], model: trained.Model, batch_size: int
) -> str:
  """Measures the loss without all heads of a name, and without each."""
  config, params = model.experiment.model, model.params
  own = [row for row in rows if row['name'] == name]
  gates = [np.ones(x.num_heads) for x in config.layers]
  batch = trained.batch(model, 0, batch_size)
  loss = pruning.loss_with_gates(config, params, batch, gates)
  for row in own:
    gates[row['layer']][row['head']] = 0
  gain = pruning.loss_with_gates(config, params, batch, gates) - loss
  each = [row['ablation_zero'] for row in own]
  others = [row['ablation_zero'] for row in rows if row not in own]
  heads = ', '.join(f'{row["layer"]}.{row["head"]}' for row in own)
  alone = f'{min(each):.3f} to {max(each):.3f} without one of them'
  another = f', up to {max(others):.3f} without another head' if others else ''
  return (
    f'{name}: {heads}. The loss gains {float(gain):.3f} nats without all of '
    f'them, {alone}{another}.'
  )


def report(
  rows: list[dict[str, Any]], model: trained.Model, chosen: Settings
) -> None:
  """Writes CSVs, figure and page; prints the table and the caution."""
  config, task = model.experiment.model, model.experiment.task
  inputs = trained.batch(model, 0, chosen.examples).inputs
  maps = probing.attention_maps(config, model.params, inputs)
  layers, pairs = divergences(model, trained.batch(model, 0, chosen.batch_size))
  setting = trained.described(model)
  for name, lines in (('heads', rows), ('divergence', pairs)):
    table = [line | trained.fields(model) for line in lines]
    record.write_csv(chosen.workdir / f'{name}.csv', table)
  figure = chosen.workdir / 'probe_heads.png'
  heads_figures.probe_heads(maps, rows, layers, setting, figure)
  html = chosen.workdir / 'probe_heads.html'
  texts = [[task.token_text(int(x)) for x in row] for row in inputs]
  page.write_page(
    html, maps, texts, rows, title='What heads learn', setting=setting
  )
  names = sorted({row['name'] for row in rows} - {''})
  printing.show(
    _table(rows, setting),
    *(effect(name, rows, model, chosen.batch_size) for name in names),
    CAUTION,
    f'recorded in {chosen.workdir}, figure {figure}, page {html}',
  )


def _table(rows: list[dict[str, Any]], setting: str) -> Table:
  """Scores of each head; losses without it as gains in nats."""
  names = {
    'previous_token': 'prev',
    'duplicate_token': 'dupl',
    'prefix_matching': 'pref',
    'copying_score': 'copy',
    'first_token': '1st',
    'separators': 'sep',
    'entropy': 'bits',
    'mean_distance': 'dist',
    'ablation_zero': 'zero',
    'ablation_mean': 'mean',
  }
  caption = (
    'scores of mha_jax.analysis.probing: previous-token, duplicate-token, '
    'prefix-matching, copying, attention to the first token and to '
    'separators; bits: entropy; dist: in tokens; zero '
    'and mean: nats that the loss gains when these replace the head'
  )
  table = Table(
    title=setting, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
  )
  for name in ('head', *names.values(), 'looks like'):
    table.add_column(name, justify='right')
  for row in rows:
    cells = ['-' if row[name] is None else f'{row[name]:.2f}' for name in names]
    table.add_row(
      f'{row["layer"]}.{row["head"]}', *cells, row['name'].replace(' ', '\n')
    )
  return table


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/recall.py:induction')

"""Exercise 1: do more heads help, plateau or hurt?

  python -m experiments.sweep_heads
  python -m experiments.sweep_heads --n_heads=1,2,4,8,16 --seeds=3
  python -m experiments.sweep_heads --config=configs/copy_task.py:tiny
  python -m experiments.sweep_heads --study --seeds=5   (an hour)

The width d_model stays fixed, so h heads have d_model / h features each and
the parameters stay the same; with --config.model.head_dim=16 heads keep their
size and parameters grow, and with --equal_params MLPs fill up what smaller
models lack. --study takes all of these, several lengths, answers that need two
sources, and variable lengths with what may help there. Prints a table and a
sentence a curve, and writes results.jsonl, results.csv and sweep_heads.png into
the workdir.

Every head count is trained at each of --learning_rates and judged at its best:
for the final loss the rate with the least median, for speed the one with the
fewest steps. A head count at a rate, with its seeds, is a point. A finished
point is not trained again; a failed one is recorded, does not end the sweep,
and is tried again next time. Ctrl-C and SIGTERM stop; the same command goes on
with what is missing.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from rich.table import Table

from experiments.figures import sweeps
from experiments.harness import command_line, cores, folders, printing, settings
from experiments.harness.points import (
  EQUAL_PARAMS,
  SEEDS,
  Point,
  Row,
  equal_params,
  points_of,
  train_points,
)
from experiments.reports import head_counts
from mha_jax.attention import checks
from mha_jax.tasks import CopyTask
from mha_jax.training import record, train

N_HEADS = flags.DEFINE_list(
  'n_heads', ['1', '2', '4', '8', '16'], 'head counts, divisors of d_model'
)
THRESHOLD = flags.DEFINE_float(
  'threshold', 0.05, 'the loss (nats) that speed is measured to'
)
STUDY = flags.DEFINE_bool(
  'study', False, 'exercise 1 in full, around a plain copy task'
)
FREE = ('n_heads', 'threshold', 'learning_rates')
"""Flags that may differ from call to call in a folder: points are kept."""


@dataclasses.dataclass(frozen=True)
class Sweep:
  """One curve over head counts.

  Args:
    panel: the setting that it is drawn in.
    label: what tells it from the other curves there; '' where it is alone.
    points: for each head count a point at each learning rate.
  """

  panel: str
  label: str
  points: tuple[tuple[Point, ...], ...]


@dataclasses.dataclass(frozen=True)
class Settings:
  sweeps: tuple[Sweep, ...]
  threshold: float
  title: str
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_sections(config)
  if 'config.model.num_heads' in flags.FLAGS:
    raise ValueError(
      '--config.model.num_heads is what the sweep varies; use --n_heads'
    )
  checks.real('--threshold', THRESHOLD.value, 1e-6, 1e3)
  model = config.model
  title = f'{config.name}, {model.attention}, d_model = {model.d_model}'
  if STUDY.value:
    chosen = study(config)
  else:
    chosen = (make_sweep(title, '', config, EQUAL_PARAMS.value),)
  workdir = folders.named(f'sweep_heads-{config.name}')
  asked = folders.asked(config, free=FREE)
  record.check_same_config(workdir, asked)
  return Settings(chosen, THRESHOLD.value, title, workdir, asked)


def make_sweep(
  panel: str,
  label: str,
  config: ConfigDict,
  equal: bool = False,
  changes: Mapping[str, Any] | None = None,
  every: int = 1,
) -> Sweep:
  """The points of a config, with changes to its fields, at head counts.

  Args:
    panel: the setting that the curve is drawn in.
    label: what tells it from the other curves there.
    config: what is trained.
    equal: whether MLPs fill up what smaller models lack.
    changes: fields of the config by their names with dots.
    every: 1 takes all of --n_heads, 2 every other one from the first on.
  """
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(dict(changes or {}))
  heads = sorted(set(command_line.positive_ints('n_heads', N_HEADS.value)))
  heads = heads[::every]
  experiments = [_experiment(config, h) for h in heads]
  if equal:
    experiments = equal_params(experiments)
  seeds = settings.seeds_from('--seeds', experiments[0].train.seed, SEEDS.value)
  points = []
  for x, h in zip(experiments, heads, strict=True):
    size = x.model.layers[0].qk_head_dim
    labels = {'n_heads': h, 'head_dim': size}
    name = f'{label} {h:>2} head{"s" * (h > 1)}'
    points.append(points_of(x, seeds, name, labels))
  return Sweep(panel, label, tuple(points))


def _experiment(config: ConfigDict, num_heads: int) -> train.Experiment:
  """The experiment with a number of heads; an error names the flag."""
  config = config.copy_and_resolve_references()
  config.model.num_heads = num_heads
  try:
    found = settings.experiment_from(config)
  except ValueError as error:
    raise ValueError(f'--n_heads={num_heads}: {error}') from error
  heads = [layer.num_heads for layer in found.model.layers]
  if heads != [num_heads] * len(heads):
    raise ValueError(
      f'--n_heads={num_heads}: config.model.layers sets num_heads={heads}, '
      'which the sweep varies; leave it out there'
    )
  return found


def study(config: ConfigDict) -> tuple[Sweep, ...]:
  """Exercise 1 in full, around a config of the copy task.

  Fixed lengths, from half to four times the config's, in batches of as many
  symbols and with more steps where they are longer; the controls of one length;
  answers that need two sources, with the controls, for twice as long; variable
  lengths, for three times as long. Every other head count is enough for the
  longest sequences and for variable ones, which take the most time.
  """
  task = settings.experiment_from(config).task
  if not isinstance(task, CopyTask) or task.pairs or task.min_length:
    raise ValueError('--study wants a plain copy task: configs/copy_task.py')
  if EQUAL_PARAMS.value or config.model.head_dim is not None:
    raise ValueError(
      '--study has its own controls; leave out --equal_params and '
      '--config.model.head_dim'
    )
  length = config.task.length
  if length % 4:
    raise ValueError(
      f'--config.task.length={length} must be a multiple of 4 with --study'
    )
  symbols = max(2, config.task.num_symbols // 4)
  two = {'task.pairs': True, 'task.num_symbols': symbols}
  two |= {'train.steps': 2 * config.train.steps}
  return (
    *fixed_lengths(config),
    *controls(f'one source, L = {length}', config, {}),
    *controls(f'two sources, L = {length}', config, two),
    *variable_lengths(config),
  )


def fixed_lengths(config: ConfigDict) -> tuple[Sweep, ...]:
  """From half to four times the config's length."""
  length, usual = config.task.length, config.train
  factors = {  # of batch and steps at each length, and which head counts
    length // 2: (2, 1, 1),
    length: (1, 1, 1),
    2 * length: (1 / 2, 2, 1),
    4 * length: (1 / 4, 4, 2),
  }
  return tuple(
    make_sweep(
      'one source',
      f'L = {x}',
      config,
      changes={
        'task.length': x,
        'train.batch_size': max(1, round(batch * usual.batch_size)),
        'train.steps': steps * usual.steps,
      },
      every=every,
    )
    for x, (batch, steps, every) in factors.items()
  )


def variable_lengths(config: ConfigDict) -> tuple[Sweep, ...]:
  """Rows of their own lengths, with what may tell a layer the distance."""
  length = config.task.length
  ragged = {
    'task.min_length': max(1, length // 4),
    'train.steps': 3 * config.train.steps,
  }
  two = {'model.num_layers': 2}
  helps: dict[str, dict[str, Any]] = {
    '1 layer': {},
    '1 layer, fixed separator': {'task.fixed_separator': True},
    '2 layers': two,
    '2 layers, RoPE': {**two, 'model.positions': 'rope'},
  }
  panel = f'variable length, {length // 4} to {length}'
  return tuple(
    make_sweep(panel, label, config, changes=ragged | x, every=2)
    for label, x in helps.items()
  )


def controls(
  panel: str, config: ConfigDict, changes: Mapping[str, Any]
) -> tuple[Sweep, ...]:
  """Tells the effect of the number of heads from that of their size.

  At a fixed d_model more heads are smaller heads; at a fixed head_dim of
  d_model / 4 parameters grow with their number, unless an MLP makes them equal.
  """
  size = config.model.d_model // 4
  fixed = {**changes, 'model.head_dim': size}
  return (
    make_sweep(panel, 'head_dim = d_model / n_heads', config, changes=changes),
    make_sweep(panel, f'head_dim = {size}', config, changes=fixed),
    make_sweep(panel, f'head_dim = {size}, MLP fills up', config, True, fixed),
  )


def main(chosen: Settings) -> int:
  points = [x for sweep in chosen.sweeps for one in sweep.points for x in one]
  rows, stopped_by = train_points(points, chosen.workdir, chosen.asked)
  if stopped_by is not None:
    return command_line.exit_code(stopped_by)
  report(rows, chosen)
  return 0 if all(row['status'] == 'finished' for row in rows) else 1


def report(rows: list[Row], chosen: Settings) -> None:
  """Writes CSV and figure; prints a table and a sentence a sweep."""
  curves: list[sweeps.Curve] = []
  texts: list[str | Table] = []
  table: list[dict[str, Any]] = []
  left = iter(rows)
  for sweep in chosen.sweeps:
    own = [[next(left) for _ in points] for points in sweep.points]
    failed = [x for one in own for x in one if x['status'] == 'failed']
    finished = [[x for x in one if x['status'] == 'finished'] for one in own]
    summaries = [
      head_counts.summarise(x, chosen.threshold) for x in finished if x
    ]
    texts += [f'{sweep.panel}, {sweep.label}'] * bool(sweep.label)
    texts.append(head_counts.table(summaries, chosen.threshold))
    texts += [
      f'n_heads={x["n_heads"]} at {x["learning_rate"]:g} failed: {x["error"]}'
      for x in failed
    ]
    if summaries:
      texts.append(head_counts.verdict(summaries, chosen.threshold))
      texts.append(head_counts.rates(summaries))
      curves.append(sweeps.Curve(sweep.panel, sweep.label, summaries))
    name = {'panel': sweep.panel, 'curve': sweep.label} if STUDY.value else {}
    for x in summaries:
      fields = head_counts.fields(x.final.row['config'])
      table.append(name | x.line | fields)
  if table:
    figure = chosen.workdir / 'sweep_heads.png'
    record.write_csv(chosen.workdir / 'results.csv', table)
    if STUDY.value:
      sweeps.study(curves, chosen.threshold, chosen.title, figure)
    else:
      sweeps.sweep_heads(curves[0], chosen.threshold, chosen.title, figure)
    texts.append(f'recorded in {chosen.workdir}, figure {figure}')
  printing.show(*texts)


if __name__ == '__main__':
  cores.use_all_cores()
  command_line.run(parse, main, default_config='configs/copy_task.py')

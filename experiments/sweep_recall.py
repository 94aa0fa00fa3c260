"""Which attention recalls how many pairs, and how wide must it be for that?

  python -m experiments.sweep_recall
  python -m experiments.sweep_recall --d_model=16,32,64,128 --pairs=4,8,16
  python -m experiments.sweep_recall --config=configs/sweep_recall.py:full

Multi-query associative recall as in figure 2 of Arora et al. 2023, "Zoology":
accuracy against d_model and the number of key/value pairs, for MHA with 1, 2
and 4 heads and for MQA, MLA and GTA with 4. MLA's latent has d_model / 4
features beside its rotary key, GTA one state for all heads; with RoPE both
cache as much. There are twice as many keys as pairs, and twice as many values,
and all pairs are asked for. With --equal_params MLPs are widened until all
models of a size have as many parameters.

Every model is trained at each of --learning_rates and judged at the one with
the least median validation loss. Prints a table and what follows from it;
writes results.jsonl, results.csv and sweep_recall.png into the workdir.
Finished points are kept.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from rich.table import Table

from experiments.figures import recall as figures
from experiments.harness import command_line, cores, folders, printing, settings
from experiments.harness.points import (
  EQUAL_PARAMS,
  SEEDS,
  Point,
  equal_params,
  points_of,
  train_points,
)
from experiments.reports import recall
from mha_jax.attention import checks
from mha_jax.training import record, train
from mha_jax.training.record import Row

D_MODEL = flags.DEFINE_list(
  'd_model', None, "widths; by default 16, 32, ... up to the config's d_model"
)
PAIRS = flags.DEFINE_list(
  'pairs', None, "pairs to recall; by default 4, 8, ... up to the config's"
)

HEADS = 4
"""Heads of the models that share or compress keys and values."""
MULTIPLE = 4 * HEADS
"""Of d_model: halves of GTA's 4 heads are turned, so they are even too."""
FREE = ('d_model', 'pairs', 'learning_rates')
"""Flags that may differ from call to call in a folder: points are kept."""
VARIED = {
  'model.d_model': '--d_model',
  'task.num_pairs': '--pairs',
  'task.num_queries': '--pairs',
  'task.num_keys': '--pairs',
  'task.num_values': '--pairs',
}
"""Fields of the config that the sweep sets, and the flags to use instead."""
SETTLED = (
  'attention',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'kv_lora_rank',
  'qk_nope_head_dim',
  'qk_rope_head_dim',
  'v_head_dim',
)
"""Fields of the config that tell the models apart; no flag sets them."""


@dataclasses.dataclass(frozen=True)
class Settings:
  points: tuple[Point, ...]
  title: str
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_sections(config)
  _check_config(config)
  widths = _sizes('d_model', D_MODEL.value, 16, config.model.d_model)
  pairs = _sizes('pairs', PAIRS.value, 4, config.task.num_pairs)
  if odd := [d for d in widths if d % MULTIPLE]:
    raise ValueError(
      f'--d_model={",".join(map(str, widths))}: {odd[0]} must be a multiple of '
      f'{MULTIPLE}, so that RoPE can turn half of each of {HEADS} heads, for '
      'instance --d_model=16,32,64'
    )
  points = points_at(config, widths, pairs)
  workdir = folders.named(f'sweep_recall-{config.name}')
  asked = folders.asked(config, free=FREE)
  record.check_same_config(workdir, asked)
  layers, steps = config.model.num_layers, config.train.steps
  title = f'{config.name}, {layers} layers, {steps} steps'
  title += ', equal parameters' * EQUAL_PARAMS.value
  return Settings(points, title, workdir, asked)


def _check_config(config: ConfigDict) -> None:
  """Raises a ValueError where the config sets what the sweep varies."""
  if (kind := config.task.get('kind')) != 'recall':
    raise ValueError(
      f'--config.task.kind={kind!r} must be recall; use '
      '--config=configs/sweep_recall.py'
    )
  for name, flag in VARIED.items():
    if f'config.{name}' in flags.FLAGS:
      raise ValueError(f'--config.{name} is what the sweep varies; use {flag}')
  for name in SETTLED:
    if f'config.model.{name}' in flags.FLAGS:
      raise ValueError(
        f'--config.model.{name} tells the models of the sweep apart; leave it '
        'out'
      )
  if config.model.get('layers') is not None:
    raise ValueError(
      '--config: model.layers sets the attention that the sweep varies; leave '
      'it out'
    )


def _sizes(
  name: str, given: list[str] | None, first: int, most: int
) -> list[int]:
  """A flag's numbers in order.

  Where it is not given, first and its doubles that are not over the config's
  size `most`; a config that is smaller than first has its own size alone.
  """
  if given is not None:
    return sorted(set(command_line.positive_ints(name, given)))
  checks.positive(f'--{name}', most)
  doubled = [first << i for i in range(most.bit_length())]
  return [x for x in doubled if x <= most] or [most]


def points_at(
  config: ConfigDict, widths: Sequence[int], pairs: Sequence[int]
) -> tuple[Point, ...]:
  """The points of all models at each number of pairs and each width."""
  found: list[Point] = []
  for n in pairs:
    for d in widths:
      models = models_of(d)
      experiments = [_experiment(config, n, x) for x in models.values()]
      if EQUAL_PARAMS.value:
        experiments = equal_params(experiments)
      for name, x in zip(models, experiments, strict=True):
        seeds = settings.seeds_from('--seeds', x.train.seed, SEEDS.value)
        cache = sum(layer.cache_elements for layer in x.model.layers)
        labels = {'variant': name, 'd_model': d, 'pairs': n}
        labels |= {'cache_elements': cache}
        shown = f'{n:>2} pairs, d_model={d:<3} {name:<11}'
        found += points_of(x, seeds, shown, labels)
  return tuple(found)


def models_of(d_model: int) -> dict[str, dict[str, Any]]:
  """The changes of the model's config by name, in order of the tables."""
  models = {
    f'MHA {h} head{"s" * (h > 1)}': {'attention': 'mha', 'num_heads': h}
    for h in (1, 2, HEADS)
  }
  size = d_model // HEADS
  shared: dict[str, dict[str, Any]] = {
    'MQA': {'attention': 'mqa'},
    'MLA': {'attention': 'mla', 'kv_lora_rank': size},
    'GTA': {'attention': 'gta', 'num_kv_heads': 1, 'head_dim': size},
  }
  for name, changes in shared.items():
    models[f'{name} {HEADS} heads'] = changes | {'num_heads': HEADS}
  unset = dict.fromkeys(SETTLED) | {'d_model': d_model}
  return {name: unset | changes for name, changes in models.items()}


def _experiment(
  config: ConfigDict, pairs: int, changes: Mapping[str, Any]
) -> train.Experiment:
  """The experiment with so many pairs and with changes to its model."""
  config = config.copy_and_resolve_references()
  config.model.update(changes)
  config.task.update({'num_pairs': pairs, 'num_queries': pairs})
  config.task.update({'num_keys': 2 * pairs, 'num_values': 2 * pairs})
  return settings.experiment_from(config)


def main(chosen: Settings) -> int:
  rows, stopped_by = train_points(chosen.points, chosen.workdir, chosen.asked)
  if stopped_by is not None:
    return command_line.exit_code(stopped_by)
  report(rows, chosen)
  return 0 if all(row['status'] == 'finished' for row in rows) else 1


def report(rows: Sequence[Row], chosen: Settings) -> None:
  """Writes CSV and figure; prints failures, the table and what follows."""
  texts: list[str | Table] = [
    f'{row["variant"]}, {row["pairs"]} pairs, d_model={row["d_model"]} at '
    f'{row["learning_rate"]:g} failed: {row["error"]}'
    for row in rows
    if row['status'] == 'failed'
  ]
  if lines := recall.summarise(rows):
    record.write_csv(chosen.workdir / 'results.csv', lines)
    figure = chosen.workdir / 'sweep_recall.png'
    figures.sweep_recall(lines, chosen.title, figure)
    texts += [recall.table(lines), *recall.answers(lines)]
    texts += recall.advice(lines)
    texts.append(f'recorded in {chosen.workdir}, figure {figure}')
  printing.show(*texts)


if __name__ == '__main__':
  cores.use_all_cores()
  command_line.run(parse, main, default_config='configs/sweep_recall.py')

"""Exercise 3: which latent rank keeps quality, and what cache does it need?

  python -m experiments.mla_rank
  python -m experiments.mla_rank --config=configs/mla_rank.py:copy
  python -m experiments.mla_rank --config=configs/mla_rank.py:full \
    --ranks=2,4,8,12,16,32,64 --rotary=0,4

Trains the same decoder with MHA, GQA, MQA and MLA of several ranks r and holds
validation loss (bits per token) against cached elements a token. --rotary lists
sizes p of the decoupled rotary key; p = 0 means learned positions and no
rotary part, any other RoPE. With --without_norm each MLA comes also without
the norm of its latent, which tells the norm's price from the rank's. Beside
them stands MHA with one head and with heads of fewer features, at MQA's cache.
With --equal_params MLPs are widened until all have as many parameters. Every
model is trained at each of --learning_rates and judged at the one with the
least median validation loss.
Prints a table and the answer; writes results.jsonl, results.csv and
mla_rank.png into the workdir. Finished points are kept.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from rich.table import Table

from experiments.figures import caches
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
from experiments.reports import latent_ranks
from mha_jax.attention import checks
from mha_jax.training import record, train

RANKS = flags.DEFINE_list('ranks', ['4', '12', '64'], 'latent ranks r of MLA')
ROTARY = flags.DEFINE_list(
  'rotary', ['0'], 'rotary features p; 0: learned positions instead'
)
WITHOUT_NORM = flags.DEFINE_bool(
  'without_norm', False, 'each MLA also without the norm of its latent'
)

FREE = ('ranks', 'rotary', 'without_norm', 'learning_rates')
"""Flags that may differ from call to call in a folder: points are kept."""


@dataclasses.dataclass(frozen=True)
class Settings:
  models: tuple[tuple[Point, ...], ...]
  title: str
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_sections(config)
  varied = ('attention', 'num_kv_heads', 'kv_lora_rank', 'positions')
  for name in (*varied, 'qk_rope_head_dim', 'qk_nope_head_dim'):
    if f'config.model.{name}' in flags.FLAGS:
      raise ValueError(
        f'--config.model.{name} is what the experiment varies; use --ranks and '
        '--rotary'
      )
  if config.model.get('layers') is not None:
    raise ValueError(
      '--config: model.layers sets the attention that the experiment varies; '
      'leave it out'
    )
  ranks = sorted(set(command_line.positive_ints('ranks', RANKS.value)))
  sizes = [int(x) if x.isdecimal() else -1 for x in ROTARY.value]
  if not sizes or any(p < 0 or p % 2 for p in sizes):
    raise ValueError(
      f'--rotary={",".join(ROTARY.value)} must be even numbers from 0 on, with '
      'commas between'
    )
  models = models_of(config, sorted(set(sizes)), ranks)
  workdir = folders.named(f'mla_rank-{config.name}')
  asked = folders.asked(config, free=FREE)
  record.check_same_config(workdir, asked)
  model = models[0][0].experiment.model
  title = (
    f'{config.name}, {model.num_layers} layers, d_model = {model.d_model}, '
    f'{model.layers[0].num_heads} heads'
    + ', equal parameters'
    * EQUAL_PARAMS.value
  )
  return Settings(models, title, workdir, asked)


def models_of(
  config: ConfigDict, sizes: Sequence[int], ranks: Sequence[int]
) -> tuple[tuple[Point, ...], ...]:
  """The points of all models of each rotary size p, MHA first."""
  norms = (True, False) if WITHOUT_NORM.value else (True,)
  models = [x for p in sizes for x in _models(config, p, ranks, norms)]
  experiments = [_experiment(config, changes) for _, _, changes in models]
  if EQUAL_PARAMS.value:
    experiments = equal_params(experiments)
  seeds = settings.seeds_from('--seeds', experiments[0].train.seed, SEEDS.value)
  found = []
  for x, (name, p, changes) in zip(experiments, models, strict=True):
    cache = sum(layer.cache_elements for layer in x.model.layers)
    labels = {'variant': name, 'rotary': p, 'cache_elements': cache}
    labels['rank'] = changes.get('kv_lora_rank')
    labels['latent_norm'] = changes.get('latent_norm')
    found.append(points_of(x, seeds, f'{name:>16} p={p}', labels))
  return tuple(found)


def _models(
  config: ConfigDict,
  p: int,
  ranks: Sequence[int],
  norms: Sequence[bool],
) -> list[tuple[str, int, dict[str, Any]]]:
  """(name, p, changes of the model's config) of each model; MHA is first.

  MLA comes once for each of norms: with one on its latent, or without.
  """
  h, d = config.model.num_heads, config.model.d_model
  checks.positive('--config.model.num_heads', h)
  checks.positive('--config.model.d_model', d)
  k = config.model.head_dim or d // h
  positions = {'positions': 'rope' if p else 'learned'}
  widths = [x for x in range(1, k) if k % x == 0 and not (p and x % 2)]
  named: list[tuple[str, dict[str, Any]]] = [('MHA', {'attention': 'mha'})]
  named += [
    (f'GQA n={n}', {'attention': 'gqa', 'num_kv_heads': n})
    for n in (h // 2, h // 4)
    if n > 1 and h % n == 0
  ]
  if h > 1:
    named.append(('MQA', {'attention': 'mqa'}))
    one = {'attention': 'mha', 'num_heads': 1, 'head_dim': k}
    named.append(('MHA, 1 head', one))
    if widths:  # about h narrow heads that keep as much as MQA's one
      narrow = min(widths, key=lambda x: abs(x - k / h))
      few = {'attention': 'mha', 'num_heads': k // narrow, 'head_dim': narrow}
      named.append((f'MHA, heads of {narrow}', few))
  for r in ranks:
    mla = {'attention': 'mla', 'kv_lora_rank': r, 'head_dim': None}
    mla |= {'qk_nope_head_dim': k, 'v_head_dim': config.model.v_head_dim or k}
    mla |= {'qk_rope_head_dim': p}
    for norm in norms:
      name = f'MLA r={r}' + ', no norm' * (not norm)
      named.append((name, mla | {'latent_norm': norm}))
  return [(name, p, positions | changes) for name, changes in named]


def _experiment(
  config: ConfigDict, changes: dict[str, Any]
) -> train.Experiment:
  """The experiment with changes to its model."""
  config = config.copy_and_resolve_references()
  config.model.update(changes)
  return settings.experiment_from(config)


def main(chosen: Settings) -> int:
  points = [point for model in chosen.models for point in model]
  rows, stopped_by = train_points(points, chosen.workdir, chosen.asked)
  if stopped_by is not None:
    return command_line.exit_code(stopped_by)
  report(rows, chosen)
  return 0 if all(row['status'] == 'finished' for row in rows) else 1


def report(rows: Sequence[Row], chosen: Settings) -> None:
  """Writes CSV and figure; prints failures, the tables and the answers."""
  texts: list[str | Table] = [
    f'{row["variant"]}, p={row["rotary"]} at {row["learning_rate"]:g} failed: '
    f'{row["error"]}'
    for row in rows
    if row['status'] == 'failed'
  ]
  if lines := latent_ranks.summarise(rows):
    record.write_csv(chosen.workdir / 'results.csv', lines)
    figure = chosen.workdir / 'mla_rank.png'
    caches.mla_rank(lines, chosen.title, figure)
    for p in dict.fromkeys(line['rotary'] for line in lines):
      own = [line for line in lines if line['rotary'] == p]
      texts += latent_ranks.in_words(own)
    texts.append(f'recorded in {chosen.workdir}, figure {figure}')
  printing.show(*texts)


if __name__ == '__main__':
  cores.use_all_cores()
  command_line.run(parse, main, default_config='configs/mla_rank.py')

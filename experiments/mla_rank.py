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
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich import box
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
from experiments.reports import head_counts, statistics
from mha_jax.attention import checks
from mha_jax.training import record, train

RANKS = flags.DEFINE_list('ranks', ['4', '12', '64'], 'latent ranks r of MLA')
ROTARY = flags.DEFINE_list(
  'rotary', ['0'], 'rotary features p; 0: learned positions instead'
)
WITHOUT_NORM = flags.DEFINE_bool(
  'without_norm', False, 'each MLA also without the norm of its latent'
)

WITHIN = (1.0, 0.1, 0.02)
"""Differences to MHA, in bits per token, that the answer asks for."""
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


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
  """A line for each model at its best rate, against MHA of its rotary size.

  A difference is taken seed by seed, since seeds share batches; medians and
  ranges over seeds follow, and the mean with its interval.
  """
  models: dict[tuple[str, int], list[Row]] = {}
  for row in rows:
    if row['status'] == 'finished':
      models.setdefault((row['variant'], row['rotary']), []).append(row)
  best = {
    name: statistics.best_rate(own, _bits) for name, own in models.items()
  }
  lines = []
  for (_, rotary), one in best.items():
    mha = best.get(('MHA', rotary))
    if mha is None:
      continue
    row = dict(one.row)
    worst = max(_bits_before(x) for x in (one.row, mha.row))
    names = ('variant', 'rotary', 'rank', 'params', 'cache_elements')
    line = {name: row[name] for name in names} | {'seeds': len(row['seeds'])}
    line['cache_share'] = row['cache_elements'] / mha.row['cache_elements']
    line['learning_rate'] = one.learning_rate
    line |= statistics.spread('bits', one.values)
    line['perplexity'] = 2 ** line['bits_median']
    each = np.minimum([one.values, mha.values], worst)
    line |= statistics.spread('difference', (each[0] - each[1]).tolist())
    found = statistics.difference(one.values, mha.values, worst)
    line |= {
      'difference_mean': found.mean,
      'difference_low': found.low,
      'difference_high': found.high,
      'advice': one.advice,
    }
    lines.append(line | head_counts.fields(row['config']))
  return lines


def _bits(row: Mapping[str, Any]) -> list[float]:
  """Validation losses in bits per token, by seed; inf: diverged."""
  return [x / math.log(2) for x in head_counts.final_losses(row)]


def _bits_before(row: Mapping[str, Any]) -> float:
  """Bits per token before training, which a seed that diverged counts as."""
  return max(statistics.number(x[0]) for x in row['loss']) / math.log(2)


def report(rows: Sequence[Row], chosen: Settings) -> None:
  """Writes CSV and figure; prints failures, the tables and the answers."""
  texts: list[str | Table] = [
    f'{row["variant"]}, p={row["rotary"]} at {row["learning_rate"]:g} failed: '
    f'{row["error"]}'
    for row in rows
    if row['status'] == 'failed'
  ]
  if lines := summarise(rows):
    record.write_csv(chosen.workdir / 'results.csv', lines)
    figure = chosen.workdir / 'mla_rank.png'
    caches.mla_rank(lines, chosen.title, figure)
    for p in dict.fromkeys(line['rotary'] for line in lines):
      own = [line for line in lines if line['rotary'] == p]
      texts += [_table(own), answer(own), *_advice(own)]
    texts.append(f'recorded in {chosen.workdir}, figure {figure}')
  printing.show(*texts)


def _advice(lines: Sequence[dict[str, Any]]) -> list[str]:
  """Names the models whose best rate is the last of those tried."""
  found: dict[str, list[str]] = {}
  for line in lines:
    if line['advice']:
      found.setdefault(line['advice'], []).append(line['variant'])
  return [f'For {", ".join(names)} {x}.' for x, names in found.items()]


def answer(lines: Sequence[dict[str, Any]]) -> str:
  """Exercise 3 in words, for the models of one rotary size.

  A rank is within a difference when the whole interval lies below it.
  """
  p, mha = lines[0]['rotary'], lines[0]
  parts = [f'p = {p}:']
  latent = [line for line in lines if line['rank'] is not None]
  small = [line for line in latent if line['cache_share'] < 1 / 8]
  if latent:
    per_feature = latent[0]['cache_elements'] / (latent[0]['rank'] + p)
    bound = mha['cache_elements'] / per_feature / 8
    parts.append(f"MLA's cache is below 1/8 of MHA's for r + p < {bound:g};")
  if small:
    best = max(small, key=lambda line: line['rank'])
    held = best['difference_high'] <= 1
    parts.append(
      f'at r = {best["rank"]} it is {best["cache_share"]:.3g} of it, and the '
      f'loss {_difference(best).in_words()} bits from '
      f"MHA's, which is {'within' if held else 'not within'} 1 bit."
    )
  else:
    parts.append('no rank that was trained lies there.')
  for bits in WITHIN:
    near = [x for x in latent if x['difference_high'] <= bits]
    rank = f'r = {min(x["rank"] for x in near)}' if near else 'no rank'
    parts.append(f'Smallest within {bits:g} bits: {rank}.')
  same = [x['variant'] for x in lines[1:] if _difference(x).sign == 0]
  parts.append(f'Not told apart from MHA: {", ".join(same) or "none"}.')
  return ' '.join(parts)


def _difference(line: dict[str, Any]) -> statistics.Difference:
  ends = (line[f'difference_{end}'] for end in ('mean', 'low', 'high'))
  return statistics.Difference(*ends)


def _table(lines: Sequence[dict[str, Any]]) -> Table:
  p = lines[0]['rotary']
  title = f'RoPE, p = {p}' if p else 'learned positions, p = 0'
  caption = (
    'cached elements a token; bits per token and perplexity (ppl) on '
    'validation batches, medians over seeds at the best learning rate (lr); '
    'minus MHA: mean difference, seed by seed, and its '
    f'{statistics.CONFIDENCE:.0%} interval'
  )
  table = Table(
    title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption
  )
  columns = ('variant', 'params', 'cache', 'of MHA', 'lr', 'bits', 'ppl')
  for name in (*columns, 'minus MHA'):
    side = 'left' if name == 'variant' else 'right'
    table.add_column(name, justify=side)  # type: ignore[arg-type]
  for x in lines:
    table.add_row(
      x['variant'],
      f'{x["params"]:,}',
      str(x['cache_elements']),
      f'{x["cache_share"]:.2g}',
      f'{x["learning_rate"]:g}',
      f'{x["bits_median"]:.3f}',
      f'{x["perplexity"]:.2f}',
      _difference(x).in_words().replace(' (', '\n('),
    )
  return table


if __name__ == '__main__':
  cores.use_all_cores()
  command_line.run(parse, main, default_config='configs/mla_rank.py')

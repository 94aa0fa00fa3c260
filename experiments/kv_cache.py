"""Exercise 2: how far do parameters drop, how far does the KV cache shrink?

  python -m experiments.kv_cache
  python -m experiments.kv_cache --length=8192 --config.ranks=16,64
  python -m experiments.kv_cache --config=configs/kv_cache.py:deepseek_v2

For MHA, GQA at each number of key/value heads, MQA, and MLA at each rank: the
attention parameters, the bytes that decoding keeps, by formula and in arrays
that were really allocated, and the tokens a second of a decoding step of one
layer with a full cache. Prints a table and writes results.csv, results.jsonl
and kv_cache.png into the workdir. With --config.decode_steps=0 (as for the
published shapes) nothing is allocated.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict
from rich import box
from rich.table import Table

from experiments.figures import caches
from experiments.harness import command_line, folders, printing, settings
from experiments.reports import head_counts
from mha_jax.attention import (
  AttentionConfig,
  Rope,
  apply,
  checks,
  init_cache,
  init_table,
  masks,
  num_params,
)
from mha_jax.attention.caches import Cache
from mha_jax.attention.variants import build
from mha_jax.training import record

LENGTH = flags.DEFINE_integer(
  'length', None, 'tokens in the cache; short for --config.length'
)

DTYPES = ('bfloat16', 'float16', 'float32')
SIZES = (
  'd_model',
  'num_heads',
  'num_layers',
  'length',
  'batch_size',
  'repeats',
)
OTHERS = (
  'head_dim',
  'kv_heads',
  'ranks',
  'qk_rope_head_dim',
  'v_head_dim',
  'q_lora_rank',
  'window',
  'dtype',
  'decode_steps',
)
"""The fields of a config that are not sizes."""


@dataclasses.dataclass(frozen=True)
class Settings:
  rows: tuple[tuple[str, AttentionConfig], ...]
  config: ConfigDict
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_fields(config, ('name', *SIZES, *OTHERS))
  if LENGTH.value is not None:
    checks.positive('--length', LENGTH.value)
  command_line.merge(config, {'length': LENGTH})
  for name in SIZES:
    checks.positive(f'--config.{name}', config[name])
  checks.whole('--config.decode_steps', config.decode_steps, 0, config.length)
  if config.dtype not in DTYPES:
    raise ValueError(f'--config.dtype={config.dtype!r} must be in {DTYPES}')
  if config.window is not None:
    checks.positive('--config.window', config.window)
  rows = tuple(variants(config))
  workdir, asked = folders.named(config.name), folders.asked(config)
  record.check_same_config(workdir, asked)
  return Settings(rows, config, workdir, asked)


def variants(config: ConfigDict) -> list[tuple[str, AttentionConfig]]:
  """The rows of the table by name: MHA first."""
  shape = {'d_model': config.d_model, 'num_heads': config.num_heads}
  grouped = shape | {
    'head_dim': config.head_dim,
    'use_bias': False,
    'rope': Rope(),
  }
  rows = [('MHA', _build('num_heads', config, 'mha', **grouped))]
  for n in _numbers('kv_heads', config.kv_heads):
    gqa = _build('kv_heads', config, 'gqa', num_kv_heads=n, **grouped)
    rows.append((f'GQA n={n}', gqa))
  rows.append(('MQA', _build('num_heads', config, 'mqa', **grouped)))
  for rank in _numbers('ranks', config.ranks):
    mla = _build(
      'ranks',
      config,
      'mla',
      kv_lora_rank=rank,
      q_lora_rank=config.q_lora_rank,
      qk_nope_head_dim=config.head_dim,
      qk_rope_head_dim=config.qk_rope_head_dim,
      v_head_dim=config.v_head_dim,
      **shape,
    )
    rows.append((f'MLA r={rank}', mla))
  return rows


def _build(
  field: str, config: ConfigDict, kind: str, **options: Any
) -> AttentionConfig:
  """The config of a variant; an error names the field that asks for it."""
  try:
    return build(kind, **options)
  except ValueError as error:
    raise ValueError(f'--config.{field}={config[field]}: {error}') from error


def _numbers(name: str, text: str) -> list[int]:
  """A list of numbers in a config's string; empty: none."""
  if not text:
    return []
  return command_line.positive_ints(f'config.{name}', text.split(','))


def main(chosen: Settings) -> int:
  with folders.kept(chosen.workdir, chosen.asked):
    report(chosen, count(chosen))
  return 0


def count(chosen: Settings) -> list[dict[str, Any]]:
  """A row for each variant."""
  config = chosen.config
  slots = min(config.length, config.window or config.length)
  tokens = slots * config.batch_size * config.num_layers
  itemsize = jnp.dtype(config.dtype).itemsize
  rows: list[dict[str, Any]] = []
  for name, attention in chosen.rows:
    row = {
      'variant': name,
      'params': num_params(attention.table) * config.num_layers,
      'elements_per_token': attention.cache_elements * config.num_layers,
      'bytes_per_token': attention.cache_elements
      * itemsize
      * config.num_layers,
      'cache_bytes': attention.cache_elements * itemsize * tokens,
    }
    rows.append(row)
  for row in rows:
    row['params_drop'] = 1 - row['params'] / rows[0]['params']
    row['cache_share'] = row['cache_bytes'] / rows[0]['cache_bytes']
  if config.decode_steps:
    measure(chosen, slots, rows)
  return rows


def measure(chosen: Settings, slots: int, rows: list[dict[str, Any]]) -> None:
  """Adds the allocated bytes, and tokens a second of all rows in turn."""
  config = chosen.config
  runs: list[tuple[AttentionConfig, Any, list[float]]] = []
  for (name, attention), row in zip(chosen.rows, rows, strict=True):
    row['allocated_bytes'] = (
      empty_cache(config, attention, slots).nbytes * config.num_layers
    )
    if row['allocated_bytes'] != row['cache_bytes']:
      raise AssertionError(f'{name}: the formula and the arrays differ')
    params = init_table(attention.table, jax.random.key(0), dtype=config.dtype)
    runs.append((attention, params, []))
  for repeat in range(config.repeats + 1):
    for attention, params, seconds in runs:
      cache = empty_cache(config, attention, slots)
      start = jnp.full(config.batch_size, config.length - config.decode_steps)
      cache = dataclasses.replace(cache, lengths=start.astype(jnp.int32))
      x = jnp.ones((config.batch_size, 1, config.d_model), config.dtype)
      jax.block_until_ready((cache, x))
      begin = time.perf_counter()
      jax.block_until_ready(
        decode(attention, config.decode_steps, params, x, cache)
      )
      if repeat:  # the first one compiles
        seconds.append(time.perf_counter() - begin)
  count = config.decode_steps * config.batch_size
  for row, (_, _, seconds) in zip(rows, runs, strict=True):
    row['tokens_per_s'] = count / statistics.median(seconds)
    row['tokens_per_s_min'] = count / max(seconds)
    row['tokens_per_s_max'] = count / min(seconds)


def empty_cache(
  config: ConfigDict, attention: AttentionConfig, slots: int
) -> Cache:
  """The cache of one layer."""
  size = {'window': slots} if config.window else {'capacity': slots}
  return init_cache(attention, config.batch_size, dtype=config.dtype, **size)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def decode(
  attention: AttentionConfig,
  steps: int,
  params: Any,
  x: jax.Array,
  cache: Cache,
) -> tuple[jax.Array, Cache]:
  """Steps of one layer, each fed with what the one before gave."""

  def step(
    carry: tuple[jax.Array, Cache], _: None
  ) -> tuple[tuple[jax.Array, Cache], None]:
    x, cache = carry
    return apply(attention, params, x, cache=cache, mask=masks.causal()), None

  return jax.lax.scan(step, (x, cache), None, steps)[0]


def report(chosen: Settings, rows: list[dict[str, Any]]) -> None:
  """Writes CSV, JSON lines and the figure; prints the table."""
  config = chosen.config
  title = (
    f'd_model={config.d_model}, {config.num_heads} heads, {config.num_layers} '
    f'layer{"s" * (config.num_layers > 1)}, {config.length} tokens, '
    f'batch {config.batch_size}, {config.dtype}'
  )
  table = Table(title=title, box=box.SIMPLE)
  names = ('variant', 'parameters', 'drop', 'bytes/token', 'cache', 'of MHA')
  measured = 'tokens_per_s' in rows[0]
  for name in (*names, *['tokens/s'] * measured):
    table.add_column(name, justify='left' if name == 'variant' else 'right')
  for row in rows:
    table.add_row(
      row['variant'],
      short(row['params']),
      f'{row["params_drop"]:.2%}',
      f'{row["bytes_per_token"]:,}',
      readable(row['cache_bytes']),
      f'1/{1 / row["cache_share"]:.4g}',
      *([f'{row["tokens_per_s"]:,.0f}'] if measured else []),
    )
  rows = [row | head_counts.fields(config.to_dict()) for row in rows]
  record.write_csv(chosen.workdir / 'results.csv', rows)
  lines = ''.join(json.dumps(row) + '\n' for row in rows)
  record.write_text(chosen.workdir / 'results.jsonl', lines)
  figure = chosen.workdir / 'kv_cache.png'
  caches.kv_cache(rows, title, figure)
  printing.show(table, f'recorded in {chosen.workdir}, figure {figure}')


def short(count: int) -> str:
  """A number in full up to millions, then in billions."""
  return f'{count:,}' if count < 1e9 else f'{count / 1e9:.4g} B'


def readable(size: int) -> str:
  """Bytes in the largest binary unit that keeps a whole part."""
  value, units = float(size), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  while value >= 1024 and len(units) > 1:
    value, units = value / 1024, units[1:]
  return f'{value:.4g} {units[0]}'


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/kv_cache.py')

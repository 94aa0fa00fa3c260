"""Does the roofline hold here? Decoding steps, predicted and measured.

  python -m experiments.check_costs                                    (15 s)
  python -m experiments.check_costs --config.length=2048 --config.batch_size=2

Measures this machine's FLOP/s and bandwidth, predicts the decoding step of a
decoder with MHA, GQA and absorbed MLA from its shape alone, then runs it with a
cache of that many tokens, in turn, and prints medians beside the predictions.
Writes results.csv into the workdir.
"""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import ConfigDict
from rich import box
from rich.table import Table

from experiments.harness import (
  command_line,
  folders,
  printing,
  settings,
  timing,
)
from experiments.reports import head_counts
from experiments.suites.case import Run
from mha_jax.analysis.costs import decoder_shape, hardware, roofline
from mha_jax.attention import checks
from mha_jax.decoder import DecoderConfig, DecoderLM, decoder_config
from mha_jax.training import record

SIZES = ('d_model', 'num_heads', 'num_layers', 'length', 'batch_size', 'rounds')


@dataclasses.dataclass(frozen=True)
class Settings:
  models: dict[str, DecoderConfig]
  length: int
  batch_size: int
  rounds: int
  config: ConfigDict
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_fields(config, ('name', *SIZES))
  for name in SIZES:
    checks.positive(f'--config.{name}', config[name])
  models = models_of(config)
  workdir, asked = folders.named(config.name), folders.asked(config)
  record.check_same_config(workdir, asked)
  sizes = (config.length, config.batch_size, config.rounds)
  return Settings(models, *sizes, config, workdir, asked)


def models_of(config: ConfigDict) -> dict[str, DecoderConfig]:
  """The decoders by name: MHA, GQA unless it is MHA, and MLA.

  GQA has a quarter of the heads with keys and values, or the next divisor
  below, so that with one head it is MHA; MLA half of a head's features that
  rotate, or the next even number.
  """
  h = config.num_heads
  checks.divides('--config.num_heads', h, '--config.d_model', config.d_model)
  k = config.d_model // h
  if k % 2:
    raise ValueError(
      f'--config.d_model={config.d_model} over --config.num_heads={h} gives '
      f'heads of {k} features; RoPE needs an even number'
    )
  n = next(x for x in range(max(1, h // 4), 0, -1) if h % x == 0)
  make = functools.partial(
    decoder_config,
    vocab_size=1024,
    max_len=config.length + 1,
    d_model=config.d_model,
    num_layers=config.num_layers,
    num_heads=h,
    mlp_dim=4 * config.d_model,
    positions='rope',
  )
  gqa = {'GQA': make(attention='gqa', num_kv_heads=n)} if n < h else {}
  return {
    'MHA': make(),
    **gqa,
    'MLA': make(
      attention='mla',
      kv_lora_rank=4 * k,
      qk_nope_head_dim=k,
      qk_rope_head_dim=max(2, k // 4 * 2),
    ),
  }


def main(chosen: Settings) -> int:
  with folders.kept(chosen.workdir, chosen.asked):
    rows, words = measure(chosen)
    fields = head_counts.fields(chosen.config.to_dict())
    table = [row | fields for row in rows]
    record.write_csv(chosen.workdir / 'results.csv', table)
  printing.show(words, _table(rows), f'recorded in {chosen.workdir}')
  return 0


def measure(chosen: Settings) -> tuple[list[dict[str, Any]], str]:
  """A row for each model, and what was measured in words."""
  length, batch = chosen.length, chosen.batch_size
  cpu = hardware.measure_cpu()
  place = roofline.Placement(cpu, param_dtype='fp32', cache_dtype='fp32')
  runs = {name: _step(x, length, batch) for name, x in chosen.models.items()}
  seconds = timing.interleaved(runs, chosen.rounds)
  assert seconds is not None  # nothing asks it to stop
  rows: list[dict[str, Any]] = []
  for name, model in chosen.models.items():
    shape = decoder_shape(model)
    step = roofline.decode_step(shape, place, length + 1, batch)
    measured = statistics.median(seconds[name])
    row = {'model': name, 'predicted': step.seconds, 'measured': measured}
    rows.append(row | {'ratio': measured / step.seconds, 'bound': step.bound})
  words = (
    f'{cpu.flops / 1e9:.0f} GFLOP/s, {cpu.bandwidth / 1e9:.0f} GB/s; d_model = '
    f'{model.d_model}, {model.layers[0].num_heads} heads, '
    f'{model.num_layers} layers, '
    f'{length} tokens, batch {batch}, float32'
  )
  return rows, words


def _step(model: DecoderConfig, length: int, batch_size: int) -> Run:
  """A run of one decoding step behind a full cache.

  The cache holds zeros: what stands in it does not change the time. Its length
  is put back at each step, so that it never fills up.
  """
  decoder = DecoderLM(model)
  tokens = jnp.zeros((batch_size, 1), jnp.int32)
  params = jax.jit(decoder.init)(jax.random.key(0), tokens)
  caches = decoder.init_cache(batch_size, length + 1)
  full = jnp.full(batch_size, length, jnp.int32)

  @functools.partial(jax.jit, donate_argnums=1)
  def step(params: Any, caches: Any, full: jax.Array) -> Any:
    at = tuple(dataclasses.replace(x, lengths=full) for x in caches)
    return decoder.apply(params, tokens, cache=at)

  state = [caches]

  def run() -> object:
    logits, state[0] = step(params, state[0], full)
    return jax.block_until_ready((logits, state[0]))

  return run


def _table(rows: list[dict[str, Any]]) -> Table:
  table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
  for name in ('model', 'predicted ms', 'measured ms', 'ratio', 'bound by'):
    table.add_column(name, justify='left' if name == 'model' else 'right')
  for row in rows:
    times = (f'{1e3 * row[x]:.2f}' for x in ('predicted', 'measured'))
    table.add_row(row['model'], *times, f'{row["ratio"]:.2f}', row['bound'])
  return table


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/check_costs.py')

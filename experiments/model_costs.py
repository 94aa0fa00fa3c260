"""What a published model costs: `configure_heads --model=NAME`."""

import dataclasses
from typing import Any

from rich import box
from rich.table import Table

from mha_jax.analysis import costs, roofline
from mha_jax.analysis.candidates import Demand
from mha_jax.analysis.published import Published


def costs_of(model: Published, demand: Demand) -> dict[str, Any]:
  """What a published model costs under a demand."""
  shape, place = model.shape, demand.place
  length, batch = demand.seq_len, demand.batch
  step = roofline.decode_step(shape, place, length, batch)
  attention = shape.layers[0].attention
  cache = roofline.device_cache_bytes(shape, place, length, batch)
  return {
    'model': model.name,
    'source': model.source,
    'demand': dataclasses.asdict(demand),
    'params': dataclasses.asdict(costs.num_params(shape))
    | {'total': costs.num_params(shape).total},
    'cache_bytes_per_token': costs.cache_bytes(shape, dtype=demand.cache_dtype),
    'cache_bytes_per_sequence': costs.cache_bytes(
      shape, length, dtype=demand.cache_dtype
    ),
    'weight_bytes_per_device': roofline.weight_bytes(shape, place),
    'cache_bytes_per_device': cache,
    'score_bytes_per_layer': costs.score_bytes(attention, length),
    'train_flops_per_token': costs.train_flops_per_token(shape, length),
    'decode_flops_per_token': costs.decode_flops(shape, length),
    'attention_intensity': costs.decode_intensity(
      attention, length, demand.cache_dtype
    ),
    'ridge': place.hardware.ridge,
    'step_seconds': step.seconds,
    'step_parts': step.parts,
    'bound': step.bound,
    'tokens_per_second': step.tokens_per_second,
    'prefill_seconds': roofline.prefill_seconds(shape, place, length, batch),
    'max_batch': roofline.max_batch(shape, place, length),
    'max_context': roofline.max_context(shape, place, batch),
  }


def table(model: Published, demand: Demand, result: dict[str, Any]) -> Table:
  """The costs on 80 columns."""
  title = (
    f'{model.name}, {demand.seq_len:,} tokens, batch {demand.batch}, '
    f'{demand.devices} x {demand.hardware.name}'
  )
  rows = Table(
    title=title, box=box.SIMPLE, show_header=False, caption=model.source
  )
  params, gigabytes = result['params'], costs.gigabytes
  used = result['weight_bytes_per_device'] + result['cache_bytes_per_device']
  over = used - demand.hardware.memory
  parts = result['step_parts'].items()
  context = result['max_context']
  for name, value in (
    ('attention', f'{model.shape.layers[0].attention}'),
    ('parameters', f'{params["total"]:,}, {params["active"]:,} active'),
    (
      'of them',
      ', '.join(f'{x} {params[x]:,}' for x in ('attention', 'mlp')),
    ),
    ('cache a token', f'{result["cache_bytes_per_token"] / 1024:,.4g} KiB'),
    ('cache a sequence', gigabytes(result['cache_bytes_per_sequence'])),
    ('weights a device', gigabytes(result['weight_bytes_per_device'])),
    ('cache a device', gigabytes(result['cache_bytes_per_device'])),
    (
      'fits',
      'yes' if over <= 0 else f'no: {gigabytes(over)} too many a device',
    ),
    ('scores, exact form', gigabytes(result['score_bytes_per_layer'])),
    ('training', f'{result["train_flops_per_token"]:.3g} FLOP a token'),
    ('decoding', f'{result["decode_flops_per_token"]:.3g} FLOP a token'),
    (
      'attention reads',
      f'{result["attention_intensity"]:.3g} FLOP a byte of cache; computing '
      f'binds from {result["ridge"]:.0f} on',
    ),
    ('decode step', f'{result["step_seconds"] * 1e3:.3g} ms'),
    ('its parts', ', '.join(f'{x} {s * 1e3:.3g} ms' for x, s in parts)),
    ('tokens a second', f'{result["tokens_per_second"]:,.0f}'),
    ('reading prompts', f'{result["prefill_seconds"]:.3g} s'),
    ('most sequences', f'{result["max_batch"]:,}'),
    ('most tokens', 'any' if context is None else f'{context:,}'),
  ):
    rows.add_row(name, value)
  return rows

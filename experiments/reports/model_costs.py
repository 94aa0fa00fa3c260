"""What a published model costs: `configure_heads --model=NAME`."""

import dataclasses
from typing import Any

from rich import box
from rich.table import Table

from mha_jax.analysis import costs
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.costs import roofline
from mha_jax.analysis.costs.published import Published
from mha_jax.analysis.costs.shape import Layer, ModelShape

OWN = ('params', 'vocab_size', 'head_dim', 'objective')
"""Fields of a demand that a published model settles or does not need."""


def costs_of(model: Published, demand: Demand) -> dict[str, Any]:
  """Costs a published model under a demand; as JSON has it.

  Of an encoder there is no cache and no decoding.
  """
  shape, place = model.shape, demand.place
  length, batch = demand.seq_len, demand.batch
  params = costs.num_params(shape)
  weights = roofline.weight_bytes(shape, place)
  result = {
    'model': model.name,
    'source': model.source,
    'context': model.context,
    'demand': {
      name: x
      for name, x in dataclasses.asdict(demand).items()
      if name not in OWN
    },
    'params': dataclasses.asdict(params) | {'total': params.total},
    'layers': [
      _layer(x, count, demand, shape.causal) for x, count in shape.groups
    ],
    'weight_bytes_per_device': weights,
    'train_flops_per_token': costs.train_flops_per_token(shape, length),
    'prefill_seconds': roofline.prefill_seconds(shape, place, length, batch),
    'ridge': place.hardware.ridge,
  }
  if not shape.causal:
    return result
  step = roofline.decode_step(shape, place, length, batch)
  room = max(0.0, demand.usable_memory - weights)
  return result | {
    'cache_bytes_per_sequence': costs.cache_bytes(
      shape, length, dtype=demand.kv_dtype
    ),
    'cache_bytes_per_device': roofline.device_cache_bytes(
      shape, place, length, batch
    ),
    'decode_flops_per_token': costs.decode_flops(shape, length),
    'step_seconds': step.seconds,
    'step_weight_bytes': step.weight_bytes,
    'step_cache_bytes': step.cache_bytes,
    'step_parts': step.parts,
    'bound': step.bound,
    'tokens_per_second': step.tokens_per_second,
    'max_batch': roofline.max_batch(shape, place, length, room),
    'max_context': roofline.max_context(shape, place, batch, room),
  }


def _layer(
  layer: Layer, count: int, demand: Demand, causal: bool
) -> dict[str, Any]:
  """Costs one of so many layers that are alike.

  Its step and training with a vocabulary of one token, which hardly counts.
  """
  alone = ModelShape((layer,), vocab_size=1, norms=0, causal=causal)
  step = roofline.decode_step(alone, demand.place, demand.seq_len, demand.batch)
  attention: Any = layer.attention  # a frozen dataclass, whatever the variant
  length = demand.seq_len
  params = costs.layer_params(layer)
  flops, kept, made = costs.attention_step(layer, length)
  size = costs.itemsize('kv_dtype', demand.kv_dtype)
  return {
    'count': count,
    'attention': dataclasses.asdict(attention),
    'window': layer.window,
    'params': params.total,
    'attention_params': params.attention,
    'active_params': params.active,
    'cache_bytes_per_token': attention.cache_elements * size,
    'cache_bytes_per_sequence': kept * size,
    'made_elements_per_step': made,
    'decode_flops_per_token': 2 * params.active + flops,
    'train_flops_per_token': costs.train_flops_per_token(alone, length),
    'step_bytes_per_device': step.weight_bytes + step.cache_bytes,
    'step_seconds': step.seconds,
    'attention_intensity': costs.decode_intensity(
      attention, layer.keys(length), demand.kv_dtype
    ),
    'score_bytes': costs.score_bytes(attention, length),
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
  for name, value in (
    *_parameters(model, demand, result),
    *_layers(result),
    *_costs(demand, result),
  ):
    rows.add_row(name, value)
  return rows


def _parameters(
  model: Published, demand: Demand, result: dict[str, Any]
) -> list[tuple[str, str]]:
  params = result['params']
  rows = [
    ('parameters', f'{params["total"]:,}, {params["active"]:,} active'),
    *[(f'  {x}', f'{params[x]:,}') for x in ('attention', 'mlp', 'embeddings')],
  ]
  if demand.seq_len > model.context:
    beyond = f'{demand.seq_len:,} tokens are beyond its {model.context:,}'
    rows.append(('context', f'{beyond}: costs hold, the model may not'))
  return rows


def _layers(result: dict[str, Any]) -> list[tuple[str, str]]:
  """A row or two of each kind of layer."""
  rows = []
  decodes = 'step_seconds' in result
  for layer in result['layers']:
    shown = {
      name: x
      for name, x in layer['attention'].items()
      if name.startswith(('num_', 'head_', 'kv_lora', 'qk_', 'v_head')) and x
    }
    sizes = ', '.join(f'{name} {x}' for name, x in shown.items())
    window = f', window {layer["window"]:,}' if layer['window'] else ''
    rows.append((f'{layer["count"]} layers', f'{sizes}{window}'))
    costs_each = f'{layer["params"]:,} parameters'
    if decodes:
      costs_each += (
        f', cache {layer["cache_bytes_per_token"] / 1024:,.4g} KiB a token, '
        f'{costs.gigabytes(layer["cache_bytes_per_sequence"])} a sequence, '
        f'{layer["decode_flops_per_token"]:.3g} FLOP and '
        f'{layer["attention_intensity"]:.3g} FLOP a byte of cache to decode, '
        f'{1e3 * layer["step_seconds"]:.3g} ms of a step'
      )
    costs_each += f', {layer["train_flops_per_token"]:.3g} FLOP to train'
    scores = costs.gigabytes(layer['score_bytes'])
    costs_each += f', scores {scores} a sequence (exact form, float32)'
    rows.append(('  each', costs_each))
  return rows


def _costs(demand: Demand, result: dict[str, Any]) -> list[tuple[str, str]]:
  gigabytes = costs.gigabytes
  weights = result['weight_bytes_per_device']
  used = weights + result.get('cache_bytes_per_device', 0)
  over = used - demand.usable_memory
  rows = [
    ('weights a device', gigabytes(weights)),
    ('training', f'{result["train_flops_per_token"]:.3g} FLOP a token'),
    ('reading all prompts', f'{result["prefill_seconds"]:.3g} s'),
  ]
  if 'step_seconds' in result:
    context = result['max_context']
    per_token = sum(
      x['count'] * x['cache_bytes_per_token'] for x in result['layers']
    )
    windows = any(x['window'] for x in result['layers'])
    within = ' while it is within all windows' if windows else ''
    parts = result['step_parts'].items()
    time, bound = result['step_seconds'] * 1e3, demand.latency_ms
    if bound is not None:
      met = 'yes' if time <= bound else f'no: {time - bound:.3g} ms too many'
      rows.append(('within latency_ms', met))
    moved = (gigabytes(result[f'step_{x}_bytes']) for x in ('weight', 'cache'))
    rows += [
      ('cache a token', f'{per_token / 1024:,.4g} KiB{within}'),
      ('cache a sequence', gigabytes(result['cache_bytes_per_sequence'])),
      ('cache a device', gigabytes(result['cache_bytes_per_device'])),
      ('decoding', f'{result["decode_flops_per_token"]:.3g} FLOP a token'),
      ('decode step', f'{time:.3g} ms'),
      ('it reads', '{} of weights, {} of cache a device'.format(*moved)),
      ('its parts', ', '.join(f'{x} {s * 1e3:.3g} ms' for x, s in parts)),
      (
        'hardware',
        f'{result["ridge"]:.0f} FLOP a byte; fewer wait for memory',
      ),
      ('tokens a second', f'{result["tokens_per_second"]:,.0f}'),
      ('most sequences', f'{result["max_batch"]:,}'),
      (
        'most tokens',
        f'{"any" if context is None else f"{context:,}"}, each of the batch',
      ),
    ]
  else:
    rows.append(('an encoder', 'no cache, no decoding'))
  limit = gigabytes(demand.usable_memory)
  fits = 'yes' if over <= 0 else f'no: {gigabytes(over)} too many a device'
  return [*rows, ('fits', f'{fits}, of {limit}, 90 % of the memory')]

"""Errors that say why no decoder meets a demand, and what to change."""

import dataclasses
import math
from collections.abc import Sequence

from mha_jax.analysis.configurator.candidates import candidates
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.configurator.rules import (
  HEAD_DIM,
  LANES,
  LATENCY,
  MEMORY,
  SPLIT,
  Costed,
  Rule,
)
from mha_jax.analysis.costs.counts import BYTES, counted, gigabytes

SMALLEST = 'int4'
"""No dtype is smaller."""
MOST_DEVICES = 4096
"""The largest number of devices that is tried."""


def no_shape(demand: Demand) -> str:
  """Says why no shape has so many parameters, and the budgets nearest to it."""
  near = [x for step in (-1, 1) if (x := _nearest_budget(demand, step))]
  take = f'nearest: params={" or ".join(near)}' if near else 'no other has'
  if demand.vocab_size > 256:
    take += '; or take a smaller vocab_size'
  asked = '' if demand.head_dim is None else f', head_dim={demand.head_dim}'
  return (
    f'params={demand.params:,.0f}: no d_model (a multiple of 128) with d/160 '
    'to d/50 layers and an MLP of 2.5 to 5.5 d comes within 3 % beside '
    f'vocab_size={demand.vocab_size:,}{asked}; {take}'
  )


def refusal(rule: Rule, left: Sequence[Costed]) -> str:
  """Says which rule drops the last candidates, by how much, and a remedy."""
  demand = left[0].demand
  machine = demand.hardware
  if rule is MEMORY:
    return _memory(left)
  if rule is LATENCY:
    return _latency(left)
  if rule is SPLIT:
    heads = sorted({x.candidate.num_heads for x in left})
    near = _nearest_devices(demand, heads)
    take = f'nearest that do: devices={near}' if near else 'take other params'
    return (
      f'split: devices={demand.devices} do not divide the query heads, '
      f'key/value heads and MLP of any of {len(left):,} shapes of {heads[0]} '
      f'to {heads[-1]} heads; {take}'
    )
  found = ', '.join(map(str, sorted({x.candidate.head_dim for x in left})))
  if rule is LANES:
    return (
      f'lanes: head_dim {found} are no multiples of lanes={machine.lanes} of '
      f'{machine.name}; ask for a head_dim that is to be padded'
    )
  return f'head_dim: only {found} come within the budget; ask for that head_dim'


def _latency(left: Sequence[Costed]) -> str:
  best = min(left, key=lambda x: x.step.seconds)
  demand = best.demand
  time, bound = best.step.seconds * 1e3, demand.latency_ms
  assert bound is not None
  changes = ['more devices']
  changes += ['fewer sequences'] * (demand.batch > 1)
  dtypes = {demand.param_dtype, demand.kv_dtype}
  changes += ['smaller dtypes'] * (dtypes != {SMALLEST})
  return (
    f'latency: the best possible step takes {_upward(time)} ms against '
    f'latency_ms={bound:g}, {time - bound:.3g} ms too many '
    f'({best.candidate.words}, bound by {best.step.bound}); take '
    f'{_listed(changes)}'
  )


def _memory(left: Sequence[Costed]) -> str:
  demand = left[0].demand
  limit = demand.usable_memory
  least = min(left, key=lambda x: x.memory)
  weights = least.weight_bytes
  devices = 'each device' if demand.devices > 1 else 'the device'
  where = f'the {gigabytes(limit)} that {devices} has for them'
  ways = next(
    (
      2**i
      for i in range(demand.devices.bit_length(), MOST_DEVICES.bit_length())
      if _holds(dataclasses.replace(demand, devices=2**i))
    ),
    None,
  )
  changes = [f'devices={ways}'] * (ways is not None)
  if weights > limit:
    smallest = weights * BYTES[SMALLEST] / BYTES[demand.param_dtype]
    changes += ['a smaller param_dtype'] * (smallest < min(limit, weights))
    return (
      f'memory: weights {gigabytes(weights)} of {where}: '
      f'{gigabytes(weights - limit)} too many; take '
      f'{_listed([*changes, "fewer params"])}'
    )
  tokens = int((limit - weights) // (least.cache_bytes / demand.seq_len))
  fits = least.memory_batch
  held = [f'batch={fits}'] * (fits > 0) + [f'seq_len={tokens}'] * (tokens > 0)
  cache = least.cache_bytes
  smallest = cache * BYTES[SMALLEST] / BYTES[demand.kv_dtype]
  changes += ['a smaller kv_dtype'] * (smallest < min(limit - weights, cache))
  changes += [f'{" or ".join(held)}, which fits the memory'] * bool(held)
  return (
    f'memory: weights {gigabytes(weights)} and a cache of at least '
    f'{gigabytes(least.cache_bytes)} ({least.candidate.words}) of {where}: '
    f'{gigabytes(least.memory - limit)} too many; take '
    f'{_listed(changes or ["fewer params"])}'
  )


def _holds(demand: Demand, rules: Sequence[Rule] = (SPLIT, MEMORY)) -> bool:
  """Tells whether a candidate breaks none of these rules nor those of heads."""
  asked = (HEAD_DIM, LANES, *rules)
  return any(
    not any(rule.broken_by(costed) for rule in asked)
    for costed in (Costed(x, demand) for x in candidates(demand))
  )


def _nearest_devices(demand: Demand, heads: Sequence[int]) -> str:
  """Up to two numbers of devices that some shape divides over, in words.

  Args:
    demand: what asks for too many.
    heads: query heads of the shapes, which devices must divide.
  """
  ways = sorted(
    {x for h in heads for x in range(1, h + 1) if h % x == 0},
    key=lambda x: abs(math.log(x / demand.devices)),
  )
  found = (
    str(x)
    for x in ways
    if _holds(dataclasses.replace(demand, devices=x), (SPLIT,))
  )
  return ' or '.join(x for x, _ in zip(found, range(2), strict=False))


def _nearest_budget(demand: Demand, step: int) -> str | None:
  """The next budget up (step 1) or down (-1) that has candidates, in words."""
  for i in range(1, 100):
    params = float(f'{demand.params * 1.03 ** (step * i):.3g}')
    if not 1e5 <= params <= 1e13:
      return None
    changed = dataclasses.replace(demand, params=params)
    if next(candidates(changed), None) is not None:
      return counted(params).replace(' ', '')
  return None


def _upward(x: float) -> float:
  """Rounded up to three digits, so that it is enough as a bound."""
  unit = 10.0 ** (math.floor(math.log10(x)) - 2)
  return float(f'{math.ceil(x / unit) * unit:.3g}')


def _listed(parts: Sequence[str]) -> str:
  """With commas, and an 'or' before the last."""
  *first, last = parts
  return f'{", ".join(first)} or {last}' if first else last

"""A recommendation in words: why, what else, and what is not known."""

import dataclasses
import math
from collections.abc import Callable

from mha_jax.analysis.candidates import Demand, kv_heads
from mha_jax.analysis.configurator import (
  GQA_LOSS,
  LOSSES,
  Choice,
  fitting_batch,
  quality,
)
from mha_jax.analysis.costs import cache_elements, gigabytes
from mha_jax.analysis.published import Published
from mha_jax.analysis.roofline import (
  decode_step,
  device_cache_bytes,
  weight_bytes,
)
from mha_jax.analysis.rules import RULES, Costed

UNKNOWN = (
  'Quality is not predicted by formula: the proxy orders, it does not measure; '
  'data, training and tuning decide more. Train two small models before you '
  'spend money.',
  'Step times are lower bounds: communication between devices, norms, softmax '
  'and launches are not counted, nor is memory for activations (leave 10 %).',
  'Windows, experts, tied keys and values and sparse attention are not among '
  'the candidates.',
)
ALIKE = 1.25
"""Factors of the cache below this need no reason."""


def reasons(choice: Choice) -> list[str]:
  """Why the recommendation is what it is, a sentence or two each."""
  best = choice.best
  return [
    _body(best),
    *_keys_and_values(choice),
    *_latent(choice),
    _step(best),
    _memory(best),
  ]


def remedies(choice: Choice) -> dict[str, list[str]]:
  """What to change when 'memory' or 'latency' is short.

  What keeps the quality comes first, then what saves most.

  Each is costed: what it takes instead of what the recommendation takes.
  """
  best = choice.best
  options = _options(choice)

  def ordered(take: Callable[[Costed], float]) -> list[tuple[float, str]]:
    rows = [
      (quality(x.candidate.attention) < -GQA_LOSS, take(x), words)
      for words, x in options
      if take(x) < 0.97 * take(best)
    ]
    return [row[1:] for row in sorted(rows)]

  now = best.step.seconds * 1e3
  return {
    'memory': [
      f'{words}: {gigabytes(x)} a device for {gigabytes(best.memory)}'
      for x, words in ordered(lambda x: x.memory)
    ],
    'latency': [
      f'{words}: {x * 1e3:.3g} ms for {now:.3g}'
      for x, words in ordered(lambda x: x.step.seconds)
    ],
  }


def rules(choice: Choice) -> list[str]:
  """What each rule dropped, where it did, and why there is one."""
  count = len(choice.feasible) + sum(map(len, choice.dropped.values()))
  return [
    f'{rule.name} dropped {len(choice.dropped[rule.name])} of {count:,}: '
    f'{rule.words}.'
    for rule in RULES
    if choice.dropped[rule.name]
  ]


def differences(costed: Costed, model: Published) -> dict[str, float]:
  """Factors whose product is a model's cache a token over the candidate's.

  At the demand's length, of which layers with a window keep a part.

  Returns:
    By name: 'layers', 'key/value heads', 'head_dim', 'windows'; where one of
    both has a latent, 'elements a layer' for the two in the middle.
  """
  candidate, shape = costed.candidate, model.shape
  length = costed.demand.seq_len
  ours, theirs = candidate.attention, shape.layers[0].attention
  each = theirs.cache_elements / ours.cache_elements
  factors = {'layers': len(shape.layers) / candidate.num_layers}
  n, m = kv_heads(theirs), kv_heads(ours)
  if n is None or m is None:
    factors['elements a layer'] = each
  else:
    factors['key/value heads'] = n / m
    factors['head_dim'] = each * m / n
  whole = len(shape.layers) * theirs.cache_elements * length
  factors['windows'] = cache_elements(shape, length) / whole
  return factors


def explain(costed: Costed, model: Published) -> str:
  """How a published model's cache differs from the candidate's, and why."""
  candidate, demand = costed.candidate, costed.demand
  factors = differences(costed, model)
  ratio = math.prod(factors.values())
  attention = model.shape.layers[0].attention
  theirs = {
    'layers': f'{len(model.shape.layers)} layers for {candidate.num_layers}',
    'key/value heads': (
      f'{attention.entry_shapes[0][0]} key/value heads for '
      f'{candidate.num_kv_heads}'
    ),
    'head_dim': f'head_dim {attention.qk_head_dim} for {candidate.head_dim}',
    'elements a layer': (
      f'{attention.cache_elements} elements a layer for '
      f'{candidate.attention.cache_elements}'
    ),
    'windows': 'windows, beyond which layers keep nothing',
  }
  parts = [
    f'{theirs[name]} (x {x:.3g})'
    for name, x in factors.items()
    if abs(math.log(x)) > 0.01
  ]
  why = [
    _why(name, x, model)
    for name, x in factors.items()
    if not 1 / ALIKE <= x <= ALIKE
  ]
  place, length, batch = demand.place, demand.seq_len, demand.batch
  step = decode_step(model.shape, place, length, batch)
  cache = device_cache_bytes(model.shape, place, length, batch)
  room = place.hardware.memory - weight_bytes(model.shape, place)
  left = f'{gigabytes(room)} are left' if room > 0 else 'nothing is left'
  fits = '' if cache <= room else f' (does not fit: {left})'
  head = f'{model.name} keeps {ratio:.3g} times as much a token'
  return ' '.join(
    [
      f'{head}: {", ".join(parts)}.' if parts else f'{head}.',
      *why,
      f'Under this demand its cache takes {gigabytes(cache)} a device{fits}, '
      f'its step {step.seconds * 1e3:.3g} ms.',
    ]
  )


def _why(name: str, factor: float, model: Published) -> str:
  """What makers may have weighed otherwise."""
  lost = -quality(model.shape.layers[0].attention)
  if name == 'key/value heads':
    return (
      'More key/value heads: worth 0.1 points of the proxy at most, which the '
      'recommendation gives for the cache.'
      if factor > 1
      else f'Fewer key/value heads: {lost:.2g} points of the proxy for less '
      'cache; this demand has room for more.'
    )
  return {
    'layers': 'Another depth, which at equal parameters hardly matters.',
    'head_dim': 'Another head_dim: 64 up to d_model 2048, 128 beyond is usual.',
    'elements a layer': (
      'A latent differs: the objective quality takes one only where no grouped '
      'attention is as good and fits; others weigh its cache and step.'
    ),
    'windows': 'Windows, which are not among the candidates, save cache.',
  }[name]


def _options(choice: Choice) -> list[tuple[str, Costed]]:
  """Changes of the demand or of keys and values, each costed."""
  best = choice.best
  candidate, demand = best.candidate, best.demand
  changes: list[tuple[str, Demand]] = []
  if demand.cache_dtype not in ('fp8', 'int8', 'int4'):
    fp8 = dataclasses.replace(demand, cache_dtype='fp8')
    changes.append(('a cache in fp8, whose loss is not counted', fp8))
  if demand.param_dtype not in ('fp8', 'int8', 'int4'):
    fp8 = dataclasses.replace(demand, param_dtype='fp8')
    changes.append(('weights in fp8, whose loss is not counted', fp8))
  if candidate.num_heads % (2 * demand.devices) == 0:
    twice = dataclasses.replace(demand, devices=2 * demand.devices)
    changes.append((f'{twice.devices} devices', twice))
  if demand.batch > 1:
    half = dataclasses.replace(demand, batch=demand.batch // 2)
    changes.append((f'batch {half.batch}', half))
  options = [(words, Costed(candidate, x)) for words, x in changes]
  for x in choice.strategies:
    lost = quality(candidate.attention) - quality(x.candidate.attention)
    note = f', {lost:.2g} points of the proxy' if lost > 0.005 else ''
    options.append((x.candidate.strategy + note, x))
  return options


def _body(best: Costed) -> str:
  x = best.candidate
  return (
    f'Width {x.d_model:,}, {x.num_layers} layers, MLPs of {x.mlp_width:,}: d / '
    f'layers is {x.d_model / x.num_layers:.0f} and f / d '
    f'{x.mlp_width / x.d_model:.2g}, as published models have them (50 to 160, '
    '2.5 to 5.5). At equal parameters the proportions hardly matter (Kaplan et '
    'al. 2020, figure 5), so the usual ones are taken.'
  )


def _keys_and_values(choice: Choice) -> list[str]:
  best, objective = choice.best.candidate, choice.best.demand.objective
  n, h = best.num_kv_heads, best.num_heads
  lost = -quality(best.attention)
  said = []
  if n is None:
    said.append(
      f'A latent of {best.attention.cache_elements} elements for all {h} heads '
      'instead of keys and values: as good as multi-head attention or better '
      "(DeepSeek-V2 2024, table 9), one maker's finding."
    )
  elif n == h:
    said.append(
      f'Every head keeps keys and values: no smaller divisor of {h} leaves '
      'eight or more.'
    )
  else:
    said.append(
      f'{n} key/value head{"s" * (n > 1)} for {h}, 1/{h // n} of '
      f"multi-head's cache: {lost:.2g} points of the proxy lost. Eight lost "
      '0.1 of 47.2, one 0.6 (Ainslie et al. 2023, table 1); the objective '
      f'{objective} gives up {LOSSES[objective]:g} below the best that no rule '
      'drops.'
    )
  better = {
    x.candidate.words: name
    for name, rows in choice.dropped.items()
    for x in rows
    if x.candidate.head_dim == best.head_dim
    and -quality(x.candidate.attention) <= 0.1 < lost
    and x.candidate.num_kv_heads is not None
  }
  if better:
    names = ' and '.join(dict.fromkeys(better.values()))
    said.append(f'Eight or more would lose less, but break a rule: {names}.')
  return said


def _latent(choice: Choice) -> list[str]:
  """How latent attention would do, where it is not recommended."""
  best = choice.best
  rows = [x for x in choice.strategies if x.candidate.kind == 'MLA']
  if best.candidate.kind == 'MLA':
    return []
  if not rows:
    broken = [
      name
      for name, dropped in choice.dropped.items()
      if any(
        x.candidate.kind == 'MLA'
        and x.candidate.head_dim == best.candidate.head_dim
        for x in dropped
      )
    ]
    if broken:
      return [f'Latent attention breaks a rule: {" or ".join(broken)}.']
    return ['Latent attention of this width and depth misses the budget.']
  x = rows[0]
  cache, step = (
    x.cache_bytes / best.cache_bytes,
    x.step.seconds / best.step.seconds,
  )
  said = (
    f'Latent attention would take {cache:.2g} times the cache on each device '
    f'and {step:.2g} times the step'
  )
  if best.demand.devices > 1:
    said += ', since each device keeps the whole latent'
  if best.demand.objective == 'quality':
    said += (
      "; that it is as good rests on one maker's ablations, so quality takes "
      'it only where no grouped attention is as good and fits'
    )
  return [f'{said}.']


def _step(best: Costed) -> str:
  step = best.step
  parts = ', '.join(f'{name} {x * 1e3:.3g}' for name, x in step.parts.items())
  return (
    f'A step takes {step.seconds * 1e3:.3g} ms, '
    f'{step.tokens_per_second:,.0f} tokens/s in all: {parts} ms, the larger of '
    f'weights and compute and of cache and attention. It waits for the '
    f'{step.bound}.'
  )


def _memory(best: Costed) -> str:
  limit = best.demand.hardware.memory
  return (
    f'Weights {gigabytes(best.weight_bytes)} and cache '
    f'{gigabytes(best.cache_bytes)} of {gigabytes(limit)} a device; up to '
    f'{fitting_batch(best):,} sequences fit.'
  )

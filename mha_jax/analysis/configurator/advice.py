"""A recommendation in words: why, what else, and what is not known."""

import dataclasses
from collections.abc import Callable

from mha_jax.analysis.configurator.choice import (
  LOSSES,
  POINT,
  STRAY,
  Choice,
  body,
)
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.configurator.quality import GQA_LOSS, quality
from mha_jax.analysis.configurator.rules import RULES, Costed
from mha_jax.analysis.costs.counts import gigabytes
from mha_jax.analysis.costs.roofline import decode_step

TIMES = (
  'Step times are what reading and computing take at least: communication '
  'between devices, norms, softmax and launches are not counted. Weights and '
  'caches of 8 bits or fewer are computed with at the rate of bf16.'
)
UNKNOWN = (
  'Quality is not predicted by formula: the proxy orders, it does not measure; '
  'data, training and tuning decide more. Of 7B models trained from scratch 8 '
  "key/value heads lost 4.0 and one 7.3 of multi-head's 45.2 points of MMLU "
  '(DeepSeek-V2 2024, table 8), far more than the proxy has. It does not see '
  'head_dim: as many key/value heads of half the features have half the cache '
  'and lose nothing by it. Train two small models before you spend money.',
  TIMES,
  'Windows, experts, tied keys and values and sparse attention are not among '
  'the candidates.',
)
LESS = 0.97
"""A remedy saves more than the 3 % that candidates' parameters differ by."""


def reasons(choice: Choice) -> list[str]:
  """Gives the reasons for the recommendation, a sentence or two each."""
  best = choice.best
  return [
    _body(best),
    _keys_and_values(choice),
    *_dropped(choice),
    *_latent(choice),
    _step(best),
    _memory(best),
  ]


def remedies(choice: Choice) -> dict[str, list[str]]:
  """Lists changes that help where 'memory' or 'latency' is short.

  What keeps the quality comes first, then what saves most.

  Each is costed: what it takes instead of what the recommendation takes.
  """
  best = choice.best
  options = _options(choice)

  def ordered(take: Callable[[Costed], float]) -> list[tuple[float, str]]:
    rows = [
      (quality(x.candidate.attention) < -GQA_LOSS, take(x), words)
      for words, x in options
      if take(x) < LESS * take(best)
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


def rules_in_words(choice: Choice) -> list[str]:
  """Says of each rule that dropped something how much, and why it exists."""
  count = len(choice.feasible) + sum(map(len, choice.dropped.values()))
  return [
    f'{rule.name} dropped {len(choice.dropped[rule.name])} of {count:,}: '
    f'{rule.words}.'
    for rule in RULES
    if choice.dropped[rule.name]
  ]


def _options(choice: Choice) -> list[tuple[str, Costed]]:
  """Changes of the demand, of keys and values, or of all, each costed."""
  best = choice.best
  candidate, demand = best.candidate, best.demand
  changes: list[tuple[str, Demand]] = []
  if demand.kv_dtype not in ('fp8', 'int8', 'int4'):
    fp8 = dataclasses.replace(demand, kv_dtype='fp8')
    changes.append(('a cache in fp8, whose loss is not counted', fp8))
  if demand.param_dtype not in ('fp8', 'int8', 'int4'):
    fp8 = dataclasses.replace(demand, param_dtype='fp8')
    changes.append(('weights in fp8, whose loss is not counted', fp8))
  twice = dataclasses.replace(demand, devices=2 * demand.devices)
  changes.append((f'{twice.devices} devices', twice))
  if demand.devices > 1 and demand.batch > 1:
    spread = dataclasses.replace(demand, split='batch')
    words = 'split=batch: caches by sequences, exchanges not counted'
    changes.append((words, spread))
  if demand.batch > 1:
    half = dataclasses.replace(demand, batch=demand.batch // 2)
    changes.append((f'batch {half.batch}', half))
  options = [
    (words, costed)
    for words, x in changes
    for costed in [Costed(candidate, x)]
    if not any(rule.broken_by(costed) for rule in RULES)
  ]
  for x in choice.strategies:
    lost = quality(candidate.attention) - quality(x.candidate.attention)
    note = f', {lost:.2g} points of the proxy' if lost > 0.005 else ''
    options.append((x.candidate.strategy + note, x))
  return options + _other_shapes(choice)


def _other_shapes(choice: Choice) -> list[tuple[str, Costed]]:
  """The least memory and the shortest step of other bodies, as good or better.

  The objective weighs them against usual proportions; who is short may not.
  """
  least = quality(choice.best.candidate.attention) - 1e-9
  others = [
    x
    for x in choice.feasible
    if body(x) != body(choice.best) and quality(x.candidate.attention) >= least
  ]
  if not others:
    return []
  found = (
    min(others, key=lambda x: x.memory),
    min(others, key=lambda x: x.step.seconds),
  )
  return [
    (
      f'd_model {x.candidate.d_model:,}, {x.candidate.num_layers} layers, '
      f'{x.candidate.words} (unusual proportions)',
      x,
    )
    for x in dict.fromkeys(found)
  ]


def _body(best: Costed) -> str:
  x = best.candidate
  return (
    f'Width {x.d_model:,}, {x.num_layers} layers, MLPs of {x.mlp_width:,}: d / '
    f'layers is {x.d_model / x.num_layers:.0f} and f / d '
    f'{x.mlp_width / x.d_model:.2g} (50 to 160 and '
    '2.5 to 5.5 are searched). Proportions hardly matter (Kaplan et al. 2020, '
    'figure 5), so the usual ones are preferred: to be off them by a factor of '
    f'two must save {1 - 0.5**STRAY:.0%} of the cost.'
  )


def _keys_and_values(choice: Choice) -> str:
  best, objective = choice.best.candidate, choice.best.demand.objective
  n, h = best.num_kv_heads, best.num_heads
  lost = -quality(best.attention)
  if n is None:
    found = (
      'better than multi-head attention in seven of eight scores (DeepSeek-V2 '
      "2024, table 9), one maker's finding"
    )
    if lost > 0:
      found = f"half of DeepSeek's rank, which is charged {lost:.2g} points"
    return (
      f'A latent of {best.attention.cache_elements} elements for {h} '
      f'head{"s" * (h > 1)} instead of keys and values: {found}.'
    )
  tenth = 1 - 0.5 ** (POINT / 10)
  weighed = (
    f'the objective {objective} gives up {LOSSES[objective]:g} at most below '
    f'the best that no rule drops, and a tenth for {tenth:.0%} of the cost or '
    'more'
  )
  if n == h:
    return f'Every head keeps keys and values, no points lost: {weighed}.'
  return (
    f'{n} key/value head{"s" * (n > 1)} for {h}, 1/{h // n} of '
    f"multi-head's cache: {lost:.2g} points of the proxy lost. Eight lost 0.1 "
    f'of 47.2, one 0.6 (Ainslie et al. 2023, table 1); {weighed}.'
  )


def _dropped(choice: Choice) -> list[str]:
  """The strategies of its width and depth that a rule drops."""
  gone = [
    f'{", ".join(names)} ({rule})'
    for rule, rows in choice.dropped.items()
    for names in [
      [x.candidate.strategy for x in rows if body(x) == body(choice.best)]
    ]
    if names
  ]
  return [f'Of its strategies rules drop {"; ".join(gone)}.'] if gone else []


def _latent(choice: Choice) -> list[str]:
  """Compares latent attention where it is not recommended."""
  best = choice.best
  rows = [x for x in choice.strategies if x.candidate.kind == 'MLA']
  if best.candidate.kind == 'MLA' or not rows:
    return []
  x = max(rows, key=lambda x: quality(x.candidate.attention))
  cache, step = (
    x.cache_bytes / best.cache_bytes,
    x.step.seconds / best.step.seconds,
  )
  said = (
    f'Latent attention ({x.candidate.strategy}) would take {cache:.2g} times '
    f'the cache on each device and {step:.2g} times the step'
  )
  if best.demand.devices > 1 and best.demand.split == 'heads':
    said += ', each device with the whole latent (split=batch spreads it)'
  if best.demand.objective == 'quality':
    said += (
      "; that it is as good rests on one maker's ablations, so quality prefers "
      'grouped attention while one within 0.1 points of the best fits'
    )
  return [f'{said}.']


def _step(best: Costed) -> str:
  """The step at the batch asked for, and what throughput is measured by."""
  step, demand = best.step, best.demand
  most = best.fitting_batch
  full = decode_step(
    best.candidate.shape, demand.place, demand.seq_len, max(1, most)
  )
  parts = ', '.join(f'{name} {x * 1e3:.3g}' for name, x in step.parts.items())
  goes_by = ', which throughput goes by' * (demand.objective == 'throughput')
  return (
    f'A step takes {step.seconds * 1e3:.3g} ms, '
    f'{step.tokens_per_second:,.0f} tokens/s in all: {parts} ms, the larger of '
    f'weights and compute and of cache and attention; most is {step.bound}. '
    f'With {most:,} sequences, the most that are possible: '
    f'{full.tokens_per_second:,.0f} tokens/s{goes_by}.'
  )


def _memory(best: Costed) -> str:
  demand, most = best.demand, best.fitting_batch
  bound = '' if demand.latency_ms is None else f', {most:,} within latency_ms'
  return (
    f'Weights {gigabytes(best.weight_bytes)} and cache '
    f'{gigabytes(best.cache_bytes)} of {gigabytes(demand.usable_memory)} a '
    f'device, 90 % of {demand.hardware.name} ({demand.hardware.source}); up to '
    f'{best.memory_batch:,} sequences fit{bound}.'
  )

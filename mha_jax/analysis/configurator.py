"""Which heads a new decoder should have: a recommendation with its reasons.

  choice = choose(Demand(params=1.3e9, seq_len=32_768, hardware=h100, batch=16))
  choice.best.candidate.attention
  choice.front, choice.closest
  reasons(choice), remedies(choice), explain(choice.best, model)

Of the candidates that no rule drops, those within a loss of quality of the best
are compared by what the objective asks for. Quality is not predicted by
formula: the proxy is what two papers found when they changed nothing but keys
and values, and parameters are the same for all.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from mha_jax.analysis.candidates import (
  MEMORY,
  RULES,
  Candidate,
  Costed,
  Demand,
  Rule,
  candidates,
  kv_heads,
)
from mha_jax.analysis.costs import ModelShape, cache_elements, num_params
from mha_jax.analysis.published import PUBLISHED, Published
from mha_jax.analysis.roofline import decode_step
from mha_jax.attention import AttentionConfig

MQA_LOSS, GQA_LOSS = 0.6, 0.1
"""Points of T5-XXL's average score that one and eight key/value heads lose."""
QUALITY_SOURCE = (
  "points below multi-head attention's average score over seven tasks: T5-XXL "
  '47.2 with 64 key/value heads, 47.1 with 8, 46.6 with 1 (Ainslie et al. '
  '2023, GQA, table 1), in between by the logarithm; latent attention 0, as '
  'good as multi-head or better (DeepSeek-V2 2024, table 9). Depth against '
  'width counts nothing at equal parameters (Kaplan et al. 2020, figure 5)'
)
LOSSES = {'quality': 0.1, 'throughput': 0.3, 'latency': 0.3}
"""Points of the proxy that each objective gives up for what it asks for."""
STRAY = 2.0
"""Halvings of the cost that a factor of two off usual proportions must bring."""
NEAR = 2.0
"""Caches a token within this factor are alike."""


@dataclasses.dataclass(frozen=True)
class Choice:
  """What `choose` found.

  Args:
    demand: what was asked for.
    best: the recommendation.
    front: the Pareto front of all that is feasible, by cache.
    closest: the two closest published decoders.
    count: of candidates within the budget.
    dropped: how many each rule dropped, in its turn.
  """

  demand: Demand
  best: Costed
  front: tuple[Costed, ...]
  closest: tuple[Published, ...]
  count: int
  dropped: dict[str, int]


def quality(attention: AttentionConfig) -> float:
  """The proxy: points that fewer key/value heads cost, 0 at most.

    n = h      0
    n >= 8     -0.1 (1 - log(n / 8) / log(h / 8))
    n < 8      -0.6 + 0.5 log2(n) / 3
    latent     0

  No prediction: it orders, see `QUALITY_SOURCE`. DeepSeek-V2's table 8 finds
  the same order for its own 7B models, with wider gaps on harder tasks.

  Args:
    attention: its config.

  Source: Ainslie et al. 2023, GQA, table 1; DeepSeek-V2 (2024), table 9.
  """
  n, h = kv_heads(attention), attention.num_heads
  if n is None or n == h:
    return 0.0
  if n >= 8:
    return -GQA_LOSS * (1 - math.log(n / 8) / math.log(h / 8))
  return -MQA_LOSS + (MQA_LOSS - GQA_LOSS) * math.log2(n) / 3


def choose(demand: Demand) -> Choice:
  """The recommendation for a demand.

  Args:
    demand: what the model is to be and do.

  Raises:
    ValueError: nothing can meet the demand; the message says which bound fails
      and by how much.
  """
  everything = [Costed(x, demand) for x in candidates(demand)]
  if not everything:
    raise ValueError(_no_shape(demand))
  left, dropped = everything, {}
  for rule in RULES:
    kept = [x for x in left if not rule.broken_by(x)]
    if not kept:
      raise ValueError(_failure(rule, left))
    dropped[rule.name] = len(left) - len(kept)
    left = kept
  best = best_of(left)
  return Choice(
    demand,
    best,
    front=pareto(left),
    closest=closest(best.candidate.shape),
    count=len(everything),
    dropped=dropped,
  )


def best_of(feasible: Sequence[Costed]) -> Costed:
  """The one that the objective prefers.

  Those within `LOSSES` of the highest quality remain; for 'quality' grouped
  ones come before latent ones, which more makers have tried. Then the least

    log2(cost) + 2 strangeness

  decides: cost is bytes of a token's cache on each device for 'quality',
  seconds of a token for 'throughput', of a step for 'latency'.

  Args:
    feasible: candidates that break no rule, at least one.
  """
  demand = feasible[0].demand
  top = max(quality(x.candidate.attention) for x in feasible)
  least = top - LOSSES[demand.objective] - 1e-9
  good = [x for x in feasible if quality(x.candidate.attention) >= least]
  if demand.objective == 'quality':
    good = [x for x in good if x.candidate.kind != 'MLA'] or good
  return min(
    good, key=lambda x: math.log2(_cost(x)) + STRAY * x.candidate.strangeness
  )


def pareto(costed: Sequence[Costed]) -> tuple[Costed, ...]:
  """Those that no other beats: a token's cache, step time, quality.

  One beats another when it is no worse in all three and better in one; of
  equals the least strange stays.
  """

  def axes(x: Costed) -> tuple[float, float, float]:
    return x.token_bytes, x.step.seconds, -quality(x.candidate.attention)

  front: list[Costed] = []
  # Sorted so, only what came before can beat one.
  for x in sorted(costed, key=lambda x: (*axes(x), x.candidate.strangeness)):
    own = axes(x)
    if not any(
      all(a <= b for a, b in zip(axes(other), own, strict=True))
      for other in front
    ):
      front.append(x)
  return tuple(front)


def closest(shape: ModelShape, count: int = 2) -> tuple[Published, ...]:
  """The published decoders whose sizes are least far, the nearest first.

  sum of (log a - log b)^2 over parameters, depth, width, heads, and elements
  of a token's cache a layer
  """
  own = _sizes(shape)
  decoders = [x for x in PUBLISHED.values() if x.shape.causal]
  distance = {x.name: math.dist(own, _sizes(x.shape)) for x in decoders}
  return tuple(sorted(decoders, key=lambda x: distance[x.name])[:count])


def fitting_batch(costed: Costed) -> int:
  """The most sequences that memory, and latency where it is bound, allow."""
  demand, shape = costed.demand, costed.candidate.shape
  room = demand.hardware.memory - costed.weight_bytes
  most = int(room // (costed.cache_bytes / demand.batch))
  if demand.latency_ms is None:
    return most

  def milliseconds(batch: int) -> float:
    step = decode_step(shape, demand.place, demand.seq_len, batch)
    return step.seconds * 1e3

  return bisect.bisect_right(
    range(1, most + 1), demand.latency_ms, key=milliseconds
  )


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


def _cost(costed: Costed) -> float:
  """What the objective minimises."""
  demand, candidate = costed.demand, costed.candidate
  if demand.objective == 'quality':
    return costed.cache_bytes
  if demand.objective == 'latency':
    return costed.step.seconds
  batch = fitting_batch(costed)
  step = decode_step(candidate.shape, demand.place, demand.seq_len, batch)
  return 1 / step.tokens_per_second


def _sizes(shape: ModelShape) -> tuple[float, ...]:
  attention = shape.layers[0].attention
  return tuple(
    math.log(x)
    for x in (
      num_params(shape).total,
      len(shape.layers),
      shape.d_model,
      attention.num_heads,
      attention.cache_elements,
    )
  )


def _no_shape(demand: Demand) -> str:
  """Why nothing has so many parameters."""
  smallest = 128 * demand.vocab_size
  if smallest > demand.params:
    return (
      f'params={demand.params:,.0f}: the table of vocab_size='
      f'{demand.vocab_size:,} alone has {smallest:,} at d_model=128, '
      f'{smallest - demand.params:,.0f} too many; take more parameters or a '
      'smaller vocabulary'
    )
  return (
    f'params={demand.params:,.0f}: no d_model (a multiple of 128) with d/160 '
    f'to d/50 layers and an MLP of 2.5 to 5.5 d comes within 3 % beside '
    f'vocab_size={demand.vocab_size:,} and head_dim={demand.head_dim}; take '
    'more parameters or a smaller vocabulary'
  )


def _failure(rule: Rule, left: Sequence[Costed]) -> str:
  """Which bound the last candidates failed, and by how much."""
  demand = left[0].demand
  if rule is MEMORY:
    return _memory_failure(left)
  if rule.name == 'latency':
    best = min(left, key=lambda x: x.step.seconds)
    time, bound = best.step.seconds * 1e3, demand.latency_ms
    assert bound is not None
    return (
      f'latency: the best possible step takes {time:.3g} ms against '
      f'latency_ms={bound:g}, {time - bound:.3g} ms too many ({short(best)}, '
      f'bound by {best.step.bound}); take more devices, fewer sequences or '
      'smaller dtypes'
    )
  have = sorted({x.candidate.num_heads for x in left})
  return (
    f'{rule.name}: no candidate holds that {rule.words}; devices='
    f'{demand.devices}, heads from {have[0]} to {have[-1]}; change devices, '
    'params or head_dim'
  )


def _memory_failure(left: Sequence[Costed]) -> str:
  demand = left[0].demand
  limit = demand.hardware.memory
  least = min(left, key=lambda x: x.memory)
  weights, memory = least.weight_bytes, least.memory
  devices = 'each device' if demand.devices > 1 else 'the device'
  if weights > limit:
    return (
      f'memory: weights {gigabytes(weights)} of {gigabytes(limit)} on '
      f'{devices}: {gigabytes(weights - limit)} too many; take at least '
      f'{math.ceil(weights * demand.devices / limit)} devices or a smaller '
      'param_dtype'
    )
  sequence = least.cache_bytes / demand.batch
  fits = int((limit - weights) // sequence)
  tokens = int((limit - weights) // (least.cache_bytes / demand.seq_len))
  return (
    f'memory: weights {gigabytes(weights)} and a cache of at least '
    f'{gigabytes(least.cache_bytes)} ({short(least)}) of {gigabytes(limit)} on '
    f'{devices}: {gigabytes(memory - limit)} too many; batch={fits} or '
    f'seq_len={tokens} fits, or take more devices or a smaller cache_dtype'
  )


def gigabytes(size: float) -> str:
  """Bytes in words, of 10^9."""
  return f'{size / 1e9:.1f} GB' if size >= 1e9 else f'{size / 1e6:.1f} MB'


def short(costed: Costed) -> str:
  """A candidate in a few words."""
  candidate = costed.candidate
  heads = f'{candidate.num_heads} heads of {candidate.head_dim}'
  n = candidate.num_kv_heads
  keeps = (
    f'a latent of {candidate.attention.cache_elements}'
    if n is None
    else f'{n} key/value head{"s" * (n > 1)}'
  )
  return f'{candidate.kind}, {heads}, {keeps}'

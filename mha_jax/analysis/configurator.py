"""Which heads a new decoder should have: a recommendation.

  choice = choose(Demand(params=1.3e9, seq_len=32_768, hardware=h100, batch=16))
  choice.best.candidate.attention
  choice.front, choice.closest        see `advice` for reasons in words

Of the candidates that no rule drops, those within a loss of quality of the best
are compared by what the objective asks for and by that loss. Quality is not
predicted by formula: the proxy is what two papers found for fewer keys and
values, and parameters are the same for all.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from mha_jax.analysis.candidates import Demand, candidates, kv_heads
from mha_jax.analysis.costs import (
  ModelShape,
  gigabytes,
  itemsize,
  num_params,
)
from mha_jax.analysis.published import PUBLISHED, Published
from mha_jax.analysis.roofline import decode_step, max_batch
from mha_jax.analysis.rules import MEMORY, RULES, Costed, Rule
from mha_jax.attention import AttentionConfig, LatentConfig

MQA_LOSS, GQA_LOSS = 0.6, 0.1
"""Points of T5-XXL's average score that one and eight key/value heads lose."""
LOW_RANK_LOSS = 0.6
"""Points for half of DeepSeek's rank: our guess, the most that is known."""
QUALITY_SOURCE = (
  "points below multi-head attention's average score over seven tasks: T5-XXL "
  '47.2 with 64 key/value heads, 47.1 with 8, 46.6 with 1, both uptrained from '
  'the first with 5 % of its compute (Ainslie et al. 2023, GQA, table 1); in '
  'between by the logarithm, which is our interpolation. Latent attention 0: '
  'better than multi-head in seven of eight scores (DeepSeek-V2 2024, table '
  '9); half of its rank 0.6, our guess. Depth against width counts nothing '
  '(Kaplan et al. 2020, figure 5, at equal parameters without embeddings)'
)
LOSSES = {'quality': 0.1, 'throughput': 0.3, 'latency': 0.3}
"""Points of the proxy that each objective gives up for what it asks for."""
POINT = 1.0
"""Halvings of the cost that make up for a point."""
STRAY = 2.0
"""Halvings of the cost that make up for a factor of two off the usual."""


@dataclasses.dataclass(frozen=True)
class Choice:
  """What `choose` found.

  Args:
    best: the recommendation.
    feasible: all that break no rule.
    strategies: those with its width, depth and head_dim, by a token's cache:
      only keys, values and the MLP that fills the budget up differ.
    front: the strategies that no other beats, see `pareto`.
    closest: the two closest published decoders.
    dropped: what each rule dropped, in its turn.
  """

  best: Costed
  feasible: tuple[Costed, ...]
  strategies: tuple[Costed, ...]
  front: tuple[Costed, ...]
  closest: tuple[Published, ...]
  dropped: dict[str, tuple[Costed, ...]]


def quality(attention: AttentionConfig) -> float:
  """The proxy: points that fewer key/value heads cost, 0 at most.

    n = h      0
    n >= 8     -0.1 (1 - log(n / 8) / log(h / 8))
    n < 8      -0.6 + 0.5 log2(n) / 3
    latent     -0.6 max(0, log2(4 k / r))

  No prediction: it orders, see `QUALITY_SOURCE`. DeepSeek-V2's table 8 finds
  the same order for 7B models trained from scratch, with far wider gaps: of
  MMLU 45.2, 8 key/value heads lose 4.0 and one 7.3.

  Args:
    attention: its config.

  Source: Ainslie et al. 2023, GQA, table 1; DeepSeek-V2 (2024), table 9.
  """
  n, h = kv_heads(attention), attention.num_heads
  if isinstance(attention, LatentConfig):
    halvings = math.log2(4 * attention.sizes['k'] / attention.kv_lora_rank)
    return -LOW_RANK_LOSS * max(0.0, halvings)
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
  left = [Costed(x, demand) for x in candidates(demand)]
  if not left:
    raise ValueError(_no_shape(demand))
  dropped = {}
  for rule in RULES:
    gone = [x for x in left if rule.broken_by(x)]
    if len(gone) == len(left):
      raise ValueError(_failure(rule, left))
    dropped[rule.name] = tuple(gone)
    ids = set(map(id, gone))
    left = [x for x in left if id(x) not in ids]
  best = best_of(left)
  strategies = sorted(
    (x for x in left if body(x) == body(best)), key=lambda x: x.token_bytes
  )
  return Choice(
    best,
    feasible=tuple(left),
    strategies=tuple(strategies),
    front=tuple(strategies[i] for i in pareto([axes(x) for x in strategies])),
    closest=closest(best.candidate.shape),
    dropped=dropped,
  )


def best_of(feasible: Sequence[Costed]) -> Costed:
  """The one that the objective prefers.

  Those within `LOSSES` of the highest quality remain; for 'quality' grouped
  ones come before latent ones, which fewer makers have tried. Then the least

    log2(cost) + points lost + 2 strangeness

  decides: cost is bytes of weights (of the budget) and cache on each device for
  'quality', seconds of a token at the batch that fits for 'throughput', of a
  step for 'latency'. So a cache that is small beside the weights costs no
  quality.

  Args:
    feasible: candidates that break no rule, at least one.
  """
  objective = feasible[0].demand.objective
  top = max(quality(x.candidate.attention) for x in feasible)
  least = top - LOSSES[objective] - 1e-9
  good = [x for x in feasible if quality(x.candidate.attention) >= least]
  if objective == 'quality':
    good = [x for x in good if x.candidate.kind != 'MLA'] or good
  return min(good, key=_preference)


def axes(costed: Costed) -> tuple[float, float, float]:
  """What the front weighs: a token's bytes, seconds of a step, points lost."""
  lost = -quality(costed.candidate.attention)
  return costed.token_bytes, costed.step.seconds, lost


def pareto(points: Sequence[tuple[float, ...]]) -> list[int]:
  """The places of the points that no other beats, of which less is better.

  One beats another that is no less anywhere and more somewhere; of equals the
  first stays.
  """
  front: list[int] = []
  # Sorted so, only what came before can beat one.
  for i in sorted(range(len(points)), key=points.__getitem__):
    if not any(
      all(a <= b for a, b in zip(points[j], points[i], strict=True))
      for j in front
    ):
      front.append(i)
  return front


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
  room = max(0.0, demand.usable_memory - costed.weight_bytes)
  most = max_batch(shape, demand.place, demand.seq_len, room)
  if demand.latency_ms is None:
    return most

  def milliseconds(batch: int) -> float:
    step = decode_step(shape, demand.place, demand.seq_len, batch)
    return step.seconds * 1e3

  return bisect.bisect_right(
    range(1, most + 1), demand.latency_ms, key=milliseconds
  )


def body(costed: Costed) -> tuple[int, int, int]:
  """Width, depth and features of a head: what strategies have in common."""
  x = costed.candidate
  return x.d_model, x.num_layers, x.head_dim


def _preference(costed: Costed) -> float:
  candidate = costed.candidate
  lost = -quality(candidate.attention)
  stray = STRAY * candidate.strangeness
  return math.log2(_cost(costed)) + POINT * lost + stray


def _cost(costed: Costed) -> float:
  """What the objective minimises."""
  demand, candidate = costed.demand, costed.candidate
  if demand.objective == 'quality':
    size = itemsize('param_dtype', demand.param_dtype)
    return demand.params * size / demand.devices + costed.cache_bytes
  if demand.objective == 'latency':
    return costed.step.seconds
  batch = max(1, fitting_batch(costed))
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
      f'latency_ms={bound:g}, {time - bound:.3g} ms too many '
      f'({best.candidate.words}, bound by {best.step.bound}); take more '
      'devices, fewer sequences or smaller dtypes'
    )
  heads = sorted({x.candidate.num_heads for x in left})
  return (
    f'{rule.name}: devices={demand.devices}, but of {len(left):,} shapes of '
    f'{heads[0]} to {heads[-1]} heads none holds that {rule.words}; change '
    'devices or params, or ask for a head_dim'
  )


def _memory_failure(left: Sequence[Costed]) -> str:
  demand = left[0].demand
  limit = demand.usable_memory
  least = min(left, key=lambda x: x.memory)
  weights, memory = least.weight_bytes, least.memory
  devices = 'each device' if demand.devices > 1 else 'the device'
  where = f'the {gigabytes(limit)} that {devices} has for them'
  if weights > limit:
    ways = 2 ** math.ceil(math.log2(weights * demand.devices / limit))
    return (
      f'memory: weights {gigabytes(weights)} of {where}: '
      f'{gigabytes(weights - limit)} too many; take devices={ways} or more, or '
      'a smaller param_dtype'
    )
  fits = fitting_batch(dataclasses.replace(least, demand=_unbound(demand)))
  tokens = int((limit - weights) // (least.cache_bytes / demand.seq_len))
  held = [f'batch={fits}'] * (fits > 0) + [f'seq_len={tokens}'] * (tokens > 0)
  take = f'{" or ".join(held)} fits, or take' if held else 'take'
  return (
    f'memory: weights {gigabytes(weights)} and a cache of at least '
    f'{gigabytes(least.cache_bytes)} ({least.candidate.words}) of {where}: '
    f'{gigabytes(memory - limit)} too many; {take} '
    'more devices or a smaller kv_dtype'
  )


def _unbound(demand: Demand) -> Demand:
  """The same without a bound on latency."""
  return dataclasses.replace(demand, latency_ms=None)

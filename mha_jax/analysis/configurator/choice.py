"""Which heads a new decoder should have: a recommendation.

  choice = choose(Demand(params=1.3e9, seq_len=32_768, hardware=h100, batch=16))
  choice.best.candidate.attention
  choice.front, choice.closest        see `advice` for reasons in words

Of the candidates that no rule drops, those within a loss of quality of the best
are compared by what the objective asks for and by that loss. Quality is not
predicted by formula: the proxy is what two papers found for fewer keys and
values, and parameters are the same for all.
"""

import dataclasses
import math
from collections.abc import Sequence

from mha_jax.analysis.configurator.candidates import candidates
from mha_jax.analysis.configurator.comparison import closest
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.configurator.quality import quality
from mha_jax.analysis.configurator.refusals import no_shape, refusal
from mha_jax.analysis.configurator.rules import RULES, Costed
from mha_jax.analysis.costs.counts import itemsize
from mha_jax.analysis.costs.published import Published
from mha_jax.analysis.costs.roofline import decode_step

LOSSES = {'quality': 0.1, 'throughput': 0.3, 'latency': 0.3}
"""Points of the proxy that each objective gives up for what it asks for."""
POINT = 1.0
"""Halvings of the cost that make up for a point."""
STRAY = 2.0
"""Halvings of the cost that make up for a factor of two off the usual."""


@dataclasses.dataclass(frozen=True)
class Choice:
  """The result of `choose`: the recommendation, and its alternatives.

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
    raise ValueError(no_shape(demand))
  dropped = {}
  for rule in RULES:
    gone = [x for x in left if rule.broken_by(x)]
    if len(gone) == len(left):
      raise ValueError(refusal(rule, left))
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
  """Gives a device's cache (bytes), a step (seconds) and the points lost."""
  lost = -quality(costed.candidate.attention)
  return costed.cache_bytes, costed.step.seconds, lost


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
  """Computes the cost that the objective minimises."""
  demand, candidate = costed.demand, costed.candidate
  if demand.objective == 'quality':
    size = itemsize('param_dtype', demand.param_dtype)
    return demand.params * size / demand.devices + costed.cache_bytes
  if demand.objective == 'latency':
    return costed.step.seconds
  batch = max(1, costed.fitting_batch)
  step = decode_step(candidate.shape, demand.place, demand.seq_len, batch)
  return 1 / step.tokens_per_second

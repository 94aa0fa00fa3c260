"""Costs of candidates, and the rules that drop some.

costed = Costed(candidate, demand)
costed.step.seconds, costed.memory
[rule.name for rule in RULES if rule.broken_by(costed)]
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable

from mha_jax.analysis.configurator.candidates import Candidate
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.costs.counts import itemsize, num_params
from mha_jax.analysis.costs.roofline import (
  Step,
  decode_step,
  device_cache_bytes,
  max_batch,
  weight_bytes,
)

USUAL_HEAD_DIMS = (64, 128)
"""Features of a head at the least and at the most, unless asked for."""


@dataclasses.dataclass(frozen=True)
class Costed:
  """A candidate and what it takes under a demand, as far as one asks.

  Args:
    candidate: the decoder.
    demand: where and how it runs.
  """

  candidate: Candidate
  demand: Demand

  @functools.cached_property
  def params(self) -> int:
    return num_params(self.candidate.shape).total

  @functools.cached_property
  def weight_bytes(self) -> float:
    """Bytes of the weights on each device."""
    return weight_bytes(self.candidate.shape, self.demand.place)

  @functools.cached_property
  def cache_bytes(self) -> float:
    """Bytes of a whole batch's cache on each device."""
    demand = self.demand
    return device_cache_bytes(
      self.candidate.shape, demand.place, demand.seq_len, demand.batch
    )

  @property
  def memory(self) -> float:
    """Bytes of weights and cache on each device."""
    return self.weight_bytes + self.cache_bytes

  @property
  def token_bytes(self) -> float:
    """Bytes of a token's cache in all layers, whatever the devices."""
    elements = self.candidate.attention.cache_elements
    size = itemsize('kv_dtype', self.demand.kv_dtype)
    return elements * self.candidate.num_layers * size

  @functools.cached_property
  def step(self) -> Step:
    """A decode step at the full length."""
    demand = self.demand
    return decode_step(
      self.candidate.shape, demand.place, demand.seq_len, demand.batch
    )

  @functools.cached_property
  def memory_batch(self) -> int:
    """The most sequences that memory allows."""
    demand = self.demand
    room = max(0.0, demand.usable_memory - self.weight_bytes)
    return max_batch(self.candidate.shape, demand.place, demand.seq_len, room)

  @functools.cached_property
  def fitting_batch(self) -> int:
    """The most that memory, and latency where it is bound, allow."""
    demand = self.demand
    if demand.latency_ms is None:
      return self.memory_batch

    def milliseconds(batch: int) -> float:
      shape, place = self.candidate.shape, demand.place
      return decode_step(shape, place, demand.seq_len, batch).seconds * 1e3

    return bisect.bisect_right(
      range(1, self.memory_batch + 1), demand.latency_ms, key=milliseconds
    )


@dataclasses.dataclass(frozen=True)
class Rule:
  """A condition that every candidate must meet.

  Args:
    name: a word or two.
    words: what it asks and why.
    broken_by: whether a candidate breaks it.
  """

  name: str
  words: str
  broken_by: Callable[[Costed], bool]


def _strange_head(costed: Costed) -> bool:
  least, most = USUAL_HEAD_DIMS
  asked = costed.demand.head_dim is not None
  return not (asked or least <= costed.candidate.head_dim <= most)


def _off_lanes(costed: Costed) -> bool:
  lanes = costed.demand.hardware.lanes
  asked = costed.demand.head_dim is not None
  return not asked and costed.candidate.head_dim % lanes != 0


def _splits_badly(costed: Costed) -> bool:
  candidate, ways = costed.candidate, costed.demand.devices
  n = candidate.num_kv_heads if costed.demand.split == 'heads' else None
  sizes = (candidate.num_heads, candidate.mlp_width, n or ways)
  return any(x % ways for x in sizes)


def _too_large(costed: Costed) -> bool:
  return costed.memory > costed.demand.usable_memory


def _too_slow(costed: Costed) -> bool:
  bound = costed.demand.latency_ms
  return bound is not None and costed.step.seconds * 1e3 > bound


HEAD_DIM = Rule(
  'head_dim',
  'a head has 64 to 128 features unless you ask for others (head_dim): '
  'published models outside are rare, Gemma with 256 among them',
  _strange_head,
)
LANES = Rule(
  'lanes',
  'head_dim fills the lanes of the hardware: multiples of 128 on TPU, whose '
  'vectors are so wide and pad what is missing, elsewhere of 64, as the fused '
  'kernels have them',
  _off_lanes,
)
SPLIT = Rule(
  'split',
  'query and key/value heads divide over the devices: with fewer key/value '
  'heads than devices each still keeps one, so as many heads as devices cost '
  'no more cache there; a latent stands on every device (split=batch spreads '
  'both by sequences)',
  _splits_badly,
)
MEMORY = Rule(
  'memory',
  'weights and the caches of the whole batch fit into 90 % of the memory of a '
  'device; the rest is for activations',
  _too_large,
)
LATENCY = Rule(
  'latency',
  'a decode step at the full length takes no longer than latency_ms',
  _too_slow,
)
RULES = (HEAD_DIM, LANES, SPLIT, MEMORY, LATENCY)
"""In the order in which they are asked."""

"""When a model decodes, and where: seconds, bytes and devices by a roofline.

  place = Placement(hardware('h100'), devices=8)
  decode_step(shape, place, length, batch).seconds
  prefill_seconds(shape, place, length, batch)
  max_batch(shape, place, length)

Not counted: communication between devices, activations, norms and softmax,
launches. Times are lower bounds: what is measured is slower.

Source: Austin et al. 2025, How to Scale Your Model (jax-ml.github.io/
scaling-book), chapters 4 and 7; Pope et al. 2022, Efficiently Scaling
Transformer Inference.
"""

import dataclasses
import math
from collections.abc import Callable

from mha_jax.analysis.costs.counts import (
  BYTES,
  attention_params,
  attention_step,
  check_sizes,
  core_flops,
  device_elements,
  itemsize,
  mlp_params,
)
from mha_jax.analysis.costs.hardware import Hardware
from mha_jax.analysis.costs.shape import ModelShape
from mha_jax.attention import AttentionConfig, checks

SPLITS = ('heads', 'batch')


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices that a model runs on, and how it is split over them.

  Args:
    hardware: each device.
    devices: ways of tensor parallelism. Query and key/value heads, hidden
      features and vocabulary are split; past n ways key/value heads are
      replicated, what has no heads (MLA's latent) stands on every device.
    param_dtype: of the weights, a name in `BYTES`.
    cache_dtype: of the cache.
    split: how the cache is split: 'heads', or 'batch': by heads as far as they
      go and beyond that by sequences, so that nothing is replicated (Pope et
      al.'s optimised multi-query). Weights are split as with 'heads', so each
      layer exchanges queries and outputs, which is not counted.

  Raises:
    ValueError: devices is not positive, or a name is unknown.
  """

  hardware: Hardware
  devices: int = 1
  param_dtype: str = 'bf16'
  cache_dtype: str = 'bf16'
  split: str = 'heads'

  def __post_init__(self) -> None:
    checks.positive('devices', self.devices)
    itemsize('param_dtype', self.param_dtype)
    itemsize('cache_dtype', self.cache_dtype)
    if self.split not in SPLITS:
      raise ValueError(f'split={self.split!r} must be in {SPLITS}')

  def ways(self, attention: AttentionConfig) -> tuple[int, int]:
    """Ways that the cache is split by heads and by sequences."""
    if self.split == 'heads':
      return self.devices, 1
    heads = max(heads for heads, _ in attention.entry_shapes)
    by_heads = math.gcd(heads, self.devices)
    return by_heads, self.devices // by_heads


def weight_bytes(shape: ModelShape, place: Placement) -> float:
  """Bytes of the weights on each device."""
  body, head = _device_params(shape, place.devices, math.inf)
  lookups = shape.positions * shape.d_model + (0 if shape.tied else head)
  return (body + head + lookups) * BYTES[place.param_dtype]


def device_cache_bytes(
  shape: ModelShape, place: Placement, length: int, batch: int = 1
) -> float:
  """Bytes of the cache on each device, of the fullest one."""
  check_sizes(length, batch)
  total = 0
  for layer, count in shape.groups:
    by_heads, by_batch = place.ways(layer.attention)
    elements = device_elements(layer.attention, by_heads) * layer.keys(length)
    total += count * math.ceil(batch / by_batch) * elements
  return total * BYTES[place.cache_dtype]


@dataclasses.dataclass(frozen=True)
class Step:
  """A decoding step on each device, which all take as long.

    seconds = max(linear FLOPs / flops, weights / bandwidth)
              + max(attention FLOPs / flops, cache / bandwidth)

  The second is the cache's read unless the attention's intensity exceeds the
  hardware's, as MLA's may.

  Args:
    hardware: the device.
    batch: sequences, each of which gets a token.
    weight_bytes: read of the weights, once for all sequences.
    linear_flops: of the products with them.
    cache_bytes: read of the caches of all sequences; in the expanded form of
      latent attention also keys and values, written and read.
    attention_flops: of the products with them.

  Source: Austin et al. 2025, How to Scale Your Model, chapter 7, theoretical
  step time (general), where attention is taken to wait for memory always.
  """

  hardware: Hardware
  batch: int
  weight_bytes: float
  linear_flops: float
  cache_bytes: float
  attention_flops: float

  @property
  def parts(self) -> dict[str, float]:
    """Seconds of each part; the larger of the first and last two count."""
    flops, bandwidth = self.hardware.flops, self.hardware.bandwidth
    return {
      'weights': self.weight_bytes / bandwidth,
      'compute': self.linear_flops / flops,
      'cache': self.cache_bytes / bandwidth,
      'attention': self.attention_flops / flops,
    }

  @property
  def seconds(self) -> float:
    parts = self.parts
    linear = max(parts['weights'], parts['compute'])
    return linear + max(parts['cache'], parts['attention'])

  @property
  def bound(self) -> str:
    """The part that takes the longest."""
    return max(self.parts, key=self.parts.__getitem__)

  @property
  def tokens_per_second(self) -> float:
    return self.batch / self.seconds


def decode_step(
  shape: ModelShape, place: Placement, length: int, batch: int = 1
) -> Step:
  """Counts the work of decoding one token of each sequence.

  Args:
    shape: the model.
    place: where it runs.
    length: tokens of a sequence, the new one included.
    batch: sequences.
  """
  check_sizes(length, batch)
  read, head = _device_params(shape, place.devices, batch)
  used, _ = _device_params(shape, place.devices, 1)
  size = BYTES[place.cache_dtype], BYTES[place.param_dtype]
  flops, moved = 0.0, 0.0
  for layer, count in shape.groups:
    by_heads, by_batch = place.ways(layer.attention)
    each = attention_step(layer, length, by_heads)
    sequences = count * math.ceil(batch / by_batch)
    flops += sequences * each[0]
    moved += sequences * (each[1] * size[0] + each[2] * size[1])
  return Step(
    place.hardware,
    batch,
    weight_bytes=(read + head) * BYTES[place.param_dtype],
    linear_flops=2.0 * batch * (used + head),
    cache_bytes=moved,
    attention_flops=flops,
  )


def prefill_seconds(
  shape: ModelShape, place: Placement, length: int, batch: int = 1
) -> float:
  """Seconds to read prompts: the larger of computing and moving bytes.

    max(FLOPs / flops, (weights read + cache written) / bandwidth)

  Args:
    shape: the model.
    place: where it runs.
    length: tokens of a prompt.
    batch: prompts.
  """
  cache = device_cache_bytes(shape, place, length, batch)
  read, _ = _device_params(shape, place.devices, batch * length)
  used, head = _device_params(shape, place.devices, 1)
  core = core_flops(shape, length, place.devices)
  flops = batch * (2 * used * length + 2 * head + core)
  moved = (read + head) * BYTES[place.param_dtype] + cache
  return max(flops / place.hardware.flops, moved / place.hardware.bandwidth)


def max_batch(
  shape: ModelShape,
  place: Placement,
  length: int,
  cache_memory: float | None = None,
) -> int:
  """The most sequences of a length whose caches fit, below 2^31; 0: not one.

  Args:
    shape: the model.
    place: where it runs.
    length: tokens of a sequence.
    cache_memory: bytes of each device for the cache; None: what the weights
      leave.
  """
  room = _room(shape, place, cache_memory)
  most = _most(lambda x: device_cache_bytes(shape, place, length, x) <= room)
  return 2**31 - 1 if most is None else most


def max_context(
  shape: ModelShape,
  place: Placement,
  batch: int = 1,
  cache_memory: float | None = None,
) -> int | None:
  """The most tokens of each sequence whose caches fit; 0: not one.

  Args:
    shape: the model.
    place: where it runs.
    batch: sequences.
    cache_memory: bytes of each device for the cache; None: what the weights
      leave.

  Returns:
    Tokens; None: any number, since every layer has a window and they fit.
  """
  room = _room(shape, place, cache_memory)
  return _most(lambda x: device_cache_bytes(shape, place, x, batch) <= room)


def _device_params(
  shape: ModelShape, devices: int, tokens: float
) -> tuple[float, int]:
  """Parameters that so many tokens use on each device: layers, and output."""
  d = shape.d_model
  body: float = shape.norms * d
  for layer, count in shape.groups:
    attention = attention_params(layer.attention, devices)
    mlp = mlp_params(layer, tokens, devices)
    body += count * (attention + mlp + layer.norms * d)
  return body, math.ceil(shape.vocab_size / devices) * d


def _room(
  shape: ModelShape, place: Placement, cache_memory: float | None
) -> float:
  """Bytes of each device for the cache."""
  if cache_memory is None:
    return place.hardware.memory - weight_bytes(shape, place)
  checks.real('cache_memory', cache_memory, 0, math.inf)
  return cache_memory


def _most(fits: Callable[[int], bool]) -> int | None:
  """The largest number that fits, of those below 2^31; None: all do."""
  low, high = 0, 2**31
  if fits(high - 1):
    return None
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low

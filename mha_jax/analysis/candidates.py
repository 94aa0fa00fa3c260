"""Decoders that a parameter budget allows, and the rules that drop some.

  demand = Demand(params=1.3e9, seq_len=32_768, hardware=hardware('h100'))
  for candidate in candidates(demand): ...
  costed = Costed(candidate, demand)
  costed.step.seconds, costed.memory
  [rule.name for rule in RULES if rule.broken_by(costed)]

Widths are multiples of 128; depth and MLP lie in the ranges that published
models span; there are h = d / k heads, key/value heads are a divisor of them,
and latents have DeepSeek's proportions. The MLP fills the budget up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

from mha_jax.analysis.costs import (
  Mlp,
  ModelShape,
  attention_params,
  itemsize,
  num_params,
  stack,
)
from mha_jax.analysis.hardware import Hardware
from mha_jax.analysis.roofline import (
  Placement,
  Step,
  decode_step,
  device_cache_bytes,
  weight_bytes,
)
from mha_jax.attention import (
  AttentionConfig,
  GroupedConfig,
  LatentConfig,
  Rope,
  checks,
)

OBJECTIVES = ('quality', 'throughput', 'latency')
HEAD_DIMS = (64, 80, 96, 128, 256)
USUAL_HEAD_DIMS = (64, 128)
"""Features of a head at the least and at the most, unless asked for."""
ASPECTS = (50, 160)
"""d / layers: GPT-2 64, Gemma 2 85, Llama-3 70B 102, Llama-3 8B 128."""
MLP_RATIOS = (2.5, 5.5)
"""f / d of gated MLPs: Llama-2 2.7, Llama-3 3.5, Gemma 2 4.0, Qwen 2.5 5.3."""
USUAL_ASPECT, USUAL_MLP_RATIO = 114, 3.5
"""The medians of `published`."""
NARROW = 2048
"""Up to this d_model 64 features a head are usual, beyond it 128."""
TIED_SHARE = 0.15
"""Embeddings are tied where two tables would be more of the parameters."""
TOLERANCE = 0.03
"""How far parameters may be from the budget."""


@dataclasses.dataclass(frozen=True)
class Demand:
  """What a model is to be and do.

  Args:
    params: how many parameters, within 3 %.
    seq_len: tokens of a sequence when it decodes.
    hardware: each device.
    devices: ways of tensor parallelism.
    batch: sequences at once.
    latency_ms: milliseconds that a decode step may take; None: any.
    param_dtype: of the weights, a name in `costs.BYTES`.
    cache_dtype: of the cache.
    objective: 'quality', 'throughput' (tokens a second, at the batch that
      fits) or 'latency' (of a step, at `batch`).
    vocab_size: m.
    head_dim: features of a head; None: 64 or 128. To ask for another is the
      reason that it needs.

  Raises:
    ValueError: a value is none of these.
  """

  params: float
  seq_len: int
  hardware: Hardware
  devices: int = 1
  batch: int = 1
  latency_ms: float | None = None
  param_dtype: str = 'bf16'
  cache_dtype: str = 'bf16'
  objective: str = 'quality'
  vocab_size: int = 128_256
  head_dim: int | None = None

  def __post_init__(self) -> None:
    checks.real('params', self.params, 1e5, 1e13)
    for name in ('seq_len', 'devices', 'batch', 'vocab_size'):
      checks.positive(name, getattr(self, name))
    if self.latency_ms is not None:
      checks.real('latency_ms', self.latency_ms, 1e-6, 1e6)
    itemsize('param_dtype', self.param_dtype)
    itemsize('cache_dtype', self.cache_dtype)
    if self.objective not in OBJECTIVES:
      raise ValueError(f'objective={self.objective!r} must be in {OBJECTIVES}')
    if self.head_dim not in (None, *HEAD_DIMS):
      raise ValueError(f'head_dim={self.head_dim!r} must be in {HEAD_DIMS}')

  @property
  def place(self) -> Placement:
    """Where it runs."""
    return Placement(
      self.hardware, self.devices, self.param_dtype, self.cache_dtype
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A decoder: layers alike, gated MLPs, RMSNorm before each part.

  Args:
    attention: of each layer.
    num_layers: how many.
    mlp_width: f.
    vocab_size: m.
    tied: whether the output projection is the table of embeddings.
  """

  attention: GroupedConfig | LatentConfig
  num_layers: int
  mlp_width: int
  vocab_size: int
  tied: bool

  @functools.cached_property
  def shape(self) -> ModelShape:
    return stack(
      self.attention,
      self.num_layers,
      vocab_size=self.vocab_size,
      mlp=Mlp(self.mlp_width),
      tied=self.tied,
    )

  @property
  def d_model(self) -> int:
    return self.attention.d_model

  @property
  def num_heads(self) -> int:
    return self.attention.num_heads

  @property
  def head_dim(self) -> int:
    """k; of latent attention without its rotary part."""
    return self.attention.sizes['k']

  @property
  def num_kv_heads(self) -> int | None:
    """n; None: there is a latent instead."""
    return kv_heads(self.attention)

  @property
  def kind(self) -> str:
    """'MHA', 'GQA', 'MQA' or 'MLA'."""
    n = self.num_kv_heads
    if n is None:
      return 'MLA'
    return {self.num_heads: 'MHA', 1: 'MQA'}.get(n, 'GQA')

  @property
  def strategy(self) -> str:
    """'MHA', 'GQA-8', 'MQA' or 'MLA'."""
    return self.kind + (f'-{self.num_kv_heads}' if self.kind == 'GQA' else '')

  @property
  def words(self) -> str:
    """Such as 'GQA, 32 heads of 128, 8 key/value heads'."""
    n = self.num_kv_heads
    keeps = f'a latent of {self.attention.cache_elements}'
    if n is not None:
      keeps = f'{n} key/value head{"s" * (n > 1)}'
    return f'{self.kind}, {self.num_heads} heads of {self.head_dim}, {keeps}'

  @property
  def strangeness(self) -> float:
    """Factors of two by which it is off published models' usual proportions.

    |log2(d / layers / 114)| + |log2(f / d / 3.5)| + |log2(k / usual)|
    """
    usual = 64 if self.d_model <= NARROW else 128
    ratios = (
      self.d_model / self.num_layers / USUAL_ASPECT,
      self.mlp_width / self.d_model / USUAL_MLP_RATIO,
      self.head_dim / usual,
    )
    return sum(abs(math.log2(x)) for x in ratios)


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
    """On each device."""
    return weight_bytes(self.candidate.shape, self.demand.place)

  @functools.cached_property
  def cache_bytes(self) -> float:
    """Of a whole batch, on each device."""
    demand = self.demand
    return device_cache_bytes(
      self.candidate.shape, demand.place, demand.seq_len, demand.batch
    )

  @property
  def memory(self) -> float:
    """Bytes on each device."""
    return self.weight_bytes + self.cache_bytes

  @property
  def token_bytes(self) -> float:
    """Of the cache of a token in all layers, however many devices keep it."""
    elements = self.candidate.attention.cache_elements
    size = itemsize('cache_dtype', self.demand.cache_dtype)
    return elements * self.candidate.num_layers * size

  @functools.cached_property
  def step(self) -> Step:
    """A decode step at the full length."""
    demand = self.demand
    return decode_step(
      self.candidate.shape, demand.place, demand.seq_len, demand.batch
    )


@dataclasses.dataclass(frozen=True)
class Rule:
  """What a candidate must hold.

  Args:
    name: a word or two.
    words: what it asks and why.
    broken_by: whether a candidate breaks it.
  """

  name: str
  words: str
  broken_by: Callable[[Costed], bool]


def on_tpu(hardware: Hardware) -> bool:
  """Whether a device is a TPU, by its name: v5e, tpu-v4, ..."""
  name = hardware.name.lower().removeprefix('tpu').lstrip('-_ ')
  return name != hardware.name.lower() or name[:2] in ('v4', 'v5', 'v6', 'v7')


def _strange_head(costed: Costed) -> bool:
  least, most = USUAL_HEAD_DIMS
  asked = costed.demand.head_dim is not None
  return not (asked or least <= costed.candidate.head_dim <= most)


def _off_lanes(costed: Costed) -> bool:
  lanes = 128 if on_tpu(costed.demand.hardware) else 64
  asked = costed.demand.head_dim is not None
  return not asked and costed.candidate.head_dim % lanes != 0


def _splits_badly(costed: Costed) -> bool:
  candidate, ways = costed.candidate, costed.demand.devices
  n = candidate.num_kv_heads or ways
  return any(x % ways for x in (candidate.num_heads, candidate.mlp_width, n))


def _too_large(costed: Costed) -> bool:
  return costed.memory > costed.demand.hardware.memory


def _too_slow(costed: Costed) -> bool:
  bound = costed.demand.latency_ms
  return bound is not None and costed.step.seconds * 1e3 > bound


HEAD_DIM = Rule(
  'head_dim',
  'a head has 64 to 128 features unless you ask for others (--head_dim): '
  'published models outside are rare, Gemma with 256 among them',
  _strange_head,
)
LANES = Rule(
  'lanes',
  'head_dim fills the lanes of the hardware: multiples of 64, of 128 on TPU, '
  'whose matrix units are 128 or 256 wide; what is missing is padded',
  _off_lanes,
)
SPLIT = Rule(
  'split',
  'query and key/value heads divide over the devices: with fewer key/value '
  'heads than devices each still keeps one, so as many heads as devices cost '
  'no more cache there; a latent stands on every device',
  _splits_badly,
)
MEMORY = Rule(
  'memory',
  'weights and the caches of the whole batch fit into the memory of a device',
  _too_large,
)
LATENCY = Rule(
  'latency',
  'a decode step at the full length takes no longer than --latency_ms',
  _too_slow,
)
RULES = (HEAD_DIM, LANES, SPLIT, MEMORY, LATENCY)
"""In the order in which they are asked."""


def candidates(demand: Demand) -> Iterator[Candidate]:
  """The decoders whose parameters are within 3 % of the budget."""
  for d in _widths():
    table = demand.vocab_size * d
    if table > demand.params:
      return
    tied = 2 * table > TIED_SHARE * demand.params
    for attention in _attentions(d, demand):
      own = attention_params(attention)
      for layers in _depths(d):
        outside = (1 if tied else 2) * table + d
        room = (demand.params - outside) / layers - own - 2 * d
        unit = math.lcm(128, demand.devices)
        width = round(room / (3 * d) / unit) * unit
        if not MLP_RATIOS[0] <= width / d <= MLP_RATIOS[1]:
          continue
        total = outside + layers * (own + 2 * d + 3 * d * width)
        if abs(total / demand.params - 1) <= TOLERANCE:
          yield Candidate(attention, layers, width, demand.vocab_size, tied)


def kv_heads(attention: AttentionConfig) -> int | None:
  """n; None for latent attention."""
  return None if attention.keeps_latent else attention.entry_shapes[0][0]


def _widths() -> Iterator[int]:
  """Multiples of 128, farther apart where they are large."""
  d = 128
  while d <= 32_768:
    yield d
    d += 128 if d < 2048 else 256 if d < 4096 else 512


def _depths(d: int) -> Iterator[int]:
  """Numbers of layers that d / layers allows, farther apart where many."""
  for layers in range(1, d // ASPECTS[0] + 1):
    step = 1 if layers < 12 else 2 ** (layers.bit_length() - 4)
    if layers % step == 0 and d / layers <= ASPECTS[1]:
      yield layers


def _attentions(
  d: int, demand: Demand
) -> Iterator[GroupedConfig | LatentConfig]:
  """MHA, GQA and MQA with every divisor of the heads, and MLA.

  Latents as DeepSeek-V2's: r = 4 k, p = k / 2, from d = 5120 on queries too
  come from one, of 3 r features; r and p are multiples of 64.
  """
  rope = Rope(10_000.0 if demand.seq_len <= 4096 else 500_000.0)
  for k in HEAD_DIMS if demand.head_dim is None else (demand.head_dim,):
    if d % k:
      continue
    h = d // k
    for n in range(1, h + 1):
      if h % n == 0:
        yield GroupedConfig(d, h, n, k, use_bias=False, rope=rope)
    r = 4 * k
    if r % 64 == 0:
      yield LatentConfig(
        d,
        h,
        kv_lora_rank=r,
        q_lora_rank=3 * r if d >= 5120 else None,
        qk_nope_head_dim=k,
        qk_rope_head_dim=max(64, k // 2 // 64 * 64),
        v_head_dim=k,
        rope=rope,
      )

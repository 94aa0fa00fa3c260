"""Decoders that a parameter budget allows.

  demand = Demand(params=1.3e9, seq_len=32_768, hardware=hardware('h100'))
  for candidate in candidates(demand): ...
  candidate.shape, as_python(candidate)

Widths are multiples of 128; depth and MLP lie in ranges about those of
`published`; there are h = d / k heads, key/value heads are a divisor of them,
and latents have r = 4 k, as DeepSeek's, or half. The MLP fills the budget up.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from mha_jax.analysis.configurator.demand import HEAD_DIMS, Demand
from mha_jax.analysis.costs.counts import attention_params
from mha_jax.analysis.costs.shape import Mlp, ModelShape, stack
from mha_jax.attention import (
  AttentionConfig,
  GroupedConfig,
  LatentConfig,
  Rope,
)

ASPECTS = (50, 160)
"""d / layers: GPT-2 64, Gemma 2 85, Llama-3 70B 102, Llama-3 8B 128."""
MLP_RATIOS = (2.5, 5.5)
"""f / d of gated MLPs: Llama-2 2.7, Llama-3 3.5, Gemma 2 4.0, Qwen 2.5 5.3."""
USUAL_ASPECT, USUAL_MLP_RATIO = 114, 3.5
"""The medians of `published`'s dense decoders."""
NARROW = 2048
"""Up to this d_model 64 features a head are usual, beyond it 128."""
TIED_SHARE = 0.15
"""Embeddings are tied where two tables would be more of the parameters."""
TOLERANCE = 0.03
"""The greatest relative difference of the parameters from the budget."""


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
    return {1: 'MQA', self.num_heads: 'MHA'}.get(n, 'GQA')

  @property
  def strategy(self) -> str:
    """'MHA', 'GQA-8' by key/value heads, 'MQA' or 'MLA-512' by rank."""
    sizes = {
      'GQA': self.num_kv_heads,
      'MLA': dict(self.attention.sizes).get('r'),
    }
    return (
      f'{self.kind}-{sizes[self.kind]}' if self.kind in sizes else self.kind
    )

  @property
  def words(self) -> str:
    """Describes it, as in 'GQA, 32 heads of 128, 8 key/value heads'."""
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


def candidates(demand: Demand) -> Iterator[Candidate]:
  """The decoders whose parameters are within 3 % of the budget."""
  for d in _widths():
    table = demand.vocab_size * d
    if table > demand.params:
      return
    tied = 2 * table > TIED_SHARE * demand.params
    outside = (1 if tied else 2) * table + d
    depths = [
      (layers, room)
      for layers in _depths(d)
      for room in [(demand.params - outside) / layers - 2 * d]
      if 3 * MLP_RATIOS[0] < room / d**2 < 3 * MLP_RATIOS[1] + 5
    ]  # attention has about 5 d^2 parameters at most
    if not depths:
      continue
    unit = math.lcm(128, demand.devices)
    unit = unit if unit <= d else 128  # which rule then drops
    for attention in _attentions(d, demand):
      own = attention_params(attention)
      for layers, room in depths:
        width = round((room - own) / (3 * d) / unit) * unit
        if not MLP_RATIOS[0] <= width / d <= MLP_RATIOS[1]:
          continue
        total = outside + layers * (own + 2 * d + 3 * d * width)
        if abs(total / demand.params - 1) <= TOLERANCE:
          yield Candidate(attention, layers, width, demand.vocab_size, tied)


def as_python(candidate: Candidate) -> str:
  """The attention of a layer as a module of this library, ready to run."""
  attention = candidate.attention
  if isinstance(attention, LatentConfig):
    module = 'MultiHeadLatentAttention'
    names = ['num_heads', 'kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim']
    names += ['qk_rope_head_dim', 'v_head_dim']
  else:
    module = 'GroupedQueryAttention'
    names = ['num_heads', 'num_kv_heads', 'head_dim', 'use_bias']
  options = [f'  {name}={getattr(attention, name)},' for name in names]
  assert attention.rope is not None
  d = candidate.d_model
  lines = (
    'import jax',
    'import jax.numpy as jnp',
    '',
    'import mha_jax.linen as mha',
    'from mha_jax.attention import Rope, masks',
    '',
    f'# Each of {candidate.num_layers} layers, d_model {d}, beside a gated MLP',
    f'# of {candidate.mlp_width}: {attention_params(attention):,} parameters.',
    f'attention = mha.{module}(',
    *options,
    f'  rope=Rope(theta={attention.rope.theta:_}),',
    ')',
    f'x = jnp.zeros((1, 8, {d}))',
    'variables = attention.init(jax.random.key(0), x)',
    'y = attention.apply(variables, x, mask=masks.causal())',
  )
  return '\n'.join(lines) + '\n'


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

  Of more heads than 8 multiples of 4, as most published have them, so that 2 or
  4 devices can share them.
  Latents as DeepSeek-V2's: r = 4 k or half of it, p = k / 2 but at least 64;
  from d = 5120 on queries too come from one, of 12 k features. RoPE's base is
  Llama-2's, beyond its length Llama-3's.
  """
  rope = Rope(10_000.0 if demand.seq_len <= 4096 else 500_000.0)
  for k in HEAD_DIMS if demand.head_dim is None else (demand.head_dim,):
    h = d // k
    if d % k or (h > 8 and h % 4):
      continue
    for n in range(1, h + 1):
      if h % n == 0:
        yield GroupedConfig(d, h, n, k, use_bias=False, rope=rope)
    for r in (2 * k, 4 * k):
      yield LatentConfig(
        d,
        h,
        kv_lora_rank=r,
        q_lora_rank=12 * k if d >= 5120 else None,
        qk_nope_head_dim=k,
        qk_rope_head_dim=max(64, k // 2 // 64 * 64),
        v_head_dim=k,
        rope=rope,
      )

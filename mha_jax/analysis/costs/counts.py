"""Counts of parameters, FLOPs and bytes.

  num_params(shape).total                     parameters, by part
  train_flops_per_token(shape, length)
  cache_bytes(shape, length, batch)           what decoding keeps

`model_shape` has the shapes, `roofline` says what devices make of them. All
follows from the attentions' tables of einsum strings: a kernel's size is its
parameters, twice that its FLOPs a token, and the letters h and n (query and
key/value heads) tell what tensor parallelism splits; what has neither, such as
MLA's latent, stands on every device.

Latent attention comes in the form that its config names: `form='absorbed'`, or
'expanded', the naive one that makes the keys and values of all cached tokens at
every step; 'auto' takes fewer multiplications, as the library does.

Not counted: activations, norms and softmax.

Source: Austin et al. 2025, How to Scale Your Model (jax-ml.github.io/
scaling-book), chapters 4 and 7; DeepSeek-V2 (2024), section 2.1.
"""

import dataclasses
import functools
import math

from mha_jax.analysis.costs.shape import Layer, ModelShape
from mha_jax.attention import AttentionConfig, Projection, checks
from mha_jax.attention.projections import Row

BYTES = {
  'fp32': 4.0,
  'bf16': 2.0,
  'fp16': 2.0,
  'fp8': 1.0,
  'int8': 1.0,
  'int4': 0.5,
}
"""Bytes of a number by dtype; the scales of quantised ones are not counted."""


@dataclasses.dataclass(frozen=True)
class Params:
  """Parameters by part.

  Args:
    attention: projections, and the norms within.
    mlp: MLPs, experts and routers.
    norms: between the layers' parts, and the last.
    embeddings: of tokens and positions, and the output projection.
    active: those that a token is multiplied by: of the experts the ones it
      uses, of the embeddings the output projection, not what it looks up.
  """

  attention: int
  mlp: int
  norms: int
  embeddings: int
  active: int

  @property
  def total(self) -> int:
    return self.attention + self.mlp + self.norms + self.embeddings


def num_params(shape: ModelShape) -> Params:
  """Parameters of a model; of a single layer: `layer_params`."""
  d = shape.d_model
  layers = [(layer_params(layer), count) for layer, count in shape.groups]
  head = shape.vocab_size * d
  outside = shape.norms * d
  lookups = shape.positions * d + (0 if shape.tied else head)
  return Params(
    attention=sum(x.attention * count for x, count in layers),
    mlp=sum(x.mlp * count for x, count in layers),
    norms=sum(x.norms * count for x, count in layers) + outside,
    embeddings=head + lookups,
    active=sum(x.active * count for x, count in layers) + outside + head,
  )


def layer_params(layer: Layer) -> Params:
  """Parameters of one layer."""
  d = layer.attention.d_model
  attention = attention_params(layer.attention)
  norms = layer.norms * d
  return Params(
    attention=attention,
    mlp=round(mlp_params(layer, math.inf)),
    norms=norms,
    embeddings=0,
    active=attention + norms + round(mlp_params(layer, 1)),
  )


def train_flops_per_token(shape: ModelShape, length: int) -> float:
  """FLOPs of a training step a token, forward and backward.

    6 N + 3 sum over layers of 2 h (k + v) pairs / t

  N the active parameters; causal attention has pairs / t = (t + 1) / 2, else t,
  where 2 h (k + v) t = 4 h k t and the whole 6 N + 12 layers h k t.

  Args:
    shape: the model.
    length: t, tokens of a sequence.

  Source: Chowdhery et al. 2022, PaLM, appendix B (not causal).
  """
  checks.positive('length', length)
  core = core_flops(shape, length)
  return 6 * num_params(shape).active + 3 * core / length


def prefill_flops(shape: ModelShape, length: int, batch: int = 1) -> float:
  """FLOPs to read prompts, with logits of the last token alone.

    b (2 N_layers t + 2 m d + sum over layers of 2 h (k + v) pairs)

  Args:
    shape: the model.
    length: t, tokens of a prompt.
    batch: b, prompts.
  """
  check_sizes(length, batch)
  head = shape.vocab_size * shape.d_model
  body = num_params(shape).active - head
  return batch * (2 * body * length + 2 * head + core_flops(shape, length))


def decode_flops(shape: ModelShape, length: int, batch: int = 1) -> float:
  """FLOPs to decode one token of each sequence.

    b (2 N + sum over layers of 2 h (k + v) s),  s = min(length, window)

  Absorbed latent attention has (r + p) + r for k + v; expanded, the keys and
  values of the other s - 1 tokens are made again: 2 r h (k + v) each.

  Args:
    shape: the model.
    length: tokens of a sequence, the new one included.
    batch: b, sequences.
  """
  check_sizes(length, batch)
  core = sum(
    count * attention_step(layer, length)[0] for layer, count in shape.groups
  )
  return batch * (2 * num_params(shape).active + core)


def cache_elements(shape: ModelShape, length: int = 1, batch: int = 1) -> int:
  """Counts the cached elements; the default is that of one token.

    b sum over layers of elements min(length, window)

  Args:
    shape: the model.
    length: tokens of a sequence.
    batch: b, sequences.
  """
  check_sizes(length, batch)
  return batch * sum(
    count * layer.attention.cache_elements * layer.keys(length)
    for layer, count in shape.groups
  )


def cache_bytes(
  shape: ModelShape, length: int = 1, batch: int = 1, dtype: str = 'bf16'
) -> float:
  """Counts the bytes of the cache; see `cache_elements`."""
  return cache_elements(shape, length, batch) * itemsize('dtype', dtype)


def score_bytes(
  attention: AttentionConfig, length: int, batch: int = 1, dtype: str = 'fp32'
) -> float:
  """Bytes of the attention matrix of the exact form, a layer: b h t^2."""
  check_sizes(length, batch)
  scores = batch * attention.num_heads * length**2
  return scores * itemsize('dtype', dtype)


def decode_intensity(
  attention: AttentionConfig, length: int = 4096, dtype: str = 'bf16'
) -> float:
  """FLOPs of decoding attention a byte of cache that it reads.

    2 h (k + v) / (elements bytes),  absorbed: 2 h (2 r + p) / ((r + p) bytes)

  In bf16 MHA has 1, GQA h / n, MQA h. Where it is below `Hardware.ridge`,
  attention waits for memory.

  Args:
    attention: its config.
    length: tokens, which only the expanded form of latent attention depends on.
    dtype: of the cache.
  """
  check_sizes(length, 1)
  flops, kept, made = attention_step(Layer(attention), length)
  return flops / ((kept + made) * itemsize('dtype', dtype))


def itemsize(name: str, dtype: str) -> float:
  """The bytes of a dtype; a ValueError that names the argument for others."""
  if dtype not in BYTES:
    raise ValueError(f'{name}={dtype!r} must be in {tuple(BYTES)}')
  return BYTES[dtype]


def counted(params: float) -> str:
  """Parameters in words, such as 1.3 B."""
  return f'{params / 1e9:.3g} B' if params >= 1e9 else f'{params / 1e6:.3g} M'


def gigabytes(size: float) -> str:
  """Bytes in words, of 10^9 as makers of memory count."""
  return f'{size / 1e9:.1f} GB' if size >= 1e9 else f'{size / 1e6:.3g} MB'


def check_sizes(length: int, batch: int) -> None:
  """Raises a ValueError unless both are positive integers."""
  checks.positive('length', length)
  checks.positive('batch', batch)


def _row_params(row: Row, devices: int) -> int:
  """Parameters of a row on each device: h and n are split."""
  if not isinstance(row, Projection):
    return row.num_params
  sizes = {
    letter: math.ceil(size / devices) if letter in 'hn' else size
    for letter, size in dict(row.sizes).items()
  }
  kernel = math.prod(sizes[x] for x in row.kernel_letters)
  bias = math.prod(sizes[x] for x in row.bias_letters)
  return kernel + (bias if row.use_bias else 0)


@functools.lru_cache(maxsize=4096)
def attention_params(attention: AttentionConfig, devices: int = 1) -> int:
  """Parameters of an attention on each device.

  Args:
    attention: its config.
    devices: ways that heads are split.
  """
  return sum(_row_params(row, devices) for row in attention.table.values())


def mlp_params(layer: Layer, tokens: float, devices: int = 1) -> float:
  """Parameters of a layer's MLP that so many tokens use, on each device.

  Args:
    layer: the layer.
    tokens: of a step; math.inf: all are used.
    devices: ways that hidden features are split.
  """
  if layer.mlp is None:
    return 0
  return layer.mlp.num_params(layer.attention.d_model, tokens, devices)


def device_elements(attention: AttentionConfig, devices: int) -> int:
  """Elements of a token's entries on each device.

  Args:
    attention: its config.
    devices: ways that heads are split; past n ways each device keeps one.
  """
  return sum(
    math.ceil(heads / devices) * features
    for heads, features in attention.entry_shapes
  )


def _head_widths(attention: AttentionConfig, expanded: bool) -> tuple[int, int]:
  """Features that a score and an output of a head sum over: k and v."""
  if attention.keeps_latent and not expanded:
    features = [x for _, x in attention.entry_shapes]
    return sum(features), features[0]
  out = attention.table['out']
  assert isinstance(out, Projection)
  return attention.qk_head_dim, dict(out.sizes)['v']


def core_flops(shape: ModelShape, length: int, devices: int = 1) -> float:
  """FLOPs of scores and outputs of a whole sequence, on each device.

  Args:
    shape: the model.
    length: tokens of the sequence.
    devices: ways that heads are split.
  """
  total = 0.0
  for layer, count in shape.groups:
    attention = layer.attention
    k, v = _head_widths(attention, attention.expands(length, length))
    heads = math.ceil(attention.num_heads / devices)
    pairs = layer.pairs(length, shape.causal)
    total += count * 2 * heads * (k + v) * pairs
  return total


def attention_step(
  layer: Layer, length: int, devices: int = 1
) -> tuple[float, float, float]:
  """Counts a new token's attention on each device; see `decode_flops`.

  Args:
    layer: the layer.
    length: tokens of the sequence, the new one included.
    devices: ways that heads are split.

  Returns:
    FLOPs; elements of the cache that are read; and, in the expanded form of
    latent attention, of keys and values that are written and read again.
  """
  attention, keys = layer.attention, layer.keys(length)
  expanded = attention.expands(1, keys)
  k, v = _head_widths(attention, expanded)
  heads = math.ceil(attention.num_heads / devices)
  flops = 2.0 * heads * (k + v) * keys
  kept, made = float(device_elements(attention, devices) * keys), 0.0
  if expanded:
    ups = [
      row
      for row in attention.table.values()
      if isinstance(row, Projection) and row.contracted == 'r'
    ]
    flops += 2.0 * (keys - 1) * sum(_row_params(x, devices) for x in ups)
    features = [math.prod(x.bias_shape) // attention.num_heads for x in ups]
    made = 2.0 * keys * heads * sum(features)
  return flops, kept, made

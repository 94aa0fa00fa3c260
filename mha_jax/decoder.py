"""A small decoder-only language model built from the Linen shells.

  x = embed(tokens) [+ learned positions]
  x = x + attention(norm(x))       num_layers times,
  x = x + mlp(norm(x))             the MLP only where mlp_dim > 0
  logits = norm(x) W_out

A model of one layer without an MLP is a normal setting. Layers may differ in
their numbers of heads, as pruning leaves them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import mha_jax.linen as mha
from mha_jax.attention import (
  AttentionConfig,
  Rope,
  checks,
  init_cache,
  layer_inputs,
  masks,
  variants,
)
from mha_jax.attention.caches import Cache, check_cache
from mha_jax.attention.checks import as_positions
from mha_jax.attention.dtypes import wide_dtype
from mha_jax.generation import generate

__all__ = ['Block', 'DecoderConfig', 'DecoderLM', 'generate']

POSITIONS = ('learned', 'rope', 'none')
DTYPES = ('float32', 'bfloat16', 'float16', 'float64')
ATTENTION_FIELDS = (
  'd_model',
  'num_heads',
  'num_kv_heads',
  'head_dim',
  'v_head_dim',
  'kv_lora_rank',
  'q_lora_rank',
  'qk_nope_head_dim',
  'qk_rope_head_dim',
  'use_bias',
  'normalize_qk',
  'rope',
  'logit_softcap',
)
"""What of a decoder's config goes into its attention's."""
BY_LAYER = ('num_heads', 'num_kv_heads')
"""What may be a tuple of one integer a layer."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder.

  Args:
    vocab_size: m, the number of tokens.
    max_len: the longest sequence; only learned positions need it.
    d_model: width of the residual stream.
    num_layers: number of blocks.
    attention: 'mha', 'gqa', 'mqa', 'mla' or 'gta', a name in
      `mha_jax.attention.variants.VARIANTS`.
    num_heads: query heads; a tuple: those of each layer, at least 1, which
      needs head_dim, for 'mla' qk_nope_head_dim. Equal ones become one number.
    num_kv_heads: key/value heads, for 'gqa' and 'gta'; a tuple likewise.
    head_dim: features of a head, but for 'mla'; None: d_model / num_heads.
    v_head_dim: features of a value head; None: as those of a key.
    kv_lora_rank: features of the latent, for 'mla' like those that follow.
    q_lora_rank: features of the query latent; None: none.
    qk_nope_head_dim: features of a head that do not rotate.
    qk_rope_head_dim: rotary features; None: half of qk_nope_head_dim with
      positions='rope', else 0.
    mlp_dim: hidden width f of the MLP; 0: no MLP.
    positions: 'learned', 'rope' or 'none'.
    rope_theta: base of RoPE's wavelengths.
    dropout_rate: of the attention weights.
    use_bias: whether attention and MLP add biases.
    normalize_qk: 'layer' or 'rms', norm of queries and keys; None: none.
    logit_softcap: bound on the attention scores; None: none.
    dtype: the dtype to compute in; parameters are float32.

  Raises:
    ValueError: sizes do not fit, or an option is unknown.
  """

  vocab_size: int
  max_len: int
  d_model: int = 64
  num_layers: int = 1
  attention: str = 'mha'
  num_heads: int | tuple[int, ...] = 4
  num_kv_heads: int | tuple[int, ...] | None = None
  head_dim: int | None = None
  v_head_dim: int | None = None
  kv_lora_rank: int | None = None
  q_lora_rank: int | None = None
  qk_nope_head_dim: int | None = None
  qk_rope_head_dim: int | None = None
  mlp_dim: int = 0
  positions: str = 'learned'
  rope_theta: float = 10_000.0
  dropout_rate: float = 0.0
  use_bias: bool = False
  normalize_qk: str | None = None
  logit_softcap: float | None = None
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    for name in ('vocab_size', 'max_len', 'd_model'):
      checks.positive(name, getattr(self, name))
    checks.whole('num_layers', self.num_layers, 1, 10_000)  # each is traced
    for name in BY_LAYER:
      value = getattr(self, name)
      if isinstance(value, list | tuple):
        value = _by_layer(name, value, self.num_layers)
        object.__setattr__(self, name, value)
      elif name == 'num_heads':
        checks.positive(name, value)
    if self.mlp_dim != 0:
      checks.positive('mlp_dim', self.mlp_dim)
    if self.positions not in POSITIONS:
      raise ValueError(f'positions={self.positions!r} must be in {POSITIONS}')
    if self.dtype not in DTYPES:
      raise ValueError(f'dtype={self.dtype!r} must be in {DTYPES}')
    if self.dtype == 'float64' and jnp.result_type(float) != jnp.float64:
      raise ValueError(
        f'dtype={self.dtype!r} needs 64-bit JAX; set JAX_ENABLE_X64=1'
      )
    checks.rate('dropout_rate', self.dropout_rate)
    if self.qk_rope_head_dim and self.positions != 'rope':
      raise ValueError(
        f"qk_rope_head_dim={self.qk_rope_head_dim} needs positions='rope', "
        f'got {self.positions!r}'
      )
    size = self.head_dim_field
    if isinstance(self.num_heads, tuple) and getattr(self, size) is None:
      raise ValueError(
        f'{size}=None with num_heads={self.num_heads}: layers of different '
        f'numbers of heads do not share d_model={self.d_model} out; give {size}'
      )
    self.attention_configs  # noqa: B018  checks the sizes

  @property
  def rope(self) -> Rope | None:
    return Rope(self.rope_theta) if self.positions == 'rope' else None

  @property
  def head_dim_field(self) -> str:
    """The field that tells a head's features."""
    return 'qk_nope_head_dim' if self.attention == 'mla' else 'head_dim'

  @functools.cached_property
  def attention_configs(self) -> tuple[AttentionConfig, ...]:
    """The shape of each block's attention."""

    def of_layer(layer: int) -> AttentionConfig:
      options = {name: getattr(self, name) for name in ATTENTION_FIELDS}
      for name in BY_LAYER:
        if isinstance(options[name], tuple):
          options[name] = options[name][layer]
      return variants.build(self.attention, **options)

    return tuple(map(of_layer, range(self.num_layers)))

  @property
  def attention_config(self) -> AttentionConfig:
    """The shape of every block's attention.

    Raises:
      ValueError: layers have different numbers of heads.
    """
    for name in BY_LAYER:
      if isinstance(getattr(self, name), tuple):
        raise ValueError(
          f'{name}={getattr(self, name)} differs by layer; use '
          'attention_configs, one a layer'
        )
    return self.attention_configs[0]


class Block(nn.Module):
  """Pre-norm attention and, where mlp_dim > 0, a pre-norm MLP."""

  config: DecoderConfig
  layer: int = 0

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: masks.Mask | None,
    deterministic: bool,
    input_positions: jax.Array | None,
    head_gates: jax.Array | None,
    sow_weights: bool,
    cache: Cache | None = None,
    valid: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache | None]:
    config = self.config
    attention = mha.Attention(
      config.attention_configs[self.layer],
      dropout_rate=config.dropout_rate,
      dtype=config.dtype,
      name='attention',
    )
    y: Any = attention(
      nn.RMSNorm(dtype=config.dtype, name='attention_norm')(x),
      mask=mask,
      deterministic=deterministic,
      input_positions=input_positions,
      head_gates=head_gates,
      sow_weights=sow_weights,
      cache=cache,
      valid=valid,
    )
    y, cache = (y, None) if cache is None else y
    x = x + y
    if config.mlp_dim == 0:
      return x, cache
    y = nn.RMSNorm(dtype=config.dtype, name='mlp_norm')(x)
    y = nn.Dense(
      config.mlp_dim, config.use_bias, dtype=config.dtype, name='mlp_in'
    )(y)
    y = nn.Dense(
      config.d_model, config.use_bias, dtype=config.dtype, name='mlp_out'
    )(nn.gelu(y))
    return x + y, cache


class DecoderLM(nn.Module):
  """A decoder-only language model.

  Attributes:
    config: its shape.
  """

  config: DecoderConfig

  @nn.compact
  def __call__(
    self,
    tokens: Any,
    *,
    mask: Any = None,
    deterministic: bool = True,
    input_positions: Any = None,
    head_gates: Any = None,
    sow_weights: bool = False,
    cache: tuple[Cache, ...] | None = None,
    valid: Any = None,
  ) -> Any:
    """Predicts the next token at every position.

    Args:
      tokens: (b, t) integers below vocab_size.
      mask: a `Mask` or booleans that broadcast to (b, h, t, t), joined with the
        causal mask.
      deterministic: whether dropout is off; on, it draws from 'dropout'.
      input_positions: (b, t) or (t,) integers; None: 0 .. t-1.
      head_gates: (num_layers, h) factors of each head's output; where layers
        differ in h, a sequence of (h,) arrays.
      sow_weights: whether the attention weights go to 'intermediates'.
      cache: a cache for each layer, from `init_cache`; tokens continue it.
      valid: (b, t) with a cache, False for padding; None: all are tokens.

    Returns:
      Logits (b, t, m) in float32, or float64 for float64; with a cache the pair
      of them and the new cache.

    Raises:
      ValueError: tokens are no integers (b, t), or longer than max_len.
    """
    config = self.config
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
      raise ValueError(
        f'tokens must be integers of shape (b, t), got {tokens.dtype} of shape '
        f'{tokens.shape}'
      )
    b, t = tokens.shape
    if cache is not None:
      if input_positions is not None:
        raise ValueError('input_positions come from the cache; leave them None')
      _check_layers(config, cache, b)
      if valid is not None:
        valid = layer_inputs.as_valid(valid, (b, t))
        tokens = jnp.where(valid, tokens, 0)  # whatever stands there
    input_positions = as_positions(
      'input_positions', input_positions, (b, t), (1, t), (t,)
    )
    gates = _gates_by_layer(config, head_gates)
    checks.known_range(
      'tokens',
      tokens,
      0,
      config.vocab_size - 1,
      f', below vocab_size={config.vocab_size}; raise it or cut tokens',
    )
    x = nn.Embed(
      config.vocab_size, config.d_model, dtype=config.dtype, name='embed'
    )(tokens)
    if config.positions == 'learned':
      known = isinstance(t, int)  # not a symbolic dimension
      if cache is None and known and t > config.max_len:
        raise ValueError(
          f'tokens of length {t} exceed max_len={config.max_len} learned '
          "positions; raise max_len or use positions='rope'"
        )
      positions = jnp.arange(t) if input_positions is None else input_positions
      name = 'input_positions'
      if cache is not None:
        name, positions = 'positions in cache', cache[0].positions(t, valid)
        if valid is not None:
          positions = jnp.where(valid, positions, 0)
      checks.known_range(
        name,
        positions,
        0,
        config.max_len - 1,
        f', below max_len={config.max_len}; raise it or cut the sequence',
      )
      rows = jnp.reshape(positions, (positions.size // max(t, 1), t))
      x = x + nn.Embed(
        config.max_len, config.d_model, dtype=config.dtype, name='positions'
      )(rows)
    allowed = masks.all_of(masks.causal(), masks.from_numbers(mask))
    after = []
    for layer in range(config.num_layers):
      x, kept = Block(config, layer, name=f'block_{layer}')(
        x,
        allowed,
        deterministic,
        input_positions,
        gates[layer],
        sow_weights,
        None if cache is None else cache[layer],
        valid,
      )
      after.append(kept)
    x = nn.RMSNorm(dtype=config.dtype, name='norm')(x)
    logits = nn.Dense(
      config.vocab_size, use_bias=False, dtype=config.dtype, name='output'
    )(x)
    logits = logits.astype(wide_dtype(logits.dtype))
    return logits if cache is None else (logits, tuple(after))

  @property
  def vocab_size(self) -> int:
    """Tokens lie below it."""
    return self.config.vocab_size

  @property
  def max_positions(self) -> int | None:
    """The tokens that a row can have at most; None: any number."""
    return self.config.max_len if self.config.positions == 'learned' else None

  def init_cache(
    self,
    batch_size: int,
    capacity: int | None = None,
    dtype: Any = None,
    *,
    window: int | None = None,
  ) -> tuple[Cache, ...]:
    """An empty cache for each layer, see `mha_jax.attention.init_cache`.

    Args:
      batch_size: rows b.
      capacity: tokens that a row can hold; None with a window.
      dtype: of the entries; None: the dtype that the model computes in.
      window: the slots of a ring instead.

    Raises:
      ValueError: the capacity exceeds max_len learned positions.
    """
    config = self.config
    if self.max_positions is not None and (capacity or 0) > config.max_len:
      raise ValueError(
        f'capacity={capacity} exceeds max_len={config.max_len} learned '
        "positions; raise max_len or use positions='rope'"
      )
    return tuple(
      init_cache(
        attention,
        batch_size,
        capacity,
        dtype or config.dtype,
        window=window,
      )
      for attention in config.attention_configs
    )


def _by_layer(name: str, values: Any, num_layers: int) -> int | tuple[int, ...]:
  """One integer for every layer: a tuple, or a number where all are equal."""
  if len(values) != num_layers:
    raise ValueError(
      f'{name}={values!r} must be an integer, or one integer for each of '
      f'num_layers={num_layers}'
    )
  for layer, value in enumerate(values):
    checks.positive(f'{name}[{layer}]', value)
  numbers = tuple(int(value) for value in values)
  return numbers if len(set(numbers)) > 1 else numbers[0]


def _check_layers(config: DecoderConfig, cache: Any, batch: int) -> None:
  """Raises a ValueError unless there is a fitting cache for each layer."""
  if not isinstance(cache, tuple) or len(cache) != config.num_layers:
    raise ValueError(
      f'cache must be a tuple of num_layers={config.num_layers} caches, as '
      f'init_cache makes it; got {type(cache).__name__}'
    )
  for attention, layer in zip(config.attention_configs, cache, strict=True):
    check_cache(attention, layer, batch)


def _gates_by_layer(
  config: DecoderConfig, head_gates: Any
) -> Sequence[jax.Array | None]:
  """The gates (h,) of each layer; None: none."""
  if head_gates is None:
    return [None] * config.num_layers
  several = isinstance(head_gates, list | tuple) or jnp.ndim(head_gates) > 0
  gates = [jnp.asarray(x) for x in head_gates] if several else []
  shapes = [x.shape for x in gates]
  wanted = [(x.num_heads,) for x in config.attention_configs]
  if shapes != wanted:
    raise ValueError(
      f'head_gates of shapes {shapes} by layer must be (h,) for each of '
      f'num_layers={config.num_layers}: {wanted}'
    )
  return gates

"""A small decoder-only language model built from the Linen shells.

  x = embed(tokens) [+ learned positions]
  x = x + attention(norm(x))       num_layers times,
  x = x + mlp(norm(x))             the MLP only where mlp_dim > 0
  logits = norm(x) W_out

A model of one layer without an MLP is a normal setting. Each layer has an
attention of its own, of any variant.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
from mha_jax.attention.notation import ArrayLike
from mha_jax.generation import generate

__all__ = ['Block', 'DecoderConfig', 'DecoderLM', 'decoder_config', 'generate']

POSITIONS = ('learned', 'rope', 'none')
DTYPES = ('float32', 'bfloat16', 'float16', 'float64')
NUM_HEADS = 4
"""Heads of a decoder's attention, unless others are asked for."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """The shape of a decoder.

  Args:
    vocab_size: m, the number of tokens.
    max_len: the longest sequence; only learned positions need it.
    attention: the attention of every layer, or a sequence of one a layer, which
      may differ in anything but d_model. Equal ones become one.
    num_layers: number of blocks; 0: as many as there are attentions.
    mlp_dim: hidden width f of the MLP; 0: no MLP.
    learned_positions: whether a learned vector is added to each token by its
      position; None: where no layer turns its queries and keys.
    dropout_rate: of the attention weights.
    use_bias: whether the MLP adds biases.
    dtype: the dtype to compute in; parameters are float32.

  Raises:
    ValueError: sizes do not fit, or an option is unknown.
  """

  vocab_size: int
  max_len: int
  attention: AttentionConfig | tuple[AttentionConfig, ...]
  num_layers: int = 0
  mlp_dim: int = 0
  learned_positions: bool | None = None
  dropout_rate: float = 0.0
  use_bias: bool = False
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.yes_or_no('use_bias', self.use_bias)
    if self.learned_positions is not None:
      checks.yes_or_no('learned_positions', self.learned_positions)
    for name in ('vocab_size', 'max_len'):
      checks.positive(name, getattr(self, name))
    given = self.attention
    layers = tuple(given) if isinstance(given, list | tuple) else (given,)
    for attention in layers:
      _check_residual(attention, layers[0])
    if self.num_layers == 0:
      object.__setattr__(self, 'num_layers', len(layers))
    checks.whole('num_layers', self.num_layers, 1, 10_000)  # each is traced
    if len(layers) not in (1, self.num_layers) or not layers:
      raise ValueError(
        f'attention of {len(layers)} layers must be one config, or one for '
        f'each of num_layers={self.num_layers}'
      )
    one = len(set(layers)) == 1
    object.__setattr__(self, 'attention', layers[0] if one else layers)
    if self.learned_positions is None:
      turned = any(x.rotary is not None for x in layers)
      object.__setattr__(self, 'learned_positions', not turned)
    if self.mlp_dim != 0:
      checks.positive('mlp_dim', self.mlp_dim)
    if self.dtype not in DTYPES:
      raise ValueError(f'dtype={self.dtype!r} must be in {DTYPES}')
    if self.dtype == 'float64' and jnp.result_type(float) != jnp.float64:
      raise ValueError(
        f'dtype={self.dtype!r} needs 64-bit JAX; set JAX_ENABLE_X64=1'
      )
    checks.rate('dropout_rate', self.dropout_rate)

  @functools.cached_property
  def layers(self) -> tuple[AttentionConfig, ...]:
    """The attention of each block."""
    if isinstance(self.attention, tuple):
      return self.attention
    return (self.attention,) * self.num_layers

  @property
  def d_model(self) -> int:
    """The width of the residual stream."""
    return self.layers[0].d_model


def _check_residual(attention: Any, first: AttentionConfig) -> None:
  """Raises a ValueError unless an attention adds to the stream of the first."""
  if not isinstance(attention, AttentionConfig):
    raise ValueError(
      f'attention={attention!r} must be an AttentionConfig, as '
      'GroupedConfig(d_model=64, num_heads=4), or one for each layer'
    )
  d = first.d_model
  out = dict(getattr(attention.table['out'], 'sizes', ())).get('d', d)
  if (*attention.input_widths, out) != (d,) * 4:
    raise ValueError(
      f'attention={attention!r} takes inputs of {attention.input_widths} '
      f'features and gives {out}; in a decoder all are d_model={d}'
    )


def decoder_config(
  vocab_size: int,
  max_len: int,
  d_model: int = 64,
  *,
  attention: str = 'mha',
  num_layers: int = 1,
  positions: str = 'learned',
  rope_theta: float = 10_000.0,
  mlp_dim: int = 0,
  dropout_rate: float = 0.0,
  use_bias: bool = False,
  dtype: str = 'float32',
  layers: Sequence[Mapping[str, Any]] | None = None,
  **options: Any,
) -> DecoderConfig:
  """Builds a decoder's config from flat options, as flags give them.

    decoder_config(50, 64, attention='gqa', num_heads=8, num_kv_heads=2)
    decoder_config(50, 64, attention='mla', kv_lora_rank=16, positions='rope')
    decoder_config(
      50, 64, num_layers=2, layers=({'num_heads': 8}, {'attention': 'mqa'})
    )

  Which options there are, the configs of the variants say: `GroupedConfig`,
  `LatentConfig`, `TiedConfig`.

  Args:
    vocab_size: the number of tokens.
    max_len: the longest sequence; only learned positions need it.
    d_model: width of the residual stream.
    attention: 'mha', 'gqa', 'mqa', 'mla' or 'gta'.
    num_layers: number of blocks.
    positions: 'learned', 'rope' or 'none'.
    rope_theta: base of RoPE's wavelengths.
    mlp_dim: hidden width f of the MLP; 0: no MLP.
    dropout_rate: of the attention weights.
    use_bias: whether attention and MLP add biases.
    dtype: the dtype to compute in; parameters are float32.
    layers: for each layer the options of its attention that differ from the
      others', attention, positions and rope_theta among them; None: none do.
    **options: of the variant; num_heads is `NUM_HEADS` unless given.

  Raises:
    ValueError: sizes do not fit, or an option is unknown.
  """
  checks.whole('num_layers', num_layers, 1, 10_000)
  changes = [{}] if layers is None else _changes(layers)
  if layers is not None and len(changes) != num_layers:
    raise ValueError(
      f'layers of length {len(changes)} must have the changes of each of '
      f'num_layers={num_layers}'
    )
  common = {
    'positions': positions,
    'rope_theta': rope_theta,
    'num_heads': NUM_HEADS,
  }
  common |= {'attention': attention, 'd_model': d_model, 'use_bias': use_bias}
  attentions = tuple(_attention(**{**common, **options, **x}) for x in changes)
  learned = any(x.get('positions', positions) == 'learned' for x in changes)
  sizes = (vocab_size, max_len, attentions, num_layers, mlp_dim, learned)
  return DecoderConfig(*sizes, dropout_rate, use_bias, dtype)


def _changes(layers: Any) -> list[dict[str, Any]]:
  """The options of each layer that differ from the others', checked by kind."""
  options = (*variants.option_types(), 'attention', 'positions', 'rope_theta')
  known = set(options) - {'rope', 'd_model'}
  each = layers if isinstance(layers, list | tuple) else [layers]
  for changes in each:
    if not isinstance(changes, Mapping):
      raise ValueError(
        f'layers={layers!r} must be a tuple of a dict of options for each layer'
      )
    if unknown := [x for x in changes if x not in known]:
      raise ValueError(
        f'layers: {unknown[0]!r} is no option of a layer, which are '
        f'{", ".join(sorted(known))}'
      )
  return [{x: y for x, y in one.items() if y is not None} for one in each]


def _attention(
  *, attention: str, positions: str, rope_theta: float, **options: Any
) -> AttentionConfig:
  """Builds the attention of one layer from flat options."""
  if positions not in POSITIONS:
    raise ValueError(f'positions={positions!r} must be in {POSITIONS}')
  if options.get('qk_rope_head_dim') and positions != 'rope':
    raise ValueError(
      f"qk_rope_head_dim={options['qk_rope_head_dim']} needs positions='rope', "
      f'got {positions!r}'
    )
  rope = Rope(rope_theta) if positions == 'rope' else None
  return variants.build(attention, **options, rope=rope)


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
      config.layers[self.layer],
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


class Embed(nn.Embed):
  """Flax's, which also looks up indices that an explicit mesh has sharded."""

  def __call__(self, inputs: jax.Array) -> jax.Array:
    (table,) = self.promote_dtype(
      self.embedding, dtype=self.dtype, inexact=False
    )
    assert table is not None  # there is one to promote
    indices = jax.typeof(inputs).sharding
    sharding = None
    if any(dimension is not None for dimension in indices.spec):
      spec = PartitionSpec(*indices.spec, None)
      sharding = NamedSharding(indices.mesh, spec)
    return table.at[inputs].get(mode='fill', out_sharding=sharding)


class DecoderLM(nn.Module):
  """A decoder-only language model.

  Attributes:
    config: its shape.
  """

  config: DecoderConfig

  @nn.compact
  def __call__(
    self,
    tokens: ArrayLike,
    *,
    mask: masks.Mask | ArrayLike | None = None,
    deterministic: bool = True,
    input_positions: ArrayLike | None = None,
    head_gates: ArrayLike | None = None,
    sow_weights: bool = False,
    cache: tuple[Cache, ...] | None = None,
    valid: ArrayLike | None = None,
  ) -> Any:
    """Predicts the next token at every position.

      model = DecoderLM(decoder_config(vocab_size=50, max_len=64))
      variables = model.init(key, tokens)
      logits = model.apply(variables, tokens)
      cache = model.init_cache(batch_size=2, capacity=32)
      logits, cache = model.apply(variables, tokens, cache=cache)

    A causal mask is always there, and the mask given is joined with it.
    Positions are 0 .. t-1, with a cache those after what it holds, unless they
    are given; RoPE, learned positions and masks all go by them. `generate`
    continues prompts in one compiled program.

    Args:
      tokens: (b, t) integers below vocab_size.
      mask: a `Mask` or booleans that broadcast to (b, h, t, t), joined with the
        causal mask.
      deterministic: whether dropout is off; on, it draws from the stream
        'dropout'.
      input_positions: (b, t) or (t,) integers; None: 0 .. t-1.
      head_gates: (num_layers, h) factors of each head's output; where layers
        differ in h, a sequence of (h,) arrays.
      sow_weights: whether the attention weights, before dropout, are sown
        into the collection 'intermediates', see below.
      cache: a cache for each layer, from `init_cache`; tokens continue it.
        None: there is none, all tokens are here.
      valid: (b, t) with a cache, False for padding; None: all are tokens.

    Returns:
      Logits (b, t, m) in float32, or float64 for float64; with a cache the pair
      of them and the new cache.

    Raises:
      ValueError: tokens are no integers (b, t), or longer than max_len; the
        cache, gates or positions do not fit.

    The attention weights of every block are sown under its name:

      logits, state = model.apply(
        variables, tokens, sow_weights=True, mutable='intermediates'
      )
      state['intermediates']['block_0']['attention']['attention_weights'][0]
    """
    config = self.config
    tokens, positions, valid = _checked(
      config, tokens, input_positions, cache, valid
    )
    gates = _gates_by_layer(config, head_gates)
    size: dict[str, Any] = {'features': config.d_model, 'dtype': config.dtype}
    x = Embed(config.vocab_size, name='embed', **size)(tokens)
    if config.learned_positions:
      rows = _learned_rows(config, tokens.shape[1], positions, cache, valid)
      x = x + Embed(config.max_len, name='positions', **size)(rows)
    allowed = masks.all_of(masks.causal(), masks.from_numbers(mask))
    after = []
    for layer in range(config.num_layers):
      x, kept = Block(config, layer, name=f'block_{layer}')(
        x,
        allowed,
        deterministic,
        positions,
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
    return self.config.max_len if self.config.learned_positions else None

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
      for attention in config.layers
    )


def _checked(
  config: DecoderConfig,
  tokens: ArrayLike,
  input_positions: ArrayLike | None,
  cache: tuple[Cache, ...] | None,
  valid: ArrayLike | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
  """Makes arrays of what a call is given; a ValueError if it does not fit."""
  if isinstance(tokens, np.ndarray) and tokens.dtype.kind in 'iu':
    # Before JAX makes them narrower.
    checks.known_range('tokens', tokens, -(2**31), 2**31 - 1)
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
  positions = as_positions(
    'input_positions', input_positions, (b, t), (1, t), (t,)
  )
  checks.known_range(
    'tokens',
    tokens,
    0,
    config.vocab_size - 1,
    f', below vocab_size={config.vocab_size}; raise it or cut tokens',
  )
  return tokens, positions, valid  # type: ignore[return-value]


def _learned_rows(
  config: DecoderConfig,
  t: int,
  positions: jax.Array | None,
  cache: tuple[Cache, ...] | None,
  valid: jax.Array | None,
) -> jax.Array:
  """Returns the learned positions (b, t) or (1, t) of t tokens.

  Raises:
    ValueError: one is not below max_len.
  """
  known = isinstance(t, int)  # not a symbolic dimension
  if cache is None and known and t > config.max_len:
    raise ValueError(
      f'tokens of length {t} exceed max_len={config.max_len} learned '
      "positions; raise max_len or use positions='rope'"
    )
  name, rows = 'input_positions', positions
  if cache is not None:
    name, rows = 'positions in cache', cache[0].positions(t, valid)
    if valid is not None:
      rows = jnp.where(valid, rows, 0)
  rows = jnp.arange(t) if rows is None else rows
  checks.known_range(
    name,
    rows,
    0,
    config.max_len - 1,
    f', below max_len={config.max_len}; raise it or cut the sequence',
  )
  return jnp.reshape(rows, (rows.size // max(t, 1), t))


def _check_layers(config: DecoderConfig, cache: Any, batch: int) -> None:
  """Raises a ValueError unless there is a fitting cache for each layer."""
  if not isinstance(cache, tuple) or len(cache) != config.num_layers:
    raise ValueError(
      f'cache must be a tuple of num_layers={config.num_layers} caches, as '
      f'init_cache makes it; got {type(cache).__name__}'
    )
  for attention, layer in zip(config.layers, cache, strict=True):
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
  wanted = [(x.num_heads,) for x in config.layers]
  if shapes != wanted:
    raise ValueError(
      f'head_gates of shapes {shapes} by layer must be (h,) for each of '
      f'num_layers={config.num_layers}: {wanted}'
    )
  return gates

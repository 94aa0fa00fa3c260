"""Flax NNX shells over `mha_jax.attention`: parameters and random keys.

  import mha_jax.nnx as mha

  layer = mha.GroupedQueryAttention(
    num_heads=8, in_features=64, num_kv_heads=2, rngs=nnx.Rngs(0)
  )
  y = layer(x, mask=masks.causal())

`MultiHeadAttention` is a drop-in for `nnx.MultiHeadAttention`: the same
arguments, the same parameter tree, the same initial values. An argument that we
do not take says what to use instead.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.variablelib import VariableMetadata

from mha_jax import axis_names, flax_arguments
from mha_jax.attention import (
  AttentionConfig,
  Dropout,
  Rope,
  StaticCache,
  apply,
  checks,
  init_cache,
  keys_values,
  masks,
  shapes,
)
from mha_jax.attention.caches import Cache
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import ArrayLike, DTypeLike
from mha_jax.attention.projections import INITIALIZERS, Initializer, Row
from mha_jax.attention.variants.config import check_config

__all__ = [
  'Attention',
  'GroupedQueryAttention',
  'MultiHeadAttention',
  'MultiHeadLatentAttention',
  'MultiQueryAttention',
  'attention_fn',
]

Metadata = Mapping[str, Any]
NO_METADATA: Metadata = MappingProxyType({})


class NnxOptions(flax_arguments.CallOptions, total=False):
  """The options of a call, beside inputs and a cache."""

  rngs: nnx.Rngs | nnx.RngStream | None
  decode: bool | None
  is_causal: bool
  out_sharding: None
  qkv_sharding: None


class Parameters(nnx.Module):
  """Owns the parameters of one row of a table, each an `nnx.Param`."""

  def __init__(
    self,
    name: str,
    row: Row,
    initializers: Mapping[str, Initializer],
    metadata: Mapping[str, Metadata],
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
  ):
    self.names = tuple(row.shapes)
    for parameter, shape in row.shapes.items():
      label = f'{parameter} of {name!r}'
      given = metadata.get(parameter, {})
      axis_names.check(label, given.get('out_sharding'), shape)
      flat = row.init_shapes[parameter]
      value = initializers[parameter](rngs.params(), flat, param_dtype)
      if isinstance(value, VariableMetadata):
        axes = value.metadata.get('out_sharding')
        axis_names.check(label, axes, shape)
        value.raw_value = jnp.reshape(value.raw_value, shape)
      else:
        value = jnp.reshape(value, shape)
      setattr(self, parameter, nnx.Param(value, **given))
    if 'kernel' in self.names and 'bias' not in self.names:
      self.bias = None  # as in Flax

  def __call__(self, *inputs: Any) -> dict[str, jax.Array]:
    if inputs:
      flax_arguments.refuse_inputs()
    return {name: getattr(self, name)[...] for name in self.names}

  def metadata(self, key: str) -> dict[str, Any]:
    """One entry of each parameter's metadata; None where it is not there."""
    return {
      name: getattr(self, name).get_metadata(key, None) for name in self.names
    }


class Attention(nnx.Module):
  """Attention of any variant, told by its config.

  Args:
    config: an `AttentionConfig`, for instance `GroupedConfig(...)`.
    dtype: the dtype to compute in; None: that of inputs and parameters.
    param_dtype: the dtype of the parameters.
    dropout_rate: probability in [0, 1) to drop an attention weight; drawn per
      row, head, query and key.
    deterministic: whether dropout is off; may be given at the call, or set by
      `train()`, `eval()` and `nnx.view`.
    precision: of every product, see `mha_jax.attention.apply`.
    kernel_init: initialiser of the kernels; sees (fan-in, fan-out).
    out_kernel_init: that of the output kernel; None: kernel_init.
    bias_init: initialiser of the biases.
    out_bias_init: that of the output bias; None: bias_init.
    implementation: see `mha_jax.attention.multihead_attention`.
    rngs: 'params' makes the parameters, 'dropout' the stream that is kept.
    keep_rngs: whether the module keeps a stream for dropout.
    kernel_metadata: of the kernels' `nnx.Param`.
    out_kernel_metadata: of the output kernel; empty: kernel_metadata.
    bias_metadata: of the biases.
    out_bias_metadata: of the output bias; empty: bias_metadata.
    scale_metadata: of the norms' scales, by the name of the norm.

  Raises:
    ValueError: an option does not fit.
  """

  @flax_arguments.refuse_unknown
  def __init__(
    self,
    config: AttentionConfig,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    dropout_rate: float = 0.0,
    deterministic: bool | None = None,
    precision: Any = None,
    kernel_init: Initializer = INITIALIZERS['kernel'],
    out_kernel_init: Initializer | None = None,
    bias_init: Initializer = INITIALIZERS['bias'],
    out_bias_init: Initializer | None = None,
    implementation: str = 'auto',
    rngs: nnx.Rngs,
    keep_rngs: bool = True,
    kernel_metadata: Metadata = NO_METADATA,
    out_kernel_metadata: Metadata = NO_METADATA,
    bias_metadata: Metadata = NO_METADATA,
    out_bias_metadata: Metadata = NO_METADATA,
    scale_metadata: Mapping[str, Metadata] = NO_METADATA,
  ):
    dropout_rate = checks.plain(dropout_rate)
    checks.rate('dropout_rate', dropout_rate)
    check_config(config)
    self.config = config
    self.dtype = dtype
    self.dropout_rate = dropout_rate
    self.deterministic = deterministic
    self.decode: bool | None = None  # refused at the call, whoever sets it
    self.precision = precision
    self.implementation = implementation
    self.row_names = tuple(config.table)
    own = {'kernel': kernel_init, 'bias': bias_init}
    out = {
      'kernel': out_kernel_init or kernel_init,
      'bias': out_bias_init or bias_init,
    }
    for name, row in config.table.items():
      initializers = {**row.initializers, **(out if name == 'out' else own)}
      metadata = {
        'kernel': kernel_metadata,
        'bias': bias_metadata,
        'scale': scale_metadata.get(name, NO_METADATA),
      }
      if name == 'out':
        metadata['kernel'] = out_kernel_metadata or kernel_metadata
        metadata['bias'] = out_bias_metadata or bias_metadata
      parameters = Parameters(
        name, row, initializers, metadata, param_dtype, rngs
      )
      setattr(self, name, parameters)
    axis_names.warn_of_short(config.table, self._axis_names())
    keep = keep_rngs and dropout_rate > 0
    self.rngs = rngs.dropout.fork() if keep else None

  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: None = None,
    **options: Unpack[NnxOptions],
  ) -> jax.Array: ...
  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: Cache,
    **options: Unpack[NnxOptions],
  ) -> tuple[jax.Array, Cache]: ...
  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: Cache | None,
    **options: Unpack[NnxOptions],
  ) -> Any: ...

  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    mask: Mask | ArrayLike | None = None,
    deterministic: bool | None = None,
    rngs: nnx.Rngs | nnx.RngStream | None = None,
    sow_weights: bool = False,
    decode: bool | None = None,
    is_causal: bool = False,
    out_sharding: None = None,
    qkv_sharding: None = None,
    input_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    head_gates: ArrayLike | None = None,
    cache: Cache | None = None,
    valid: ArrayLike | None = None,
  ) -> Any:
    """Attends from inputs_q to inputs_k, or to a cache.

      layer = mha.GroupedQueryAttention(
        num_heads=8, in_features=64, num_kv_heads=2, rngs=nnx.Rngs(0)
      )
      y = layer(x, mask=masks.causal())
      y = layer(x, other)  # another sequence
      cache = layer.init_cache(batch_size=2, capacity=32)
      y, cache = layer(x, mask=masks.causal(), cache=cache)
      kept = layer.keys_values(other)  # projected once
      y, kept = layer(x, cache=kept)

    With dropout, a call takes its key from `rngs`, or from the stream that the
    module keeps; `layer.eval()` and `layer.train()` turn it off and on.

    With `sow_weights=True` the weights are found by
    `nnx.pop(layer, nnx.Intermediate)['attention_weights']`.

    With a cache, inputs_q continue what it holds. A causal mask still has to be
    given, and any split of a sequence into calls gives what one call gives.
    Rows may have different lengths, see valid. A cache of `keys_values` stands
    in the place of inputs_k.

    Args:
      inputs_q: (..., t, d).
      inputs_k: (..., s, d'); None: inputs_q, self-attention.
      inputs_v: (..., s, d''); None: inputs_k.
      mask: a `Mask`, or an array that broadcasts to (..., h, t, s), booleans
        or what Flax's mask helpers return: nonzero may attend.
      deterministic: whether dropout is off; None: the module's own.
      rngs: a stream for dropout; None: the one that the module keeps.
      sow_weights: whether to sow the weights (..., h, t, s), before dropout,
        as 'attention_weights' of type `nnx.Intermediate`.
      decode: not taken: keys and values are kept by the caller, see cache.
      out_sharding: not taken: apply `jax.sharding.reshard` to the output.
      qkv_sharding: not taken: shard the kernels by kernel_metadata.
      is_causal: whether to join the mask with `masks.causal()`.
      input_positions: (..., t) absolute positions of the queries for RoPE and
        masks; where inputs_k is None of the keys too. None: 0 .. t-1.
      key_positions: (..., s) of the keys; None: 0 .. s-1, or input_positions
        where inputs_k is None.
      bias: added to the scores, broadcasts to (..., h, t, s).
      head_gates: (h,) factors of each head's output.
      cache: from `init_cache` or `keys_values`; see `mha_jax.attention.apply`.
      valid: (..., t) with a cache, False for padding.

    Returns:
      (..., t, out_features); with a cache the pair of it and the new cache.

    Raises:
      ValueError: inputs or options do not fit.
    """
    flax_arguments.refuse(
      decode=self.decode if decode is None else decode,
      out_sharding=out_sharding,
      qkv_sharding=qkv_sharding,
    )
    mask = self._mask(mask, is_causal, np.shape(inputs_q)[:-2])
    out = apply(
      self.config,
      self._params(),
      inputs_q,
      inputs_k,
      inputs_v,
      mask=mask,
      bias=bias,
      input_positions=input_positions,
      key_positions=key_positions,
      dropout=self._dropout(deterministic, rngs),
      head_gates=head_gates,
      dtype=self.dtype,
      precision=self.precision,
      cache=cache,
      valid=valid,
      return_weights=sow_weights,
      implementation=self.implementation,
    )
    if not sow_weights:
      return out
    (out, weights), after = (out, None) if cache is None else out
    self.sow(nnx.Intermediate, 'attention_weights', weights)
    return out if cache is None else (out, after)

  def _mask(
    self, mask: Mask | ArrayLike | None, is_causal: bool, batch: tuple[int, ...]
  ) -> Mask | ArrayLike | None:
    """Joins a mask, which may be Flax's numbers, with the causal one."""
    mask = masks.from_numbers(mask)
    if not is_causal:
      return mask
    return masks.all_of(
      masks.causal(), shapes.Batch(batch).of_scores('mask', mask)
    )

  def keys_values(
    self,
    inputs_k: ArrayLike,
    inputs_v: ArrayLike | None = None,
    *,
    key_positions: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
  ) -> StaticCache:
    """Projects what cross-attention attends to, once for many calls.

    See `mha_jax.attention.keys_values`.
    """
    return keys_values(
      self.config,
      self._params(),
      inputs_k,
      inputs_v,
      key_positions=key_positions,
      lengths=lengths,
      dtype=self.dtype,
      precision=self.precision,
    )

  @flax_arguments.refuse_unknown
  def init_cache(
    self,
    batch_size: int,
    capacity: int | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    window: int | None = None,
  ) -> Cache:
    """An empty cache, see `mha_jax.attention.init_cache`."""
    return init_cache(self.config, batch_size, capacity, dtype, window=window)

  def _axis_names(self) -> dict[str, dict[str, Any]]:
    """By row and parameter, what its metadata say; None: nothing."""
    return {
      row: getattr(self, row).metadata('out_sharding') for row in self.row_names
    }

  def _params(self) -> dict[str, dict[str, jax.Array]]:
    return {name: getattr(self, name)() for name in self.row_names}

  def set_view(
    self,
    deterministic: bool | None = None,
    decode: bool | None = None,
    batch_size: Any = None,
    max_length: int | None = None,
  ) -> None:
    """Sets what `nnx.view` sets.

    Args:
      deterministic: whether dropout is off.
      decode: not taken; False is as it is.
      batch_size, max_length: of Flax's cache; ignored.
    """
    del batch_size, max_length
    flax_arguments.refuse(decode=decode)
    if deterministic is not None:
      self.deterministic = deterministic

  def _dropout(
    self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
  ) -> Dropout | None:
    """Dropout with a key of the given stream or our own; None: off."""
    if self.dropout_rate == 0:
      return None
    off = self.deterministic if deterministic is None else deterministic
    if off is None:
      raise ValueError(
        f'deterministic=None with dropout_rate={self.dropout_rate}; pass it at '
        'the call or to the constructor, or call train() or eval()'
      )
    if off:
      return None
    stream = self.rngs if rngs is None else rngs
    stream = stream.dropout if isinstance(stream, nnx.Rngs) else stream
    if not isinstance(stream, nnx.RngStream):
      raise ValueError(
        f'rngs={rngs}: dropout needs an nnx.Rngs or nnx.RngStream; pass one at '
        'the call, or construct the module with dropout_rate > 0 and '
        'keep_rngs=True'
      )
    return Dropout(stream(), self.dropout_rate)


SHARED = tuple(inspect.signature(Attention.__init__).parameters)[2:]
"""The arguments of `Attention`, but its config."""
SAME = {
  'attention_fn': (nnx.dot_product_attention,),
  'qkv_promote_dtype': (dtypes.promote_dtype,),
  'out_promote_dtype': (dtypes.promote_dtype,),
  'ln_promote_dtype': (dtypes.promote_dtype,),
}
"""Values of arguments that are not taken which mean the default."""


class GroupedQueryAttention(Attention):
  """Attention with fewer key/value heads than query heads.

  The first arguments are those of `flax.nnx.MultiHeadAttention`, in its order;
  see `Attention` for those that all modules share.

  Args:
    num_heads: query heads h.
    in_features: width of inputs_q.
    qkv_features: h k in all; None: in_features.
    out_features: width of the output; None: in_features.
    num_kv_heads: key/value heads n, a divisor of h.
    in_kv_features: width of inputs_k and inputs_v; None: in_features.
    broadcast_dropout: ignored; dropout is drawn per row, head, query and key.
    use_bias: whether the projections add a bias.
    attention_fn, decode, qkv_promote_dtype, out_promote_dtype,
      ln_promote_dtype, qkv_dot_general, out_dot_general, qkv_dot_general_cls,
      out_dot_general_cls: not taken.
    normalize_qk: False, True (Flax's LayerNorm), 'layer' or 'rms'.
    query_ln_scale_metadata: of the query norm's scale.
    key_ln_scale_metadata: of the key norm's scale.
    head_dim: k, free of in_features; None: qkv_features / h.
    v_head_dim: v; None: head_dim.
    rope: a `Rope` that rotates queries and keys; None: none.
    logit_softcap: bound on the scores; None: none.
  """

  kind = 'gqa'

  @flax_arguments.refuse_unknown
  def __init__(
    self,
    num_heads: int,
    in_features: int,
    qkv_features: int | None = None,
    out_features: int | None = None,
    num_kv_heads: int | None = None,
    in_kv_features: int | None = None,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    broadcast_dropout: bool = True,
    dropout_rate: float = 0.0,
    deterministic: bool | None = None,
    precision: Any = None,
    kernel_init: Initializer = INITIALIZERS['kernel'],
    out_kernel_init: Initializer | None = None,
    bias_init: Initializer = INITIALIZERS['bias'],
    out_bias_init: Initializer | None = None,
    use_bias: bool = True,
    attention_fn: Callable[..., Any] | None = None,
    decode: bool | None = None,
    normalize_qk: bool | str = False,
    qkv_promote_dtype: DTypeLike | None = None,
    out_promote_dtype: DTypeLike | None = None,
    ln_promote_dtype: DTypeLike | None = None,
    qkv_dot_general: Any = None,
    out_dot_general: Any = None,
    qkv_dot_general_cls: Any = None,
    out_dot_general_cls: Any = None,
    rngs: nnx.Rngs,
    keep_rngs: bool = True,
    kernel_metadata: Metadata = NO_METADATA,
    out_kernel_metadata: Metadata = NO_METADATA,
    bias_metadata: Metadata = NO_METADATA,
    out_bias_metadata: Metadata = NO_METADATA,
    query_ln_scale_metadata: Metadata = NO_METADATA,
    key_ln_scale_metadata: Metadata = NO_METADATA,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    rope: Rope | None = None,
    logit_softcap: float | None = None,
    implementation: str = 'auto',
  ):
    given = dict(locals())
    flax_arguments.refuse_given(given, SAME)
    config = flax_arguments.grouped_config(
      self.kind, given, (in_features, in_kv_features, None)
    )
    norms = {
      'query_ln': query_ln_scale_metadata,
      'key_ln': key_ln_scale_metadata,
    }
    shared = {name: given[name] for name in SHARED if name in given}
    super().__init__(config, scale_metadata=norms, **shared)


class MultiHeadAttention(GroupedQueryAttention):
  """Attention with a key/value head for each query head.

  The same arguments as `GroupedQueryAttention`; num_kv_heads is num_heads,
  unless it is given, as in `flax.nnx.MultiHeadAttention`.
  """

  kind = 'mha'


class MultiQueryAttention(GroupedQueryAttention):
  """Attention whose query heads share one key/value head.

  The same arguments as `GroupedQueryAttention`; num_kv_heads is 1.
  """

  kind = 'mqa'


class MultiHeadLatentAttention(Attention):
  """DeepSeek-V2's attention: keys and values from one latent per token.

  See `LatentConfig` for the sizes, and `Attention` for the arguments that all
  modules share. inputs_v stays None in its calls.

  Args:
    num_heads: heads h.
    in_features: width of inputs_q.
    kv_lora_rank: features r of the latent.
    q_lora_rank: features of the query latent; None: none.
    qk_nope_head_dim: k; None: in_features / h.
    qk_rope_head_dim: rotary features p; 0: none. None: half of
      qk_nope_head_dim where rope is given, else 0.
    v_head_dim: v; None: qk_nope_head_dim.
    out_features: width of the output; None: in_features.
    in_kv_features: width of inputs_k; None: in_features.
    use_bias: whether latents, rotary key and output add a bias.
    rope: turns the rotary features; None: `Rope()` where there are any.
    logit_softcap: bound on the scores; None: none.
    latent_norm: whether the latents are normalised.
    form: 'auto', 'expanded' or 'absorbed'.
    rngs: see `Attention`.
    **shared: further arguments of `Attention`.
  """

  @functools.partial(flax_arguments.refuse_unknown, others=Attention.__init__)
  def __init__(
    self,
    num_heads: int,
    in_features: int,
    kv_lora_rank: int,
    q_lora_rank: int | None = None,
    qk_nope_head_dim: int | None = None,
    qk_rope_head_dim: int | None = None,
    v_head_dim: int | None = None,
    out_features: int | None = None,
    in_kv_features: int | None = None,
    *,
    use_bias: bool = False,
    rope: Rope | None = None,
    logit_softcap: float | None = None,
    latent_norm: bool = True,
    form: str = 'auto',
    rngs: nnx.Rngs,
    **shared: Any,
  ):
    widths = in_features, in_kv_features, None
    config = flax_arguments.latent_config(locals(), widths)
    super().__init__(config, rngs=rngs, **shared)


def attention_fn(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  bias: ArrayLike | None = None,
  mask: Mask | ArrayLike | None = None,
  broadcast_dropout: bool = True,
  dropout_rng: jax.Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: DTypeLike | None = None,
  precision: Any = None,
  module: nnx.Module | None = None,
  promote_dtype: DTypeLike | None = None,
  is_causal: bool = False,
  *,
  and_mask: Mask | ArrayLike | None = None,
  query_positions: ArrayLike | None = None,
  logit_softcap: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Our attention in Flax's modules: `attention_fn=mha.attention_fn`.

  The arguments of `flax.nnx.dot_product_attention`. `broadcast_dropout` is
  ignored (dropout is drawn per row, head, query and key), `promote_dtype` not
  taken. Flax's modules pass their own mask, so
  `functools.partial(attention_fn, and_mask=masks.causal())` adds one to it.

  Args:
    and_mask: a `Mask` or booleans, joined with `mask`. Queries count from 0:
      with Flax's decode=True, causal and window masks need query_positions.
    query_positions: (..., t) integers for masks; None: 0 .. t-1.
    logit_softcap: bound on the scores.
    implementation: see `mha_jax.dot_product_attention`.

  Returns:
    (..., t, h, v).
  """
  given = dict(locals())
  same = {'promote_dtype': (dtypes.promote_dtype,)}
  flax_arguments.refuse_given(given, same)
  return flax_arguments.attention(given, nnx.Intermediate)

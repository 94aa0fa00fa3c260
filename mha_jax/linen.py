"""Flax Linen shells over `mha_jax.attention`: parameters and random keys.

  import mha_jax.linen as mha

  layer = mha.GroupedQueryAttention(num_heads=8, num_kv_heads=2)
  variables = layer.init(key, x)
  y = layer.apply(variables, x, mask=masks.causal())

`MultiHeadAttention`, `MultiHeadDotProductAttention` and `SelfAttention` are
drop-ins for the modules of these names in `flax.linen`: the same arguments, the
same parameter tree, the same initial values. An argument that we do not take
says what to use instead.
"""

from collections.abc import Callable
from typing import Any, Unpack, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

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
)
from mha_jax.attention.caches import Cache
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import ArrayLike, DTypeLike
from mha_jax.attention.projections import (
  INITIALIZERS,
  Initializer,
  Row,
  Table,
)

__all__ = [
  'Attention',
  'GroupedQueryAttention',
  'MultiHeadAttention',
  'MultiHeadDotProductAttention',
  'MultiHeadLatentAttention',
  'MultiQueryAttention',
  'SelfAttention',
  'attention_fn',
]


class LinenOptions(flax_arguments.CallOptions, total=False):
  """The options of a call, beside inputs and a cache."""

  dropout_rng: jax.Array | None
  inputs_kv: None


class Parameters(nn.Module):
  """Owns the parameters of one row of a table."""

  row: Row
  initializers: dict[str, Initializer]  # in place of the row's own
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, *inputs: Any) -> dict[str, jax.Array]:
    if inputs:
      flax_arguments.refuse_inputs()
    params = {}
    for name, shape in self.row.shapes.items():
      if self.has_variable('params', name):
        # `self.param` would trace the initialiser to compare shapes, which
        # takes most of a call; `apply` compares them.
        params[name] = meta.unbox(self.get_variable('params', name))
      else:
        init = self._init(name)
        params[name] = self.param(name, init, shape, self.param_dtype)
    return params

  def _init(self, name: str) -> Callable[..., Any]:
    """Makes an initialiser that sees the flattened shape, may return a box."""
    initializer = {**self.row.initializers, **self.initializers}[name]

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
      value = initializer(key, self.row.init_shapes[name], dtype)
      if not isinstance(value, meta.AxisMetadata):
        return jnp.reshape(value, shape)
      axis_names.check(
        f'{name}_init of {self.name!r}', getattr(value, 'names', None), shape
      )
      partitioned = isinstance(value, meta.Partitioned)
      # The names are those of the real shape: no constraint before.
      unbox = {'apply_constraint': False} if partitioned else {}
      box = value.replace_boxed(jnp.reshape(value.unbox(**unbox), shape))
      return box.replace_boxed(box.unbox())

    return init


class _Shell(nn.Module):
  """The calls of all modules; a subclass has fields, and makes its config."""

  def __init_subclass__(cls, **options: Any) -> None:
    super().__init_subclass__(**options)
    cls.__init__ = flax_arguments.refuse_unknown(cls.__init__)  # type: ignore

  def config_for(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None,
    inputs_v: ArrayLike | None,
  ) -> AttentionConfig:
    """The shape of the attention, by the module's fields and its inputs."""
    raise NotImplementedError

  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: None = None,
    **options: Unpack[LinenOptions],
  ) -> jax.Array: ...
  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: Cache,
    **options: Unpack[LinenOptions],
  ) -> tuple[jax.Array, Cache]: ...
  @overload
  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    cache: Cache | None,
    **options: Unpack[LinenOptions],
  ) -> Any: ...

  def __call__(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None = None,
    inputs_v: ArrayLike | None = None,
    *,
    inputs_kv: None = None,
    mask: Mask | ArrayLike | None = None,
    deterministic: bool | None = None,
    dropout_rng: jax.Array | None = None,
    sow_weights: bool = False,
    input_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    head_gates: ArrayLike | None = None,
    cache: Cache | None = None,
    valid: ArrayLike | None = None,
  ) -> Any:
    """Attends from inputs_q to inputs_k, or to a cache.

      layer = mha.GroupedQueryAttention(num_heads=8, num_kv_heads=2, head_dim=8)
      variables = layer.init(key, x)
      y = layer.apply(variables, x, mask=masks.causal())
      y = layer.apply(variables, x, other)  # another sequence
      cache = layer.init_cache(batch_size=2, capacity=32)
      y, cache = layer.apply(variables, x, mask=masks.causal(), cache=cache)

    In a module of yours call it as it is: `y = layer(x, mask=masks.causal())`.

    The weights are seen by `layer.apply(variables, x, sow_weights=True,
    mutable='intermediates')`, which returns them beside the output.

    With a cache, inputs_q continue what it holds. A causal mask still has to be
    given, and any split of a sequence into calls gives what one call gives.
    Rows may have different lengths, see valid. A cache of `keys_values` stands
    in the place of inputs_k.

    Args:
      inputs_q: (..., t, d).
      inputs_k: (..., s, d'); None: inputs_q, self-attention.
      inputs_v: (..., s, d''); None: inputs_k.
      inputs_kv: not taken; pass inputs_k.
      mask: a `Mask`, or an array that broadcasts to (..., h, t, s), booleans
        or what Flax's mask helpers return: nonzero may attend.
      deterministic: whether dropout is off, here or in the constructor.
      dropout_rng: a key for dropout; None: the module's 'dropout' stream.
      sow_weights: whether to sow the weights (..., h, t, s), before dropout,
        as 'attention_weights' into the collection 'intermediates'.
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
    flax_arguments.refuse(inputs_kv=inputs_kv)
    config = self._config(inputs_q, inputs_k, inputs_v, cache)
    out = apply(
      config,
      self._params(config),
      inputs_q,
      inputs_k,
      inputs_v,
      mask=masks.from_numbers(mask),
      bias=bias,
      input_positions=input_positions,
      key_positions=key_positions,
      dropout=self._dropout(deterministic, dropout_rng),
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
    self.sow('intermediates', 'attention_weights', weights)
    return out if cache is None else (out, after)

  def _config(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None,
    inputs_v: ArrayLike | None,
    cache: Cache | None,
  ) -> AttentionConfig:
    """Makes the config; a static cache stands for inputs that are not here."""
    if isinstance(cache, StaticCache):
      inputs_k = self._as_stored(inputs_q, 'key_down', 'key')
      inputs_v = self._as_stored(inputs_k, 'value')
    return self.config_for(inputs_q, inputs_k, inputs_v)

  def keys_values(
    self,
    inputs_k: ArrayLike,
    inputs_v: ArrayLike | None = None,
    *,
    key_positions: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
  ) -> StaticCache:
    """Projects what cross-attention attends to, once for many calls.

    `module.apply(variables, y, method='keys_values')`. See
    `mha_jax.attention.keys_values`.
    """
    inputs_q = self._as_stored(inputs_k, 'query_down', 'query')
    config = self.config_for(inputs_q, inputs_k, inputs_v)
    return keys_values(
      config,
      self._params(config),
      inputs_k,
      inputs_v,
      key_positions=key_positions,
      lengths=lengths,
      dtype=self.dtype,
      precision=self.precision,
    )

  def cache_config(self) -> AttentionConfig:
    """A config with the sizes that a cache needs, without any inputs."""
    raise NotImplementedError

  @flax_arguments.refuse_unknown
  def init_cache(
    self,
    batch_size: int,
    capacity: int | None = None,
    dtype: DTypeLike = jnp.float32,
    *,
    window: int | None = None,
  ) -> Cache:
    """An empty cache, without variables; see `mha_jax.attention.init_cache`."""
    return init_cache(
      self.cache_config(), batch_size, capacity, dtype, window=window
    )

  def _as_stored(self, inputs: Any, *rows: str) -> Any:
    """Inputs as wide as the first of these rows takes; without any, inputs.

    For sizes that other inputs would tell.
    """
    stored = nn.meta.unbox(self.variables.get('params', {}))
    kernels = [stored[row]['kernel'] for row in rows if row in stored]
    if not kernels:
      return inputs
    return jnp.zeros((*[1] * (np.ndim(inputs) - 1), kernels[0].shape[0]))

  @nn.compact
  def _params(self, config: AttentionConfig) -> dict[str, dict[str, jax.Array]]:
    """The parameters of each row, from a submodule of its name."""
    own = {'kernel': self.kernel_init, 'bias': self.bias_init}
    out = {
      'kernel': self.out_kernel_init or self.kernel_init,
      'bias': self.out_bias_init or self.bias_init,
    }
    params = {}
    for name, row in config.table.items():
      initializers = out if name == 'out' else own
      params[name] = Parameters(
        row, initializers, self.param_dtype, name=name
      )()
    if self.is_initializing():
      axis_names.warn_of_short(config.table, self._axis_names(config.table))
    return params

  def _axis_names(self, table: Table) -> dict[str, dict[str, Any]]:
    """By row and parameter, the names in its box; None: no box, or no names."""
    made = self.variables['params']
    return {
      row: {name: getattr(x, 'names', None) for name, x in made[row].items()}
      for row in table
    }

  def _dropout(
    self, deterministic: bool | None, key: jax.Array | None
  ) -> Dropout | None:
    """Dropout with the given key or the module's own; None when it is off."""
    rate = checks.plain(self.dropout_rate)
    checks.rate('dropout_rate', rate)
    if rate == 0 or nn.merge_param(
      'deterministic', self.deterministic, deterministic
    ):
      return None
    key = self.make_rng('dropout') if key is None else key
    return Dropout(key, rate)


class Attention(_Shell):
  """Attention of any variant, told by its config.

  Attributes:
    config: an `AttentionConfig`, for instance `GroupedConfig(...)`.
    dtype: the dtype to compute in; None: that of inputs and parameters.
    param_dtype: the dtype of the parameters.
    dropout_rate: probability in [0, 1) to drop an attention weight; drawn per
      row, head, query and key.
    deterministic: whether dropout is off; may be given at the call instead.
    precision: of every product, see `mha_jax.attention.apply`.
    kernel_init: initialiser of the kernels; sees (fan-in, fan-out).
    out_kernel_init: that of the output kernel; None: kernel_init.
    bias_init: initialiser of the biases.
    out_bias_init: that of the output bias; None: bias_init.
    implementation: see `mha_jax.attention.multihead_attention`.
  """

  config: AttentionConfig
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  dropout_rate: float = 0.0
  deterministic: bool | None = None
  precision: Any = None
  kernel_init: Initializer = INITIALIZERS['kernel']
  out_kernel_init: Initializer | None = None
  bias_init: Initializer = INITIALIZERS['bias']
  out_bias_init: Initializer | None = None
  implementation: str = 'auto'

  def config_for(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None,
    inputs_v: ArrayLike | None,
  ) -> AttentionConfig:
    return self.config

  def cache_config(self) -> AttentionConfig:
    return self.config


class GroupedQueryAttention(_Shell):
  """Attention with fewer key/value heads than query heads.

  The first attributes are those of `flax.linen.MultiHeadDotProductAttention`,
  in its order; see `Attention` for those that all modules share.

  Attributes:
    num_heads: query heads h.
    qkv_features: h k in all; None: the width of inputs_q.
    out_features: width of the output; None: the width of inputs_q.
    broadcast_dropout: ignored; dropout is drawn per row, head, query and key.
    use_bias: whether the projections add a bias.
    attention_fn, decode, qkv_dot_general, out_dot_general,
      qkv_dot_general_cls, out_dot_general_cls, qk_attn_weights_einsum_cls,
      attn_weights_value_einsum_cls: not taken.
    normalize_qk: False, True (Flax's LayerNorm), 'layer' or 'rms'.
    force_fp32_for_softmax: ignored; the softmax is in float32 at least.
    num_kv_heads: key/value heads n, a divisor of h.
    head_dim: k, free of the input's width; None: qkv_features / h.
    v_head_dim: v; None: head_dim.
    rope: a `Rope` that rotates queries and keys; None: none.
    logit_softcap: bound on the scores; None: none.
  """

  kind = 'gqa'  # no field: the subclasses' own

  num_heads: int
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  qkv_features: int | None = None
  out_features: int | None = None
  broadcast_dropout: bool = True
  dropout_rate: float = 0.0
  deterministic: bool | None = None
  precision: Any = None
  kernel_init: Initializer = INITIALIZERS['kernel']
  out_kernel_init: Initializer | None = None
  bias_init: Initializer = INITIALIZERS['bias']
  out_bias_init: Initializer | None = None
  use_bias: bool = True
  attention_fn: Callable[..., Any] | None = None
  decode: bool = False
  normalize_qk: bool | str = False
  force_fp32_for_softmax: bool = False
  qkv_dot_general: Any = None
  out_dot_general: Any = None
  qkv_dot_general_cls: Any = None
  out_dot_general_cls: Any = None
  qk_attn_weights_einsum_cls: Any = None
  attn_weights_value_einsum_cls: Any = None
  num_kv_heads: int | None = None
  head_dim: int | None = None
  v_head_dim: int | None = None
  rope: Rope | None = None
  logit_softcap: float | None = None
  implementation: str = 'auto'

  def config_for(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None,
    inputs_v: ArrayLike | None,
  ) -> AttentionConfig:
    flax_arguments.refuse_given(
      vars(self), {'attention_fn': (nn.dot_product_attention,)}
    )
    widths = flax_arguments.widths(inputs_q, inputs_k, inputs_v)
    return flax_arguments.grouped_config(self.kind, vars(self), widths)

  def cache_config(self) -> AttentionConfig:
    k = flax_arguments.head_dim_of(
      self.num_heads, self.qkv_features, self.head_dim
    )
    if k is None:
      raise ValueError(
        'head_dim=None and qkv_features=None: a cache is made without inputs, '
        'which would tell the size of a head; make the module with head_dim= '
        'or qkv_features='
      )
    return self.config_for(*[jnp.zeros((1, self.num_heads * k))] * 3)


class MultiHeadAttention(GroupedQueryAttention):
  """Attention with a key/value head for each query head.

  The same attributes as `GroupedQueryAttention`; num_kv_heads is num_heads,
  unless it is given, as in `flax.nnx.MultiHeadAttention`.
  """

  kind = 'mha'


class MultiHeadDotProductAttention(MultiHeadAttention):
  """`MultiHeadAttention` under Flax's other name.

  Linen names a submodule after its class: this one finds the parameters of an
  unnamed `nn.MultiHeadDotProductAttention`, `MultiHeadAttention` those of an
  unnamed `nn.MultiHeadAttention`.
  """


class SelfAttention(MultiHeadDotProductAttention):
  """`MultiHeadDotProductAttention` of one sequence, with Flax's arguments.

  The second argument is the mask.
  """

  def __call__(  # type: ignore[override]
    self,
    inputs_q: Any,
    mask: Any = None,
    deterministic: bool | None = None,
    dropout_rng: jax.Array | None = None,
    sow_weights: bool = False,
    **options: Any,
  ) -> Any:
    """Attends from inputs_q to inputs_q.

    Args:
      inputs_q: (..., t, d).
      mask, deterministic, dropout_rng, sow_weights: see
        `MultiHeadDotProductAttention`, as for **options: input_positions, bias,
        head_gates, cache, valid.

    Returns:
      (..., t, out_features); with a cache the pair of it and the new cache.

    Raises:
      ValueError: other keys or values are given, or inputs do not fit.
    """
    if others := sorted({'inputs_k', 'inputs_v'} & set(options)):
      raise ValueError(
        f'{others[0]} is given to SelfAttention; use MultiHeadAttention'
      )
    return super().__call__(
      inputs_q,
      mask=mask,
      deterministic=deterministic,
      dropout_rng=dropout_rng,
      sow_weights=sow_weights,
      **options,
    )


class MultiQueryAttention(GroupedQueryAttention):
  """Attention whose query heads share one key/value head.

  The same attributes as `GroupedQueryAttention`; num_kv_heads is 1.
  """

  kind = 'mqa'


class MultiHeadLatentAttention(_Shell):
  """DeepSeek-V2's attention: keys and values from one latent per token.

  See `LatentConfig` for the sizes, and `Attention` for the attributes that all
  modules share. inputs_v stays None.

  Attributes:
    num_heads: heads h.
    kv_lora_rank: features r of the latent.
    q_lora_rank: features of the query latent; None: none.
    qk_nope_head_dim: k; None: the width of inputs_q / h.
    qk_rope_head_dim: rotary features p; 0: none. None: half of
      qk_nope_head_dim where rope is given, else 0.
    v_head_dim: v; None: qk_nope_head_dim.
    out_features: width of the output; None: the width of inputs_q.
    use_bias: whether latents, rotary key and output add a bias.
    rope: turns the rotary features; None: `Rope()` where there are any.
    logit_softcap: bound on the scores; None: none.
    latent_norm: whether the latents are normalised.
    form: 'auto', 'expanded' or 'absorbed'.
  """

  num_heads: int
  kv_lora_rank: int
  q_lora_rank: int | None = None
  qk_nope_head_dim: int | None = None
  qk_rope_head_dim: int | None = None
  v_head_dim: int | None = None
  out_features: int | None = None
  use_bias: bool = False
  rope: Rope | None = None
  logit_softcap: float | None = None
  latent_norm: bool = True
  form: str = 'auto'
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  dropout_rate: float = 0.0
  deterministic: bool | None = None
  precision: Any = None
  kernel_init: Initializer = INITIALIZERS['kernel']
  out_kernel_init: Initializer | None = None
  bias_init: Initializer = INITIALIZERS['bias']
  out_bias_init: Initializer | None = None
  implementation: str = 'auto'

  def config_for(
    self,
    inputs_q: ArrayLike,
    inputs_k: ArrayLike | None,
    inputs_v: ArrayLike | None,
  ) -> AttentionConfig:
    widths = flax_arguments.widths(inputs_q, inputs_k, inputs_v)
    return flax_arguments.latent_config(vars(self), widths)

  def cache_config(self) -> AttentionConfig:
    k = self.qk_nope_head_dim
    if k is None and self.qk_rope_head_dim is None and self.rope is not None:
      raise ValueError(
        'qk_rope_head_dim=None and qk_nope_head_dim=None: without inputs a '
        'cache needs one of them'
      )
    return self.config_for(*[jnp.zeros((1, self.num_heads * (k or 1)))] * 3)


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
  module: nn.Module | None = None,
  force_fp32_for_softmax: bool = False,
  einsum_dot_general: Any = None,
  qk_attn_weights_einsum: Any = None,
  attn_weights_value_einsum: Any = None,
  *,
  and_mask: Mask | ArrayLike | None = None,
  query_positions: ArrayLike | None = None,
  logit_softcap: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Our attention in Flax's modules: `attention_fn=mha.attention_fn`.

  The arguments of `flax.linen.dot_product_attention`. `broadcast_dropout` and
  `force_fp32_for_softmax` are ignored (dropout is drawn per row, head, query
  and key; the softmax is in float32 at least), the last three are not taken.
  Flax's modules pass their own mask, so
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
  flax_arguments.refuse_given(given)
  return flax_arguments.attention(given, 'intermediates')

"""Flax Linen shells over `mha_jax.attention`: parameters and random keys.

  import mha_jax.linen as mha

  layer = mha.GroupedQueryAttention(num_heads=8, num_kv_heads=2)
  variables = layer.init(key, x)
  y = layer.apply(variables, x, mask=masks.causal())

The parameter tree is that of `flax.linen.MultiHeadDotProductAttention`, whose
checkpoints load unchanged; arguments that both have bear Flax's names.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from mha_jax.attention import (
  Dropout,
  Rope,
  checks,
  grouped,
  masks,
  module_config,
)
from mha_jax.attention.projections import INITIALIZERS, Initializer, Row

__all__ = [
  'GroupedQueryAttention',
  'MultiHeadAttention',
  'MultiQueryAttention',
]


class Parameters(nn.Module):
  """Owns the parameters of one row of a table."""

  row: Row
  initializers: dict[str, Initializer]
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self) -> dict[str, jax.Array]:
    return {
      name: self.param(name, self._init(name), shape, self.param_dtype)
      for name, shape in self.row.shapes.items()
    }

  def _init(self, name: str) -> Callable[..., Any]:
    """The initialiser sees the flattened shape and may return a box."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
      flat = self.row.init_shapes[name]
      value = self.initializers[name](key, flat, dtype)
      if isinstance(value, meta.AxisMetadata):
        return meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
      return jnp.reshape(value, shape)

    return init


class GroupedQueryAttention(nn.Module):
  """Attention with fewer key/value heads than query heads.

  Attributes:
    num_heads: query heads h.
    dtype: the dtype to compute in; None: that of inputs and parameters.
    param_dtype: the dtype of the parameters.
    qkv_features: h k in all; None: the width of inputs_q.
    out_features: width of the output; None: the width of inputs_q.
    dropout_rate: probability in [0, 1) to drop an attention weight; drawn per
      row, head, query and key.
    deterministic: whether dropout is off; may be given at the call instead.
    kernel_init: initialiser of the kernels; sees (fan-in, fan-out).
    bias_init: initialiser of the biases.
    use_bias: whether the projections add a bias.
    normalize_qk: False, True (Flax's LayerNorm), 'layer' or 'rms'.
    num_kv_heads: key/value heads n, a divisor of h.
    head_dim: k, free of the input's width; None: qkv_features / h.
    v_head_dim: v; None: head_dim.
    rope: a `Rope` that rotates queries and keys; None: none.
    logit_softcap: bound on the scores; None: none.
    implementation: see `mha_jax.attention.multihead_attention`.
  """

  kind = 'gqa'  # no field: the subclasses' own

  num_heads: int
  dtype: Any = None
  param_dtype: Any = jnp.float32
  qkv_features: int | None = None
  out_features: int | None = None
  dropout_rate: float = 0.0
  deterministic: bool | None = None
  kernel_init: Initializer = INITIALIZERS['kernel']
  bias_init: Initializer = INITIALIZERS['bias']
  use_bias: bool = True
  normalize_qk: bool | str = False
  num_kv_heads: int | None = None
  head_dim: int | None = None
  v_head_dim: int | None = None
  rope: Rope | None = None
  logit_softcap: float | None = None
  implementation: str = 'auto'

  @nn.compact
  def __call__(
    self,
    inputs_q: Any,
    inputs_k: Any = None,
    inputs_v: Any = None,
    *,
    mask: Any = None,
    deterministic: bool | None = None,
    input_positions: Any = None,
    key_positions: Any = None,
    bias: Any = None,
    head_gates: Any = None,
    dropout_rng: jax.Array | None = None,
    sow_weights: bool = False,
  ) -> jax.Array:
    """Attends from inputs_q to inputs_k.

    Args:
      inputs_q: (..., t, d).
      inputs_k: (..., s, d'); None: inputs_q, self-attention.
      inputs_v: (..., s, d''); None: inputs_k.
      mask: a `Mask`, or an array that broadcasts to (..., h, t, s), booleans
        or what Flax's mask helpers return: nonzero may attend.
      deterministic: whether dropout is off, here or in the constructor.
      input_positions: (..., t) absolute positions of the queries for RoPE and
        masks; where inputs_k is None of the keys too. None: 0 .. t-1.
      key_positions: (..., s) of the keys; None: 0 .. s-1, or input_positions
        where inputs_k is None.
      bias: added to the scores, broadcasts to (..., h, t, s).
      head_gates: (h,) factors of each head's output.
      dropout_rng: a key for dropout; None: the module's 'dropout' stream.
      sow_weights: whether to sow the weights (..., h, t, s), before dropout,
        as 'attention_weights' into the collection 'intermediates'.

    Returns:
      (..., t, out_features).

    Raises:
      ValueError: inputs or options do not fit.
    """
    config = module_config.config_for(
      self.kind,
      inputs_q,
      inputs_k,
      inputs_v,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      qkv_features=self.qkv_features,
      head_dim=self.head_dim,
      v_head_dim=self.v_head_dim,
      out_features=self.out_features,
      use_bias=self.use_bias,
      normalize_qk=self.normalize_qk,
      rope=self.rope,
      logit_softcap=self.logit_softcap,
    )
    initializers = {**INITIALIZERS, 'kernel': self.kernel_init}
    initializers['bias'] = self.bias_init
    params = {
      name: Parameters(row, initializers, self.param_dtype, name=name)()
      for name, row in config.table.items()
    }
    out = grouped.apply(
      config,
      params,
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
      return_weights=sow_weights,
      implementation=self.implementation,
    )
    if sow_weights:
      out, weights = out
      self.sow('intermediates', 'attention_weights', weights)
    return out

  def _dropout(
    self, deterministic: bool | None, key: jax.Array | None
  ) -> Dropout | None:
    """Dropout with the given key or the module's own; None when it is off."""
    checks.rate('dropout_rate', self.dropout_rate)
    if self.dropout_rate == 0 or nn.merge_param(
      'deterministic', self.deterministic, deterministic
    ):
      return None
    key = self.make_rng('dropout') if key is None else key
    return Dropout(key, self.dropout_rate)


class MultiHeadAttention(GroupedQueryAttention):
  """Attention with a key/value head for each query head.

  The same attributes as `GroupedQueryAttention`; num_kv_heads is num_heads.
  """

  kind = 'mha'


class MultiQueryAttention(GroupedQueryAttention):
  """Attention whose query heads share one key/value head.

  The same attributes as `GroupedQueryAttention`; num_kv_heads is 1.
  """

  kind = 'mqa'

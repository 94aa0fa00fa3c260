"""What the two front ends share: Flax's arguments, and its attention_fn."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import Dropout, batching, checks, masks
from mha_jax.attention.dot_product import dot_product_attention
from mha_jax.attention.dtypes import compute_dtype, matmul_precision

_PRODUCTS = (
  "use Flax's own module with attention_fn=attention_fn from mha_jax.linen or "
  'mha_jax.nnx'
)
_DTYPE = 'use dtype= and param_dtype='
REPLACEMENTS: Mapping[str, str] = MappingProxyType(
  {
    'decode': 'keys and values are kept by the caller: pass cache=',
    'attention_fn': 'use implementation=, or ' + _PRODUCTS,
    'qkv_dot_general': _PRODUCTS,
    'out_dot_general': _PRODUCTS,
    'qkv_dot_general_cls': _PRODUCTS,
    'out_dot_general_cls': _PRODUCTS,
    'einsum_dot_general': 'use precision=',
    'qk_attn_weights_einsum': 'use precision=',
    'attn_weights_value_einsum': 'use precision=',
    'qk_attn_weights_einsum_cls': _PRODUCTS,
    'attn_weights_value_einsum_cls': _PRODUCTS,
    'qkv_promote_dtype': _DTYPE,
    'out_promote_dtype': _DTYPE,
    'ln_promote_dtype': _DTYPE,
    'promote_dtype': _DTYPE,
    'inputs_kv': 'pass it as inputs_k',
    'out_sharding': 'apply jax.sharding.reshard to the output',
    'qkv_sharding': 'shard the kernels: kernel_metadata=',
  }
)
"""Flax's arguments that are not honoured, and what to use instead."""


def refuse(
  flax_defaults: Mapping[str, Any] = MappingProxyType({}), **arguments: Any
) -> None:
  """Raises a ValueError for an argument of Flax that is not its default.

  Args:
    flax_defaults: the defaults that are not None or False, by name.
    **arguments: names in `REPLACEMENTS`, with what was given.
  """
  for name, value in arguments.items():
    default = flax_defaults.get(name)
    if value is None or value is False or value is default:
      continue
    raise ValueError(f'{name}={value!r} is not taken; {REPLACEMENTS[name]}')


def check_axis_names(name: str, names: Any, shape: tuple[int, ...]) -> None:
  """Raises a ValueError unless there is one axis name per dimension."""
  if names is not None and len(names) != len(shape):
    raise ValueError(
      f'{name}: {len(names)} axis names {tuple(names)} for a parameter of '
      f'shape {shape}; give one per dimension, or none and take them from '
      'config.table[...].logical_axes'
    )


def attention(
  query: Any,
  key: Any,
  value: Any,
  *,
  bias: Any,
  mask: Any,
  and_mask: Any,
  dropout_rng: jax.Array | None,
  dropout_rate: float,
  deterministic: bool,
  dtype: Any,
  precision: Any,
  module: Any,
  collection: Any,
  **options: Any,
) -> jax.Array:
  """`attention_fn` of both front ends: (..., t, h, k) -> (..., t, h, v).

  Args:
    query: (..., t, h, k).
    key: (..., s, n, k).
    value: (..., s, n, v).
    bias: added to the scores, broadcasts to (..., h, t, s).
    mask: a `Mask`, booleans or Flax's 0/1 numbers.
    and_mask: the same, joined with mask.
    dropout_rng: a key for dropout.
    dropout_rate: in [0, 1).
    deterministic: whether dropout is off.
    dtype: the dtype to compute in; None: that of the inputs.
    precision: see `mha_jax.attention.apply`.
    module: a module that sows the weights; None: none.
    collection: where it sows them.
    **options: further ones of `dot_product_attention`.
  """
  q, k, v = (jnp.asarray(x) for x in (query, key, value))
  dtype = compute_dtype(dtype, q, k, v)
  checks.rate('dropout_rate', dropout_rate)
  dropout = None
  if dropout_rate > 0 and not deterministic:
    if dropout_rng is None:
      raise ValueError(
        f'dropout_rng=None with dropout_rate={dropout_rate}; pass a key, or '
        'deterministic=True'
      )
    dropout = Dropout(dropout_rng, dropout_rate)
  batch = q.shape[:-3]
  allowed = masks.all_of(
    *(
      batching.fold('mask', masks.from_numbers(x), batch)
      for x in (mask, and_mask)
    )
  )
  with matmul_precision(precision):
    out = dot_product_attention(
      q.astype(dtype),
      k.astype(dtype),
      v.astype(dtype),
      bias,
      allowed,
      dropout=dropout,
      return_weights=module is not None,
      **options,
    )
  if module is None:
    return out
  out, weights = out
  module.sow(collection, 'attention_weights', weights)
  return out

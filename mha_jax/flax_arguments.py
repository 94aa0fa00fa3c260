"""The part that both front ends share: arguments, and attention_fn."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import mha_jax.flax_serialization  # noqa: F401  registers caches and masks
from mha_jax.attention import (
  AttentionConfig,
  Dropout,
  checks,
  layer_inputs,
  masks,
  shapes,
)
from mha_jax.attention.dot_product import dot_product_attention
from mha_jax.attention.dtypes import compute_dtype, matmul_precision
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import ArrayLike
from mha_jax.attention.variants import VARIANTS, build

_PRODUCTS = (
  "use precision=, or Flax's own module with attention_fn=attention_fn from "
  'mha_jax.linen or mha_jax.nnx'
)
_EINSUMS = "use precision=, or Flax's own module and attention"
_DTYPE = 'use dtype= and param_dtype='
REPLACEMENTS: Mapping[str, str] = MappingProxyType(
  {
    'decode': 'keys and values are kept by the caller: pass cache=',
    'attention_fn': "use Flax's own module with it, or implementation=",
    'qkv_dot_general': _PRODUCTS,
    'out_dot_general': _PRODUCTS,
    'qkv_dot_general_cls': _PRODUCTS,
    'out_dot_general_cls': _PRODUCTS,
    'einsum_dot_general': _EINSUMS,
    'qk_attn_weights_einsum': _EINSUMS,
    'attn_weights_value_einsum': _EINSUMS,
    'qk_attn_weights_einsum_cls': _EINSUMS,
    'attn_weights_value_einsum_cls': _EINSUMS,
    'qkv_promote_dtype': _DTYPE,
    'out_promote_dtype': _DTYPE,
    'ln_promote_dtype': _DTYPE,
    'promote_dtype': _DTYPE,
    'inputs_kv': 'pass it as inputs_k',
    'out_sharding': 'apply jax.sharding.reshard to the output',
    'qkv_sharding': 'shard the kernels: kernel_metadata=',
  }
)
"""Flax's arguments that are not taken, and what to use instead."""


_GROUPED = 'GroupedQueryAttention has it; for latent attention '
_INPUTS = 'the inputs, or config=, tell it'
_LATENT = 'MultiHeadLatentAttention has it'
OF_OTHERS: Mapping[str, str] = MappingProxyType(
  {
    'num_kv_heads': f'{_GROUPED}write kv_lora_rank=, of the shared latent',
    'head_dim': f'{_GROUPED}write qk_nope_head_dim= and qk_rope_head_dim=',
    'qkv_features': f'{_GROUPED}write qk_nope_head_dim=, of one head',
    'normalize_qk': f'{_GROUPED}leave it out: the latents are normalised',
    'broadcast_dropout': 'leave it out: dropout is drawn for each weight',
    'force_fp32_for_softmax': 'leave it out: softmax is in float32 at least',
    'kv_lora_rank': _LATENT,
    'q_lora_rank': _LATENT,
    'qk_nope_head_dim': _LATENT,
    'qk_rope_head_dim': _LATENT,
    'latent_norm': _LATENT,
    'in_features': _INPUTS,
    'in_kv_features': _INPUTS,
    'input_shape': 'write batch_size= and capacity=, its rows and tokens',
  }
)
"""Arguments of another module than the one that they were given to."""

Widths = tuple[int, int | None, int | None]


class CallOptions(TypedDict, total=False):
  """The options of calls in both front ends, beside inputs and a cache."""

  mask: Mask | ArrayLike | None
  deterministic: bool | None
  sow_weights: bool
  input_positions: ArrayLike | None
  key_positions: ArrayLike | None
  bias: ArrayLike | None
  head_gates: ArrayLike | None
  valid: ArrayLike | None


Method = TypeVar('Method', bound=Callable[..., Any])


def refuse(
  same: Mapping[str, tuple[Any, ...]] = MappingProxyType({}), **arguments: Any
) -> None:
  """Raises a ValueError for an argument of Flax that is not its default.

  Args:
    same: by name, the values that mean the same as the default.
    **arguments: names in `REPLACEMENTS`, with what was given.
  """
  for name, value in arguments.items():
    if value is None or value is False:
      continue
    if any(value is x for x in same.get(name, ())):
      continue
    shape = getattr(value, 'shape', None)
    what = repr(value) if shape is None else f'an array of shape {shape}'
    raise ValueError(f'{name}={what} is not taken; {REPLACEMENTS[name]}')


def refuse_unknown(
  method: Method, others: Callable[..., Any] | None = None
) -> Method:
  """Answers arguments that a method does not have by a ValueError.

  It says what to write, where Python's TypeError would only name the argument.

  Args:
    method: `__init__`, say.
    others: the method that its **options go to; None: it has none.
  """
  known: dict[str, None] = {}
  for function in (method,) if others is None else (method, others):
    parameters = inspect.signature(function).parameters.values()
    known |= {x.name: None for x in parameters if x.kind != x.VAR_KEYWORD}
  if others is not None:
    known.pop('config', None)  # which the method itself makes
  hidden = ('self', 'parent', 'name')
  names = [name for name in known if name not in hidden]

  @functools.wraps(method)
  def checked(self: Any, *args: Any, **options: Any) -> Any:
    for name in options:
      if name not in known:
        near = difflib.get_close_matches(name, names, n=1)
        remedy = REPLACEMENTS.get(name) or OF_OTHERS.get(name)
        where = f'{type(self).__name__}.{method.__name__}'
        raise ValueError(
          f'{name}={options[name]!r} is no argument of '
          f'{where.removesuffix(".__init__")}; '
          + (remedy or f'write {"=, ".join(near or names)}=')
        )
    return method(self, *args, **options)

  return checked  # type: ignore[return-value]


def refuse_inputs() -> None:
  """Raises a ValueError: a submodule of parameters was given inputs."""
  raise ValueError(
    'submodules own parameters and compute nothing; for layer.query(x) write '
    "layer.config.table['query'].apply(layer.query(), x), which is heads "
    'first, (b, h, t, k)'
  )


def kind_of(kind: str, num_heads: int, num_kv_heads: int | None) -> str:
  """The variant that a module of the grouped family is.

  `MultiHeadAttention` takes num_kv_heads as `flax.nnx.MultiHeadAttention` does,
  and is then grouped.
  """
  own = checks.plain(num_kv_heads) in (None, checks.plain(num_heads))
  return 'gqa' if kind == 'mha' and not own else kind


def widths(inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[int, int, int]:
  """The features of a module's inputs, where None stands for the one before.

  Raises:
    ValueError: an input has fewer than two dimensions, or is a mask.
  """
  layer_inputs.check_no_mask(inputs_q, inputs_k, inputs_v)
  inputs_k = inputs_q if inputs_k is None else inputs_k
  inputs_v = inputs_k if inputs_v is None else inputs_v
  found = []
  for name, x in (('q', inputs_q), ('k', inputs_k), ('v', inputs_v)):
    shape = np.shape(x)
    if len(shape) < 2:
      raise ValueError(
        f'inputs_{name} of shape {shape} must be (..., length, features)'
      )
    found.append(shape[-1])
  return found[0], found[1], found[2]


def head_dim_of(
  num_heads: int, qkv_features: int | None, head_dim: int | None
) -> int | None:
  """head_dim from Flax's qkv_features = h k; None where both are None.

  Raises:
    ValueError: they contradict each other or do not divide.
  """
  num_heads, qkv_features, head_dim = map(
    checks.plain, (num_heads, qkv_features, head_dim)
  )
  checks.positive('num_heads', num_heads)
  if qkv_features is None:
    return head_dim
  if head_dim is None:
    checks.positive('qkv_features', qkv_features)
    checks.divides('num_heads', num_heads, 'qkv_features', qkv_features)
    return qkv_features // num_heads
  if qkv_features != head_dim * num_heads:
    raise ValueError(
      f'qkv_features={qkv_features} contradicts head_dim={head_dim} with '
      f'num_heads={num_heads}; give one of the two'
    )
  return head_dim


def refuse_given(
  given: Mapping[str, Any],
  same: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> None:
  """Refuses those of a module's fields or arguments that are not taken."""
  refuse(same, **{name: given[name] for name in REPLACEMENTS if name in given})


def grouped_config(
  kind: str, given: Mapping[str, Any], widths: Widths
) -> AttentionConfig:
  """Builds the config of a module of the grouped family.

  Args:
    kind: 'mha', 'gqa' or 'mqa', as the module is called.
    given: the module's fields or arguments by name.
    widths: features of the three inputs; None: as the one before.
  """
  heads, kv_heads = given['num_heads'], given['num_kv_heads']
  x, y, z = widths
  head_dim = head_dim_of(heads, given['qkv_features'], given['head_dim'])
  own = {'d_model': x, 'key_features': y, 'value_features': z}
  kind = kind_of(kind, heads, kv_heads)
  return _build(kind, given, {**own, 'head_dim': head_dim})


def latent_config(given: Mapping[str, Any], widths: Widths) -> AttentionConfig:
  """Builds the config of a latent module, see `grouped_config`."""
  x, y, _ = widths
  return _build('mla', given, {'d_model': x, 'kv_features': y})


def _build(
  kind: str, given: Mapping[str, Any], own: Mapping[str, Any]
) -> AttentionConfig:
  """Builds a config of the options that are given, and of our own."""
  options = {x: given[x] for x in VARIANTS[kind].options if x in given}
  options |= {'use_bias': bool(given['use_bias']), **own}
  return build(kind, **options)


def attention(given: Mapping[str, Any], collection: Any) -> jax.Array:
  """Computes `attention_fn` of both front ends: (..., t, h, v).

  Args:
    given: the arguments of `attention_fn` by name: query (..., t, h, k), key
      (..., s, n, k), value (..., s, n, v), and so on.
    collection: where the module, if one is given, sows the weights.

  Raises:
    ValueError: an argument does not fit.
  """
  q, k, v = (jnp.asarray(given[x]) for x in ('query', 'key', 'value'))
  dtype = compute_dtype(given['dtype'], q, k, v)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  dropout = _dropout_of(given)
  and_mask, positions = given['and_mask'], given['query_positions']
  t, s = q.shape[-3], k.shape[-3]
  by_position = isinstance(and_mask, Mask) and and_mask.by_position
  if by_position and positions is None and t == 1 < s:
    raise ValueError(
      f'and_mask={and_mask} compares positions, which one query for {s} keys '
      '(as in decode=True) leaves open; pass query_positions, or and_mask=None '
      'while decoding'
    )
  batch = shapes.batch_of(q, 3)
  both = (masks.from_numbers(x) for x in (given['mask'], and_mask))
  mask = masks.all_of(*(batch.of_scores('mask', x) for x in both))
  module = given['module']
  with matmul_precision(given['precision']):
    out = dot_product_attention(
      q,
      k,
      v,
      given['bias'],
      mask,
      is_causal=given.get('is_causal', False),
      query_positions=positions,
      dropout=dropout,
      return_weights=module is not None,
      logit_softcap=given['logit_softcap'],
      implementation=given['implementation'],
    )
  if module is None:
    return out
  out, weights = out
  module.sow(collection, 'attention_weights', weights)
  return out


def _dropout_of(given: Mapping[str, Any]) -> Dropout | None:
  """Makes the dropout that the arguments of `attention_fn` ask for."""
  rate, key = checks.plain(given['dropout_rate']), given['dropout_rng']
  checks.rate('dropout_rate', rate)
  if rate == 0 or given['deterministic']:
    return None
  if key is None:
    raise ValueError(
      f'dropout_rng=None with dropout_rate={rate}; pass a key, or '
      'deterministic=True'
    )
  return Dropout(key, rate)

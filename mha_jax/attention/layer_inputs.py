"""Checks of a layer's arguments, before anything is computed."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks, masks
from mha_jax.attention.caches import Cache, StaticCache
from mha_jax.attention.notation import Array, ArrayLike
from mha_jax.attention.scores import Scores
from mha_jax.attention.shapes import Batch
from mha_jax.attention.variants.config import AttentionConfig, check_config


def check_no_mask(inputs_q: Any, inputs_k: Any, inputs_v: Any) -> None:
  """Raises a ValueError where a mask takes the place of keys or values."""
  for name, x in (('inputs_k', inputs_k), ('inputs_v', inputs_v)):
    if x is not None and _looks_like_a_mask(x, np.shape(inputs_q)):
      ours = isinstance(x, masks.Mask) or checks.is_function(x)
      what = x if ours else f'an array of shape {np.shape(x)}'
      raise ValueError(
        f'{name}={what} looks like a mask, but keys and values come after '
        'inputs_q; write mask='
      )


def _looks_like_a_mask(x: Any, queries: tuple[int, ...]) -> bool:
  """Tells whether x can be no input beside queries of that shape."""
  if isinstance(x, masks.Mask) or checks.is_function(x):
    return True
  shape = np.shape(x)
  if len(shape) == len(queries) + 1 > 2:  # (..., h, t, s)
    return shape[-2] in (1, queries[-2])
  booleans = getattr(x, 'dtype', None) == jnp.bool_
  alike = len(shape) == len(queries) and shape[-1:] == queries[-1:]
  return booleans and not alike


def check_sources(
  config: Any, inputs_q: Any, inputs_k: Any, inputs_v: Any
) -> None:
  """Raises a ValueError unless config and sources are of the right kind."""
  check_config(config)
  check_no_mask(inputs_q, inputs_k, inputs_v)
  if inputs_k is None and inputs_v is not None:
    raise ValueError(
      'inputs_v is given without inputs_k; pass the keys too, or the one '
      'source of both as inputs_k'
    )
  if config.values_from_keys and inputs_v is not None:
    raise ValueError(
      'inputs_v is given, but this attention makes both keys and values of '
      'inputs_k; '
      'leave inputs_v None'
    )


def check_positions(
  config: AttentionConfig,
  inputs_k: Any,
  input_positions: Any,
  key_positions: Any,
  cache: Any,
) -> None:
  """Raises a ValueError where positions are one-sided, or the cache's own."""
  alone = input_positions is not None and key_positions is None
  if config.rotary is not None and alone and inputs_k is not None:
    raise ValueError(
      'input_positions are given but key_positions are None, and RoPE turns '
      'the keys of inputs_k too; pass key_positions, or leave inputs_k None '
      'for self-attention'
    )
  if cache is None:
    return
  own = key_positions is not None or (
    input_positions is not None and not isinstance(cache, StaticCache)
  )
  if own:
    raise ValueError(
      'input_positions and key_positions come from the cache; leave them None'
    )


def check_suits_cache(
  cache: Cache, inputs_k: ArrayLike | None, scores: Scores
) -> None:
  """Raises a ValueError unless a call goes with its cache.

  Args:
    cache: it holds the keys.
    inputs_k: must be None.
    scores: without dropout; with a window, a mask by positions and no bias.
  """
  if inputs_k is not None:
    raise ValueError(
      'inputs_k is given with a cache, which holds the keys; pass inputs_q '
      'alone, or project inputs_k once by keys_values'
    )
  if scores.dropout is not None:
    raise ValueError(
      'dropout is on with a cache; decoding has none: pass deterministic=True'
    )
  mask = scores.mask
  columns = mask is not None and mask.by_column
  if cache.window is not None and (columns or scores.bias is not None):
    raise ValueError(
      'mask or bias goes by columns, but a WindowCache writes over its slots; '
      'use causal and window masks, or a KVCache'
    )
  left, _ = masks.reach(mask) or (None, None)
  if cache.window is not None and left is not None and left >= cache.window:
    raise ValueError(
      f'mask sees {left} tokens back, but the cache keeps only window='
      f"{cache.window} tokens, the query's own among them; make it with "
      f'window={left + 1} or more'
    )


def valid_of_call(
  cache: Cache | None, valid: ArrayLike | None, batch: Batch, t: int
) -> Array | None:
  """Makes `valid` (b, t), once its tokens have been found to have room.

  Args:
    cache: a cache, or None.
    valid: booleans (..., t), or None.
    batch: the batch dimensions.
    t: queries.

  Raises:
    ValueError: valid does not fit, or a row would hold more than its capacity.
  """
  if cache is None:
    if valid is not None:
      raise ValueError('valid is given without a cache; pass a mask instead')
    return None
  if valid is not None:
    valid = batch.merge(as_valid(valid, (*batch.sizes, t)))
  cache.check_room(t, valid)
  return valid


def as_valid(valid: Any, shape: tuple[int, ...]) -> Array:
  """Makes `valid` an array; a ValueError unless it is booleans of `shape`."""
  array = jnp.asarray(valid)
  if array.dtype != jnp.bool_ or array.shape != shape:
    raise ValueError(
      f'valid of {array.dtype} and shape {array.shape} must be booleans of '
      f'shape {shape}, False for padding'
    )
  return array


def arrays(
  config: AttentionConfig,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None,
  inputs_v: ArrayLike | None,
  keys_too: bool = True,
) -> tuple[Array, Array | None, Array | None]:
  """Makes arrays of the inputs; None stays None, the input before it.

  Args:
    config: the attention.
    inputs_q: (..., t, d), the queries' input.
    inputs_k: (..., s, d'), of keys.
    inputs_v: (..., s, d''), of values.
    keys_too: whether keys and values are checked; False where a cache has taken
      their place.

  Raises:
    ValueError: the inputs do not fit each other or the config.
  """
  x = jnp.asarray(inputs_q)
  y, z = (None if a is None else jnp.asarray(a) for a in (inputs_k, inputs_v))
  keys = x if y is None else y
  values = keys if z is None else z
  for letter, a, width in zip(
    'qkv', (x, keys, values), config.input_widths, strict=True
  ):
    wrong = a.ndim < 2 or a.shape[-1] != width
    if wrong and (keys_too or letter == 'q'):
      raise ValueError(
        f'inputs_{letter} of shape {a.shape} must be (..., length, {width}): '
        f'the projections were made for {width} features'
      )
  if not keys_too:
    return x, y, z
  if keys.shape[:-1] != values.shape[:-1]:
    raise ValueError(
      f'inputs_k of shape {keys.shape} and inputs_v of shape {values.shape} '
      'must agree in batch and length'
    )
  if x.shape[:-2] != keys.shape[:-2]:
    raise ValueError(
      f'inputs_q of shape {x.shape} and inputs_k of shape {keys.shape} must '
      'agree in their batch dimensions; a mask is passed as mask='
    )
  return x, y, z


def gates(head_gates: Any, h: int) -> Array:
  """Makes the gates (h,) an array (1, h, 1, 1)."""
  gates = jnp.asarray(head_gates)
  if gates.shape != (h,):
    raise ValueError(
      f'head_gates of shape {gates.shape} must be ({h},): one factor a head'
    )
  return jnp.reshape(gates, (1, h, 1, 1))

"""A whole attention layer: from inputs to output, with or without a cache.

out = sum_i gate_i o_i W_o,i,   o = attend(queries(x), entries(y, z))
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks, heads, layer_inputs, masks, shapes
from mha_jax.attention.caches import Cache, StaticCache, View, check_cache
from mha_jax.attention.dtypes import compute_dtype, matmul_precision
from mha_jax.attention.implementations import check_name
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import Array, ArrayLike, DTypeLike, Parts
from mha_jax.attention.one_head.dropout import Dropout
from mha_jax.attention.one_head.exact import as_parts
from mha_jax.attention.projections import ParamsByRow, as_params
from mha_jax.attention.scores import Scores, checked_scores
from mha_jax.attention.variants.config import (
  AttentionConfig,
  Heads,
  Project,
  check_config,
)


class LayerOptions(TypedDict, total=False):
  """The options of `apply` that leave the kind of its result as it is."""

  mask: Mask | ArrayLike | None
  bias: ArrayLike | None
  input_positions: ArrayLike | None
  key_positions: ArrayLike | None
  dropout: Dropout | None
  head_gates: ArrayLike | None
  dtype: DTypeLike | None
  precision: Any
  valid: ArrayLike | None
  implementation: str


@overload
def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  cache: None = None,
  return_weights: Literal[False] = False,
  **options: Unpack[LayerOptions],
) -> Array: ...
@overload
def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  cache: None = None,
  return_weights: Literal[True],
  **options: Unpack[LayerOptions],
) -> tuple[Array, Array]: ...
@overload
def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  cache: Cache,
  return_weights: Literal[False] = False,
  **options: Unpack[LayerOptions],
) -> tuple[Array, Cache]: ...
@overload
def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  cache: Cache,
  return_weights: Literal[True],
  **options: Unpack[LayerOptions],
) -> tuple[tuple[Array, Array], Cache]: ...
@overload
def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  cache: Cache | None = None,
  return_weights: bool = False,
  **options: Unpack[LayerOptions],
) -> Any: ...


def apply(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_q: ArrayLike,
  inputs_k: ArrayLike | None = None,
  inputs_v: ArrayLike | None = None,
  *,
  mask: Mask | ArrayLike | None = None,
  bias: ArrayLike | None = None,
  input_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  dropout: Dropout | None = None,
  head_gates: ArrayLike | None = None,
  dtype: DTypeLike | None = None,
  precision: Any = None,
  cache: Cache | None = None,
  valid: ArrayLike | None = None,
  return_weights: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attends with a layer and its projections: (..., t, d) -> (..., t, d).

  The same function serves self-attention, cross-attention and decoding:

    params = init_table(config.table, key)
    y = apply(config, params, x, mask=masks.causal())
    y = apply(config, params, x, other)  # attends to another sequence
    cache = init_cache(config, batch_size=2, capacity=32)
    y, cache = apply(config, params, x[:, :7], cache=cache)
    y, cache = apply(config, params, x[:, 7:8], cache=cache)
    kept = keys_values(config, params, other)  # projected once
    y, kept = apply(config, params, x, cache=kept)

  Args:
    config: an `AttentionConfig`, the shape of the attention.
    params: `{name: {'kernel': ..., 'bias': ...}}` for every row of the table.
    inputs_q: (..., t, d); leading dimensions are batch dimensions.
    inputs_k: (..., s, d'); None: inputs_q, self-attention.
    inputs_v: (..., s, d''); None: inputs_k.
    mask: a `Mask`, or booleans that broadcast to (..., h, t, s); True may
      attend.
    bias: added to the scores, broadcasts to (..., h, t, s).
    input_positions: (..., t) or (t,) integers, absolute positions of the
      queries for RoPE and masks; None: 0 .. t-1.
    key_positions: (..., s) or (s,) likewise for the keys; None: input_positions
      in self-attention, 0 .. s-1 otherwise.
    dropout: a `Dropout`; None: off.
    head_gates: (h,) factors of each head's output; None: ones.
    dtype: the dtype to compute in; None: the common dtype of inputs and params.
    precision: of every product, as `jax.lax.Precision` or a string for
      `jax.default_matmul_precision`; None: as that is set.
    cache: what is kept of past tokens; inputs_q continue them and are appended.
      A `StaticCache` (from `keys_values`) takes the place of inputs_k. None:
      no cache.
    valid: (..., t) with a cache, False for padding, left or right, which takes
      no position and no slot; None: all are tokens.
    return_weights: whether to return the weights (..., h, t, s) too.
    implementation: see `multihead_attention`.

  Returns:
    (..., t, out_features); with return_weights the pair of it and the weights;
    with a cache the pair of that and the new cache. With a cache s is the
    number of its slots, for a window and t > 1 of window + t; where lengths are
    traced, rows past the capacity of their cache are NaN.

  Raises:
    ValueError: inputs, params or options do not fit the config, a row would
      hold more than its cache can, or dropout is on with a cache.
  """
  check_name(implementation)
  batch, dtype, params, arrays = _checked(
    config,
    params,
    (inputs_q, inputs_k, inputs_v),
    input_positions,
    key_positions,
    dtype,
    cache,
    valid,
    head_gates,
    mask=mask,
    bias=bias,
    dropout=dropout,
    return_weights=return_weights,
  )
  with matmul_precision(precision), heads.forward_mode_refused():
    out, weights, after = _layer(config, dtype, implementation, params, arrays)
  result: Any = batch.split(out)
  if weights is not None:
    result = result, batch.split(weights)
  return result if cache is None else (result, after)


def keys_values(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs_k: ArrayLike,
  inputs_v: ArrayLike | None = None,
  *,
  key_positions: ArrayLike | None = None,
  lengths: ArrayLike | None = None,
  dtype: DTypeLike | None = None,
  precision: Any = None,
) -> StaticCache:
  """Projects what cross-attention attends to, once for many calls.

  Args:
    config: an `AttentionConfig`.
    params: see `apply`.
    inputs_k: (..., s, d'), the other sequence.
    inputs_v: (..., s, d''); None: inputs_k.
    key_positions: (..., s) or (s,) integers for RoPE; None: 0 .. s-1.
    lengths: (...,) tokens of each row; None: all s.
    dtype: the dtype to compute in, and of the entries.
    precision: see `apply`.

  Returns:
    A cache for `apply(config, params, x, cache=cache)`.

  Raises:
    ValueError: inputs, params, key_positions or lengths do not fit.
  """
  check_config(config)
  if inputs_k is None:
    raise ValueError('inputs_k=None must be the other sequence (..., s, d)')
  layer_inputs.check_sources(config, inputs_k, inputs_k, inputs_v)
  x = jnp.zeros((*np.shape(inputs_k)[:-2], 0, config.d_model))
  params = as_params(config.table, params)
  _, y, z = layer_inputs.arrays(config, x, inputs_k, inputs_v)
  assert y is not None
  batch, s = shapes.batch_of(y, 2), y.shape[-2]
  keys = batch.of_tokens('key_positions', key_positions, s)
  lengths = checks.as_positions('lengths', lengths, batch.sizes)
  lengths = jnp.full(batch.sizes, s) if lengths is None else lengths
  checks.known_range('lengths', lengths, 0, s)
  z = y if z is None else z
  dtype = compute_dtype(dtype, y, z, *jax.tree.leaves(params))
  y, z = batch.merge(y), batch.merge(z)
  with matmul_precision(precision):
    entries = _entries(config, dtype, params, y, z, keys)
  return StaticCache(entries, jnp.reshape(lengths, (-1,)), keys)


class _Arrays(NamedTuple):
  """The arrays of a call, checked; b counts all batch dimensions."""

  x: Array  # (b, t, d)
  y: Array | None  # (b, s, d'); None: x
  z: Array | None  # (b, s, d''); None: y
  scores: Scores
  gates: Array | None  # (1, h, 1, 1)
  cache: Cache | None
  valid: Array | None  # (b, t)


def _checked(
  config: AttentionConfig,
  params: ParamsByRow,
  inputs: tuple[ArrayLike, ArrayLike | None, ArrayLike | None],
  input_positions: ArrayLike | None,
  key_positions: ArrayLike | None,
  dtype: DTypeLike | None,
  cache: Cache | None,
  valid: ArrayLike | None,
  head_gates: ArrayLike | None,
  *,
  mask: Mask | ArrayLike | None,
  bias: ArrayLike | None,
  dropout: Dropout | None,
  return_weights: bool,
) -> tuple[shapes.Batch, DTypeLike, ParamsByRow, _Arrays]:
  """Makes the batch, the dtype and all arrays of the arguments of `apply`.

  Raises:
    ValueError: they do not fit.
  """
  layer_inputs.check_sources(config, *inputs)
  layer_inputs.check_positions(
    config, inputs[1], input_positions, key_positions, cache
  )
  params = as_params(config.table, params)
  static = isinstance(cache, StaticCache)
  x, y, z = layer_inputs.arrays(config, *inputs, keys_too=not static)
  batch, h, t = shapes.batch_of(x, 2), config.num_heads, x.shape[-2]
  s = x.shape[-2] if y is None else y.shape[-2]
  if cache is not None:
    check_cache(config, cache, batch.rows)
    s = cache.slots
  elif y is None and key_positions is None:
    key_positions = input_positions
  given = [a for a in (x, y, z) if a is not None]
  dtype = compute_dtype(dtype, *given, *jax.tree.leaves(params))
  scores = checked_scores(
    (batch.rows, h, t, s),
    dtype,
    mask=batch.of_scores('mask', mask),
    bias=batch.of_scores('bias', bias),
    query_positions=batch.of_tokens('input_positions', input_positions, t),
    key_positions=batch.of_tokens('key_positions', key_positions, s),
    dropout=dropout,
    return_weights=return_weights,
  )
  if cache is not None:
    layer_inputs.check_suits_cache(cache, inputs[1], scores)
  valid = layer_inputs.valid_of_call(cache, valid, batch, t)
  gates = None if head_gates is None else layer_inputs.gates(head_gates, h)
  y, z = (None if a is None else batch.merge(a) for a in (y, z))
  arrays = _Arrays(batch.merge(x), y, z, scores, gates, cache, valid)
  return batch, dtype, params, arrays


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
  config: AttentionConfig,
  dtype: Any,
  implementation: str,
  params: ParamsByRow,
  arrays: _Arrays,
) -> tuple[Array, Array | None, Cache | None]:
  """Computes output (b, t, d), weights (b, h, t, s) and the cache after it.

  Compiled once for equal shapes and options, also where the caller does not
  jit.
  """
  x, y, z, scores, gates, cache, valid = arrays
  project = Project(config.table, params, dtype)
  if cache is None:
    y = x if y is None else y
    z = y if z is None else z
    q = config.queries(project, x, _of_rows(scores.query_positions))
    entries = config.entries(project, y, z, _of_rows(scores.key_positions))
  else:
    q, cache, view, scores = _extended(config, project, x, cache, valid, scores)
    entries = view.entries

  def attention(
    q: Array | Parts,
    k: Array | Parts,
    v: Array,
    *,
    scale: float | Array | None = None,
    logit_softcap: float | None = None,
  ) -> Heads:
    qs, ks = as_parts(q), as_parts(k)
    shapes.sizes_of(qs, ks, v)  # whatever a variant has made
    own = dataclasses.replace(scores, scale=scale, logit_softcap=logit_softcap)
    out = heads.attended(qs, ks, v, own, implementation)
    return out.out, out.weights

  o, weights = config.attend(project, q, entries, attention)
  if gates is not None:
    o = o * gates.astype(o.dtype)
  out = project('out', o)
  if cache is not None:
    out = jnp.where(cache.overflowed[:, None, None], jnp.nan, out)
  return out, weights, cache


def _extended(
  config: AttentionConfig,
  project: Project,
  x: Array,
  cache: Cache,
  valid: Array | None,
  scores: Scores,
) -> tuple[Parts, Cache, View, Scores]:
  """Makes the queries, and what they attend to: a cache, extended by x.

  A static cache, of cross-attention, stays as it is.
  """
  if isinstance(cache, StaticCache):
    view, positions = cache.view(), _of_rows(scores.query_positions)
  else:
    positions = cache.positions(x.shape[1], valid)
    new = config.entries(project, x, x, positions)
    cache, view = cache.extend(new, valid)
    scores = dataclasses.replace(scores, query_positions=positions[:, None])
  q = config.queries(project, x, positions)
  mask = masks.all_of(
    scores.mask,
    masks.dense(view.usable[:, None, None, :]),
    None if valid is None else masks.dense(valid[:, None, :, None]),
    None if cache.window is None else masks.window(cache.window - 1, None),
  )
  scores = dataclasses.replace(
    scores, mask=mask, key_positions=view.positions[:, None]
  )
  if config.expands(x.shape[1], view.entries[0].shape[2]):
    # Slots that hold no token may hold NaN, which gradients would spread.
    usable = view.usable[:, None, :, None]
    entries = tuple(jnp.where(usable, y, 0) for y in view.entries)
    view = dataclasses.replace(view, entries=entries)
  return q, cache, view, scores


def _of_rows(positions: Array | None) -> Array | None:
  """Positions (b, 1, length) as (b, length)."""
  return None if positions is None else positions[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _entries(
  config: AttentionConfig,
  dtype: Any,
  params: ParamsByRow,
  y: Array,
  z: Array,
  positions: Array | None,
) -> Parts:
  """Computes what is kept of the keys' tokens, arrays (b, heads, s, ...)."""
  project = Project(config.table, params, dtype)
  return config.entries(project, y, z, positions)

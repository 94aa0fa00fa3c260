"""A whole attention layer: from inputs to output, with or without a cache.

out = sum_i gate_i o_i W_o,i,   o = attend(queries(x), entries(y, z))
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import (
  checks,
  heads,
  implementations,
  layer_inputs,
  masks,
  shapes,
)
from mha_jax.attention.caches import Cache, StaticCache, View, check_cache
from mha_jax.attention.checks import as_positions
from mha_jax.attention.dtypes import compute_dtype, matmul_precision
from mha_jax.attention.notation import Array
from mha_jax.attention.one_head.dropout import Dropout, check_dropout
from mha_jax.attention.projections import check_params
from mha_jax.attention.variants.config import (
  AttentionConfig,
  Heads,
  Parts,
  Rows,
)


@dataclasses.dataclass(frozen=True)
class _Scores:
  """What a call says of its scores; b counts all batch dimensions."""

  mask: masks.Mask | None
  bias: Array | None
  query_positions: Array | None
  key_positions: Array | None
  dropout: Dropout | None
  return_weights: bool
  implementation: str

  def core(
    self,
    q: Parts,
    k: Any,
    v: Array,
    *,
    scale: float | Array | None = None,
    logit_softcap: float | None = None,
  ) -> Heads:
    """`multihead_attention` with all of this filled in."""
    out = heads.multihead_attention(
      q,
      k,
      v,
      mask=self.mask,
      bias=self.bias,
      query_positions=self.query_positions,
      key_positions=self.key_positions,
      dropout=self.dropout,
      return_weights=self.return_weights,
      implementation=self.implementation,
      scale=scale,
      logit_softcap=logit_softcap,
    )
    return out if self.return_weights else (out, None)

  def of_cache(
    self, cache: Cache, view: View, valid: Array | None
  ) -> '_Scores':
    """The same over what a cache shows."""
    mask = masks.all_of(
      self.mask,
      masks.dense(view.usable[:, None, None, :]),
      None if valid is None else masks.dense(valid[:, None, :, None]),
      None if cache.window is None else masks.window(cache.window - 1, None),
    )
    return dataclasses.replace(self, mask=mask, key_positions=view.positions)


def apply(
  config: Any,
  params: Any,
  inputs_q: Any,
  inputs_k: Any = None,
  inputs_v: Any = None,
  *,
  mask: Any = None,
  bias: Any = None,
  input_positions: Any = None,
  key_positions: Any = None,
  dropout: Any = None,
  head_gates: Any = None,
  dtype: Any = None,
  precision: Any = None,
  cache: Any = None,
  valid: Any = None,
  return_weights: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attention with its projections: (..., t, d) -> (..., t, d).

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
    number of its slots, for a window and t > 1 of window + t.

  Raises:
    ValueError: inputs, params or options do not fit the config.
  """
  layer_inputs.check_no_mask(inputs_q, inputs_k, inputs_v)
  layer_inputs.check_sources(config, inputs_k, inputs_v)
  layer_inputs.check_positions(
    config, inputs_k, input_positions, key_positions, cache
  )
  x = jnp.asarray(inputs_q)
  y = x if inputs_k is None else jnp.asarray(inputs_k)
  z = y if inputs_v is None else jnp.asarray(inputs_v)
  static = isinstance(cache, StaticCache)
  layer_inputs.check_inputs(config, x, *(() if static else (y, z)))
  batch, h, t = x.shape[:-2], config.num_heads, x.shape[-2]
  s = y.shape[-2]
  if cache is not None:
    check_cache(config, cache, math.prod(batch))
    s = cache.slots
  if inputs_k is None and key_positions is None and cache is None:
    key_positions = input_positions
  mask, bias = shapes.check_pairs(
    shapes.fold('mask', mask, batch),
    shapes.fold('bias', bias, batch),
    (math.prod(batch), h, t, s),
  )
  check_dropout(dropout)
  scores = _Scores(
    mask,
    bias,
    shapes.positions('input_positions', input_positions, batch, t),
    shapes.positions('key_positions', key_positions, batch, s),
    dropout,
    return_weights,
    implementation,
  )
  gates = None if head_gates is None else layer_inputs.gates(head_gates, h)
  valid = layer_inputs.check_cached_call(
    cache, valid, (*batch, t), inputs_k, mask, bias, dropout
  )
  implementations.check_name(implementation)
  check_params(config.table, params)
  dtype = compute_dtype(dtype, x, y, z, *jax.tree.leaves(params))
  rows = Rows(config.table, params, dtype)
  x, y, z = (shapes.one_batch(a) for a in (x, y, z))
  with matmul_precision(precision):
    if cache is None:
      q = config.queries(rows, x, scores.query_positions)
      entries = config.entries(rows, y, z, scores.key_positions)
      o, weights = config.attend(rows, q, entries, scores.core)
    else:
      o, weights, cache = _attend_cache(config, rows, x, cache, valid, scores)
    if gates is not None:
      o = o * gates.astype(o.dtype)
    out = rows('out', o)
  if cache is not None:
    out = jnp.where(cache.overflowed[:, None, None], jnp.nan, out)
  out = jnp.reshape(out, (*batch, t, out.shape[-1]))
  result: Any = out
  if weights is not None:
    result = out, jnp.reshape(weights, (*batch, h, t, weights.shape[-1]))
  return result if cache is None else (result, cache)


def keys_values(
  config: Any,
  params: Any,
  inputs_k: Any,
  inputs_v: Any = None,
  *,
  key_positions: Any = None,
  lengths: Any = None,
  dtype: Any = None,
  precision: Any = None,
) -> StaticCache:
  """What cross-attention attends to, projected once for many calls.

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
  layer_inputs.check_sources(config, inputs_k, inputs_v)
  y = jnp.asarray(inputs_k)
  z = y if inputs_v is None else jnp.asarray(inputs_v)
  x = jnp.zeros((*y.shape[:-2], 0, config.d_model), y.dtype)
  layer_inputs.check_inputs(config, x, y, z)
  check_params(config.table, params)
  batch, s = y.shape[:-2], y.shape[-2]
  keys = shapes.positions('key_positions', key_positions, batch, s)
  lengths = as_positions('lengths', lengths, batch)
  dtype = compute_dtype(dtype, y, z, *jax.tree.leaves(params))
  rows = Rows(config.table, params, dtype)
  with matmul_precision(precision):
    entries = config.entries(
      rows, shapes.one_batch(y), shapes.one_batch(z), keys
    )
  if lengths is None:
    lengths = jnp.full(batch, s)
  checks.known_range('lengths', lengths, 0, s)
  return StaticCache(entries, jnp.reshape(lengths, (-1,)), keys)


def _attend_cache(
  config: AttentionConfig,
  rows: Rows,
  x: Array,
  cache: Cache,
  valid: Array | None,
  scores: _Scores,
) -> tuple[Array, Array | None, Cache]:
  """The heads over a cache, extended by x unless it is static."""
  if isinstance(cache, StaticCache):
    view, at = cache.view(), scores.query_positions
  else:
    at = cache.positions(x.shape[1], valid)
    cache, view = cache.extend(config.entries(rows, x, x, at), valid)
    scores = dataclasses.replace(scores, query_positions=at)
  core = scores.of_cache(cache, view, valid).core
  entries = view.entries
  if config.expands(x.shape[1], entries[0].shape[2]):
    # Slots that hold no token may hold NaN, which gradients would spread.
    usable = view.usable[:, None, :, None]
    entries = tuple(jnp.where(usable, y, 0) for y in entries)
  o, weights = config.attend(rows, config.queries(rows, x, at), entries, core)
  return o, weights, cache

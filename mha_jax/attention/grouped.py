"""Multi-head, grouped-query and multi-query attention: one function.

  q = x W_q, k = y W_k, v = z W_v        split into heads by their einsum
  o_i = attend(q_i, k_{i // g}, v_{i // g})
  out = sum_i gate_i o_i W_o,i

MHA has as many key/value heads as query heads (n = h), MQA one, GQA any
divisor in between. Self-attention has y = z = x.

Source: Vaswani et al. 2017 (MHA), Shazeer 2019 (MQA), Ainslie et al. 2023
(GQA); QK-norm: Dehghani et al. 2023 (layer), Qwen3 2025 (rms).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import batching, checks, heads
from mha_jax.attention.dropout import Dropout
from mha_jax.attention.dtypes import compute_dtype
from mha_jax.attention.norms import Norm
from mha_jax.attention.notation import Array, Float, Shaped
from mha_jax.attention.projections import (
  Params,
  Projection,
  Table,
  check_params,
)
from mha_jax.attention.rope import Rope


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
  """The shape of a multi-head, grouped-query or multi-query attention.

  Args:
    d_model: width of the queries' input.
    num_heads: query heads h.
    num_kv_heads: key/value heads n, a divisor of h; None: h.
    head_dim: features k of a query and key head; None: d_model / h.
    v_head_dim: features v of a value head; None: head_dim.
    key_features: width of the keys' input; None: d_model.
    value_features: width of the values' input; None: key_features.
    out_features: width of the output; None: d_model.
    use_bias: whether the projections add a bias.
    normalize_qk: False, True or 'layer' (Flax's LayerNorm without bias), or
      'rms': norm of every query and key head.
    rope: rotates queries and keys, after the norm; None: no positions.
    logit_softcap: bound on the scores, see `attend`.

  Raises:
    ValueError: sizes do not divide or are not positive, or an option is
      unknown.
  """

  d_model: int
  num_heads: int
  num_kv_heads: int | None = None
  head_dim: int | None = None
  v_head_dim: int | None = None
  key_features: int | None = None
  value_features: int | None = None
  out_features: int | None = None
  use_bias: bool = True
  normalize_qk: bool | str = False
  rope: Rope | None = None
  logit_softcap: float | None = None

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int or (field.type == int | None and value is not None):
        checks.positive(field.name, value)
    if self.head_dim is None:
      checks.divides('num_heads', self.num_heads, 'd_model', self.d_model)
    checks.divides('num_kv_heads', self.sizes['n'], 'num_heads', self.num_heads)
    if self.normalize_qk not in (False, True, *Norm.KINDS):
      raise ValueError(
        f'normalize_qk={self.normalize_qk!r} must be False, True (Flax, the '
        "same as 'layer'), 'layer' or 'rms'"
      )
    checks.softcap(self.logit_softcap)
    if self.rope is not None:
      if not isinstance(self.rope, Rope):
        raise ValueError(
          f'rope={self.rope!r} must be a Rope, as Rope(), or None'
        )
      checks.even('head_dim', self.sizes['k'])

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """The sizes of the letters h, n, k and v."""
    h = self.num_heads
    k = self.head_dim or self.d_model // h
    return {
      'h': h,
      'n': self.num_kv_heads or h,
      'k': k,
      'v': self.v_head_dim or k,
    }

  @property
  def table(self) -> Table:
    """The variant: its projections and norms by name."""
    key_features = self.key_features or self.d_model
    features = {
      'query': self.d_model,
      'key': key_features,
      'value': self.value_features or key_features,
      'out': self.out_features or self.d_model,
    }
    specs = {
      'query': 'btd,dhk->bhtk',
      'key': 'bsd,dnk->bnsk',
      'value': 'bsd,dnv->bnsv',
      'out': 'bhtv,hvd->btd',
    }
    rows: dict[str, Projection | Norm] = {
      name: Projection(spec, self.sizes | {'d': features[name]}, self.use_bias)
      for name, spec in specs.items()
    }
    if self.normalize_qk:
      kind = 'rms' if self.normalize_qk == 'rms' else 'layer'
      norm = Norm(kind, self.sizes['k'])
      rows |= {'query_ln': norm, 'key_ln': norm}
    return rows


def apply(
  config: GroupedConfig,
  params: Mapping[str, Params],
  inputs_q: Any,
  inputs_k: Any = None,
  inputs_v: Any = None,
  *,
  mask: Any = None,
  bias: Any = None,
  input_positions: Any = None,
  key_positions: Any = None,
  dropout: Dropout | None = None,
  head_gates: Any = None,
  dtype: Any = None,
  return_weights: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attention with its projections: (..., t, d) -> (..., t, d).

  Args:
    config: the shape of the attention.
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
      where inputs_k is None, else 0 .. s-1.
    dropout: drops attention weights; None: no dropout.
    head_gates: (h,) factors of each head's output; None: ones.
    dtype: the dtype to compute in; None: the common dtype of inputs and
      parameters.
    return_weights: whether to return the weights (..., h, t, s) too, before
      dropout.
    implementation: see `multihead_attention`.

  Returns:
    The output (..., t, out_features); with return_weights the pair of output
    and weights.

  Raises:
    ValueError: inputs do not fit each other or the config.
  """
  if inputs_k is None and inputs_v is not None:
    raise ValueError(
      'inputs_v is given without inputs_k; pass the keys too, or the one '
      'source of both as inputs_k'
    )
  self_attention = inputs_k is None
  one_sided = input_positions is not None and key_positions is None
  if one_sided and not self_attention and config.rope is not None:
    raise ValueError(
      'input_positions is given without key_positions, and RoPE turns the '
      'keys of inputs_k too; pass key_positions, or leave inputs_k None for '
      'self-attention'
    )
  x = jnp.asarray(inputs_q)
  y = x if self_attention else jnp.asarray(inputs_k)
  z = y if inputs_v is None else jnp.asarray(inputs_v)
  _check_inputs(config, x, y, z)
  batch = x.shape[:-2]
  h, t, s = config.num_heads, x.shape[-2], y.shape[-2]
  if self_attention and key_positions is None:
    key_positions = input_positions
  queries = batching.positions('input_positions', input_positions, batch, t)
  keys = batching.positions('key_positions', key_positions, batch, s)

  mask, bias = heads.check_pairs(
    batching.fold('mask', mask, batch),
    batching.fold('bias', bias, batch),
    (math.prod(batch), h, t, s),
  )
  gates = None if head_gates is None else _gates(head_gates, h)
  heads.pick(implementation)

  check_params(config.table, params)
  dtype = compute_dtype(dtype, x, y, z, *jax.tree.leaves(params))
  x, y, z = (batching.one_batch(a) for a in (x, y, z))
  o = heads.multihead_attention(
    *_project(config, params, x, y, z, queries, keys, dtype),
    mask=mask,
    bias=bias,
    logit_softcap=config.logit_softcap,
    query_positions=queries,
    key_positions=keys,
    dropout=dropout,
    return_weights=return_weights,
    implementation=implementation,
  )
  o, weights = o if return_weights else (o, None)
  if gates is not None:
    o = o * gates.astype(o.dtype)
  out = config.table['out'].apply(params['out'], o, dtype)
  out = jnp.reshape(out, (*batch, t, out.shape[-1]))
  if weights is None:
    return out
  return out, jnp.reshape(weights, (*batch, h, t, s))


def _project(
  config: GroupedConfig,
  params: Mapping[str, Params],
  x: Shaped[Array, 'b t dq'],
  y: Shaped[Array, 'b s dk'],
  z: Shaped[Array, 'b s dv'],
  queries: Array | None,
  keys: Array | None,
  dtype: Any,
) -> tuple[Float[Array, 'b h t k'], Float[Array, 'b n s k'], Array]:
  """Queries, keys (normalised, then rotated) and values, heads first."""
  rows = config.table
  q, k, v = (
    rows[name].apply(params[name], a, dtype)
    for name, a in (('query', x), ('key', y), ('value', z))
  )
  if config.normalize_qk:
    q = rows['query_ln'].apply(params['query_ln'], q, dtype)
    k = rows['key_ln'].apply(params['key_ln'], k, dtype)
  if config.rope is not None:
    q, k = _rotate(config.rope, q, queries), _rotate(config.rope, k, keys)
  return q, k, v


def _check_inputs(config: GroupedConfig, x: Array, y: Array, z: Array) -> None:
  """Raises a ValueError unless the inputs fit each other and the table."""
  for name, row, a in (
    ('inputs_q', 'query', x),
    ('inputs_k', 'key', y),
    ('inputs_v', 'value', z),
  ):
    width = config.table[row].shapes['kernel'][0]
    if a.ndim < 2 or a.shape[-1] != width:
      raise ValueError(
        f'{name} of shape {a.shape} must be (..., length, {width}): the '
        f'{row} projection was made for {width} features'
      )
  if y.shape[:-1] != z.shape[:-1]:
    raise ValueError(
      f'inputs_k of shape {y.shape} and inputs_v of shape {z.shape} must agree '
      'in batch and length'
    )
  if x.shape[:-2] != y.shape[:-2]:
    raise ValueError(
      f'inputs_q of shape {x.shape} and inputs_k of shape {y.shape} must agree '
      'in their batch dimensions'
    )


def _rotate(rope: Rope, x: Array, positions: Array | None) -> Array:
  """Turns x (b, heads, length, k) by positions (b, length) or 0, 1, 2, ..."""
  if positions is None:
    positions = jnp.arange(x.shape[2])[None, :]
  return rope.rotate(x, positions[:, None, :])


def _gates(head_gates: Any, h: int) -> Array:
  """The gates (h,) as (1, h, 1, 1)."""
  gates = jnp.asarray(head_gates)
  if gates.shape != (h,):
    raise ValueError(
      f'head_gates of shape {gates.shape} must be ({h},): one factor a head'
    )
  return jnp.reshape(gates, (1, h, 1, 1))

"""A whole attention layer: what all variants share.

  q = queries(x), entries = entries(y, z)      the variant's projections
  o_i = attend(q, entries)_i                   its heads
  out = sum_i gate_i o_i W_o,i

A variant is an `AttentionConfig`: its sizes, its table of projections, and how
they make queries, entries and heads. `apply` does the rest. Entries are what
decoding keeps of a token: for MHA its keys and values, for MLA its latent.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import batching, checks, heads
from mha_jax.attention.dropout import check_dropout
from mha_jax.attention.dtypes import compute_dtype, matmul_precision
from mha_jax.attention.notation import Array
from mha_jax.attention.projections import Params, Table, check_params
from mha_jax.attention.rope import Rope

Heads = tuple[Array, Array | None]
"""The heads' outputs (b, h, t, v) and weights (b, h, t, s), None: not asked."""

Parts = tuple[Array, ...]
"""Arrays (b, heads, length, features), heads first."""

Positions = Array | None
"""(b, length) or (1, length) integers; None: 0, 1, 2, ..."""

Core = Callable[..., Heads]
"""`core(q_BHTK, k_BNSK, v_BNSV, scale=, logit_softcap=)`: `multihead_attention`
with mask, bias, positions and dropout filled in."""


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of a table with their parameters: `rows(name, x)` applies one."""

  table: Table
  params: Mapping[str, Params]
  dtype: Any

  def __call__(self, name: str, x: Array) -> Array:
    return self.table[name].apply(self.params[name], x, self.dtype)

  def kernel(self, name: str) -> Array:
    """A projection's kernel, in the dtype to compute in."""
    return jnp.asarray(self.params[name]['kernel']).astype(self.dtype)


class AttentionConfig:
  """The shape of an attention: a frozen dataclass, a subclass a variant."""

  d_model: int
  num_heads: int
  rope: Rope | None = None
  values_from_keys = (
    False  # True: inputs_v has no place, all comes from inputs_k
  )

  @property
  def table(self) -> Table:
    """The variant: its rows by name; 'out' takes the heads."""
    raise NotImplementedError

  @property
  def qk_head_dim(self) -> int:
    """The features that a score is a sum over."""
    raise NotImplementedError

  @property
  def entry_shapes(self) -> tuple[tuple[int, int], ...]:
    """(heads, features) of each array of `entries`."""
    raise NotImplementedError

  @property
  def cache_elements(self) -> int:
    """What decoding keeps of a token, in elements a layer."""
    return sum(math.prod(shape) for shape in self.entry_shapes)

  @property
  def input_widths(self) -> tuple[int, int, int]:
    """The features of inputs_q, inputs_k and inputs_v."""
    return (self.d_model,) * 3

  @property
  def rotary(self) -> Rope | None:
    """The RoPE that is in use."""
    return self.rope

  def queries(self, rows: Rows, x: Array, at: Positions) -> Parts:
    """The parts of the queries (b, h, t, ...) from x (b, t, d)."""
    raise NotImplementedError

  def entries(self, rows: Rows, y: Array, z: Array, at: Positions) -> Parts:
    """What decoding keeps (b, heads, s, ...) of y (b, s, d'), z (b, s, d'')."""
    raise NotImplementedError

  def attend(self, rows: Rows, q: Parts, entries: Parts, core: Core) -> Heads:
    """The outputs of the heads: makes keys and values, calls `core`."""
    raise NotImplementedError

  def rotate(self, x_BHTK: Array, at: Positions) -> Array:
    """Turns x by the RoPE in use, where there is one."""
    rope = self.rotary
    return x_BHTK if rope is None else rope.rotate_heads(x_BHTK, at)

  def check_sizes(self, *may_be_zero: str) -> None:
    """Raises a ValueError unless every integer field is positive."""
    for name, kind in typing.get_type_hints(type(self)).items():
      value = getattr(self, name)
      optional = kind == int | None and value is None
      if kind not in (int, int | None) or optional:
        continue
      if not (name in may_be_zero and value == 0):
        checks.positive(name, value)

  def check_rope(self, name: str, size: int) -> None:
    """Raises a ValueError unless `rope` is a Rope that can turn `size`."""
    if self.rope is None:
      return
    if not isinstance(self.rope, Rope):
      raise ValueError(f'rope={self.rope!r} must be a Rope, as Rope(), or None')
    checks.even(name, size)


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
    return_weights: whether to return the weights (..., h, t, s) too.
    implementation: see `multihead_attention`.

  Returns:
    (..., t, out_features); with return_weights the pair of it and the weights.

  Raises:
    ValueError: inputs, params or options do not fit the config.
  """
  if not isinstance(config, AttentionConfig):
    raise ValueError(
      f'config={config!r} must be an AttentionConfig, as GroupedConfig(...)'
    )
  if inputs_k is None and inputs_v is not None:
    raise ValueError(
      'inputs_v is given without inputs_k; pass the keys too, or the one '
      'source of both as inputs_k'
    )
  if config.values_from_keys and inputs_v is not None:
    raise ValueError(
      'inputs_v is given, but keys and values are made of inputs_k together; '
      'leave inputs_v None'
    )
  self_attention = inputs_k is None
  alone = input_positions is not None and key_positions is None
  if config.rotary is not None and alone and not self_attention:
    raise ValueError(
      'input_positions are given but key_positions are None, and RoPE turns '
      'the keys of inputs_k too; pass key_positions, or leave inputs_k None '
      'for self-attention'
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
  check_dropout(dropout)
  check_params(config.table, params)
  dtype = compute_dtype(dtype, x, y, z, *jax.tree.leaves(params))

  def core(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out = heads.multihead_attention(
      q,
      k,
      v,
      mask=mask,
      bias=bias,
      query_positions=queries,
      key_positions=keys,
      dropout=dropout,
      return_weights=return_weights,
      implementation=implementation,
      **options,
    )
    return out if return_weights else (out, None)

  rows = Rows(config.table, params, dtype)
  x, y, z = (batching.one_batch(a) for a in (x, y, z))
  with matmul_precision(precision):
    q = config.queries(rows, x, queries)
    o, weights = config.attend(rows, q, config.entries(rows, y, z, keys), core)
    if gates is not None:
      o = o * gates.astype(o.dtype)
    out = rows('out', o)
  out = jnp.reshape(out, (*batch, t, out.shape[-1]))
  if weights is None:
    return out
  return out, jnp.reshape(weights, (*batch, h, t, s))


def _check_inputs(
  config: AttentionConfig, x: Array, y: Array, z: Array
) -> None:
  """Raises a ValueError unless the inputs fit each other and the config."""
  for letter, a, width in zip(
    'qkv', (x, y, z), config.input_widths, strict=True
  ):
    if a.ndim < 2 or a.shape[-1] != width:
      raise ValueError(
        f'inputs_{letter} of shape {a.shape} must be (..., length, {width}): '
        f'the projections were made for {width} features'
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


def _gates(head_gates: Any, h: int) -> Array:
  """The gates (h,) as (1, h, 1, 1)."""
  gates = jnp.asarray(head_gates)
  if gates.shape != (h,):
    raise ValueError(
      f'head_gates of shape {gates.shape} must be ({h},): one factor a head'
    )
  return jnp.reshape(gates, (1, h, 1, 1))

"""Every vmap over heads: who shares what.

`attend` knows one head. Three nested `jax.vmap`s, all over leading axes, make
it attention of many, and `in_axes` alone tells which heads share a key and a
value; nothing is repeated in memory.

  vmap over        q  k          v          MHA    GQA        MQA
  batch rows b     0  0          0
  kv heads n       0  0 or None  0 or None  n = h  1 < n < h  n = 1
  group's heads g  0  None       None       g = 1  g = h / n  g = h

Over kv heads an axis of size 1 is shared (`None`), any other is mapped (0): so
is each part of a key that comes in parts. Latent attention, expanded, has keys
and values by head and one rotary key, (0, None) and 0; absorbed, it is MQA.
Masks, biases, positions and dropout keys ride along by the same rule.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks, exact, masks
from mha_jax.attention.arguments import as_bias, as_positions
from mha_jax.attention.dropout import check_dropout
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.notation import Array, Shaped

Attend = Callable[..., Any]
Parts = tuple[Array, ...]
KeysValues = tuple[Parts, Array]
Extras = dict[str, Any]
"""What belongs to a score and not to q, k or v: leaves lead with (b, n, g)."""

IMPLEMENTATIONS: dict[str, Attend] = {'exact': exact.attend}


def multihead_attention(
  q_BHTK: Any,
  k_BNSK: Any,
  v_BNSV: Any,
  *,
  mask: Any = None,
  bias: Any = None,
  scale: float | Array | None = None,
  logit_softcap: float | None = None,
  query_positions: Any = None,
  key_positions: Any = None,
  dropout: Any = None,
  return_weights: bool = False,
  return_residual: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attention of h query heads over n key/value heads, heads first.

  Head i attends to key/value head i // (h / n).

  Args:
    q_BHTK: queries (b, h, t, k), or a tuple of parts (b, h, t, k_i) whose
      scores add.
    k_BNSK: keys (b, n, s, k), n divides h; or a tuple of as many parts, each
      (b, n, s, k_i), or (b, 1, s, k_i) where all heads share it.
    v_BNSV: values (b, n, s, v), or (b, 1, s, v) likewise.
    mask: a `Mask`, or booleans that broadcast to (b, h, t, s); True may attend.
    bias: added to the scores, broadcasts to (b, h, t, s); -inf may not attend.
    scale: multiplies q k^T; None: 1 / sqrt(k), with k = sum k_i.
    logit_softcap: c > 0 bounds the scaled scores as c tanh(x / c), before bias
      and mask; None: no bound.
    query_positions: (b, t) or (t,) integers for masks; None: 0 .. t-1.
    key_positions: (b, s) or (s,) integers for masks; None: 0 .. s-1.
    dropout: a `Dropout`; every row and head draws its own bits from its key.
    return_weights: whether to return the weights (b, h, t, s) too, before
      dropout.
    return_residual: whether to return the log of the softmax's denominator
      (b, h, t) too, see `attend`.
    implementation: 'auto' or 'exact'.

  Returns:
    The output (b, h, t, v) in the inputs' common dtype; with return_weights or
    return_residual a tuple of it and what was asked for, in this order. A query
    that may attend to nothing gets zeros.

  Raises:
    ValueError: shapes do not fit, the mask is not boolean, or an option is
      unknown.
  """
  qs, ks, v = (
    exact.as_parts(q_BHTK),
    exact.as_parts(k_BNSK),
    jnp.asarray(v_BNSV),
  )
  b, h, t, n, s = _check_shapes(qs, ks, v)
  attend = pick(implementation)
  checks.softcap(logit_softcap)
  check_dropout(dropout)
  exact.check_scale(scale)
  mask, bias = check_pairs(mask, bias, (b, h, t, s))
  if bias is not None:
    bias = bias.astype(wide_dtype(compute_dtype(None, *qs, *ks, v)))
  extras = {
    'mask': mask,
    'bias': bias,
    'query_positions': _per_row('query_positions', query_positions, b, t),
    'key_positions': _per_row('key_positions', key_positions, b, s),
    'dropout': None if dropout is None else dropout.per_head(b, h),
  }
  extras = jax.tree.map(lambda leaf: _split_heads(leaf, n, h // n), extras)

  def one_head(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return attend(
      qs,
      *kv,
      scale=scale,
      logit_softcap=logit_softcap,
      return_weights=return_weights,
      return_residual=return_residual,
      **extras,
    )

  per_group = _share_kv(one_head)
  per_row = _map_heads(per_group)
  per_batch = _map_rows(per_row)
  grouped_qs = tuple(jnp.reshape(q, (b, n, h // n, *q.shape[2:])) for q in qs)
  out = per_batch(grouped_qs, (ks, v), extras)
  return jax.tree.map(lambda x: jnp.reshape(x, (b, h, *x.shape[3:])), out)


def check_pairs(
  mask: Any, bias: Any, shape: tuple[int, int, int, int]
) -> tuple[masks.Mask | None, Array | None]:
  """Mask and bias as a Mask and a 4-D array that fit scores (b, h, t, s).

  Raises:
    ValueError: they do not broadcast, or have the wrong dtype.
  """
  mask = masks.as_mask(mask)
  if mask is not None:
    mask.check(shape)
  return mask, as_bias(bias, shape, 'bhts')


def _map_rows(function: Callable[..., Any]) -> Callable[..., Any]:
  """Maps over batch rows: each has its own q, k and v."""

  def mapped(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    extras, axes = _peel(extras)
    return jax.vmap(function, in_axes=(0, 0, axes))(qs, kv, extras)

  return mapped


def _map_heads(function: Callable[..., Any]) -> Callable[..., Any]:
  """Maps over key/value heads; a part with one head serves them all."""

  def mapped(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    kv, kv_axes = _peel(kv)
    extras, axes = _peel(extras)
    return jax.vmap(function, in_axes=(0, kv_axes, axes))(qs, kv, extras)

  return mapped


def _share_kv(one_head: Callable[..., Any]) -> Callable[..., Any]:
  """Maps over the query heads of a group, which share one k and one v.

  Where the heads' masks differ, a key is silenced if no head of the group may
  attend to it, so that k and v stay shared.
  """

  def mapped(
    qs: tuple[Shaped[Array, 'g t _'], ...],
    kv: tuple[tuple[Shaped[Array, 's _'], ...], Shaped[Array, 's v']],
    extras: Extras,
  ) -> Any:
    extras, axes = _peel(extras)
    (group, t), s = qs[0].shape[:2], kv[1].shape[0]
    pair_names = ('mask', 'bias', 'query_positions', 'key_positions')
    pair_axes = {name: axes[name] for name in pair_names}
    extras['used'] = axes['used'] = None
    if jax.tree.leaves(pair_axes):

      def allowed(pair: Extras) -> Any:
        return exact.allowed_pairs(
          pair['mask'],
          pair['bias'],
          masks.Axis(t, pair['query_positions']),
          masks.Axis(s, pair['key_positions']),
        )

      pairs = {name: extras[name] for name in pair_names}
      allowed_GTS = jax.vmap(allowed, in_axes=(pair_axes,), axis_size=group)(
        pairs
      )
      extras['used'] = jnp.any(allowed_GTS, axis=(0, 1))
    return jax.vmap(one_head, in_axes=(0, None, axes))(qs, kv, extras)

  return mapped


def _peel(tree: Any) -> tuple[Any, Any]:
  """Takes off the leading axis of every leaf, where it is of size 1.

  Returns the leaves and their in_axes: None for a shared axis, else 0.
  """
  peeled = jax.tree.map(lambda x: x[0] if x.shape[0] == 1 else x, tree)
  axes = jax.tree.map(lambda x: None if x.shape[0] == 1 else 0, tree)
  return peeled, axes


def _split_heads(leaf: Array, n: int, g: int) -> Array:
  """(b, h, ...) -> (b, n, g, ...), or (b, 1, ...) -> (b, 1, 1, ...)."""
  heads = (n, g) if leaf.shape[1] == n * g else (1, 1)
  return jnp.reshape(leaf, (leaf.shape[0], *heads, *leaf.shape[2:]))


def pick(implementation: str) -> Attend:
  """The one-head function to map."""
  if implementation == 'auto':
    return exact.attend
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'implementation={implementation!r} is unknown; use one of '
      f'{["auto", *IMPLEMENTATIONS]}'
    )
  return IMPLEMENTATIONS[implementation]


def _check_shapes(
  qs: Parts, ks: Parts, v: Array
) -> tuple[int, int, int, int, int]:
  """The sizes b, h, t, n, s; a ValueError where the shapes do not fit."""
  for name, parts, letters in (
    ('q', qs, '(b, h, t, k)'),
    ('k', ks, '(b, n, s, k)'),
    ('v', (v,), '(b, n, s, v)'),
  ):
    for x in parts:
      if x.ndim != 4:
        raise ValueError(f'{name} of shape {x.shape} must be {letters}')
  exact.check_widths(qs, ks)
  b, h, t = qs[0].shape[:3]
  if any(q.shape[:3] != (b, h, t) for q in qs):
    raise ValueError(
      f'the parts of q have shapes {[q.shape for q in qs]}; they must agree '
      'in (b, h, t)'
    )
  n, s = max(x.shape[1] for x in (*ks, v)), v.shape[2]
  for k in ks:
    heads = {k.shape[1], v.shape[1]}
    if not heads <= {1, n} or (k.shape[0], v.shape[0], k.shape[2]) != (b, b, s):
      raise ValueError(
        f'k of shape {k.shape} and v of shape {v.shape} must be (b, n, s, ...) '
        f"with q's b={b}, or n = 1 where all share; check batch, heads and "
        'length'
      )
  if n < 1 or h % n:
    raise ValueError(
      f'k and v have {n} heads, which must divide the {h} heads of q; heads '
      'come second: (b, n, s, k)'
    )
  return b, h, t, n, s


def _per_row(name: str, positions: Any, b: int, size: int) -> Array | None:
  """Positions as (b, 1, length) or (1, 1, length): shared by the heads."""
  array = as_positions(name, positions, (b, size), (1, size), (size,))
  if array is None:
    return None
  return jnp.reshape(array, (math.prod(array.shape[:-1]), 1, size))

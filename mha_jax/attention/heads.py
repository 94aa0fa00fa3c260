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

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import blockwise, checks, exact, masks
from mha_jax.attention.arguments import as_bias, as_positions
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.choice import choose
from mha_jax.attention.dropout import check_dropout
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.notation import Array, Shaped

Parts = tuple[Array, ...]
KeysValues = tuple[Parts, Array]
Extras = dict[str, Any]
"""What belongs to a score and not to q, k or v: leaves lead with (b, n, g)."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
  'exact': exact.attend,
  'blockwise': blockwise.attend,
}

OF_MASKS = ('mask', 'query_positions', 'key_positions')


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
    implementation: 'exact', 'blockwise', or 'auto', see `choose`.

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
  chosen = choose(implementation, t, s, return_weights)
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
  shared: dict[str, Any] = {
    'scale': scale,
    'logit_softcap': logit_softcap,
    'return_residual': return_residual,
  }
  one_by_one = False
  if chosen == 'exact':
    shared['return_weights'] = return_weights
  else:
    one_by_one = blockwise.fits_better_alone(t)
    shared['sizes'] = sizes = blockwise.block_sizes(t, s, h // n)
    blocks = Blocks(t, sizes.queries), Blocks(s, sizes.keys)
    extras['pairs'] = _block_pairs(extras, *blocks, by_head=one_by_one)

  def one_head(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return IMPLEMENTATIONS[chosen](qs, *kv, **shared, **extras)

  def one_row(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return _each(per_group, qs, kv, extras, one_by_one=one_by_one)

  per_group = _map_group(one_head)
  if chosen == 'exact':
    per_group = _silence_together(per_group)
  grouped_qs = tuple(jnp.reshape(q, (b, n, h // n, *q.shape[2:])) for q in qs)
  out = _each(one_row, grouped_qs, (ks, v), extras, one_by_one=one_by_one)
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


def _map_group(one_head: Callable[..., Any]) -> Callable[..., Any]:
  """Maps over the query heads of a group, which share one k and one v."""

  def mapped(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return _each(one_head, qs, jax.tree.map(lambda x: x[None], kv), extras)

  return mapped


def _silence_together(per_group: Callable[..., Any]) -> Callable[..., Any]:
  """Silences the keys that no head of a group may attend to.

  Where the heads' masks differ, each would silence others, and k and v would no
  longer be shared.
  """

  def silenced(
    qs: tuple[Shaped[Array, 'g t _'], ...],
    kv: tuple[tuple[Shaped[Array, 's _'], ...], Shaped[Array, 's v']],
    extras: Extras,
  ) -> Any:
    pairs = {name: extras[name] for name in (*OF_MASKS, 'bias')}
    t, s = qs[0].shape[1], kv[1].shape[0]

    def allowed(pair: Extras) -> Any:
      return exact.allowed_pairs(
        pair['mask'],
        pair['bias'],
        Axis(t, pair['query_positions']),
        Axis(s, pair['key_positions']),
      )

    used = None
    if any(x.shape[0] > 1 for x in jax.tree.leaves(pairs)):
      used = jnp.any(_each(allowed, pairs), axis=(0, 1))[None]
    return per_group(qs, kv, extras | {'used': used})

  return silenced


def _block_pairs(
  extras: Extras, queries: Blocks, keys: Blocks, by_head: bool
) -> blockwise.BlockPairs:
  """The pairs of blocks to compute; leaves lead with (b, n, 1) or (1, 1, 1).

  Args:
    extras: what masks go by.
    queries: the blocks of queries, keys: those of keys.
    by_head: whether each batch row and key/value head has a list of its own. A
      loop under `jax.vmap` has to have one for all.
  """

  def touches(extras: Extras) -> Array:
    return blockwise.touches(
      extras['mask'],
      dataclasses.replace(queries, positions=extras['query_positions']),
      dataclasses.replace(keys, positions=extras['key_positions']),
    )

  def per_head(extras: Extras) -> Array:
    return jnp.any(_each(touches, extras), axis=0, keepdims=True)

  def per_row(extras: Extras) -> Array:
    return _each(per_head, extras)

  touching = _each(per_row, {name: extras[name] for name in OF_MASKS})
  if not by_head:
    touching = jnp.any(touching, axis=(0, 1), keepdims=True)
  return jax.vmap(jax.vmap(jax.vmap(blockwise.as_pairs)))(touching)


def _each(
  function: Callable[..., Any], *args: Any, one_by_one: bool = False
) -> Any:
  """Maps over the leading axis of every leaf; one of size 1 is shared.

  Args:
    function: takes args without their leading axis.
    args: what to map over.
    one_by_one: a loop in place of `jax.vmap`, so that what is computed at a
      time fits a processor's cache.
  """
  leaves, tree = jax.tree.flatten(args)
  in_axes = [None if x.shape[0] == 1 else 0 for x in leaves]
  leaves = [x[0] if x.shape[0] == 1 else x for x in leaves]

  def of_leaves(*leaves: Array) -> Any:
    return function(*jax.tree.unflatten(tree, leaves))

  if 0 not in in_axes:
    return jax.tree.map(lambda x: x[None], of_leaves(*leaves))
  mapping = _loop if one_by_one else jax.vmap
  return mapping(of_leaves, in_axes=in_axes)(*leaves)


def _loop(
  function: Callable[..., Any], in_axes: list[int | None]
) -> Callable[..., Any]:
  """`jax.vmap` of arrays, one after the other."""

  def mapped(*arrays: Array) -> Any:
    pairs = list(zip(arrays, in_axes, strict=True))

    def step(parts: list[Array]) -> Any:
      rest = iter(parts)
      return function(*(x if axis is None else next(rest) for x, axis in pairs))

    return jax.lax.map(step, [x for x, axis in pairs if axis == 0])

  return mapped


def _split_heads(leaf: Array, n: int, g: int) -> Array:
  """(b, h, ...) -> (b, n, g, ...), or (b, 1, ...) -> (b, 1, 1, ...)."""
  heads = (n, g) if leaf.shape[1] == n * g else (1, 1)
  return jnp.reshape(leaf, (leaf.shape[0], *heads, *leaf.shape[2:]))


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

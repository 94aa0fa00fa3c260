"""Every vmap over heads: who shares what.

`attend` knows one head. Three nested maps over leading axes make it attention
of many: `jax.vmap`, or on a CPU `jax.lax.map` for long calls. `in_axes` alone
tells which heads share a key and a value; nothing is repeated in memory.

  map over         q  k          v          MHA    GQA        MQA
  batch rows b     0  0          0
  kv heads n       0  0 or None  0 or None  n = h  1 < n < h  n = 1
  group's heads g  0  None       None       g = 1  g = h / n  g = h

Over kv heads an axis of size 1 is shared (`None`), any other is mapped (0): so
is each part of a key that comes in parts. Latent attention, expanded, has keys
and values by head and one rotary key, (0, None) and 0; absorbed, it is MQA.
Masks, biases, positions and dropout keys ride along by the same rule.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from mha_jax.attention import implementations, shapes
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.constants import opaque
from mha_jax.attention.dtypes import compute_dtype
from mha_jax.attention.masks import Mask
from mha_jax.attention.notation import Array, ArrayLike, Parts, Shaped
from mha_jax.attention.one_head import block_pairs, blockwise, exact
from mha_jax.attention.one_head.block_pairs import BlockPairs, BlockSizes
from mha_jax.attention.one_head.dropout import Dropout
from mha_jax.attention.one_head.exact import Attended, as_parts
from mha_jax.attention.scores import (
  AskedOptions,
  Scores,
  ScoresOptions,
  checked_scores,
)
from mha_jax.attention.sharded_rows import rows_over_devices

KeysValues = tuple[Parts, Array]
Mapped = Callable[..., Any]


class HeadsOptions(ScoresOptions, total=False):
  """The options of `multihead_attention` that keep its result's type."""

  implementation: str


@overload
def multihead_attention(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  return_weights: Literal[False] = False,
  return_residual: Literal[False] = False,
  **options: Unpack[HeadsOptions],
) -> Array: ...
@overload
def multihead_attention(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  return_weights: Literal[True],
  return_residual: bool = False,
  **options: Unpack[HeadsOptions],
) -> tuple[Array, ...]: ...
@overload
def multihead_attention(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  return_weights: bool = False,
  return_residual: Literal[True],
  **options: Unpack[HeadsOptions],
) -> tuple[Array, ...]: ...
@overload
def multihead_attention(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  return_weights: bool = False,
  return_residual: bool = False,
  **options: Unpack[HeadsOptions],
) -> Any: ...


def multihead_attention(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  mask: Mask | ArrayLike | None = None,
  bias: ArrayLike | None = None,
  scale: float | Array | None = None,
  logit_softcap: float | None = None,
  query_positions: ArrayLike | None = None,
  key_positions: ArrayLike | None = None,
  dropout: Dropout | None = None,
  return_weights: bool = False,
  return_residual: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attends with h query heads to n key/value heads, heads first.

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
    implementation: 'auto', 'exact', 'blockwise', 'cudnn' or 'splash', see
      `implementations.choose`.

  Returns:
    The output (b, h, t, v) in the inputs' common dtype; with return_weights or
    return_residual a tuple of it and what was asked for, in this order. A query
    that may attend to nothing gets zeros.

  Raises:
    ValueError: shapes do not fit, the mask is not boolean, or an option is
      unknown or cannot serve.
    TypeError: forward-mode differentiation of blocks, see `blockwise.attend`.
  """
  qs, ks, v, scores = _checked(
    q_BHTK,
    k_BNSK,
    v_BNSV,
    mask=mask,
    bias=bias,
    scale=scale,
    logit_softcap=logit_softcap,
    query_positions=query_positions,
    key_positions=key_positions,
    dropout=dropout,
    return_weights=return_weights,
    return_residual=return_residual,
  )
  with forward_mode_refused():
    return attended(qs, ks, v, scores, implementation).as_asked()


def implementation_of(
  q_BHTK: ArrayLike | tuple[ArrayLike, ...],
  k_BNSK: ArrayLike | tuple[ArrayLike, ...],
  v_BNSV: ArrayLike,
  *,
  implementation: str = 'auto',
  **options: Unpack[AskedOptions],
) -> str:
  """Names the implementation that `multihead_attention` takes for a call.

  >>> x = jnp.zeros((1, 8, 4096, 64))
  >>> implementation_of(x, x, x, mask=masks.causal())
  'blockwise'

  Args:
    q_BHTK: queries, k_BNSK: keys, v_BNSV: values.
    implementation: the choice, as in `multihead_attention`.
    **options: further arguments of `multihead_attention`.
  """
  qs, ks, v, scores = _checked(q_BHTK, k_BNSK, v_BNSV, **options)
  traits = implementations.traits_of(qs, ks, v, scores)
  return implementations.choose(implementation, traits)


def _checked(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  **options: Unpack[AskedOptions],
) -> tuple[Parts, Parts, Array, Scores]:
  """Makes arrays and `Scores` of the arguments; a ValueError if they misfit."""
  qs, ks, v = as_parts(q), as_parts(k), jnp.asarray(v)
  b, h, t, _, s = shapes.sizes_of(qs, ks, v)
  dtype = compute_dtype(None, *qs, *ks, v)
  return qs, ks, v, checked_scores((b, h, t, s), dtype, **options)


def attended(
  qs: Parts, ks: Parts, v: Array, scores: Scores, implementation: str
) -> Attended:
  """Computes `multihead_attention` of checked arguments.

  Args:
    qs, ks: the parts (b, h, t, k_i) of the queries, (b, n, s, k_i) of the keys.
    v: the values (b, n, s, v).
    scores: all that belongs to the scores.
    implementation: the choice, see `implementations.choose`.
  """
  traits = implementations.traits_of(qs, ks, v, scores)
  chosen = implementations.choose(implementation, traits)
  if chosen in implementations.KERNELS:
    return Attended(implementations.by_kernel(chosen, qs, ks, v, scores))
  return _by_head(qs, ks, v, scores, chosen)


@contextlib.contextmanager
def forward_mode_refused() -> Iterator[None]:
  """Within the block, a derivative that blocks do not have says what has it."""
  try:
    yield
  except TypeError as error:
    if 'custom_vjp' not in str(error):
      raise
    raise TypeError(
      'blockwise attention has no forward-mode derivative (jax.jvp); use '
      "implementation='exact'"
    ) from error


@functools.partial(jax.jit, static_argnames='implementation')
def _by_head(
  qs: Parts, ks: Parts, v: Array, scores: Scores, implementation: str
) -> Attended:
  """Maps a function of one head over all heads.

  Compiled once for equal shapes and options, also where the caller does not
  jit.
  """
  scores = jax.tree.map(opaque, scores)
  b, h = qs[0].shape[:2]
  if scores.dropout is not None:
    scores = dataclasses.replace(scores, dropout=scores.dropout.per_head(b, h))
  of_rows = functools.partial(_of_rows, implementation=implementation)
  return rows_over_devices(of_rows, (qs, ks, v, scores))


def _of_rows(
  call: tuple[Parts, Parts, Array, Scores], implementation: str
) -> Attended:
  """Maps a function of one head over the batch rows that one device has."""
  qs, ks, v, scores = call
  b, h, t = qs[0].shape[:3]
  n, s = max(x.shape[1] for x in (*ks, v)), v.shape[2]
  g = h // n
  scores = _by_group(scores, qs, n, g)
  qs = tuple(jnp.reshape(q, (b, n, g, *q.shape[2:])) for q in qs)
  if implementation == 'exact':
    out = over_rows(over_kv_heads(_exact_group))(qs, (ks, v), scores)
  else:
    in_turn = block_pairs.fits_better_alone(t, v)
    sizes = block_pairs.block_sizes(t, s, g, b * n)
    pairs = _block_pairs(scores, t, s, sizes, of_each_head=in_turn)
    of_group = functools.partial(_blockwise_group, sizes=sizes)
    mapped = over_rows(over_kv_heads(of_group, in_turn), in_turn)
    out = mapped(qs, (ks, v), scores, pairs)
  return jax.tree.map(lambda x: jnp.reshape(x, (b, h, *x.shape[3:])), out)


def over_rows(function: Mapped, in_turn: bool = False) -> Mapped:
  """Maps over batch rows; what has one row is shared by all."""
  return functools.partial(_over_leading_axis, function, in_turn)


def over_kv_heads(function: Mapped, in_turn: bool = False) -> Mapped:
  """Maps over key/value heads; what has one head is shared by all."""
  return functools.partial(_over_leading_axis, function, in_turn)


def over_group(of_head: Mapped) -> Mapped:
  """Maps over the query heads of a group, which share one k and one v."""

  def of_one(qs: Parts, kv: KeysValues, *by_head: Any) -> Attended:
    return of_head(qs, *kv, *by_head)

  def mapped(qs: Parts, kv: KeysValues, *by_head: Any) -> Attended:
    shared = jax.tree.map(lambda x: x[None], kv)
    return _over_leading_axis(of_one, False, qs, shared, *by_head)

  return mapped


def _over_leading_axis(function: Mapped, in_turn: bool, *args: Any) -> Any:
  """Maps over the leading axis of every leaf; one of size 1 is shared.

  Args:
    function: takes args without their leading axis.
    in_turn: a loop in place of `jax.vmap`, so that what is computed at a time
      fits a processor's cache.
    args: pytrees to map over.
  """
  leaves, tree = jax.tree.flatten(args)
  in_axes = [None if x.shape[0] == 1 else 0 for x in leaves]
  leaves = [x[0] if x.shape[0] == 1 else x for x in leaves]

  def of_leaves(*leaves: Array) -> Any:
    return function(*jax.tree.unflatten(tree, leaves))

  if 0 not in in_axes:
    return jax.tree.map(lambda x: x[None], of_leaves(*leaves))
  mapping = _loop if in_turn else jax.vmap
  return mapping(of_leaves, in_axes=in_axes)(*leaves)


def _loop(function: Mapped, in_axes: list[int | None]) -> Mapped:
  """Does as `jax.vmap` of arrays, one after the other."""

  def mapped(*arrays: Array) -> Any:
    pairs = list(zip(arrays, in_axes, strict=True))

    def step(parts: list[Array]) -> Any:
      rest = iter(parts)
      return function(*(x if axis is None else next(rest) for x, axis in pairs))

    return jax.lax.map(step, [x for x, axis in pairs if axis == 0])

  return mapped


def _exact_group(
  qs: tuple[Shaped[Array, 'g t _'], ...],
  kv: tuple[tuple[Shaped[Array, 's _'], ...], Shaped[Array, 's v']],
  scores: Scores,
) -> Attended:
  """Attends with the heads of a group, all scores at once.

  The keys that no head of the group may attend to are silenced together: where
  the heads' masks differ, each would silence others, and k and v would no
  longer be shared.
  """
  t, s = qs[0].shape[1], kv[1].shape[0]

  def allowed(scores: Scores) -> Any:
    queries = Axis(t, scores.query_positions)
    keys = Axis(s, scores.key_positions)
    return exact.allowed_pairs(scores.mask, scores.bias, queries, keys)

  of_pairs, used = scores.of_pairs(), None
  if any(x.shape[0] > 1 for x in jax.tree.leaves(of_pairs)):
    by_head = _over_leading_axis(allowed, False, of_pairs)
    used = jnp.any(by_head, axis=(0, 1))[None]
  return over_group(exact.of_head)(qs, kv, scores, used)


def _blockwise_group(
  qs: Parts,
  kv: KeysValues,
  scores: Scores,
  pairs: BlockPairs,
  sizes: BlockSizes,
) -> Attended:
  """Attends with the heads of a group by blocks."""
  return over_group(functools.partial(blockwise.of_head, sizes=sizes))(
    qs, kv, scores, pairs
  )


def _block_pairs(
  scores: Scores, t: int, s: int, sizes: BlockSizes, of_each_head: bool
) -> BlockPairs:
  """Lists the pairs of blocks to compute; leaves lead with (b, n, 1) or ones.

  Args:
    scores: leaves lead with (b, n, g).
    t, s: queries and keys.
    sizes: of the blocks.
    of_each_head: whether each batch row and key/value head has a list of its
      own. A loop under `jax.vmap` has to have one for all.
  """

  def of_head(scores: Scores) -> Array:
    queries = Blocks(t, sizes.queries, scores.query_positions)
    keys = Blocks(s, sizes.keys, scores.key_positions)
    return block_pairs.touches(scores.mask, queries, keys)

  def of_group(scores: Scores) -> Array:
    touching = _over_leading_axis(of_head, False, scores)
    return jnp.any(touching, axis=0, keepdims=True)

  of_pairs = dataclasses.replace(scores.of_pairs(), bias=None)
  touching = over_rows(over_kv_heads(of_group))(of_pairs)
  if not of_each_head:
    touching = jnp.any(touching, axis=(0, 1), keepdims=True)
  return jax.vmap(jax.vmap(jax.vmap(block_pairs.as_pairs)))(touching)


def _by_group(scores: Scores, qs: Parts, n: int, g: int) -> Scores:
  """The leaves (b, h, ...) as (b, n, g, ...), those of one head (b, 1, 1, ...).

  The scale, which has no such axes, gets three of size 1.
  """

  def split(leaf: Array) -> Array:
    heads = (n, g) if leaf.shape[1] == n * g else (1, 1)
    return jnp.reshape(leaf, (leaf.shape[0], *heads, *leaf.shape[2:]))

  scale = jnp.asarray(scores.scale_for(qs))
  leaves = jax.tree.map(split, dataclasses.replace(scores, scale=None))
  return dataclasses.replace(leaves, scale=jnp.reshape(scale, (1, 1, 1)))

"""Attention of one head by blocks: memory grows with t, not with t s.

The same function as `exact.attend`, with an online softmax over pairs of blocks
of queries and keys. Of a block of queries it keeps, over the keys seen so far,

  m = max_j s_j    l = sum_j exp(s_j - m)    o = sum_j exp(s_j - m) v_j

and rescales l and o by exp(m - m') whenever the maximum grows. The gradient
computes the scores again, block by block, from the log-sum-exp m + log l:

  p = exp(s - lse)    dv = p^T do    ds = p (do v^T - sum(do o))
  dq = ds k           dk = ds^T q

Pairs that a mask rules out are not computed: block_pairs.py lists the others.
Second derivatives are forward over reverse only, as Hessian-vector products.

Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2.
"""

import dataclasses
import functools
import operator
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.notation import Array, ArrayLike, Bool, Float, Parts
from mha_jax.attention.one_head import block_pairs, exact
from mha_jax.attention.one_head.block_pairs import BlockPairs, BlockSizes
from mha_jax.attention.pytrees import pytree
from mha_jax.attention.scores import AskedOptions, Scores
from mha_jax.attention.sharded_rows import in_shard_map


@dataclasses.dataclass(frozen=True)
class _Options:
  """The static part of a call."""

  sizes: BlockSizes
  dtype: Any
  precision: Any  # of products, as it was set for the forward pass


@pytree
class _Inputs:
  """The arrays that have a gradient."""

  qs: Any  # (t, k_i) each
  ks: Any  # (s, k_i) each
  v: Any  # (s, v)
  bias: Any  # (#t, #s) or None
  scale: Any  # ()


@pytree
class _Terms:
  """The arrays that have none."""

  scores: Scores  # without bias and scale
  pairs: BlockPairs


@dataclasses.dataclass(frozen=True)
class _Block:
  """A pair of blocks: its parts of the inputs, and its scores."""

  queries: Axis
  keys: Axis
  qs: Parts  # (i, k_i)
  ks: Parts  # (j, k_i)
  v: Array  # (j, v)
  products: Array  # (i, j), sums of q k^T
  capped: Array  # (i, j), scaled and capped, before the bias
  scores: Array  # (i, j), -inf where a query may not attend


def attend(
  q: ArrayLike | tuple[ArrayLike, ...],
  k: ArrayLike | tuple[ArrayLike, ...],
  v: ArrayLike,
  *,
  sizes: BlockSizes | None = None,
  **options: Unpack[AskedOptions],
) -> Any:
  """Attends with one head by blocks: q (t, k), k (s, k), v (s, v) -> (t, v).

  Args:
    q: queries, k: keys, v: values: as in `exact.attend`.
    sizes: of the blocks; None: as `block_pairs.block_sizes` has them.
    **options: those of `exact.attend`, but return_weights.

  Returns:
    As `exact.attend`.

  Raises:
    ValueError: an argument does not fit, or reverse-mode differentiation of the
      gradient.
    TypeError: forward-mode differentiation (`jax.jvp`).
  """
  qs, ks, v_SV, scores = exact.checked_head(q, k, v, **options)
  if scores.return_weights:
    raise ValueError(
      'return_weights=True: blocks never have the weights as a whole; use '
      'exact.attend'
    )
  if 0 in (qs[0].shape[0], v_SV.shape[0]):  # there are no blocks
    return exact.of_head(qs, ks, v_SV, scores).as_asked()
  return of_head(qs, ks, v_SV, scores, sizes=sizes).as_asked()


def of_head(
  qs: Parts,
  ks: Parts,
  v: Array,
  scores: Scores,
  pairs: BlockPairs | None = None,
  sizes: BlockSizes | None = None,
) -> exact.Attended:
  """Attends with one head by blocks, all arguments checked.

  Args:
    qs, ks: the parts (t, k_i) of the queries and (s, k_i) of the keys.
    v: the values (s, v).
    scores: all that belongs to the scores; it never has the weights.
    pairs: the pairs of blocks to compute; None: those that the mask touches.
    sizes: of the blocks; None: as `block_pairs.block_sizes` has them.
  """
  dtype = compute_dtype(None, *qs, *ks, v)
  t, s = qs[0].shape[0], v.shape[0]
  sizes = block_pairs.block_sizes(t, s) if sizes is None else sizes
  if pairs is None:
    queries = Blocks(t, sizes.queries, scores.query_positions)
    keys = Blocks(s, sizes.keys, scores.key_positions)
    touching = block_pairs.touches(scores.mask, queries, keys)
    pairs = block_pairs.as_pairs(touching)
  qs, ks, v = jax.tree.map(lambda x: x.astype(dtype), (qs, ks, v))
  precision = jax.config.jax_default_matmul_precision  # type: ignore
  scale = jnp.asarray(scores.scale_for(qs), wide_dtype(dtype))
  inputs = _Inputs(qs, ks, v, scores.bias, scale)
  scores = dataclasses.replace(scores, bias=None, scale=None)
  terms = _Terms(scores, pairs)
  inputs = _varying_alike(inputs, terms)
  out, residual = _attend(_Options(sizes, dtype, precision), inputs, terms)
  asked = scores.return_residual
  return exact.Attended(out, residual=residual if asked else None)


def _forward(
  options: _Options, inputs: _Inputs, terms: _Terms
) -> tuple[Array, Array]:
  """Algorithm 1: the output (t, v) and the log-sum-exp (t,)."""
  wide = wide_dtype(options.dtype)
  t, width = inputs.qs[0].shape[0], inputs.v.shape[1]

  def add(pair: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
    out, top, total = carry
    block = _block(options, inputs, terms, pair)
    queries = block.queries
    before = queries.cut(top)
    highest = jnp.maximum(before, jnp.max(block.scores, axis=1))
    highest = jax.lax.stop_gradient(highest)
    shift = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(block.scores - shift[:, None])
    decay = jnp.exp(before - shift)
    mixed = jnp.einsum(
      'ts,sv->tv',
      _drop(terms, block, weights).astype(options.dtype),
      block.v,
      preferred_element_type=wide,
    )
    return (
      queries.put(out, queries.cut(out) * decay[:, None] + mixed),
      queries.put(top, highest),
      queries.put(total, queries.cut(total) * decay + jnp.sum(weights, axis=1)),
    )

  zero = jnp.zeros_like(inputs.scale)
  start = (
    jnp.full((t, width), zero),
    jnp.full(t, zero - jnp.inf),
    jnp.full(t, zero),
  )
  out, top, total = jax.lax.fori_loop(0, terms.pairs.count, add, start)
  out = out / jnp.where(total == 0, 1, total)[:, None]
  return out.astype(options.dtype), top + jnp.log(total)


def _varying_alike(inputs: _Inputs, terms: _Terms) -> _Inputs:
  """The inputs, all varying over the mesh axes that any array varies over.

  Within `jax.shard_map` a loop's sums, and a gradient, must vary as what is
  added to them; what the devices share then sums its gradient over them.
  """
  if not in_shard_map(inputs.v):
    return inputs
  scores = dataclasses.replace(
    terms.scores, dropout=None
  )  # keys are no numbers
  leaves = jax.tree.leaves((inputs, scores, terms.pairs))
  zeros = [jnp.zeros_like(x, inputs.scale.dtype, shape=()) for x in leaves]
  zero = functools.reduce(operator.add, zeros)
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), inputs)


def _keep(
  options: _Options, inputs: _Inputs, terms: _Terms
) -> tuple[tuple[Array, Array], Any]:
  """The outputs, and what the gradient needs of them, all finite."""
  out, residual = _forward(options, inputs, terms)
  seeing = residual > -jnp.inf  # queries that may attend to something
  lse = jnp.where(seeing, residual, 0)
  return (out, residual), (inputs, terms, out, lse, seeing)


def _backward(
  options: _Options, kept: Any, cotangents: tuple[Array, Array]
) -> tuple[_Inputs, None]:
  """The gradients of the inputs, products as precise as the forward ones."""
  with jax.default_matmul_precision(options.precision):
    return _gradients(options, kept, cotangents), None


def _gradients(
  options: _Options, kept: Any, cotangents: tuple[Array, Array]
) -> _Inputs:
  """Algorithm 2, over the listed pairs: arrays of the inputs' shapes."""
  inputs, terms, out, lse, seeing = kept
  d_out, d_residual = cotangents
  dtype, wide = options.dtype, wide_dtype(options.dtype)
  inputs = dataclasses.replace(
    inputs, qs=tuple(exact.silence(q, seeing) for q in inputs.qs)
  )
  delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=1)
  delta = delta - jnp.where(seeing, d_residual, 0)

  product = functools.partial(jnp.einsum, preferred_element_type=wide)

  def add(pair: Array, grads: _Inputs) -> _Inputs:
    block = _block(options, inputs, terms, pair)
    queries, keys = block.queries, block.keys
    weights = jnp.exp(block.scores - queries.cut(lse)[:, None])
    d_o = queries.cut(d_out)
    kept = _drop(terms, block, weights).astype(dtype)
    d_v = product('ts,tv->sv', kept, d_o)
    d_weights = _drop(terms, block, product('tv,sv->ts', d_o, block.v))
    d_scores = weights * (d_weights - queries.cut(delta)[:, None])
    d_bias = grads.bias
    if inputs.bias is not None:
      d_bias = _add_to_bias(d_bias, d_scores, queries, keys)
    d_scaled = d_scores
    cap = terms.scores.logit_softcap
    if cap is not None:
      d_scaled = d_scores * (1 - (block.capped / cap) ** 2)
    d_raw = (d_scaled * inputs.scale).astype(dtype)
    d_qs = tuple(
      queries.cut(x) + product('ts,sk->tk', d_raw, k)
      for x, k in zip(grads.qs, block.ks, strict=True)
    )
    d_ks = tuple(
      keys.cut(x) + product('ts,tk->sk', d_raw, q)
      for x, q in zip(grads.ks, block.qs, strict=True)
    )
    return _Inputs(
      tuple(queries.put(x, d) for x, d in zip(grads.qs, d_qs, strict=True)),
      tuple(keys.put(x, d) for x, d in zip(grads.ks, d_ks, strict=True)),
      keys.put(grads.v, keys.cut(grads.v) + d_v),
      d_bias,
      grads.scale + jnp.sum(d_scaled * block.products),
    )

  zero = jnp.zeros_like(inputs.scale)
  zeros = jax.tree.map(lambda x: jnp.full(x.shape, zero), inputs)
  grads = jax.lax.fori_loop(0, terms.pairs.count, add, zeros)
  return jax.tree.map(
    lambda g, x: forward_only(g.astype(x.dtype)), grads, inputs
  )


_with_gradient = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_with_gradient.defvjp(_keep, _backward)
_attend = jax.jit(_with_gradient, static_argnums=0)


def _block(
  options: _Options, inputs: _Inputs, terms: _Terms, pair: Array
) -> _Block:
  """Cuts out the pair of that number, and computes its scores."""
  sizes, listed = options.sizes, terms.pairs
  t, s = inputs.qs[0].shape[0], inputs.v.shape[0]
  rows = Blocks(t, sizes.queries, terms.scores.query_positions)
  columns = Blocks(s, sizes.keys, terms.scores.key_positions)
  i, j = listed.queries[pair], listed.keys[pair]
  queries, keys = rows.axis(i), columns.axis(j)
  bias = inputs.bias
  if bias is not None:
    bias = keys.cut(queries.cut(bias), axis=1)
  allowed = exact.allowed_pairs(terms.scores.mask, bias, queries, keys)
  shape = (queries.size, keys.size)
  allowed = _only(rows.own(i), columns.own(j), allowed, shape)
  qs = tuple(queries.cut(q) for q in inputs.qs)
  ks, v = tuple(keys.cut(k) for k in inputs.ks), keys.cut(inputs.v)
  if allowed is not None:
    used = jnp.any(allowed, axis=0)
    ks, v = tuple(exact.silence(k, used) for k in ks), exact.silence(v, used)
  products = exact.products(qs, ks)
  cap = terms.scores.logit_softcap
  capped = exact.bounded(products, inputs.scale, cap)
  scores = capped if bias is None else capped + bias.astype(capped.dtype)
  if allowed is not None:
    scores = jnp.where(allowed, scores, -jnp.inf)
  return _Block(queries, keys, qs, ks, v, products, capped, scores)


def _only(
  rows: Bool[Array, ' t'] | None,
  columns: Bool[Array, ' s'] | None,
  allowed: Bool[Array, 't s'] | None,
  shape: tuple[int, int],
) -> Bool[Array, 't s'] | None:
  """The allowed pairs of tokens that belong to no other pair of blocks."""
  conditions = (
    allowed,
    None if rows is None else rows[:, None],
    None if columns is None else columns[None, :],
  )
  given = [x for x in conditions if x is not None]
  if not given:
    return None
  return jnp.broadcast_to(functools.reduce(operator.and_, given), shape)


def _drop(terms: _Terms, block: _Block, weights: Array) -> Array:
  """Dropout of a block's weights, or of their gradients."""
  dropout = terms.scores.dropout
  if dropout is None:
    return weights
  return dropout.apply(weights, block.queries, block.keys)


def _add_to_bias(
  grad: Float[Array, '#all_t #all_s'],
  part: Float[Array, 't s'],
  queries: Axis,
  keys: Axis,
) -> Float[Array, '#all_t #all_s']:
  """Adds a block to the gradient of a bias, summed where it is shared."""
  for axis, size in enumerate(grad.shape):
    if size == 1:
      part = jnp.sum(part, axis=axis, keepdims=True)
  old = keys.cut(queries.cut(grad), axis=1)
  row, column = queries.begin, keys.begin
  starts = (row * int(grad.shape[0] > 1), column * int(grad.shape[1] > 1))
  return jax.lax.dynamic_update_slice(grad, old + part, starts)


_forward_only = Primitive('forward_only')


def forward_only(x: Array) -> Array:
  """Returns x, which raises a ValueError when differentiated in reverse.

  The gradient passes through it on its way out, so that a gradient of a
  gradient says what to do instead of failing inside of a loop.
  """
  return _forward_only.bind(x)


def _refuse(cotangent: Any, x: Any) -> None:
  del cotangent, x
  raise ValueError(
    'a gradient of the gradient of blockwise attention is asked for in reverse '
    "mode; use implementation='exact', or forward over reverse: "
    'jax.jvp(jax.grad(f), ...)'
  )


_forward_only.def_impl(lambda x: x)
_forward_only.def_abstract_eval(lambda x: x)
mlir.register_lowering(_forward_only, lambda _, x: [x])
batching.defvectorized(_forward_only)
ad.deflinear2(_forward_only, _refuse)

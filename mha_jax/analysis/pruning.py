"""Measures which heads matter, and prunes the decoder of the others.

  scores = head_importance(config, params, batch)         a gradient an example
  losses, loss = ablation_losses(config, params, batch)   a forward pass a head
  order = order_by(scores)                                the least first
  curve = removal_curve(config, params, batch, order)
  keep[tuple(order[:5].T)] = False                        ones before
  config, params = prune_heads(config, params, keep)

All but the last go by head gates, in decoders whose layers have equally many
heads; the last slices the kernels, so that what is gone costs nothing.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

import mha_jax.linen as mha
from mha_jax.attention import AttentionConfig, Projection, apply, checks, masks
from mha_jax.attention.dtypes import wide_dtype
from mha_jax.attention.projections import Row, check_params
from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.tasks import Batch

KINDS = ('zero', 'mean')


def loss_with_gates(
  config: DecoderConfig,
  params: Any,
  batch: Batch,
  gates: jax.Array | np.ndarray | Sequence[ArrayLike],
  means: Sequence[jax.Array] | None = None,
) -> jax.Array:
  """The loss of a decoder under head gates.

    attention = sum_i gate_i c_i + (1 - gate_i) mean_i,    c_i = o_i W_o,i

  Args:
    config: the decoder.
    params: of `DecoderLM`.
    batch: what to predict.
    gates: (num_layers, h) factors of each head's output; where layers differ
      in h, a sequence of (h,) arrays.
    means: of each layer (h, d), from `head_means`; None: zeros.

  Returns:
    The mean cross-entropy over the targets that count, in nats.

  Raises:
    ValueError: the gates' shapes do not fit the config, or the batch's do not
      fit each other.
  """

  shapes = {jnp.shape(x) for x in (batch.inputs, batch.targets, batch.weights)}
  if len(shapes) != 1:
    raise ValueError(
      f'batch has arrays of shapes {sorted(shapes)}; inputs, targets and '
      'weights must be (b, t) alike'
    )

  def add_means(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = call(*args, **kwargs)
    of_layer = isinstance(context.module, mha.Attention)
    if means is None or not of_layer or context.method_name != '__call__':
      return out
    layer = int(context.module.path[0].removeprefix('block_'))
    closed = 1 - jnp.asarray(gates[layer])
    return out + (closed @ means[layer]).astype(out.dtype)[None, None]

  with nn.intercept_methods(add_means):
    logits: Any = DecoderLM(config).apply(
      {'params': params}, batch.inputs, head_gates=gates
    )
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch.targets
  )
  return batch.mean(losses)


def seen(batch: Batch) -> jax.Array:
  """(b, t): the positions up to an example's last target that counts.

  What comes later is padding, and no target depends on it.
  """
  counts = (batch.weights > 0).astype(jnp.int32)
  return jax.lax.cummax(counts, axis=1, reverse=True) > 0


def head_means(
  config: DecoderConfig, params: Any, batch: Batch
) -> tuple[jax.Array, ...]:
  """Averages what each head adds to the residual over a batch's positions.

    mean_i = mean over examples and `seen` positions of o_i W_o,i

  Args:
    config: the decoder.
    params: of `DecoderLM`.
    batch: examples.

  Returns:
    (h, d) of each layer.
  """
  _, state = DecoderLM(config).apply(
    {'params': params},
    batch.inputs,
    mutable=['intermediates'],
    capture_intermediates=lambda module, _: module.name == 'attention_norm',
  )
  means = []
  for layer, attention in enumerate(config.layers):
    name = f'block_{layer}'
    (x,) = state['intermediates'][name]['attention_norm']['__call__']
    mean = functools.partial(
      _mean_output, attention, params[name]['attention'], x, seen(batch)
    )
    h = attention.num_heads
    bias = mean(jnp.zeros(h))
    means.append(jax.vmap(mean)(jnp.eye(h)) - bias[None])
  return tuple(means)


def _mean_output(
  config: AttentionConfig,
  params: Any,
  x: jax.Array,
  counts: jax.Array,
  gates: jax.Array,
) -> jax.Array:
  """(d,): a layer's mean output under gates (h,)."""
  dtype = wide_dtype(x.dtype)
  out = apply(
    config, params, x, mask=masks.causal(), head_gates=gates, dtype=dtype
  )
  return jnp.mean(out, axis=(0, 1), where=counts[:, :, None])


@functools.partial(
  jax.jit, static_argnames=('config', 'kind', 'normalize', 'chunk_size')
)
def head_importance(
  config: DecoderConfig,
  params: Any,
  batch: Batch,
  *,
  kind: str = 'zero',
  normalize: bool = True,
  chunk_size: int = 32,
) -> jax.Array:
  """Measures how much the loss depends on each head, to first order.

    importance_i = mean over examples of |d loss(example) / d gate_i|

  The absolute value is that of each example: over a batch, gradients of
  opposite signs would cancel.

  Args:
    config: the decoder; its layers have equally many heads.
    params: of `DecoderLM`.
    batch: examples; those without targets that count are left out. The loss of
      one is its mean cross-entropy over its targets that count.
    kind: what a gate of 0 puts in the head's place, see `ablation_losses`.
    normalize: whether to divide by the l2 norm over each layer's heads.
    chunk_size: examples at once, for memory; it changes no result.

  Returns:
    (num_layers, h).

  Raises:
    ValueError: the kind is unknown, or layers differ in their heads.

  Source: Michel et al. 2019, Are Sixteen Heads Really Better than One?, eq. 2;
  the norm: Molchanov et al. 2017.
  """
  checks.positive('chunk_size', chunk_size)
  gates = jnp.ones(_gates_shape(config))
  means = _means(config, params, batch, kind)

  def of_example(example: Batch) -> tuple[jax.Array, jax.Array]:
    alone = jax.tree.map(lambda x: x[None], example)
    slope = jax.grad(
      lambda x: loss_with_gates(config, params, alone, x, means)
    )(gates)
    counts = jnp.any(example.weights > 0)
    return jnp.where(counts, jnp.abs(slope), 0), counts

  slopes, counts = jax.lax.map(of_example, batch, batch_size=chunk_size)
  importance = jnp.sum(slopes, axis=0) / jnp.sum(counts)
  if not normalize:
    return importance
  norm = jnp.linalg.norm(importance, axis=1, keepdims=True)
  return importance / jnp.where(norm == 0, 1, norm)


def ablation_losses(
  config: DecoderConfig, params: Any, batch: Batch, kind: str = 'zero'
) -> tuple[jax.Array, jax.Array]:
  """The loss without each single head: what its importance should foretell.

  Args:
    config: the decoder; its layers have equally many heads.
    params: of `DecoderLM`.
    batch: what to predict.
    kind: what stands in a head's place: 'zero', or 'mean', its mean output over
      the batch.

  Returns:
    (num_layers, h) losses in nats, and the loss () with all heads.

  Raises:
    ValueError: the kind is unknown, or layers differ in their heads.
  """
  shape = _gates_shape(config)
  size = shape[0] * shape[1]
  gates = np.ones((size + 1, size))
  gates[np.arange(size), np.arange(size)] = 0
  losses = _losses(config, params, batch, gates.reshape(-1, *shape), kind)
  return losses[:-1].reshape(shape), losses[-1]


def removal_curve(
  config: DecoderConfig,
  params: Any,
  batch: Batch,
  order: ArrayLike,
  kind: str = 'zero',
) -> jax.Array:
  """The loss after the first 0, 1, 2, ... heads of an order are gone.

  Args:
    config: the decoder; its layers have equally many heads.
    params: of `DecoderLM`.
    batch: what to predict.
    order: (heads, 2) integers, a (layer, head) a row, each once; all heads or
      some, as `order_by` sorts them.
    kind: see `ablation_losses`.

  Returns:
    (heads + 1,) losses in nats.

  Raises:
    ValueError: the order names a head twice or one that is not there, the kind
      is unknown, or layers differ in their heads.
  """
  shape = _gates_shape(config)
  order = np.asarray(order)
  if order.ndim != 2 or order.shape[1] != 2 or order.dtype.kind not in 'iu':
    raise ValueError(
      f'order of {order.dtype} and shape {order.shape} must be integers '
      '(heads, 2), a (layer, head) a row'
    )
  rows = [(layer, head) for layer, head in order.tolist()]
  for row in rows:
    if not all(0 <= x < size for x, size in zip(row, shape, strict=True)):
      raise ValueError(
        f'order has (layer, head) {row}, but there are (num_layers, h) = '
        f'{shape}'
      )
  if len(set(rows)) < len(rows):
    raise ValueError(f'order={rows} names a head twice; name each once')
  gates = np.ones((len(rows) + 1, *shape))
  for i, (layer, head) in enumerate(rows):
    gates[i + 1 :, layer, head] = 0
  return _losses(config, params, batch, gates, kind)


def order_by(scores: ArrayLike) -> np.ndarray:
  """The heads from the least to the most score.

  `order_by(jax.random.uniform(key, (num_layers, h)))` is a random order.

  Args:
    scores: (num_layers, h) importances, or losses without a head.

  Returns:
    (num_layers h, 2) integers, a (layer, head) a row; equal scores in their
    own order.

  Raises:
    ValueError: scores have another rank, or are NaN.
  """
  # To read what a failed computation left would hang; to wait raises.
  scores = np.asarray(jax.block_until_ready(scores))
  if scores.ndim != 2:
    raise ValueError(
      f'scores of shape {scores.shape} must be (num_layers, h), one a head'
    )
  if np.any(np.isnan(scores)):
    raise ValueError('scores hold NaN and cannot be put in order')
  order = np.argsort(scores, axis=None, kind='stable')
  return np.stack(np.unravel_index(order, scores.shape), axis=1)


def keep_most(
  config: DecoderConfig, scores: ArrayLike, share: float
) -> np.ndarray:
  """Chooses heads to keep: the groups of highest score, at least one a layer.

  The query heads of a key/value head go or stay together; a group's score is
  the sum of theirs.

  Args:
    config: the decoder; its layers have equally many heads.
    scores: (num_layers, h), as of `head_importance`.
    share: of the heads to keep, in [0, 1]; rounded to whole groups.

  Returns:
    (num_layers, h) booleans for `prune_heads`.

  Raises:
    ValueError: scores or share do not fit, or layers differ in their heads.
  """
  checks.real('share', share, 0, 1)
  shape = _gates_shape(config)
  scores = np.asarray(scores, np.float64)
  if scores.shape != shape:
    raise ValueError(
      f'scores of shape {scores.shape} must be (num_layers, h) = {shape}'
    )
  groups, *others = {_num_kv_heads(x) for x in config.layers}
  if others:
    raise ValueError(
      f'num_kv_heads={sorted([groups, *others])} must be the same in every '
      'layer'
    )
  by_group = scores.reshape(shape[0], groups, -1).sum(axis=2)
  keep = np.zeros(by_group.shape, bool)
  keep[np.arange(len(keep)), by_group.argmax(axis=1)] = True
  for layer, group in order_by(by_group)[::-1]:
    if keep.sum() < round(share * keep.size):
      keep[layer, group] = True
  return np.repeat(keep, shape[1] // groups, axis=1)


def prune_heads(
  config: DecoderConfig, params: Any, keep: Sequence[ArrayLike]
) -> tuple[DecoderConfig, dict[str, Any]]:
  """The decoder with some of its heads: what gates of 0 give, but smaller.

  A kernel's axis of heads is the one whose letter in its einsum string is h,
  that of key/value heads the one of n. A key/value head goes when all of its
  query heads do.

  Args:
    config: the decoder.
    params: of `DecoderLM`.
    keep: of each layer the heads that stay, as numbers in any order or as h
      booleans; at least one a layer.

  Returns:
    The config, whose layers differ where other numbers of heads are left, and
    its parameters.

  Raises:
    ValueError: keep names no head in a layer, one twice, or one that is not
      there; or the query heads of two key/value heads are left unequal.
  """
  keep = list(keep)
  if len(keep) != config.num_layers:
    raise ValueError(
      f'keep of length {len(keep)} must hold the heads of each of '
      f'num_layers={config.num_layers}'
    )
  pruned = dict(params)
  smaller = []
  for layer, attention in enumerate(config.layers):
    name = f'block_{layer}'
    if name not in params:
      raise ValueError(
        f"params without {name!r} are none of this config's DecoderLM; pass "
        "variables['params']"
      )
    old = params[name]['attention']
    check_params(attention.table, old)
    heads = _kept(layer, keep[layer], attention.num_heads)
    kept = {'h': heads, 'n': _kept_groups(layer, heads, attention)}
    new = {x: _slice(row, old[x], kept) for x, row in attention.table.items()}
    pruned[name] = {**params[name], 'attention': new}
    h, n = len(kept['h']), len(kept['n'])
    smaller.append(_with_heads(attention, h, n))
  return dataclasses.replace(config, attention=tuple(smaller)), pruned


def _with_heads(attention: AttentionConfig, h: int, n: int) -> AttentionConfig:
  """The same attention with other numbers of heads, each as large as before."""
  changes: dict[str, Any] = {'num_heads': h}
  if getattr(attention, 'num_kv_heads', None) is not None:
    changes['num_kv_heads'] = n
  for name in ('head_dim', 'qk_nope_head_dim'):
    if getattr(attention, name, 0) is None:  # d_model / h, of the old h
      changes[name] = attention.d_model // attention.num_heads
  return dataclasses.replace(attention, **changes)  # type: ignore[type-var]


def _gates_shape(config: DecoderConfig) -> tuple[int, int]:
  """(num_layers, h); a ValueError where layers differ."""
  heads = [x.num_heads for x in config.layers]
  if len(set(heads)) > 1:
    raise ValueError(
      f'num_heads={heads} must be the same in every layer; measure the decoder '
      'before pruning, with gates of 0 for the heads that go'
    )
  return len(heads), heads[0]


@functools.partial(jax.jit, static_argnames=('config', 'kind'))
def _losses(
  config: DecoderConfig, params: Any, batch: Batch, gates: jax.Array, kind: str
) -> jax.Array:
  """The losses under each of many gates (count, num_layers, h)."""
  means = _means(config, params, batch, kind)
  return jax.lax.map(
    lambda x: loss_with_gates(config, params, batch, x, means), gates
  )


def _means(
  config: DecoderConfig, params: Any, batch: Batch, kind: str
) -> tuple[jax.Array, ...] | None:
  """Gives what stands in a head's place; None: zeros."""
  if kind not in KINDS:
    raise ValueError(f'kind={kind!r} must be in {KINDS}')
  return head_means(config, params, batch) if kind == 'mean' else None


def _kept(layer: int, keep: ArrayLike, h: int) -> np.ndarray:
  """The heads of a layer that stay, in their order."""
  heads = np.asarray(keep)
  if heads.dtype == bool:
    if heads.shape != (h,):
      raise ValueError(
        f'keep[{layer}] of shape {heads.shape} must be ({h},), a boolean a '
        'head, or the numbers of the heads that stay'
      )
    heads = np.flatnonzero(heads)
  if heads.size == 0:
    raise ValueError(
      f'keep[{layer}]={keep!r} is empty; every layer keeps a head, for '
      'instance its most important'
    )
  if heads.ndim != 1 or heads.dtype.kind not in 'iu':
    raise ValueError(
      f'keep[{layer}]={keep!r} must be integers, the heads that stay, or {h} '
      'booleans'
    )
  if unknown := [x for x in heads.tolist() if not 0 <= x < h]:
    raise ValueError(
      f'keep[{layer}] has {unknown}; the heads of the layer are 0 to {h - 1}'
    )
  unique = np.unique(heads).astype(int)
  if len(unique) < len(heads):
    raise ValueError(f'keep[{layer}]={keep!r} names a head twice')
  return unique


def _kept_groups(
  layer: int, heads: np.ndarray, attention: AttentionConfig
) -> np.ndarray:
  """The key/value heads that stay: those of which a query head does."""
  h, n = attention.num_heads, _num_kv_heads(attention)
  counts = np.bincount(heads * n // h, minlength=n)
  groups = np.flatnonzero(counts)
  if len(set(counts[groups])) > 1:
    # Of all that a group can end with, the fewest changes; rather keep than go.
    options = [
      np.where(2 * counts >= size, size, 0) for size in range(h // n, 0, -1)
    ]
    nearest = min(options, key=lambda x: int(np.sum(np.abs(x - counts))))
    raise ValueError(
      f'keep[{layer}] leaves {counts.tolist()} query heads to the key/value '
      f'heads of layer {layer}; those that stay must have equally many; '
      f'nearest: {nearest.tolist()}'
    )
  return groups


def _num_kv_heads(attention: AttentionConfig) -> int:
  """The size of the letter n, of h where no kernel has it."""
  for row in attention.table.values():
    if isinstance(row, Projection) and 'n' in row.kernel_letters:
      return dict(row.sizes)['n']
  return attention.num_heads


def _slice(
  row: Row, params: Mapping[str, Any], kept: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
  """A row's parameters, of the axes named in kept those places only."""
  if not isinstance(row, Projection):
    return dict(params)
  letters = {'kernel': row.kernel_letters, 'bias': row.bias_letters}
  sliced = {}
  for name, x in params.items():
    for axis, letter in enumerate(letters[name]):
      if letter in kept:
        x = jnp.take(jnp.asarray(x), kept[letter], axis=axis)
    sliced[name] = x
  return sliced

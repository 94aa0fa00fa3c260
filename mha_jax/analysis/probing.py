"""Measures what the heads of a trained decoder attend to and write.

  A = attention_maps(config, params, tokens)[layer]      (b, h, t, t)
  score_h = mean of f(A_bhi) over the examples b and queries i that f counts

A score describes; it proves nothing about cause. What a head is for is shown by
removing it.

Every score skips queries that may attend to nothing (their row is zeros), and
is NaN where no query counts. Maps are (b, h, t, s), and t = s where a score
compares positions.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mha_jax.attention import checks, variants
from mha_jax.attention.dtypes import wide_dtype
from mha_jax.attention.projections import Projection, check_params
from mha_jax.decoder import DecoderConfig, DecoderLM

Row = dict[str, Any]
"""The scores of one head, by name; 'layer' and 'head' are integers."""

LABELS = {
  'previous_token': 'previous token',
  'duplicate_token': 'duplicate token',
  'prefix_matching': 'induction',
  'first_token': 'first token',
  'separators': 'separators',
}
"""The name of a head, by the score in which it is high."""
SCORES = (*LABELS, 'entropy', 'mean_distance', 'copying_score')
"""The columns of the table."""


def attention_maps(
  config: DecoderConfig, params: Any, tokens: ArrayLike
) -> tuple[jax.Array, ...]:
  """The attention weights of every layer, before dropout.

  Args:
    config: the decoder's shape.
    params: its parameters, without 'params' around them.
    tokens: (b, t) integers.

  Returns:
    A map (b, h, t, t) for each layer.

  Raises:
    ValueError: tokens are no integers (b, t) that the decoder can take.
  """
  tokens = jnp.asarray(tokens)
  checks.known_range('tokens', tokens, 0, config.vocab_size - 1)
  return _attention_maps(config, params, tokens)


def previous_token(
  maps: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures how much a head attends to the token before.

    mean of A_{i, i-1} over i >= 1

  Args:
    maps: (b, h, t, t).
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,) in [0, 1].

  Source: Clark et al. 2019, What Does BERT Look At?, section 3.1; Olsson et al.
    2022, "Head Activation Evaluators".
  """
  maps = _as_maps(maps, square=True)
  return _mass(maps, jnp.eye(maps.shape[2], k=-1, dtype=bool)[None], queries)


def duplicate_token(
  maps: ArrayLike, tokens: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures attention to earlier occurrences of the current token.

    mean of sum_{j < i, x_j = x_i} A_ij over the i that have such a j

  Args:
    maps: (b, h, t, t).
    tokens: (b, t) integers x.
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,) in [0, 1].

  Source: Wang et al. 2022, Interpretability in the Wild, duplicate token heads.
  """
  maps = _as_maps(maps, square=True)
  tokens = _as_tokens(tokens, maps)
  same = tokens[:, :, None] == tokens[:, None, :]
  return _mass(maps, jnp.tril(same, -1), queries)


def prefix_matching(
  maps: ArrayLike, tokens: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures attention to what followed the current token before.

    mean of sum_{1 <= j < i, x_{j-1} = x_i} A_ij over the i that have such a j

  `repeated_tokens` has the sequences to take it on: of a query in the second
  half one j is right, and nothing but the repetition tells which.

  Args:
    maps: (b, h, t, t).
    tokens: (b, t) integers x.
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,) in [0, 1].

  Source: Olsson et al. 2022, In-context Learning and Induction Heads,
    definition of induction heads and "Head Activation Evaluators".
  """
  maps = _as_maps(maps, square=True)
  tokens = _as_tokens(tokens, maps)
  same = tokens[:, :, None] == tokens[:, None, :-1]
  followed = jnp.pad(same, ((0, 0), (0, 0), (1, 0)))
  return _mass(maps, jnp.tril(followed, -1), queries)


def attention_to(
  maps: ArrayLike, where: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures how much a head attends to marked keys.

    mean of sum_{j marked} A_ij over the queries of examples that have such a j

  Under a causal mask a query before the first marked key has no choice: leave
  it out with `queries`.

  Args:
    maps: (b, h, t, s).
    where: (b, s) booleans, the marked keys.
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,) in [0, 1].

  Source: Clark et al. 2019, section 3.2 (separators).
  """
  maps = _as_maps(maps)
  where = _as_booleans('where', where, 'bs', (maps.shape[0], maps.shape[3]))
  return _mass(maps, where[:, None, :], queries)


def entropy(maps: ArrayLike, queries: ArrayLike | None = None) -> jax.Array:
  """Measures how widely a head spreads its attention, in bits.

    mean of -sum_j A_ij log2 A_ij over i,   0 log2 0 = 0

  Args:
    maps: (b, h, t, s).
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,), from 0 to log2 of the number of keys.

  Source: Clark et al. 2019, section 3.3.
  """
  maps = _as_maps(maps)
  return _mean(_bits(maps), _counted(maps, queries))


def mean_distance(
  maps: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures how far back a head attends, in tokens.

    mean of sum_j A_ij (i - j) over i

  Args:
    maps: (b, h, t, t).
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h,); negative where later keys outweigh earlier ones.

  Source: Vig and Belinkov 2019, Analyzing the Structure of Attention in a
    Transformer Language Model, "Attention Distance".
  """
  maps = _as_maps(maps, square=True)
  place = jnp.arange(maps.shape[2], dtype=maps.dtype)
  distance = place[:, None] - place[None, :]
  back = jnp.einsum('bhts,ts->bht', maps, distance)
  return _mean(back, _counted(maps, queries))


def js_divergence(
  maps: ArrayLike, queries: ArrayLike | None = None
) -> jax.Array:
  """Measures how differently two heads attend, in bits.

    JS(A, B) = mean of H((A_i + B_i) / 2) - (H(A_i) + H(B_i)) / 2 over i

  Taken for one head after the other, in the memory of the maps.

  Args:
    maps: (b, h, t, s).
    queries: (b, t) booleans, the queries that count; None: all.

  Returns:
    (h, h), symmetric: 0 for equal maps, 1 for maps that share no key.

  Source: Clark et al. 2019, section 6 (there the sum over the data).
  """
  maps = _as_maps(maps)
  bits, counted = _bits(maps), _counted(maps, queries)

  def against_all(head: tuple[jax.Array, ...]) -> jax.Array:
    its_maps, its_bits, its_counted = (x[:, None] for x in head)
    middle = _bits((maps + its_maps) / 2)
    divergence = jnp.maximum(middle - (bits + its_bits) / 2, 0)
    return _mean(divergence, counted & its_counted)

  heads = tuple(jnp.moveaxis(x, 1, 0) for x in (maps, bits, counted))
  with jax.debug_nans(False):  # as in _mean
    return jax.lax.map(against_all, heads)


def rollout(maps_by_layer: Sequence[ArrayLike]) -> jax.Array:
  """Estimates how much of every input reaches a position, from weights alone.

    R_l = W_l R_{l-1},   W_l = (mean_h A_l + I) / 2, rows normalised,   R_0 = I

  Args:
    maps_by_layer: (b, h, t, t) of each layer, the first layer first.

  Returns:
    (b, t, t) after the last layer; rows sum to 1.

  Raises:
    ValueError: there are no maps, or their shapes do not fit.

  Source: Abnar and Zuidema 2020, section 3 (attention rollout).
  """
  layers = [_as_maps(maps, square=True) for maps in maps_by_layer]
  shapes = sorted({(x.shape[0], x.shape[2]) for x in layers})
  if len(shapes) != 1:
    raise ValueError(
      f'maps_by_layer has (b, t) = {shapes}; give one map or more, all of the '
      'same examples'
    )
  (b, t) = shapes[0]
  identity = jnp.broadcast_to(jnp.eye(t, dtype=layers[0].dtype), (b, t, t))
  reached = identity
  for maps in layers:
    weights = jnp.mean(maps, axis=1) + identity
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    reached = weights @ reached
  return reached


def copying_score(config: DecoderConfig, params: Any) -> tuple[np.ndarray, ...]:
  """Measures how far a head raises the logits of tokens that it attends to.

    sum lambda / sum |lambda|,   lambda the eigenvalues of
    W_E diag(a) W_V^h W_O^h diag(f) W_U,   (m, m)

  a and f are the scales of the layer's norm and of the final one. The division
  by the root mean square is no linear map and is left out, and so are biases,
  positions, and what lies between the layer and its two ends. The eigenvalues
  are those of the cyclic product, (v, v), and zeros. In float64 NumPy: JAX has
  no eigenvalues of general matrices on accelerators.

  Args:
    config: the decoder's shape; its attention has a value kernel (d, n, v).
    params: its parameters, without 'params' around them.

  Returns:
    (h,) in [-1, 1] for each layer: 1 copies, -1 suppresses, 0 does neither.

  Raises:
    ValueError: the attention has no such kernel, or the parameters are others.

  Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits,
    "Detecting Copying Behavior".
  """
  if not has_copying_score(config):
    raise ValueError(
      f'attention={variants.name_of(config.layers[0])!r} has no value kernel '
      "(d, n, v), which the copying score needs; use 'mha', 'gqa' or 'mqa'"
    )
  if 'embed' not in params:
    raise ValueError(
      "params without 'embed' are none of a DecoderLM; pass variables['params']"
    )
  for layer, attention in enumerate(config.layers):
    check_params(attention.table, params[f'block_{layer}']['attention'])
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  embedding = params['embed']['embedding']
  unembedding = params['norm']['scale'][:, None] * params['output']['kernel']
  scores = []
  for layer, attention in enumerate(config.layers):
    block = params[f'block_{layer}']
    value = block['attention']['value']['kernel']
    scaled = embedding * block['attention_norm']['scale']
    read = np.einsum('md,dnv->nmv', scaled, value)
    write = block['attention']['out']['kernel'] @ unembedding
    group = attention.num_heads // len(read)
    circuits = [write[i] @ read[i // group] for i in range(len(write))]
    values = np.linalg.eigvals(np.stack(circuits))
    size = np.sum(np.abs(values), axis=-1)
    with np.errstate(invalid='ignore'):  # 0 / 0, a head without a circuit
      scores.append(np.sum(values, axis=-1).real / size)
  return tuple(scores)


def has_copying_score(config: DecoderConfig) -> bool:
  """Tells whether values are one product with a kernel (d, n, v) per group."""
  values = [attention.table.get('value') for attention in config.layers]
  return all(
    isinstance(value, Projection) and value.kernel_letters == 'dnv'
    for value in values
  )


def head_scores(
  config: DecoderConfig,
  params: Any,
  tokens: ArrayLike,
  separators: Sequence[int] = (),
  queries: ArrayLike | None = None,
) -> list[Row]:
  """A table of all scores: a row for each head of each layer.

  Args:
    config: the decoder's shape.
    params: its parameters, without 'params' around them.
    tokens: (b, t) integers.
    separators: the tokens that separate.
    queries: (b, t) booleans, the queries that count (no padding); None: all.

  Returns:
    Rows of 'layer', 'head' and `SCORES`: each is the function of its name, but
    'first_token' and 'separators' are `attention_to` them, of the queries after
    the first token and from the first separator on. None: not defined, because
    no query counts or the variant has no such score.
  """
  tokens = jnp.asarray(tokens)
  layers = attention_maps(config, params, tokens)
  copying = (
    copying_score(config, params)
    if has_copying_score(config)
    else [np.full(x.num_heads, np.nan) for x in config.layers]
  )
  separates = jnp.isin(tokens, jnp.asarray(separators, tokens.dtype))
  if queries is None:
    queries = jnp.ones(tokens.shape, bool)
  rows = []
  for layer, maps in enumerate(layers):
    with jax.debug_nans(False):  # NaN says that no query counts
      scores = _all_scores(maps, tokens, separates, queries)
    # To read what a failed computation left would hang; to wait raises.
    scores = jax.block_until_ready(scores)
    scores['copying_score'] = copying[layer]
    by_name = {name: np.asarray(x).tolist() for name, x in scores.items()}
    for head in range(maps.shape[1]):
      row = {name: _defined(by_name[name][head]) for name in SCORES}
      rows.append({'layer': layer, 'head': head} | row)
  return rows


def name_heads(rows: Sequence[Row], threshold: float = 0.5) -> list[str]:
  """The name of the score in `LABELS` that a head has most of.

  A head with a score of 0.5 spends half of its attention there. In short
  sequences that is little: a uniform causal head has 0.36 on the token before
  at t = 4, 0.16 at t = 16. 'induction' says prefix matching alone; an induction
  head copies besides (see `copying_score`).

  Args:
    rows: from `head_scores`.
    threshold: the least score that makes a name.

  Returns:
    A name for each row; '' where no score reaches the threshold.
  """
  checks.real('threshold', threshold, 0, 1)
  return [_name(row, threshold) for row in rows]


def repeated_tokens(
  key: jax.Array, batch_size: int, length: int, symbols: Sequence[int]
) -> jax.Array:
  """Random sequences, each followed by itself.

  The tokens of a sequence differ, as long as there are enough: then each query
  of the second half has one earlier occurrence.

  Args:
    key: a random key.
    batch_size: b.
    length: of the sequence, half of the result's.
    symbols: the tokens to draw from, such as a model has seen in training.

  Returns:
    (b, 2 length) int32.

  Source: Olsson et al. 2022, "Head Activation Evaluators".
  """
  for name, size in (('batch_size', batch_size), ('length', length)):
    checks.positive(name, size)
  known = jnp.asarray(symbols, jnp.int32)
  if known.ndim != 1 or known.size == 0:
    raise ValueError(f'symbols of shape {known.shape} must be a list of tokens')
  replace = length > known.size

  def draw(key: jax.Array) -> jax.Array:
    return jax.random.choice(key, known, (length,), replace)

  half = jax.vmap(draw)(jax.random.split(key, batch_size))
  return jnp.concatenate([half, half], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _attention_maps(
  config: DecoderConfig, params: Any, tokens: jax.Array
) -> tuple[jax.Array, ...]:
  """Collects what the layers sow, without computing logits."""
  _, sown = DecoderLM(config).apply(
    {'params': params}, tokens, sow_weights=True, mutable='intermediates'
  )
  blocks = [
    sown['intermediates'][f'block_{i}'] for i in range(config.num_layers)
  ]
  return tuple(x['attention']['attention_weights'][0] for x in blocks)


@jax.jit
def _all_scores(
  maps: jax.Array, tokens: jax.Array, separates: jax.Array, queries: jax.Array
) -> dict[str, jax.Array]:
  """Every score of one layer's maps, (h,) each."""
  is_first = jnp.broadcast_to(jnp.arange(tokens.shape[1]) == 0, tokens.shape)
  from_separator = jax.lax.cummax(separates.astype(jnp.int32), axis=1) > 0
  return {
    'previous_token': previous_token(maps, queries),
    'duplicate_token': duplicate_token(maps, tokens, queries),
    'prefix_matching': prefix_matching(maps, tokens, queries),
    'first_token': attention_to(maps, is_first, queries & ~is_first),
    'separators': attention_to(maps, separates, queries & from_separator),
    'entropy': entropy(maps, queries),
    'mean_distance': mean_distance(maps, queries),
  }


def _name(row: Mapping[str, Any], threshold: float) -> str:
  """The label of the largest score, if it reaches the threshold."""
  found = {name: row[name] for name in LABELS if row.get(name) is not None}
  best = max(found, key=lambda name: found[name], default=None)
  return LABELS[best] if best and found[best] >= threshold else ''


def _defined(value: float) -> float | None:
  """The number, None for NaN."""
  return None if math.isnan(value) else value


def _bits(p: jax.Array) -> jax.Array:
  """The entropy of the last axis in bits."""
  # The logarithm of 0 is taken nowhere: jax_debug_nans sees 0 log 0.
  logs = jnp.log(jnp.where(p > 0, p, 1))
  return -jnp.sum(p * logs, axis=-1) / math.log(2)


def _mass(
  maps: jax.Array, pairs: jax.Array, queries: ArrayLike | None
) -> jax.Array:
  """The weight on marked pairs (b or 1, t or 1, s), of queries with a mark."""
  b, _, t, s = maps.shape
  pairs = jnp.broadcast_to(pairs, (b, t, s))
  mass = jnp.einsum('bhts,bts->bht', maps, pairs.astype(maps.dtype))
  has_one = jnp.any(pairs, axis=-1)[:, None]
  return _mean(mass, _counted(maps, queries) & has_one)


def _counted(maps: jax.Array, queries: ArrayLike | None) -> jax.Array:
  """The queries (b, h, t) that count and may attend to something."""
  used = jnp.any(maps != 0, axis=-1)
  if queries is None:
    return used
  b, _, t, _ = maps.shape
  return used & _as_booleans('queries', queries, 'bt', (b, t))[:, None]


def _mean(values: jax.Array, counted: jax.Array) -> jax.Array:
  """The mean (h,) of the values (b, h, t) that count; NaN where none does."""
  with jax.debug_nans(False):
    return jnp.mean(values, axis=(0, 2), where=counted)


def _as_maps(maps: ArrayLike, square: bool = False) -> jax.Array:
  """Maps (b, h, t, s) in float32 at least."""
  maps = jnp.asarray(maps)
  letters = '(b, h, t, t)' if square else '(b, h, t, s)'
  if maps.ndim != 4 or (square and maps.shape[2] != maps.shape[3]):
    raise ValueError(
      f'maps of shape {maps.shape} must be {letters}; pass one layer of '
      'attention_maps'
    )
  return maps.astype(wide_dtype(maps.dtype))


def _as_tokens(tokens: ArrayLike, maps: jax.Array) -> jax.Array:
  """Integers (b, t)."""
  tokens, wanted = jnp.asarray(tokens), (maps.shape[0], maps.shape[2])
  integers = jnp.issubdtype(tokens.dtype, jnp.integer)
  if tokens.shape != wanted or not integers:
    raise ValueError(
      f'tokens, {tokens.dtype} of shape {tokens.shape}, must be integers '
      f'(b, t) = {wanted}; pass those that the maps were made of'
    )
  return tokens


def _as_booleans(
  name: str, values: ArrayLike, letters: str, wanted: tuple[int, ...]
) -> jax.Array:
  """Booleans of a shape."""
  values = jnp.asarray(values)
  if values.shape != wanted or values.dtype != bool:
    raise ValueError(
      f'{name}, {values.dtype} of shape {values.shape}, must be booleans '
      f'({", ".join(letters)}) = {wanted}'
    )
  return values

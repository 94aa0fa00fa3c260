"""Generation: a prompt's tokens go in at once, new ones one by one.

The whole of it, prefill, sampling and caches, is one compiled program for each
shape of prompts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.caches import Cache
from mha_jax.attention.notation import ArrayLike

NEGATIVE = -jnp.inf


def generate(
  model: Any,
  variables: Any,
  prompts: ArrayLike,
  *,
  max_new_tokens: int,
  lengths: ArrayLike | None = None,
  temperature: float = 0.0,
  top_k: int | None = None,
  top_p: float | None = None,
  stop_tokens: tuple[int, ...] = (),
  pad_token: int = 0,
  key: jax.Array | None = None,
  capacity: int | None = None,
  cache: Any = None,
) -> Any:
  """Continues prompts, all of it in one compiled program.

    tokens, count = generate(
      model, variables, prompts, lengths=[4, 2], max_new_tokens=8
    )
    tokens, count = generate(
      model, variables, prompts, max_new_tokens=8, temperature=0.8, top_p=0.9,
      key=jax.random.key(0), stop_tokens=(0,)
    )

  Args:
    model: a module with `init_cache` whose call takes tokens, cache and valid,
      for instance `DecoderLM`; its `max_positions` and `vocab_size`, if it has
      any, are kept to.
    variables: its variables.
    prompts: (b, t) tokens; a shorter prompt is padded on the right, with
      anything.
    max_new_tokens: the number of new tokens of each row.
    lengths: (b,) tokens of each prompt, at least 1; None: all t.
    temperature: 0 takes the likeliest token; else logits are divided by it.
    top_k: samples from the k likeliest tokens; None: from all.
    top_p: samples from the likeliest tokens that together have probability
      top_p (the one that passes it included); None: from all.
    stop_tokens: a row ends with the first of them; `pad_token` follows.
    pad_token: what stands behind a row's end.
    key: a random key; needed for temperature > 0.
    capacity: slots of the cache that is made; None: enough for any lengths.
    cache: a cache for each layer to continue from; donated. None: a new one.

  Returns:
    New tokens (b, max_new_tokens), and their number in each row (b,), a stop
    token included. With a cache also the new cache, which does not yet hold
    the last token of each row.

  Raises:
    ValueError: prompts and new tokens exceed the capacity or the model's
      positions, or an option does not fit. Before anything is traced.
  """
  prompts, lengths = _checked_prompts(model, prompts, lengths)
  temperature, top_p, capacity = map(
    checks.plain, (temperature, top_p, capacity)
  )
  choice = _choice(max_new_tokens, top_k, stop_tokens, pad_token, temperature)
  _check_sampling(temperature, top_p, key)
  capacity = _capacity(model, cache, capacity, prompts, lengths, choice)
  out = _generate(
    model,
    variables,
    prompts,
    jnp.asarray(lengths),
    jax.random.key(0) if key is None else key,
    max(float(temperature), 1e-6),
    2.0 if top_p in (None, 1) else float(top_p),  # beyond any sum
    cache,
    choice=choice,
    capacity=capacity,
  )
  return out if cache is not None else out[:2]


@dataclasses.dataclass(frozen=True)
class _Choice:
  """How a row goes on, and when it ends: the static part of a call."""

  max_new_tokens: int
  greedy: bool
  top_k: int | None
  stop_tokens: tuple[int, ...]
  pad_token: int


def _choice(
  max_new_tokens: Any,
  top_k: Any,
  stop_tokens: Any,
  pad_token: Any,
  temperature: float,
) -> _Choice:
  """Makes the static part; a ValueError where an option does not fit."""
  stops = _whole_tokens('stop_tokens', stop_tokens)
  (pad,) = _whole_tokens('pad_token', [pad_token])
  max_new_tokens, top_k = checks.plain(max_new_tokens), checks.plain(top_k)
  checks.positive('max_new_tokens', max_new_tokens)
  if top_k is not None:
    checks.positive('top_k', top_k)
  return _Choice(max_new_tokens, temperature == 0, top_k, stops, pad)


def _checked_prompts(
  model: Any, prompts: ArrayLike, lengths: ArrayLike | None
) -> tuple[jax.Array, np.ndarray]:
  """Makes arrays (b, t) and (b,); a ValueError where they do not fit."""
  prompts = jnp.asarray(prompts)
  if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
    raise ValueError(
      f'prompts must be integers of shape (b, t), got {prompts.dtype} of shape '
      f'{prompts.shape}'
    )
  prompts = prompts.astype(int)  # new tokens may not fit a narrow dtype
  b, t = prompts.shape
  if 0 in (b, t):
    raise ValueError(f'prompts of shape {prompts.shape} must hold tokens')
  lengths = np.full(b, t) if lengths is None else np.asarray(lengths)
  whole = np.issubdtype(lengths.dtype, np.integer) and lengths.shape == (b,)
  if not whole or np.any(lengths < 1) or np.any(lengths > t):
    raise ValueError(
      f'lengths={lengths.tolist()} must be {b} numbers from 1 to t={t}'
    )
  vocab_size = getattr(model, 'vocab_size', None)
  if vocab_size is not None and not isinstance(prompts, jax.core.Tracer):
    tokens = np.asarray(prompts)[np.arange(t) < lengths[:, None]]
    checks.known_range('prompts', tokens, 0, vocab_size - 1)
  return prompts, lengths


def _check_sampling(
  temperature: float, top_p: float | None, key: jax.Array | None
) -> None:
  """Raises a ValueError unless tokens can be drawn as asked."""
  checks.real('temperature', temperature, 0, 1e6)
  if top_p is not None:
    checks.real('top_p', top_p, 1e-9, 1)
  if temperature > 0 and key is None:
    raise ValueError(
      f'key=None with temperature={temperature}: pass a random key, or '
      'temperature=0 for the likeliest tokens'
    )


def _capacity(
  model: Any,
  cache: Any,
  capacity: int | None,
  prompts: jax.Array,
  lengths: np.ndarray,
  choice: _Choice,
) -> int | None:
  """Returns the slots of a cache to be made; None: one is given.

  Raises:
    ValueError: the tokens do not fit the cache or the model's positions.
  """
  (b, t), more = prompts.shape, choice.max_new_tokens - 1
  limit = getattr(model, 'max_positions', None)
  # The last new token is returned and never enters the cache.
  needed = int(lengths.max()) + more
  if cache is None:
    _check_room('capacity', capacity, needed)
    room = t + more  # one program, whatever the lengths
    capacity = capacity or (room if limit is None else min(room, limit))
  else:
    capacity = None
    _check_batch(cache, b)
    for layer in cache:
      needed = int((np.asarray(layer.lengths) + lengths + more).max())
      if layer.window is None:
        _check_room('capacity of the cache', layer.slots, needed)
  _check_room('max_len of learned positions', limit, needed)
  return capacity


def _whole_tokens(name: str, tokens: Any) -> tuple[int, ...]:
  """Tokens as plain numbers; a ValueError unless they are some."""
  array = np.asarray(tokens)
  if array.size == 0:
    return ()
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise ValueError(f'{name}={tokens!r} must be integers, as (0, 7)')
  for token in array.tolist():
    checks.whole(name, token, 0, 2**31 - 1)
  return tuple(array.tolist())


def _check_room(name: str, capacity: int | None, needed: int) -> None:
  """Raises a ValueError where the tokens do not fit."""
  if capacity is not None and capacity < needed:
    raise ValueError(
      f'{name}={capacity} is less than the {needed} tokens of prompt and '
      'max_new_tokens; raise it, or generate fewer'
    )


def _check_batch(cache: Any, b: int) -> None:
  """Raises a ValueError unless there are caches with a row a prompt."""
  if not isinstance(cache, tuple) or not all(
    isinstance(layer, Cache) for layer in cache
  ):
    raise ValueError(
      'cache must be a tuple of caches, one for each layer, as init_cache of '
      f'the model makes it; got {type(cache).__name__}'
    )
  for layer in cache:
    if layer.lengths.shape != (b,):
      raise ValueError(
        f'cache has lengths of shape {layer.lengths.shape} for {b} prompts; '
        f'make it with batch_size={b}'
      )


@functools.partial(
  jax.jit,
  static_argnames=(
    'model',
    'choice',
    'capacity',
  ),
  donate_argnames=('cache',),
)
def _generate(
  model: Any,
  variables: Any,
  prompts: jax.Array,
  lengths: jax.Array,
  key: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  cache: Any,
  *,
  choice: _Choice,
  capacity: int | None,
) -> tuple[jax.Array, jax.Array, Any]:
  """Prefill, then a token a step until every row has ended."""
  b, t = prompts.shape
  if cache is None:
    cache = model.init_cache(b, capacity)
  valid = jnp.arange(t)[None, :] < lengths[:, None]
  columns = jnp.arange(choice.max_new_tokens)[None, :]
  logits, cache = model.apply(variables, prompts, cache=cache, valid=valid)
  last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]

  def next_token(i: Any, logits: jax.Array, done: jax.Array) -> Any:
    """Chooses the next token of each row; True for rows that have ended."""
    token = jnp.argmax(logits, axis=-1)
    if not choice.greedy:
      scores = restrict(logits / temperature, choice.top_k, top_p)
      token = jax.random.categorical(jax.random.fold_in(key, i), scores)
    token = jnp.where(done, choice.pad_token, token).astype(prompts.dtype)
    stops = jnp.asarray(choice.stop_tokens, prompts.dtype)
    return token, done | jnp.isin(token, stops)

  def running(state: Any) -> jax.Array:
    i, _, done, *_ = state
    return (i < choice.max_new_tokens) & ~jnp.all(done)

  def step(state: Any) -> Any:
    i, token, done, cache, tokens, count = state
    logits, cache = model.apply(
      variables, token[:, None], cache=cache, valid=~done[:, None]
    )
    count = count + ~done
    token, done = next_token(i, logits[:, 0], done)
    tokens = jnp.where(columns == i, token[:, None], tokens)
    return i + 1, token, done, cache, tokens, count

  token, done = next_token(0, last, jnp.zeros(b, bool))
  # By where, not by a scatter: an explicit mesh then knows how it is sharded.
  tokens = jnp.where(
    columns == 0,
    token[:, None],
    jnp.asarray(choice.pad_token, prompts.dtype),
  )
  count = jnp.ones_like(token, jnp.int32)
  state = (1, token, done, cache, tokens, count)
  *_, cache, tokens, count = jax.lax.while_loop(running, step, state)
  return tokens, count, cache


def restrict(
  logits: jax.Array, top_k: int | None, top_p: Any = 2.0
) -> jax.Array:
  """Logits (..., m) with -inf outside the top k, then outside the top p.

  Top p keeps the likeliest tokens up to and with the one by which their
  probabilities, of what top k left, sum to top_p; above 1 all, however the sums
  are rounded. Source: Holtzman et al. 2020.
  """
  if top_k is not None and top_k < logits.shape[-1]:
    bound = jax.lax.top_k(logits, top_k)[0][..., -1:]
    logits = jnp.where(logits >= bound, logits, NEGATIVE)
  order = jnp.flip(jnp.argsort(logits, axis=-1), axis=-1)
  probabilities = jnp.take_along_axis(jax.nn.softmax(logits), order, axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  places = jnp.argsort(order, axis=-1)
  keep = jnp.take_along_axis(before < top_p, places, axis=-1)
  return jnp.where(keep, logits, NEGATIVE)

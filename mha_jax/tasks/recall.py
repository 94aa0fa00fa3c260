"""Tasks that ask to look something up in what was read.

`RecallTask` names the key whose value is wanted; in `InductionTask` the last
token itself is the key, and what followed it before is the value.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.tasks.task import Batch

SEP, FIRST = 0, 1


@dataclasses.dataclass(frozen=True)
class RecallTask:
  """Multi-query associative recall: pairs are read, then asked for.

  With num_pairs=3 and num_queries=2 an example reads (SEP shown as |, what
  does not count as -; keys a, b, c, values in digits):

    sequence  b 4 c 1 a 4 | c 1 b 4
    inputs    b 4 c 1 a 4 | c 1 b
    targets   - - - - - - - 1 - 4

  Keys differ within an example, values need not; the keys that are asked for
  differ too, in random order. Tokens: 0 separator, the keys, the values.

  Args:
    num_pairs: pairs to read.
    num_queries: pairs asked for, at most num_pairs.
    num_keys: different keys, at least num_pairs.
    num_values: different values.

  Raises:
    ValueError: sizes are not positive, or ask for more than there is.

  Source: Arora et al. 2023, "Zoology: Measuring and Improving Recall in
  Efficient Language Models", section 4, whose queries are spread over the
  sequence by a power law; here they follow the pairs.
  """

  num_pairs: int = 8
  num_queries: int = 8
  num_keys: int = 32
  num_values: int = 32
  kind: str = dataclasses.field(default='recall', init=False)

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    for name in ('num_pairs', 'num_queries', 'num_keys', 'num_values'):
      checks.positive(name, getattr(self, name))
    for name, most in (
      ('num_queries', 'num_pairs'),
      ('num_pairs', 'num_keys'),
    ):
      if getattr(self, name) > getattr(self, most):
        raise ValueError(
          f'{name}={getattr(self, name)} exceeds {most}='
          f'{getattr(self, most)}; choose at most as many'
        )

  @property
  def vocab_size(self) -> int:
    return FIRST + self.num_keys + self.num_values

  @property
  def max_len(self) -> int:
    return 2 * (self.num_pairs + self.num_queries)

  @property
  def validation(self) -> 'RecallTask':
    return self

  @property
  def separators(self) -> tuple[int, ...]:
    return (SEP,)

  @property
  def symbols(self) -> tuple[int, ...]:
    return tuple(range(FIRST, self.vocab_size))

  def token_text(self, token: int) -> str:
    """k3 for a key, 3 for a value."""
    if token < FIRST:
      return '|'
    of_values, number = divmod(token - FIRST, self.num_keys)
    return f'k{number}' if not of_values else str(token - FIRST - self.num_keys)

  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws batch_size examples; a pure function of the key."""
    keys = jax.random.split(key, batch_size)
    sequence = jax.vmap(self._example)(keys)
    place = jnp.arange(1, self.max_len + 1)
    asked = place - 2 * self.num_pairs  # 1 for the first key, 2 for its value
    counts = (asked > 0) & (asked % 2 == 0)
    return _batch(
      sequence, jnp.broadcast_to(counts, (batch_size, self.max_len))
    )

  def _example(self, key: jax.Array) -> jax.Array:
    """One sequence of tokens."""
    of_keys, of_values, of_queries = jax.random.split(key, 3)
    keys = jax.random.permutation(of_keys, self.num_keys)[: self.num_pairs]
    values = jax.random.randint(
      of_values, (self.num_pairs,), 0, self.num_values
    )
    pairs = jnp.stack([keys, self.num_keys + values], axis=1) + FIRST
    asked = jax.random.permutation(of_queries, self.num_pairs)
    queries = pairs[asked[: self.num_queries]]
    parts = (pairs.ravel(), jnp.array([SEP]), queries.ravel())
    return jnp.concatenate(parts).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class InductionTask:
  """Random tokens that repeat; the repetition counts, but for its first token.

  With length=8, min_period=3 and a row whose period is drawn as 3:

    inputs    c a d c a d c a
    targets   - - - a d c a d

  The period differs from row to row, so that what comes next can be found by
  what followed the same token before, and not by counting places.

  Args:
    length: tokens of the inputs.
    num_symbols: different tokens m.
    min_period: the shortest period; None: a quarter of length.
    max_period: the longest period; None: half of length.

  Raises:
    ValueError: sizes are not positive, or the periods do not fit.

  Source: repeated random sequences as in Olsson et al. 2022, "In-context
  Learning and Induction Heads".
  """

  length: int = 64
  num_symbols: int = 64
  min_period: int | None = None
  max_period: int | None = None
  kind: str = dataclasses.field(default='induction', init=False)

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.positive('length', self.length)
    checks.positive('num_symbols', self.num_symbols)
    low, high = self.periods
    checks.whole('min_period', low, 1, high)
    checks.whole('max_period', high, 1, self.length - 1)

  @property
  def periods(self) -> tuple[int, int]:
    """The shortest and the longest period."""
    low, high = self.min_period, self.max_period
    low = max(1, self.length // 4) if low is None else low
    return low, max(1, self.length // 2) if high is None else high

  @property
  def vocab_size(self) -> int:
    return self.num_symbols

  @property
  def max_len(self) -> int:
    return self.length

  @property
  def validation(self) -> 'InductionTask':
    return self

  @property
  def separators(self) -> tuple[int, ...]:
    return ()

  @property
  def symbols(self) -> tuple[int, ...]:
    return tuple(range(self.num_symbols))

  def token_text(self, token: int) -> str:
    return str(token)

  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws batch_size examples; a pure function of the key."""
    of_symbols, of_periods = jax.random.split(key)
    low, high = self.periods
    symbols = jax.random.randint(
      of_symbols, (batch_size, high), 0, self.num_symbols, jnp.int32
    )
    period = jax.random.randint(of_periods, (batch_size, 1), low, high + 1)
    place = jnp.arange(self.length + 1)[None]
    sequence = jnp.take_along_axis(symbols, place % period, axis=1)
    return _batch(sequence, (place > period)[:, 1:])


def _batch(sequence: jax.Array, counts: jax.Array) -> Batch:
  """Next-token prediction of tokens (b, t + 1); counts (b, t) of targets."""
  return Batch(sequence[:, :-1], sequence[:, 1:], counts.astype(jnp.float32))

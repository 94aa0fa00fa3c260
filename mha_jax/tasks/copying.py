"""The copy task: say again what was read."""

import dataclasses

import jax
import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.tasks.task import Batch

PAD, SEP, FIRST_SYMBOL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class CopyTask:
  """Copying a sequence of random symbols; only the answer counts.

  With length=3 one example reads (SEP shown as |, what does not count as -):

    sequence  c a b | c a b
    inputs    c a b | c a
    targets   - - - c a b

  With pairs=True an answer needs two sources at once: answer i is one token
  that names both x_i and x_{i + L/2}. With length=4:

    sequence  c a b d | cb ad

  With min_length each row has its own length, uniform in min_length .. length
  (even ones for pairs), and ends in padding that does not count. With
  fixed_separator too, the separator stands at place L, behind padding, so that
  an answer is always as far from its source; a row of 2 symbols, L = 3:

    sequence  c a 0 | c a 0

  Tokens: 0 padding, 1 separator, then the symbols, then with pairs the
  num_symbols^2 pairs.

  Args:
    length: L, symbols to copy, at most.
    num_symbols: different symbols.
    min_length: the shortest sequence; None: all have the same length.
    pairs: whether an answer is a pair of symbols.
    fixed_separator: whether it stands at one place whatever a row's length.

  Raises:
    ValueError: sizes are not positive, or odd where pairs need even ones.
  """

  length: int = 32
  num_symbols: int = 32
  min_length: int | None = None
  pairs: bool = False
  fixed_separator: bool = False
  kind: str = dataclasses.field(default='copy', init=False)

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    shortest = self.length if self.min_length is None else self.min_length
    for name, value in (
      ('length', self.length),
      ('num_symbols', self.num_symbols),
      ('min_length', shortest),
    ):
      checks.positive(name, value)
    if shortest > self.length:
      raise ValueError(
        f'min_length={self.min_length} exceeds length={self.length}; '
        'choose one between 1 and length'
      )
    for name, value in (('length', self.length), ('min_length', shortest)):
      if self.pairs and value % 2:
        raise ValueError(
          f'{name}={value} must be even with pairs=True; nearest: {value - 1}, '
          f'{value + 1}'
        )

  @property
  def vocab_size(self) -> int:
    pairs = self.num_symbols**2 if self.pairs else 0
    return FIRST_SYMBOL + self.num_symbols + pairs

  @property
  def max_answer(self) -> int:
    """The longest answer, in tokens."""
    return self.length // 2 if self.pairs else self.length

  @property
  def max_len(self) -> int:
    return self.length + self.max_answer

  @property
  def validation(self) -> 'CopyTask':
    return self

  @property
  def separators(self) -> tuple[int, ...]:
    return (SEP,)

  @property
  def symbols(self) -> tuple[int, ...]:
    """The tokens of single symbols, which pairs are made of."""
    return tuple(range(FIRST_SYMBOL, FIRST_SYMBOL + self.num_symbols))

  def token_text(self, token: int) -> str:
    """A symbol's number, two for a pair."""
    if token < FIRST_SYMBOL:
      return '·|'[token]
    pair, symbol = divmod(token - FIRST_SYMBOL, self.num_symbols)
    return f'{pair - 1},{symbol}' if pair else str(symbol)

  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws batch_size examples; a pure function of the key."""
    symbol_key, length_key = jax.random.split(key)
    symbols = jax.random.randint(
      symbol_key, (batch_size, self.length), 0, self.num_symbols
    )
    sequence, counts = jax.vmap(self._example)(
      symbols, self._lengths(length_key, batch_size)
    )
    return Batch(
      inputs=sequence[:, :-1],
      targets=sequence[:, 1:],
      weights=counts[:, 1:].astype(jnp.float32),
    )

  def _lengths(self, key: jax.Array, batch_size: int) -> jax.Array:
    """The number of symbols of each example, (b,)."""
    if self.min_length is None:
      return jnp.full((batch_size,), self.length)
    step = 2 if self.pairs else 1
    low, high = self.min_length // step, self.length // step
    return step * jax.random.randint(key, (batch_size,), low, high + 1)

  def _example(
    self, symbols: jax.Array, n: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """One sequence of tokens and where its answer stands.

    Args:
      symbols: (length,) of which the first n are used.
      n: the number of symbols to copy.
    """
    place = jnp.arange(self.max_len + 1)
    separator = self.length if self.fixed_separator else n
    i = jnp.maximum(place - separator - 1, 0)
    if self.pairs:
      answers = n // 2
      other = symbols[jnp.minimum(i + answers, self.length - 1)]
      first = symbols[jnp.minimum(i, self.length - 1)]
      answer = FIRST_SYMBOL + self.num_symbols * (1 + first) + other
    else:
      answers = n
      answer = FIRST_SYMBOL + symbols[jnp.minimum(i, self.length - 1)]
    source = FIRST_SYMBOL + symbols[jnp.minimum(place, self.length - 1)]
    is_answer = (place > separator) & (place <= separator + answers)
    tokens = jnp.where(is_answer, answer, PAD)
    tokens = jnp.where(place == separator, SEP, tokens)
    tokens = jnp.where(place < n, source, tokens)
    return tokens.astype(jnp.int32), is_answer

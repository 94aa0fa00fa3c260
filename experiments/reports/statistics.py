"""Statistics over seeds: spreads, paired differences, the best learning rate.

Every sentence that an experiment prints about a difference follows from here.
Seeds share their batches, so differences are taken seed by seed. A number that
is infinite says that a seed never got there, or diverged; none is dropped.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.98
"""Of the intervals. At 95 % two equal models are told apart in one of 19 draws,
at 98 % in one of 48 (tests/experiments/reports/test_statistics.py); a sweep
makes several such comparisons."""

Values = Sequence[float]


def number(value: float | None) -> float:
  """A number of a row, in which None stands for one that is not finite."""
  return math.inf if value is None else float(value)


def spread(name: str, values: Values) -> dict[str, float]:
  """Median, least and greatest.

  Between a number and infinity the median is infinity: half never get there.
  """
  ordered = sorted(values)
  return {
    f'{name}_median': float(np.median(ordered)),
    f'{name}_min': ordered[0],
    f'{name}_max': ordered[-1],
  }


def median_range(
  line: Mapping[str, Any],
  name: str,
  form: str,
  gap: str = ' ',
  never: str = 'never',
) -> str:
  """Median (least-greatest) of a spread, in words.

  Args:
    line: has the spread.
    name: of the spread; signed numbers read "least to greatest".
    form: of a number, such as '.3f'.
    gap: between the median and the range.
    never: the word for a number that is infinite.
  """
  median, low, high = (
    never if math.isinf(x) else format(x, form)
    for x in (line[f'{name}_{part}'] for part in ('median', 'min', 'max'))
  )
  to = ' to ' if form.startswith('+') else '-'
  return median if low == high else f'{median}{gap}({low}{to}{high})'


@dataclasses.dataclass(frozen=True)
class Difference:
  """What one model has more than another, seed by seed.

  Args:
    mean: over seeds.
    low: the interval's lower end.
    high: its upper end.
  """

  mean: float
  low: float
  high: float

  @classmethod
  def of_line(cls, line: Mapping[str, Any]) -> 'Difference':
    """Reads what `columns` made of it."""
    return cls(*(line[f'difference_{end}'] for end in ('mean', 'low', 'high')))

  def columns(self) -> dict[str, float]:
    """The columns of a table or CSV that hold it."""
    ends = dataclasses.asdict(self)
    return {f'difference_{end}': value for end, value in ends.items()}

  @property
  def sign(self) -> int:
    """1: more, -1: less, 0: not told apart."""
    return int(self.low > 0) - int(self.high < 0)

  def in_words(self, form: str = '+.3f') -> str:
    """The mean and its interval, such as '+0.06 (+0.04 to +0.08)'."""
    low, high = (
      'no bound' if math.isinf(x) else format(x, form)
      for x in (self.low, self.high)
    )
    return f'{self.mean:{form}} ({low} to {high})'


def difference(
  values: Values, reference: Values, worst: float = math.inf
) -> Difference:
  """The mean of values - reference over seeds, with its interval.

    mean +- t(CONFIDENCE, seeds - 1) sd / sqrt(seeds)

  Args:
    values: of a model, by seed.
    reference: of the other, by the same seeds.
    worst: no number counts as more than this, such as one step more than were
      taken; an infinite one, of which no more is known, counts as this.

  Returns:
    The difference. One seed alone has an interval without bounds.

  Source: Student 1908, The probable error of a mean.
  """
  pairs = np.minimum(np.asarray([values, reference], float), worst)
  if not np.all(np.isfinite(pairs)):
    raise ValueError(f'values={[*values]} must be finite, or worst given')
  each = pairs[0] - pairs[1]
  mean = float(np.mean(each))
  if each.size < 2:
    return Difference(mean, -math.inf, math.inf)
  error = float(np.std(each, ddof=1)) / math.sqrt(each.size)
  half = float(stats.t.ppf((1 + CONFIDENCE) / 2, each.size - 1)) * error
  return Difference(mean, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Best:
  """A model at its best learning rate.

  Args:
    row: of that rate.
    values: what it was judged by, by seed.
    advice: where the rate is the last of those tried, what to try; else ''.
  """

  row: Mapping[str, Any]
  values: tuple[float, ...]
  advice: str

  @property
  def learning_rate(self) -> float:
    """The rate."""
    return float(self.row['learning_rate'])


def best_rate(
  rows: Sequence[Mapping[str, Any]],
  values_of: Callable[[Mapping[str, Any]], Values],
) -> Best:
  """Chooses the row whose median value is least.

  Ties, as of infinite medians, go to the rate at which fewer values are
  infinite, then to the smaller mean, in which an infinite value counts as the
  greatest finite one, then to the lower rate.

  Args:
    rows: of one model at several learning rates.
    values_of: a row's values by seed, better small.
  """
  rows = sorted(rows, key=lambda row: row['learning_rate'])
  values = [tuple(map(float, values_of(row))) for row in rows]
  known = [x for own in values for x in own if math.isfinite(x)]
  worst = max(known, default=0.0)

  def order(i: int) -> tuple[float, int, float]:
    never = sum(map(math.isinf, values[i]))
    return (
      float(np.median(sorted(values[i]))),
      never,
      float(np.mean(np.minimum(values[i], worst))),
    )

  i = min(range(len(rows)), key=order)
  rates = [float(row['learning_rate']) for row in rows]
  advice = ''
  some = any(map(math.isfinite, values[i]))  # else no rate is better
  if len(rates) > 1 and some and i in (0, len(rates) - 1):
    end = 'lowest' if i == 0 else 'highest'
    advice = (
      f'the best is {rates[i]:g}, the {end} rate tried: add '
      f'{_beyond(rates[i], i > 0):g} to --learning_rates'
    )
  return Best(rows[i], values[i], advice)


def _beyond(rate: float, up: bool) -> float:
  """The next of ..., 0.1, 0.3, 1, 3, ... above or below a rate."""
  steps = [float(f'{m}e{k}') for k in range(-13, 4) for m in (1, 3)]
  if up:
    return min(x for x in steps if x > 1.5 * rate or x == steps[-1])
  return max(x for x in steps if x < rate / 1.5 or x == steps[0])

"""Statistics over seeds, on numbers that are made up."""

import math

import numpy as np
from absl.testing import parameterized
from scipy import stats

from experiments.reports import statistics

NEVER = math.inf
DRAWS = 2000


def draws(rates: int, shift: float = 0.0, seeds: int = 5, spread: float = 0.2):
  """Final losses of two models, (draws, models, rates, seeds).

  A seed's batches shift both; the losses of 0.01 nats or so are lognormal, the
  second model's larger by a factor of exp(shift).
  """
  rng = np.random.default_rng(7)
  shared = rng.normal(size=(DRAWS, 1, 1, seeds))
  own = rng.normal(size=(DRAWS, 2, rates, seeds))
  found = spread * (shared + own)
  found[:, 1] += shift
  return 0.01 * np.exp(found)


def told(losses) -> int:
  """The sign of the second model minus the first, each at its best."""
  best = [
    statistics.best_rate(
      [{'learning_rate': r, 'x': x} for r, x in enumerate(model)],
      lambda row: row['x'],
    )
    for model in losses
  ]
  return statistics.difference(best[1].values, best[0].values).sign


class DifferenceTest(parameterized.TestCase):
  @parameterized.product(rates=(1, 4), seeds=(3, 5))
  def test_equal_models(self, rates, seeds):
    """Are not told apart in 95 of 100 draws at the least."""
    signs = [told(x) for x in draws(rates, seeds=seeds)]
    self.assertGreater(np.mean(np.equal(signs, 0)), 0.96)
    self.assertIn(1, signs)
    self.assertIn(-1, signs)

  @parameterized.parameters(1, 4)
  def test_two_spreads(self, rates):
    """A difference of twice the range over seeds is told, and which way."""
    spread = 0.02
    losses = draws(rates, 0.0, spread=spread)
    widest = np.ptp(losses[:, 0, 0], axis=-1).mean()
    losses[:, 1] += 2 * widest
    signs = [told(x) for x in losses]
    self.assertGreater(np.mean(np.equal(signs, 1)), 0.95)
    self.assertNotIn(-1, signs)

  def test_interval(self):
    """Scipy's own, of the differences."""
    rng = np.random.default_rng(0)
    values, reference = rng.normal(size=(2, 7))
    got = statistics.difference(values, reference)
    each = values - reference
    wanted = stats.t.interval(
      statistics.CONFIDENCE, 6, each.mean(), stats.sem(each)
    )
    np.testing.assert_allclose((got.low, got.high), wanted)
    self.assertAlmostEqual(got.mean, each.mean())

  def test_never_counts(self):
    """As the worst there is; without one it cannot."""
    values, reference = [50, NEVER, NEVER], [51, 52, 49]
    got = statistics.difference(values, reference, worst=301)
    self.assertAlmostEqual(got.mean, (-1 + 249 + 252) / 3)
    self.assertEqual(got.sign, 0)
    got = statistics.difference([NEVER] * 3, reference, worst=301)
    self.assertEqual(got.sign, 1)
    got = statistics.difference([NEVER] * 3, [NEVER] * 3, worst=301)
    self.assertEqual((got.sign, got.mean), (0, 0))
    with self.assertRaisesRegex(ValueError, 'must be finite, or worst given'):
      statistics.difference(values, reference)

  def test_one_seed(self):
    """Tells nothing."""
    got = statistics.difference([1.0], [9.0])
    self.assertEqual((got.mean, got.sign), (-8, 0))
    self.assertEqual(got.in_words('+.1f'), '-8.0 (no bound to no bound)')

  def test_words(self):
    found = statistics.Difference(0.0612, 0.04, 0.0799)
    self.assertEqual(found.in_words('+.2f'), '+0.06 (+0.04 to +0.08)')


class BestRateTest(parameterized.TestCase):
  @parameterized.parameters(
    ({0.1: [3, 9, 9], 1.0: [8, 7, 8], 2.0: [9, 9, 9]}, 1.0, ''),
    # A seed that diverged counts.
    ({0.1: [1, NEVER, NEVER], 1.0: [8, 7, 8], 2.0: [9, 9, 9]}, 1.0, ''),
    # Of equal medians the one with fewer that never get there, then the mean.
    ({0.1: [3, 5, NEVER], 1.0: [4, 5, 6], 2.0: [4, 5, 7]}, 1.0, ''),
    ({0.1: [NEVER] * 3, 1.0: [9, NEVER, NEVER], 2.0: [NEVER] * 3}, 1.0, ''),
    (
      {0.1: [1, 1], 1.0: [2, 2]},
      0.1,
      'the best is 0.1, the lowest rate tried: add 0.03 to --learning_rates',
    ),
    (
      {0.1: [2, 2], 1.0: [1, 1]},
      1.0,
      'the best is 1, the highest rate tried: add 3 to --learning_rates',
    ),
    (
      {0.1: [NEVER], 1.0: [NEVER]},
      0.1,
      '',  # no rate is better
    ),
    ({0.1: [2, 2]}, 0.1, ''),
  )
  def test_chosen(self, values, rate, advice):
    rows = [{'learning_rate': r, 'x': x} for r, x in values.items()]
    for order in (rows, rows[::-1]):
      found = statistics.best_rate(order, lambda row: row['x'])
      self.assertEqual(found.learning_rate, rate)
      self.assertEqual(found.values, tuple(values[rate]))
      self.assertEqual(found.advice, advice)


class WordsTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1, 2, 4], '.0f', '2 (1-4)'),
    ([1, 2], '+.1f', '+1.5 (+1.0 to +2.0)'),
    ([3, NEVER], '.0f', 'never (3-never)'),
    ([NEVER, NEVER], '.0f', 'never'),
    ([2, 2], '.2f', '2.00'),
  )
  def test_median_range(self, values, form, wanted):
    line = statistics.spread('x', values)
    self.assertEqual(statistics.median_range(line, 'x', form), wanted)

  def test_number(self):
    """None of a row is infinite."""
    self.assertEqual(statistics.number(None), NEVER)
    self.assertEqual(statistics.number(0.5), 0.5)

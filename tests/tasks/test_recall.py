"""Recall and induction: their layout, their randomness, their errors."""

import functools

import jax
import numpy as np
from absl.testing import parameterized

from mha_jax.tasks import InductionTask, RecallTask

BATCH = 97


@functools.partial(jax.jit, static_argnums=0)
def sample(task, key: jax.Array):
  return task.sample(key, BATCH)


def draw(task, seed: int = 0):
  """A batch as NumPy arrays: inputs, targets, weights."""
  batch = sample(task, jax.random.key(seed))
  return [np.asarray(x) for x in (batch.inputs, batch.targets, batch.weights)]


class RecallTest(parameterized.TestCase):
  TASK = RecallTask(num_pairs=5, num_queries=3, num_keys=7, num_values=11)

  def test_layout(self):
    """Pairs of different keys, a separator, keys asked once, their values."""
    inputs, targets, weights = draw(self.TASK)
    self.assertEqual(inputs.shape, (BATCH, 16))
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(inputs[:, 10], 0)
    np.testing.assert_array_equal(
      weights, np.tile([0] * 11 + [1, 0, 1, 0, 1], (BATCH, 1))
    )
    for row, wanted in zip(inputs, targets, strict=True):
      keys, values = row[:10:2], row[1:10:2]
      self.assertLen(set(keys.tolist()), 5)
      self.assertBetween(keys.min(), 1, 7)
      self.assertBetween(keys.max(), 1, 7)
      self.assertBetween(values.min(), 8, 18)
      self.assertBetween(values.max(), 8, 18)
      self.assertLen(set(row[11::2].tolist()), 3)
      value_of = dict(zip(keys.tolist(), values.tolist(), strict=True))
      asked = [value_of[key] for key in row[11::2].tolist()]
      self.assertEqual(wanted[11::2].tolist(), asked)

  def test_random(self):
    """Every key, value and place comes up; one key gives one batch."""
    inputs, _, _ = draw(self.TASK)
    self.assertEqual(set(inputs[:, :10:2].ravel()), set(range(1, 8)))
    self.assertEqual(set(inputs[:, 1:10:2].ravel()), set(range(8, 19)))
    places = [row[:10:2].tolist().index(row[11]) for row in inputs]
    self.assertEqual(set(places), set(range(5)))
    np.testing.assert_array_equal(inputs, draw(self.TASK)[0])
    self.assertTrue(np.any(inputs != draw(self.TASK, 1)[0]))

  def test_text(self):
    shown = [self.TASK.token_text(x) for x in (0, 1, 7, 8, 18)]
    self.assertEqual(shown, ['|', 'k0', 'k6', '0', '10'])
    self.assertEqual(self.TASK.vocab_size, 19)

  @parameterized.parameters(
    ({'num_queries': 9}, 'num_queries=9 exceeds num_pairs=8'),
    ({'num_keys': 7}, 'num_pairs=8 exceeds num_keys=7'),
    ({'num_values': 0}, 'num_values=0'),
  )
  def test_errors(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      RecallTask(**sizes)


class InductionTest(parameterized.TestCase):
  TASK = InductionTask(length=13, num_symbols=17, min_period=3, max_period=5)

  def test_layout(self):
    """What comes is what came a period before; before that nothing counts."""
    inputs, targets, weights = draw(self.TASK)
    self.assertEqual(inputs.shape, (BATCH, 13))
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    periods = (weights == 0).sum(axis=1)  # the last is the repeat's first
    self.assertEqual(set(periods.tolist()), {3, 4, 5})
    for row, wanted, counts, n in zip(
      inputs, targets, weights, periods, strict=True
    ):
      np.testing.assert_array_equal(counts, np.arange(13) >= n)
      sequence = np.append(row, wanted[-1])
      np.testing.assert_array_equal(sequence[n:], sequence[:-n])

  def test_default_periods(self):
    """From a quarter of the length to half of it."""
    self.assertEqual(InductionTask(length=22).periods, (5, 11))
    task = InductionTask(length=6, num_symbols=5, min_period=3)
    _, _, weights = draw(task)
    np.testing.assert_array_equal(weights, np.tile([0, 0, 0, 1, 1, 1], (97, 1)))

  @parameterized.parameters(
    ({'min_period': 40}, 'min_period=40'),
    ({'max_period': 64}, 'max_period=64'),
    ({'length': 1}, 'max_period=1'),
    ({'num_symbols': 0}, 'num_symbols=0'),
  )
  def test_errors(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      InductionTask(**sizes)

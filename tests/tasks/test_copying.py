"""The copy task: its layout, its randomness, its errors."""

import functools

import jax
import numpy as np
from absl.testing import parameterized

from mha_jax.tasks import CopyTask

PAD, SEP, FIRST = 0, 1, 2
TASKS = {
  'one_symbol': CopyTask(length=1, num_symbols=1),
  'fixed': CopyTask(length=7, num_symbols=5),
  'pairs': CopyTask(length=6, num_symbols=3, pairs=True),
  'variable': CopyTask(length=7, num_symbols=5, min_length=3),
  'variable_pairs': CopyTask(10, 3, min_length=4, pairs=True),
  'fixed_separator': CopyTask(7, 5, min_length=3, fixed_separator=True),
}
BATCH = 97


def named(tasks=TASKS):
  return parameterized.named_parameters(tasks.items())


@functools.partial(jax.jit, static_argnums=0)
def sample(task: CopyTask, key: jax.Array):
  return task.sample(key, BATCH)


def draw(task: CopyTask, seed: int = 0):
  """A batch as NumPy arrays: inputs, targets, weights."""
  batch = sample(task, jax.random.key(seed))
  return [np.asarray(x) for x in (batch.inputs, batch.targets, batch.weights)]


def lengths(inputs: np.ndarray) -> np.ndarray:
  """The number of symbols before the separator, or the padding before it."""
  return np.argmax(inputs < FIRST, axis=1)


def layout(task: CopyTask, symbols: np.ndarray):
  """Inputs, targets and weights of one example, spelt out from its symbols."""
  n, count = len(symbols), task.num_symbols
  answer = list(symbols)
  if task.pairs:
    pairs = [(symbols[i], symbols[i + n // 2]) for i in range(n // 2)]
    answer = [
      FIRST + count + count * (a - FIRST) + (b - FIRST) for a, b in pairs
    ]
  gap = task.fixed_separator * (task.length - n)
  sequence = [*symbols, *[PAD] * gap, SEP, *answer]
  counts = [0] * (n + gap + 1) + [1] * len(answer)
  missing = task.max_len + 1 - len(sequence)
  sequence, counts = sequence + [PAD] * missing, counts + [0] * missing
  return sequence[:-1], sequence[1:], counts[1:]


class LayoutTest(parameterized.TestCase):
  def test_docstring_example(self):
    """c a b | c a  ->  - - - c a b."""
    inputs, targets, weights = draw(CopyTask(length=3, num_symbols=3))
    row = int(np.argmax([len({*x[:3]}) == 3 for x in inputs]))
    c, a, b = inputs[row, :3]
    np.testing.assert_array_equal(inputs[row], [c, a, b, SEP, c, a])
    np.testing.assert_array_equal(targets[row], [a, b, SEP, c, a, b])
    np.testing.assert_array_equal(weights[row], [0, 0, 0, 1, 1, 1])

  def test_docstring_example_of_pairs(self):
    """c a b d | cb ad: answer i names x_i and x_{i + L/2}."""
    task = CopyTask(length=4, num_symbols=4, pairs=True)
    inputs, targets, weights = draw(task)
    c, a, b, d = inputs[:, :4].T - FIRST
    cb, ad = FIRST + 4 + 4 * c + b, FIRST + 4 + 4 * a + d
    np.testing.assert_array_equal(targets[:, -2:], np.stack([cb, ad], 1))
    np.testing.assert_array_equal(inputs[:, 4:], np.stack([0 * c + SEP, cb], 1))
    np.testing.assert_array_equal(weights, [[0, 0, 0, 0, 1, 1]] * BATCH)

  @named()
  def test_every_row_is_its_symbols_separator_and_answer(self, task):
    """Inputs, targets and weights follow from the symbols, to the token."""
    inputs, targets, weights = draw(task)
    for row, n in enumerate(lengths(inputs)):
      symbols = inputs[row, :n]
      self.assertTrue(np.all(symbols >= FIRST))
      self.assertTrue(np.all(symbols < FIRST + task.num_symbols))
      wanted = layout(task, symbols)
      np.testing.assert_array_equal(inputs[row], wanted[0])
      np.testing.assert_array_equal(targets[row], wanted[1])
      np.testing.assert_array_equal(weights[row], wanted[2])

  @named()
  def test_shapes_and_dtypes(self, task):
    """(b, max_len): int32 tokens, float32 weights."""
    for array, dtype in zip(
      draw(task), ('int32', 'int32', 'float32'), strict=True
    ):
      self.assertEqual(array.shape, (BATCH, task.max_len))
      self.assertEqual(array.dtype, dtype)

  @parameterized.parameters(
    (CopyTask(7, 5), 2 + 5, 7 + 1 + 7 - 1),
    (CopyTask(7, 5, min_length=2), 2 + 5, 7 + 1 + 7 - 1),
    (CopyTask(6, 3, pairs=True), 2 + 3 + 9, 6 + 1 + 3 - 1),
  )
  def test_sizes(self, task, vocab_size, max_len):
    """2 special tokens, the symbols, their pairs; source, separator, answer."""
    self.assertEqual((task.vocab_size, task.max_len), (vocab_size, max_len))

  @named()
  def test_the_last_token_of_the_vocabulary_occurs(self, task):
    """The vocabulary has no token too many and none too few."""
    tokens = np.concatenate([draw(task, i)[1] for i in range(9)])
    self.assertEqual(tokens.max(), task.vocab_size - 1)


class RandomnessTest(parameterized.TestCase):
  @parameterized.parameters(
    ('variable', (3, 4, 5, 6, 7)), ('variable_pairs', (4, 6, 8, 10))
  )
  def test_lengths_cover_min_to_max(self, name, wanted):
    """Every allowed length occurs, about equally often, and no other."""
    found = np.concatenate(
      [lengths(draw(TASKS[name], seed)[0]) for seed in range(5)]
    )
    values, counts = np.unique(found, return_counts=True)
    np.testing.assert_array_equal(values, wanted)
    self.assertLess(counts.max(), 1.5 * counts.min())

  @named({k: v for k, v in TASKS.items() if k != 'one_symbol'})
  def test_symbols_are_uniform_and_rows_differ(self, task):
    """Every symbol occurs about as often; no two seeds or rows in step."""
    inputs = draw(task)[0]
    first, second = inputs[:, 0], inputs[:, 1]
    _, counts = np.unique(inputs[:, :3], return_counts=True)
    self.assertLen(counts, task.num_symbols)
    self.assertLess(counts.max(), 1.6 * counts.min())
    self.assertLess(np.mean(first == second), 0.6)

  @named({k: v for k, v in TASKS.items() if k != 'one_symbol'})
  def test_a_batch_is_a_function_of_the_key(self, task):
    """The same key gives the same batch, another key another one."""
    one, same, other = draw(task, 3), draw(task, 3), draw(task, 4)
    for a, b in zip(one, same, strict=True):
      np.testing.assert_array_equal(a, b)
    self.assertTrue(np.any(one[0] != other[0]))

  @named({'variable': TASKS['variable_pairs']})
  def test_jit_and_vmap(self, task):
    """Compiled calls give the same tokens, one key at a time or mapped."""
    keys = jax.random.split(jax.random.key(1), 2)
    mapped = jax.jit(jax.vmap(lambda key: task.sample(key, BATCH)))(keys)
    for i, key in enumerate(keys):
      one = jax.tree.map(lambda x, i=i: x[i], mapped)
      jax.tree.map(np.testing.assert_array_equal, one, sample(task, key))

  def test_tasks_are_hashable(self):
    """Equal tasks are one key, so that jit caches by them."""
    self.assertEqual(hash(CopyTask(5)), hash(CopyTask(5)))
    self.assertNotEqual(CopyTask(5), CopyTask(5, min_length=5))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'length': 0}, 'length=0 must be a positive'),
    ({'num_symbols': -3}, 'num_symbols=-3 must be a positive'),
    ({'min_length': 0}, 'min_length=0 must be a positive'),
    ({'length': 5, 'min_length': 6}, 'min_length=6 exceeds length=5; choose'),
    ({'length': 5, 'pairs': True}, 'length=5 must be even .*nearest: 4, 6'),
    (
      {'length': 8, 'min_length': 3, 'pairs': True},
      'min_length=3 must be even .*nearest: 2, 4',
    ),
  )
  def test_errors(self, options, message):
    """They name the argument, the value and the remedy."""
    with self.assertRaisesRegex(ValueError, message):
      CopyTask(**options)

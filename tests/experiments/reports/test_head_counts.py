"""What a sweep shows, in numbers and words."""

import dataclasses
import io
import math

from absl.testing import parameterized
from rich.console import Console

from experiments.reports import head_counts, statistics

NEVER = math.inf


def summary(n_heads: int, steps, losses) -> head_counts.Summary:
  """A summary of three seeds from the ends of their steps and final losses."""
  found = []
  line = {'n_heads': n_heads, 'head_dim': 64 // n_heads, 'params': 12345}
  line |= {'seeds': 3, 'steps': 100, 'learning_rates': '0.01 0.1'}
  for name, ends in (('final_loss', losses), ('steps_to_threshold', steps)):
    low, high = ends
    values = (low, high if math.isinf(high) else (low + high) / 2, high)
    line |= statistics.spread(name, values)
    found.append(statistics.Best({'learning_rate': 0.01}, values, ''))
  line |= statistics.spread('final_accuracy', (0.5, 0.75))
  line |= {'learning_rate': 0.01, 'speed_learning_rate': 0.1}
  return head_counts.Summary(n_heads, *found, 3.5, line)


def sweep(*points) -> list[head_counts.Summary]:
  """Summaries of 1, 2, 4, ... heads from (steps, losses)."""
  return [summary(2**i, *point) for i, point in enumerate(points)]


# Of three seeds: a pair of ends that differ by 2 is told from one 20 away.
LOW, MIDDLE, HIGH = (10, 12), (30, 32), (50, 52)
SOLVED, UNSOLVED, BAD = (0.001, 0.002), (0.2, 0.21), (0.8, 0.81)


class NumbersTest(parameterized.TestCase):
  @parameterized.parameters(
    ([3.0, 2.0, 1.0, 0.4, 0.6, 0.3], 4.0),
    ([0.4, 2.0], 1.0),
    ([2.0, 1.0, 0.499], 3.0),
    ([2.0, 1.0, 0.5], NEVER),
    ([None, 0.1], 2.0),
  )
  def test_steps_to(self, losses, wanted):
    """The first step below the threshold, counted from 1."""
    self.assertEqual(head_counts.steps_to(losses, 0.5), wanted)

  def test_summarise(self):
    """Each number at its own best rate; of four seeds the middle of two."""
    row = {
      'n_heads': 2,
      'head_dim': 32,
      'params': 99,
      'learning_rate': 0.1,
      'seeds': [0, 1, 2, 3],
      'final_loss': [0.4, 0.1, 0.2, 0.3],
      'final_accuracy': [0.5, 0.9, 0.8, 0.7],
      'steps_per_s': 7.0,
      'loss': [[3, 2, 1.5], [1, 1, 1], [3, 1, 1], [3, 3, 3]],
    }
    fast = row | {
      'learning_rate': 0.3,
      'final_loss': [0.01, None, None, None],
      'loss': [[3, 2, 1], [1, 1, 1], [3, 1, 1], [3, None, None]],
    }
    got = head_counts.summarise([row, fast], 1.5)
    self.assertEqual(got.worst, 3)
    self.assertEqual(got.final.values, (0.4, 0.1, 0.2, 0.3))
    self.assertEqual(got.speed.values, (3, 1, 2, NEVER))
    self.assertEqual(
      got.line,
      {
        'n_heads': 2,
        'head_dim': 32,
        'params': 99,
        'seeds': 4,
        'steps': 3,
        'learning_rates': '0.1 0.3',
        'learning_rate': 0.1,
        'final_loss_median': 0.25,
        'final_loss_min': 0.1,
        'final_loss_max': 0.4,
        'final_accuracy_median': 0.75,
        'final_accuracy_min': 0.5,
        'final_accuracy_max': 0.9,
        'speed_learning_rate': 0.3,
        'steps_to_threshold_median': 2.5,
        'steps_to_threshold_min': 1.0,
        'steps_to_threshold_max': NEVER,
        'steps_per_s': 7.0,
      },
    )


class TableTest(parameterized.TestCase):
  def draw(self, summaries) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(head_counts.table(summaries, 0.05))
    return out.getvalue()

  def test_cells(self):
    """A median with its range below, the rates, and the word never."""
    text = self.draw(sweep((LOW, SOLVED), ((30, NEVER), BAD)))
    lines = text.splitlines()
    self.assertLessEqual(max(map(len, lines)), 80)
    (one,) = [i for i, x in enumerate(lines) if x.split()[:2] == ['1', '64']]
    self.assertEqual(
      lines[one].split(),
      ['1', '64', '12,345', '0.01', '0.0015', '0.62', '0.1', '11'],
    )
    self.assertEqual(
      lines[one + 1].split(), ['(0.0010-0.0020)', '(0.50-0.75)', '(10-12)']
    )
    self.assertIn('never', text)
    self.assertIn('(30-never)', text)
    self.assertIn('loss < 0.05', text)


class RatesTest(parameterized.TestCase):
  def test_whose_best_is_at_an_end(self):
    """Named once for each end; nobody else's."""
    found = sweep((LOW, SOLVED), (LOW, SOLVED), (LOW, SOLVED))
    best = [dataclasses.replace(x.final, advice='the best is X') for x in found]
    found[0] = dataclasses.replace(found[0], final=best[0], speed=best[0])
    found[2] = dataclasses.replace(found[2], final=best[2])
    self.assertEqual(
      head_counts.rates(found),
      'Learning rates tried: 0.01, 0.1. By final loss, for n_heads=1,4 the '
      'best is X. By speed, for n_heads=1 the best is X.',
    )
    self.assertEqual(
      head_counts.rates(sweep((LOW, SOLVED))),
      'Learning rates tried: 0.01, 0.1.',
    )

  def test_a_rate_that_did_not_finish(self):
    """All rates are named, and who lacks one."""
    found = sweep((LOW, SOLVED), (LOW, SOLVED))
    found[0].line['learning_rates'] = '0.01'
    self.assertEqual(
      head_counts.rates(found),
      'Learning rates tried: 0.01, 0.1. Not all of them finished for '
      'n_heads=1.',
    )


class VerdictTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('hurt', (LOW, MIDDLE, HIGH), 'hurt in speed'),
    ('help', (HIGH, MIDDLE, LOW), 'help in speed'),
    ('plateau', (LOW, LOW, LOW), 'plateau in speed'),
    ('overlap', (LOW, (12, 22), (15, 30)), 'plateau in speed'),
    ('uneven', ((10, 30), (30, 32)), 'plateau in speed'),
    ('help_plateau', (HIGH, LOW, LOW), 'help up to 2, then plateau in speed'),
    ('help_hurt', (MIDDLE, LOW, HIGH), 'help up to 2, then hurt in speed'),
    (
      'all_three',
      (MIDDLE, LOW, LOW, HIGH),
      'help up to 2, then plateau up to 4, then hurt in speed',
    ),
    (
      'a_dent',
      (LOW, HIGH, LOW, MIDDLE, LOW),
      'plateau (but 2 and 8 are worse) in speed',
    ),
    (
      'a_dent_before_the_end',
      (MIDDLE, LOW, HIGH, LOW, HIGH),
      'help up to 2, then plateau up to 8, then hurt (but 4 is worse) in speed',
    ),
    ('plateau_hurt', (LOW, LOW, HIGH), 'plateau up to 2, then hurt in speed'),
    ('never_at_last', (LOW, (NEVER, NEVER)), 'hurt in speed'),
    ('never_at_first', ((NEVER, NEVER), LOW), 'help in speed'),
    ('some_never', (LOW, (15, NEVER)), 'plateau in speed'),
  )
  def test_speed(self, steps, words):
    """Fewer steps are better; an interval around 0 is a plateau."""
    text = head_counts.verdict(sweep(*((s, SOLVED) for s in steps)), 0.05)
    self.assertStartsWith(text, f'More heads {words}')
    self.assertIn('plateau in the end', text)
    self.assertEqual(text.count('. '), 0)
    self.assertEndsWith(text, '.')

  @parameterized.named_parameters(
    ('hurt', (SOLVED, UNSOLVED), 'and hurt in the end'),
    ('help', (BAD, UNSOLVED), 'and help in the end'),
    ('plateau', (BAD, BAD), 'and plateau in the end'),
    ('solved', ((0.03, 0.04), SOLVED), 'and plateau in the end'),
    (
      'help_hurt',
      (UNSOLVED, SOLVED, BAD),
      'and help up to 2, then hurt in the end',
    ),
  )
  def test_end(self, losses, words):
    """Final losses that all lie below the threshold are alike."""
    text = head_counts.verdict(sweep(*((LOW, x) for x in losses)), 0.05)
    self.assertIn(words, text)

  def test_numbers(self):
    """It quotes the fewest heads, the best and the most."""
    text = head_counts.verdict(
      sweep((MIDDLE, SOLVED), (LOW, SOLVED), ((70, NEVER), BAD)), 0.05
    )
    for part in (
      'steps to loss < 0.05',
      '31 (30-32) with 1 head,',
      '11 (10-12) with 2 heads',
      'never (70-never) with 4 heads',
      '0.8050 (0.8000-0.8100) with 4 heads',
    ):
      self.assertIn(part, text)

  def test_never(self):
    """Where no head count gets there, nothing is said of speed."""
    never = (NEVER, NEVER)
    text = head_counts.verdict(sweep((never, UNSOLVED), (never, BAD)), 0.05)
    self.assertStartsWith(text, 'More heads hurt in the end')
    self.assertIn('no head count reaches loss < 0.05', text)

  def test_one_seed(self):
    """Nothing is said without a spread."""
    found = sweep((LOW, SOLVED), (HIGH, BAD))
    for one in found:
      one.line['seeds'] = 1
    text = head_counts.verdict(found, 0.05)
    self.assertStartsWith(text, 'One seed alone has no spread')

  def test_one_head_count(self):
    """Shows no trend."""
    text = head_counts.verdict(sweep((LOW, SOLVED)), 0.05)
    self.assertStartsWith(text, 'One head count alone shows no trend')

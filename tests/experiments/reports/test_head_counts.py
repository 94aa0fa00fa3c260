"""What a sweep shows, in numbers and words."""

import io
import math

from absl.testing import parameterized
from rich.console import Console

from experiments.reports import head_counts

NEVER = math.inf


def summary(n_heads: int, steps, losses) -> head_counts.Summary:
  """A summary from (least, greatest) steps and final losses."""
  found = {'n_heads': n_heads, 'head_dim': 64 // n_heads, 'params': 12345}
  found |= {'seeds': 3, 'steps_per_s': 10.0}
  for name, (low, high) in (
    ('steps_to_threshold', steps),
    ('final_loss', losses),
    ('final_accuracy', (0.5, 0.75)),
  ):
    middle = high if math.isinf(high) else (low + high) / 2
    found |= {f'{name}_min': low, f'{name}_max': high}
    found[f'{name}_median'] = middle
  return found


def sweep(*points) -> list[head_counts.Summary]:
  """Summaries of 1, 2, 4, ... heads from (steps, losses)."""
  return [summary(2**i, *point) for i, point in enumerate(points)]


LOW, MIDDLE, HIGH = (10, 20), (30, 40), (50, 60)
SOLVED, UNSOLVED, BAD = (0.001, 0.002), (0.2, 0.3), (0.8, 0.9)


class NumbersTest(parameterized.TestCase):
  @parameterized.parameters(
    ([3.0, 2.0, 1.0, 0.4, 0.6, 0.3], 4.0),
    ([0.4, 2.0], 1.0),
    ([2.0, 1.0, 0.499], 3.0),
    ([2.0, 1.0, 0.5], NEVER),
    ([math.nan, 0.1], 2.0),
  )
  def test_steps_to(self, losses, wanted):
    """The first step below the threshold, counted from 1."""
    self.assertEqual(head_counts.steps_to(losses, 0.5), wanted)

  def test_summarise(self):
    """Median, least and greatest over seeds; of four the middle of two."""
    row = {
      'n_heads': 2,
      'head_dim': 32,
      'params': 99,
      'seeds': [0, 1, 2, 3],
      'final_loss': [0.4, 0.1, 0.2, 0.3],
      'final_accuracy': [0.5, 0.9, 0.8, 0.7],
      'steps_per_s': 7.0,
      'loss': [[3, 2, 1], [1, 1, 1], [3, 1, 1], [3, 3, 3]],
    }
    self.assertEqual(
      head_counts.summarise(row, 1.5),
      {
        'n_heads': 2,
        'head_dim': 32,
        'params': 99,
        'seeds': 4,
        'steps': 3,
        'final_loss_median': 0.25,
        'final_loss_min': 0.1,
        'final_loss_max': 0.4,
        'final_accuracy_median': 0.75,
        'final_accuracy_min': 0.5,
        'final_accuracy_max': 0.9,
        'steps_to_threshold_median': 2.5,
        'steps_to_threshold_min': 1.0,
        'steps_to_threshold_max': NEVER,
        'steps_per_s': 7.0,
      },
    )


class TableTest(parameterized.TestCase):
  def draw(self, summaries, failed=()) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(head_counts.table(summaries, failed, 0.05))
    return out.getvalue()

  def test_cells(self):
    """A median with its range below, the words never and failed."""
    text = self.draw(
      sweep((LOW, SOLVED), ((30, NEVER), BAD)),
      [{'n_heads': 8, 'head_dim': 8}],
    )
    lines = text.splitlines()
    self.assertLessEqual(max(map(len, lines)), 80)
    (one,) = [i for i, x in enumerate(lines) if x.split()[:2] == ['1', '64']]
    self.assertEqual(
      lines[one].split(), ['1', '64', '12,345', '0.0015', '0.62', '15', '10.0']
    )
    self.assertEqual(
      lines[one + 1].split(), ['(0.0010-0.0020)', '(0.50-0.75)', '(10-20)']
    )
    self.assertIn('never', text)
    self.assertIn('(30-never)', text)
    self.assertRegex(text, r'\n +8 +8 +failed')
    self.assertIn('loss < 0.05', text)

  def test_no_speed(self):
    """Too short a run has none."""
    summaries = sweep((LOW, SOLVED))
    summaries[0]['steps_per_s'] = None
    self.assertIn(' - ', self.draw(summaries))


class VerdictTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('hurt', (LOW, MIDDLE, HIGH), 'hurt in speed'),
    ('help', (HIGH, MIDDLE, LOW), 'help in speed'),
    ('plateau', (LOW, LOW, LOW), 'plateau in speed'),
    ('overlap', (LOW, (12, 22), (15, 30)), 'plateau in speed'),
    ('touching', ((10, 20), (20, 30)), 'plateau in speed'),
    ('help_plateau', (HIGH, LOW, LOW), 'help up to 2, then plateau in speed'),
    ('help_hurt', (MIDDLE, LOW, HIGH), 'help up to 2, then hurt in speed'),
    ('plateau_hurt', (LOW, LOW, HIGH), 'plateau up to 2, then hurt in speed'),
    ('never_at_last', (LOW, (NEVER, NEVER)), 'hurt in speed'),
    ('never_at_first', ((NEVER, NEVER), LOW), 'help in speed'),
    ('some_never', (LOW, (15, NEVER)), 'plateau in speed'),
  )
  def test_speed(self, steps, words):
    """Fewer steps are better; ranges that overlap are alike."""
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
      '35 (30-40) with 1 head,',
      '15 (10-20) with 2 heads',
      'never (70-never) with 4 heads',
      '0.8500 (0.8000-0.9000) with 4 heads',
    ):
      self.assertIn(part, text)

  def test_never(self):
    """Where no head count gets there, nothing is said of speed."""
    never = (NEVER, NEVER)
    text = head_counts.verdict(sweep((never, UNSOLVED), (never, BAD)), 0.05)
    self.assertStartsWith(text, 'More heads hurt in the end')
    self.assertIn('no head count reaches loss < 0.05', text)

  def test_one_head_count(self):
    """Shows no trend."""
    text = head_counts.verdict(sweep((LOW, SOLVED)), 0.05)
    self.assertStartsWith(text, 'One head count alone shows no trend')

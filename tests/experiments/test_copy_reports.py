"""What is told of heads in the copy task, from numbers made by hand."""

import numpy as np
from absl.testing import parameterized
from copy_rows import distinct, diverge, row

from experiments.reports import copying as reports
from experiments.reports import copying_words


def three(line: dict, name: str) -> list[float]:
  return [line[f'{name}_{x}'] for x in ('median', 'min', 'max')]


class SummaryTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.51, 0.01, 'carries'),
    (0.5, 0.01, 'other'),
    (0.51, 0.009, 'spare'),
    (0.09, 0.009, 'idle'),
    (0.09, 0.01, 'other'),
    (0.1, 0.0, 'other'),
  )
  def test_role(self, attention, cost, name):
    self.assertEqual(reports.role(attention, cost), name)

  def test_line(self):
    """Numbers at the end; margins of the best head, ranks over heads."""
    line = reports.summarise(distinct()).line
    for name, wanted in {
      'final_loss': [0.02, 0.01, 0.04],
      'accuracy': [0.97, 0.94, 0.99],
      'rank': [3.75, 1.5, 6],
      'margin': [5, 2, 7],
      'margin_std': [0.5, 0.2, 0.7],
      'carries': [1, 1, 1],
      'spare': [0, 0, 1],
      'idle': [0, 0, 1],
      'other': [0, 0, 1],
      'steps_to_threshold': [12, 11, 14],
    }.items():
      self.assertEqual(three(line, name), wanted, name)
    self.assertEqual(line['learning_rate'], 0.01)
    self.assertEqual(line['speed_learning_rate'], 0.1)
    self.assertEqual((line['seeds'], line['diverged']), (3, 0))

  def test_heads(self):
    """A line of each, at the end."""
    heads = reports.summarise(distinct()).heads
    names = ('seed', 'head', 'role', 'rank', 'margin', 'margin_std')
    self.assertEqual(
      [tuple(x[name] for name in names) for x in heads],
      [
        (5, 0, 'idle', 1, 1, 0.1),
        (5, 1, 'carries', 2, 2, 0.2),
        (6, 0, 'carries', 3, 7, 0.7),
        (6, 1, 'other', 4.5, 3, 0.3),
        (7, 0, 'carries', 5, 4, 0.4),
        (7, 1, 'spare', 7, 5, 0.5),
      ],
    )

  @parameterized.parameters(0, 1, 2)
  def test_diverged(self, seed):
    """Numbers of heads are those of the other seeds; losses are infinite."""
    summary = reports.summarise(diverge(distinct(), seed))
    line, left = summary.line, [i for i in range(3) if i != seed]
    self.assertEqual((line['seeds'], line['diverged']), (3, 1))
    for name, values in {
      'rank': np.asarray([1.5, 3.75, 6])[left],
      'margin': np.asarray([2, 7, 5])[left],
      'idle': np.asarray([1, 0, 0])[left],
    }.items():
      wanted = [np.median(values), min(values), max(values)]
      self.assertEqual(three(line, name), wanted, name)
    self.assertEqual(line['final_loss_max'], np.inf)
    self.assertEqual(line['steps_to_threshold_max'], np.inf)
    self.assertEqual(line['accuracy_min'], 0.1)
    roles = [x['role'] for x in summary.heads]
    self.assertEqual(roles[2 * seed : 2 * seed + 2], ['diverged'] * 2)
    self.assertEqual(roles.count('diverged'), 2)

  def test_table(self):
    """No cell of it is nan, also where no seed has numbers."""
    whole = reports.summarise(distinct())
    some = reports.summarise(diverge(distinct(), 1))
    none = distinct()
    for seed in range(3):
      none = diverge(none, seed)
    table = reports.table([whole, some, reports.summarise(none)])
    columns = [list(x.cells) for x in table.columns]
    names = [str(x.header).partition('\n')[0] for x in table.columns]
    cells = dict(zip(names, columns, strict=True))
    self.assertNotIn('nan', str(columns))
    self.assertEqual(
      cells['rank'], ['3.8\n(1.5-6.0)', '3.8\n(1.5-6.0)', 'diverged']
    )
    self.assertEqual(cells['carry'], ['1', '1', 'diverged'])
    self.assertEqual(cells['other'], ['0\n(0-1)', '0', 'diverged'])


def verdicts(*rows: dict) -> list[str]:
  return copying_words.verdicts([reports.summarise(x) for x in rows])


class WordsTest(parameterized.TestCase):
  def test_verdicts(self):
    """Sentences that numbers made by hand settle."""
    heads, rank, odds, speed, scales = verdicts(
      row(1, 'sqrt', (10, 11, 12)),
      row(1, '1', (40, 41, 42)),
      row(16, 'sqrt', (30, 31, 32), attention=0.05, cost=0.0),
      row(16, '1', (20, 21, 22)),
      row(16, '2', (51, 51, 51)),
    )
    self.assertIn('the accuracy is 1.00 with 1, 1.00 with 16 heads', heads)
    self.assertIn('alone costs 0.01 of accuracy are 1 of 1, 0 of 16;', heads)
    self.assertIn('idle (< 0.1, less lost) 0 of 1, 16 of 16', heads)
    self.assertIn('other 0 of 1, 0 of 16.', heads)
    self.assertIn('2.0 with 64 features a head, 2.0 with 4', rank)
    self.assertIn('+3.0 with 64 features', odds)
    self.assertIn('16 heads of 4 features against 1 of 64: +20', speed)
    self.assertEndsWith(speed, 'slower.')
    self.assertIn('64 features, 1 (of 1 tried) against 0.125: +30', scales)
    self.assertIn('4 features, 1 (of 2 tried) against 0.5: -10', scales)
    self.assertIn('faster', scales)
    self.assertEndsWith(scales, "over the same seeds, which favours 'faster'.")

  def test_one_other_scale(self):
    """None was picked."""
    scales = verdicts(row(1, 'sqrt', (10, 11)), row(1, '1', (40, 41)))[-1]
    self.assertNotIn('favours', scales)

  def test_never(self):
    *_, speed = verdicts(row(1, 'sqrt', (51, 51)), row(4, 'sqrt', (51, 51)))
    self.assertEndsWith(speed, 'neither gets there.')

  @parameterized.parameters(
    ({'attention': 0.9, 'cost': 0.0}, 'are 0 of 4; spare.* are 4 of 4'),
    ({'attention': 0.3, 'cost': 0.2}, 'are 0 of 4; .*other 4 of 4'),
  )
  def test_none_carries_alone(self, numbers, wanted):
    """The model copies all the same, and the sentence shows it."""
    heads = verdicts(row(4, 'sqrt', (10, 11), **numbers))[0]
    self.assertRegex(heads, f'accuracy is 1.00 with 4 heads.*{wanted}')

  def test_diverged(self):
    whole, some = row(1, 'sqrt', (1, 1, 1)), diverge(distinct(), 1)
    *sentences, last = verdicts(whole, some)
    self.assertStartsWith(
      last, 'Diverged: 1 of 3 seeds with n_heads=2 at scale sqrt; '
    )
    self.assertNotIn('nan', ' '.join(sentences))
    self.assertNotIn('Diverged', ' '.join(verdicts(whole)))

  def test_advice(self):
    """Both rates that are best, each where it is the last one."""
    found = copying_words.advice([reports.summarise(distinct())])
    self.assertEqual(
      found,
      [
        'For n_heads=2 at scale sqrt by final loss the best is 0.01, the '
        'lowest rate tried: add 0.003 to --learning_rates.',
        'For n_heads=2 at scale sqrt by speed the best is 0.1, the highest '
        'rate tried: add 0.3 to --learning_rates.',
      ],
    )
    alike = distinct()
    alike['rates'][0]['loss'] = [[0.01] * 50] * 3
    (both,) = copying_words.advice([reports.summarise(alike)])
    self.assertIn('by final loss and speed the best is 0.01', both)

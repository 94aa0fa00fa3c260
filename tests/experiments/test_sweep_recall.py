"""The sweep over associative recall: its models, its sentences, its errors."""

import csv
import json
import pathlib
import struct
import tempfile
from unittest import mock

import numpy as np
import scripts
from absl.testing import parameterized
from scipy import stats

from configs import sweep_recall as recall_config
from experiments import sweep_recall
from experiments.figures import recall as figures
from experiments.harness import points
from experiments.reports import recall
from mha_jax.tasks import RecallTask

CACHES = {
  # name: cached elements a token of two layers at d = 32, heads of 32 / h
  'MHA 1 head': 128,
  'MHA 2 heads': 128,
  'MHA 4 heads': 128,
  'MQA 4 heads': 32,
  'MLA 4 heads': 2 * (8 + 4),
  'GTA 4 heads': 2 * (8 + 4),
}


class SweepRecallTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def call(self, *more: str) -> scripts.Result:
    return scripts.call(
      sweep_recall,
      '--config=configs/sweep_recall.py:tiny',
      f'--workdir={self.workdir}',
      '--seeds=3',
      '--learning_rates=0.003',
      *more,
    )

  def stub(self, accuracies):
    """Training that gives each model the accuracies of its labels, by seed.

    The loss is 1 - accuracy, and infinite where there is none.
    """

    def train(point):
      found = accuracies(point.labels)
      steps = point.experiment.train.steps
      return {
        'params': points.num_params(point.experiment),
        'steps_per_s': 1.0,
        'final_loss': [None if x is None else 1 - x for x in found],
        'final_accuracy': found,
        'loss': [[3.0] * steps] * len(found),
        'accuracy': [[0.0] * steps] * len(found),
      }

    def train_group(group, request):
      del request
      return [train(point) for point in group]

    return mock.patch.object(points, 'train_group', train_group)

  def rows(self) -> list[dict]:
    text = (self.workdir / 'results.jsonl').read_text()
    return [json.loads(line) for line in text.splitlines()]

  def lines(self) -> list[dict]:
    text = (self.workdir / 'results.csv').read_text()
    return list(csv.DictReader(text.splitlines()))

  def test_numbers(self):
    """Sizes of every model; accuracies and paired differences; sentences."""

    def accuracies(labels):
      name, d, n = (labels[x] for x in ('variant', 'd_model', 'pairs'))
      if name.startswith('MHA 4'):
        return [0.5, 0.6, 0.7] if d == 16 else [0.98, 0.99, 1.0]
      if name.startswith('MQA'):  # less for each seed, far within the spread
        return [0.4, 0.51, 0.6] if d == 16 else [0.98, 0.99, 1.0]
      if name.startswith('MLA'):
        return [0.9, 0.99, 1.0] if n == 3 else [0.1, 0.2, 0.3]
      return [0.5, 0.6, 0.7]

    with self.stub(accuracies):
      result = self.call('--d_model=32,16', '--pairs=3,5')
    self.assertEqual(result.code, 0, result)
    for text in (
      '3 pairs: the smallest d_model with a median accuracy of 0.99 or more is '
      '16 (MLA 4 heads), 32 (MHA 4 heads, MQA 4 heads), none tried (MHA 1 '
      'head, MHA 2 heads, GTA 4 heads).',
      '5 pairs: the smallest d_model with a median accuracy of 0.99 or more is '
      '32 (MHA 4 heads, MQA 4 heads), none tried (MHA 1 head, MHA 2 heads, '
      'MLA 4 heads, GTA 4 heads).',
      # More for each seed is told apart as well as less.
      '3 pairs: not told apart from MHA 4 heads: MHA 1 head, MHA 2 heads, GTA '
      '4 heads (d_model = 16), MQA 4 heads, MLA 4 heads (d_model = 32).',
      '5 pairs: not told apart from MHA 4 heads: MHA 1 head, MHA 2 heads, GTA '
      '4 heads (d_model = 16), MQA 4 heads (d_model = 32).',
      '0.51 (0.40-0.60)',
    ):
      self.assertIn(text, result.out)
    lines = self.lines()
    self.assertLen(lines, 4 * len(CACHES))
    wide = [x for x in lines if x['d_model'] == '32' and x['pairs'] == '3']
    self.assertEqual(
      {x['variant']: int(x['cache_elements']) for x in wide}, CACHES
    )
    for line in lines:
      n, d = int(line['pairs']), int(line['d_model'])
      for name, size in (('pairs', n), ('keys', 2 * n), ('values', 2 * n)):
        self.assertEqual(int(line[f'task.num_{name}']), size)
      self.assertEqual(int(line['task.num_queries']), n)
      self.assertEqual(int(line['model.attention.d_model']), d)
      heads = int(line['variant'].split()[1])
      self.assertEqual(int(line['model.attention.num_heads']), heads)
      kind = line['variant'].split()[0].lower()
      self.assertEqual(line['model.attention.kind'], kind)
      self.assertEqual(line['model.learned_positions'], 'False')
    found = [
      float(lines[3][f'difference_{x}']) for x in ('mean', 'low', 'high')
    ]
    each = [-0.1, -0.09, -0.1]
    interval = stats.t.interval(0.98, 2, np.mean(each), stats.sem(each))
    np.testing.assert_allclose(found, [np.mean(each), *interval], rtol=1e-5)
    self.assertEqual(result.files, scripts.names(self.workdir))

  def test_best_rate(self):
    """Judged by loss; a rate at the end is named with where it was."""

    def accuracies(labels):
      rate = labels['learning_rate']
      if labels['variant'] == 'GTA 4 heads':
        return [None] * 3 if rate == 0.1 else [0.3 + rate] * 3
      best = 0.01 if labels['d_model'] == 32 else 0.1
      return [0.9 if rate == best else 0.2] * 3

    with self.stub(accuracies):
      result = self.call('--d_model=16,32', '--learning_rates=0.1,0.01,0.001')
    self.assertEqual(result.code, 0, result)
    rates = {
      (x['variant'], x['d_model']): float(x['learning_rate'])
      for x in self.lines()
    }
    self.assertEqual(rates['MQA 4 heads', '32'], 0.01)
    self.assertEqual(rates['MQA 4 heads', '16'], 0.1)
    self.assertEqual(rates['GTA 4 heads', '16'], 0.01)
    self.assertIn(
      'MLA 4 heads (2 pairs, d_model = 16) the best is 0.1, the highest rate '
      'tried: add 0.3 to --learning_rates.',
      result.out,
    )
    self.assertNotIn('lowest', result.out)

  def test_one_seed_and_a_failure(self):
    """Nothing is told apart by one seed; what failed leaves the rest."""

    def accuracies(labels):
      if labels['variant'] == 'MHA 4 heads':
        raise RuntimeError('out of luck')
      return [1.0]

    with self.stub(accuracies):
      result = self.call('--seeds=1')
    self.assertEqual(result.code, 1, result)
    self.assertIn(
      'MHA 4 heads, 2 pairs, d_model=16 at 0.003 failed: RuntimeError: out',
      result.out,
    )
    self.assertIn('One seed alone', result.out)
    self.assertNotIn('told apart from', result.out)
    self.assertLen(self.lines(), len(CACHES) - 1)
    self.assertNotIn('difference_mean', self.lines()[0])

  def test_kept_points(self):
    """More widths and pairs go on from what is there."""
    with self.stub(lambda labels: [0.5] * 3):
      first = self.call('--d_model=16')
    calls = []

    def accuracies(labels):
      calls.append((labels['d_model'], labels['pairs']))
      return [0.6] * 3

    with self.stub(accuracies):
      result = self.call('--d_model=16,32', '--pairs=2,3')
    self.assertEqual((first.code, result.code), (0, 0), result)
    self.assertLen(calls, 3 * len(CACHES))
    self.assertNotIn((16, 2), calls)
    self.assertLen(self.rows(), 4 * len(CACHES))

  def test_equal_parameters(self):
    """MLPs fill up what models of a size lack."""
    with self.stub(lambda labels: [0.5] * 3):
      result = self.call('--equal_params', '--d_model=16,32')
    self.assertEqual(result.code, 0, result)
    for d in (16, 32):
      sizes = [x['params'] for x in self.rows() if x['d_model'] == d]
      self.assertLessEqual(max(sizes) - min(sizes), 4 * d)  # a unit a layer

  def test_trains(self):
    """One model, for real."""
    train = points.train_group

    def some(group, request):
      if group[0].labels['variant'] == 'MLA 4 heads':
        return train(group, request)
      raise RuntimeError('out of luck')

    with mock.patch.object(points, 'train_group', some):
      result = self.call()
    self.assertEqual(result.code, 1)
    (line,) = self.lines()
    self.assertBetween(float(line['accuracy_median']), 0, 1)

  @parameterized.parameters(
    ('--d_model=16,x', '--d_model=16,x must be positive integers'),
    ('--d_model=', '--d_model= must be positive integers'),
    ('--d_model=16,24', '--d_model=16,24: 24 must be a multiple of 16'),
    ('--pairs=0', '--pairs=0 must be positive integers'),
    ('--config.model.d_model=32', 'what the sweep varies; use --d_model'),
    ('--config.task.num_pairs=3', 'what the sweep varies; use --pairs'),
    ('--config.task.num_keys=9', 'what the sweep varies; use --pairs'),
    ('--config.model.num_heads=2', 'tells the models of the sweep apart'),
    ('--config.model.kv_lora_rank=4', '--config.model.kv_lora_rank tells'),
    ('--config.optimizer.learning_rate=1', 'use --learning_rates'),
    ('--config=configs/copy_task.py', "--config.task.kind='copy' must be"),
  )
  def test_errors(self, flag, message):
    result = self.call(flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn(message, result.err)
    self.assertEqual(result.err.count('\n'), 1)

  @parameterized.parameters(
    ('', [16, 32, 64], [4, 8]),
    ('full', [16, 32, 64, 128], [4, 8, 16]),
    ('tiny', [16], [2]),
  )
  def test_default_sizes(self, variants, widths, pairs):
    """By doubling, up to those of the config."""
    found = []

    def stop(settings):
      found.extend(settings.points)
      return 0

    with mock.patch.object(sweep_recall, 'main', stop):
      result = self.call(f'--config=configs/sweep_recall.py:{variants}')
    self.assertEqual(result.code, 0, result)
    self.assertEqual(sorted({x.labels['d_model'] for x in found}), widths)
    self.assertEqual(sorted({x.labels['pairs'] for x in found}), pairs)
    for x in found:
      self.assertIsInstance(x.experiment.task, RecallTask)
      self.assertEqual(x.experiment.model.num_layers, 2)

  def test_full_or_tiny(self):
    with self.assertRaisesRegex(ValueError, 'not both'):
      recall_config.get_config('full,tiny')


class FigureTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 5)
  def test_png(self, count):
    """A panel for each number of pairs, ten inches wide, one legend."""
    lines = [
      {
        'pairs': n,
        'd_model': d,
        'variant': name,
        'seeds': 3,
        'accuracy_median': 0.5,
        'accuracy_min': 0.4,
        'accuracy_max': 0.9,
      }
      for n in range(1, count + 1)
      for name in CACHES
      for d in ((16, 32) if n == 1 else (16,))
    ]
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    drawn = []
    with mock.patch.object(
      figures, 'save', lambda figure, path: drawn.append(figure)
    ):
      figures.sweep_recall(lines, 'a task', folder / 'figure.png')
    (figure,) = drawn
    shown = [x for x in figure.axes if x.axison]
    titles = [f'{n} pair{"s" * (n > 1)}' for n in range(1, count + 1)]
    self.assertEqual([x.get_title() for x in shown], titles)
    (legend,) = figure.legends
    self.assertEqual([x.get_text() for x in legend.get_texts()], [*CACHES])
    self.assertEqual(shown[0].get_ylim(), (-0.03, 1.03))
    figures.sweep_recall(lines, 'a task', folder / 'figure.png')
    data = (folder / 'figure.png').read_bytes()
    self.assertEqual(struct.unpack('>II', data[16:24])[0], 1500)


class SentencesTest(parameterized.TestCase):
  def test_all_others(self):
    """Where none is told apart they are not listed; equal ones are alike."""
    lines = [
      {
        'pairs': 1,
        'd_model': 16,
        'variant': name,
        'seeds': 3,
        'accuracy_median': 1.0,
        'difference_mean': 0.0,
        'difference_low': 0.0,
        'difference_high': 0.0,
      }
      for name in CACHES
    ]
    solved, alike = recall.answers(lines)
    self.assertIn('or more is 16 (MHA 1 head', solved)
    self.assertNotIn('none tried', solved)
    self.assertEqual(
      alike,
      '1 pair: not told apart from MHA 4 heads: all others (d_model = 16).',
    )

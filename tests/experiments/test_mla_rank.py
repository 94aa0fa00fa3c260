"""Exercise 3's script: its models, its numbers, its answer, its errors."""

import csv
import json
import math
import pathlib
import tempfile
from unittest import mock

import numpy as np
import scripts
from absl.testing import parameterized
from scipy import stats

from configs import mla_rank as mla_config
from experiments import mla_rank
from experiments.figures import caches
from experiments.harness import points, settings

MODELS = {
  # name: cached elements a token of two layers, at d = 16, h = 2, k = 8
  'MHA': 64,
  'MQA': 32,
  'MHA, 1 head': 32,
  'MHA, heads of 4': 32,
  'MLA r=2': 4,
  'MLA r=16': 32,
}


class MlaRankTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def call(self, *more: str) -> scripts.Result:
    return scripts.call(
      mla_rank,
      '--config=configs/mla_rank.py:tiny',
      f'--workdir={self.workdir}',
      '--ranks=2,16',
      '--seeds=3',
      '--learning_rates=0.003',
      *more,
    )

  def stub(self, losses):
    """Training that gives each model the bits of losses(labels), by seed."""

    def train(point):
      bits = losses(point.labels)
      return {
        'params': points.num_params(point.experiment),
        'steps_per_s': 1.0,
        'final_loss': [x and x * math.log(2) for x in bits],
        'final_accuracy': [0.0] * len(bits),
        'loss': [[40 * math.log(2)]] * len(bits),
        'accuracy': [[0.0]] * len(bits),
      }

    def train_group(group, request):
      del request
      return [train(point) for point in group]

    return mock.patch.object(points, 'train_group', train_group)

  def test_numbers(self):
    """Caches, paired differences, and the answer in words."""

    def losses(labels):
      shift = {'MLA r=2': 0.5, 'MLA r=16': 0.05}.get(labels['variant'], 0)
      # The spread over seeds is far above the differences.
      return [10 + shift, 20 + shift, 30 + 1.5 * shift]

    with self.stub(losses):
      result = self.call()
    self.assertEqual(result.code, 0, result)
    self.assertIn('r + p < 4.', result.out)
    self.assertIn("MLA: at r = 2 the cache is 0.0625 of MHA's", result.out)
    self.assertIn('+0.583 (+0.003 to +1.164) bits', result.out)
    self.assertIn('which is not shown to be within 1 bit.', result.out)
    self.assertIn('Smallest within 1 bit: r = 16.', result.out)
    self.assertIn('Smallest within 0.1 bits: no rank.', result.out)
    text = (self.workdir / 'results.csv').read_text()
    lines = list(csv.DictReader(text.splitlines()))
    self.assertEqual(
      {x['variant']: int(x['cache_elements']) for x in lines}, MODELS
    )
    self.assertEqual(result.files, scripts.names(self.workdir))
    for line in lines:
      kind = line['variant'].split()[0].strip(',').lower()
      self.assertEqual(line['model.attention.kind'], kind)
      self.assertEqual(line['task.kind'], 'copy')
      share = MODELS[line['variant']] / 64
      self.assertEqual(float(line['cache_share']), share)
    last = lines[-1]
    found = [float(last[f'difference_{x}']) for x in ('median', 'min', 'max')]
    np.testing.assert_allclose(found, [0.05, 0.05, 0.075], rtol=1e-6)
    each = [0.05, 0.05, 0.075]
    interval = stats.t.interval(0.98, 2, np.mean(each), stats.sem(each))
    found = [float(last[f'difference_{x}']) for x in ('low', 'high')]
    np.testing.assert_allclose(found, interval, rtol=1e-5)
    self.assertAlmostEqual(float(last['bits_median']), 20.05)
    self.assertAlmostEqual(float(last['perplexity']) / 2**20.05, 1)
    png = (self.workdir / 'mla_rank.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')

  @parameterized.parameters(
    (0.3, 'which is within 1 bit.'), (2.0, 'which is not within 1 bit.')
  )
  def test_within(self, shift, words):
    """The whole interval lies on one side of 1 bit."""
    with self.stub(lambda x: [10 + shift * (x['rank'] == 2)] * 3):
      result = self.call()
    self.assertIn(words, result.out)

  def test_norms_apart(self):
    """The ranks without the norm have a sentence and a curve of their own."""

    def losses(labels):
      bad = labels['rank'] is not None and labels['latent_norm']
      return [10.0 + 2 * bad] * 3

    draw = mock.Mock(wraps=caches._difference)
    with self.stub(losses), mock.patch.object(caches, '_difference', draw):
      result = self.call('--without_norm')
    self.assertEqual(result.code, 0, result)
    text = ' '.join(result.out.split())
    with_norm, without = text.split('MLA without the norm: ')
    self.assertIn('Smallest within 1 bit: no rank.', with_norm)
    self.assertIn('Smallest within 1 bit: r = 2.', without)
    curves = [x.args for x in draw.call_args_list]
    ranks = {name: [x['rank'] for x in lines] for _, lines, name, *_ in curves}
    self.assertEqual(ranks['MLA'], [2, 16])
    self.assertEqual(ranks['MLA, no norm'], [2, 16])

  def test_one_seed(self):
    """Nothing is told apart, and that is said."""
    with self.stub(lambda _: [10.0]):
      result = self.call('--seeds=1')
    self.assertEqual(result.code, 0, result)
    self.assertIn('One seed alone has no spread', result.out)
    self.assertNotIn('told apart from MHA', result.out)

  def test_rotary_and_equal_parameters(self):
    """Each rotary size has its MHA; MLPs fill up."""
    with self.stub(lambda labels: [1.0 + labels['rotary']] * 3):
      result = self.call('--rotary=0,2', '--equal_params')
    self.assertEqual(result.code, 0, result)
    rows = [
      json.loads(line)
      for line in (self.workdir / 'results.jsonl').read_text().splitlines()
    ]
    self.assertLen(rows, 2 * len(MODELS))
    sizes = [row['params'] for row in rows]
    self.assertLessEqual(max(sizes) - min(sizes), 64)  # one unit a layer
    for row in rows:
      model = row['config']['model']
      rotary = row['rotary']
      self.assertEqual(model['learned_positions'], not rotary)
      if row['rank']:
        attention = model['attention']
        self.assertEqual(attention['qk_rope_head_dim'], rotary)
        self.assertEqual(row['cache_elements'], 2 * (row['rank'] + rotary))
    self.assertIn('RoPE, p = 2', result.out)
    self.assertNotIn('+1', result.out)

  def test_best_rate_and_a_seed_that_diverged(self):
    """Each model at its own best; a diverged seed counts as untrained."""

    def losses(labels):
      rate, name = labels['learning_rate'], labels['variant']
      if name == 'MHA':
        return [2.0 - rate, 2.1 - rate, 2.2 - rate]
      if name == 'MQA':
        return [None, 2.3, 2.4] if rate == 0.1 else [4.0, 4.0, 4.0]
      return [3.0 + rate, 3.1 + rate, 3.2 + rate]

    with self.stub(losses):
      result = self.call('--learning_rates=0.1,0.01,0.001')
    self.assertEqual(result.code, 0, result)
    text = (self.workdir / 'results.csv').read_text()
    lines = {x['variant']: x for x in csv.DictReader(text.splitlines())}
    rates = {name: float(x['learning_rate']) for name, x in lines.items()}
    self.assertEqual(rates['MHA'], 0.1)
    self.assertEqual(rates['MQA'], 0.1)
    self.assertEqual(rates['MLA r=2'], 0.001)
    self.assertAlmostEqual(
      float(lines['MQA']['difference_mean']), (40 - 1.9 + 0.3 + 0.3) / 3, 5
    )
    self.assertIn('Not told apart from MHA: MQA.', result.out)
    self.assertRegex(
      result.out,
      'For MHA, MQA the best is 0.1, the highest rate tried: add 0.3',
    )
    self.assertRegex(result.out, 'MLA r=16 the best is 0.001, the lowest')

  def test_trains(self):
    """One model, for real; a failure of another leaves it standing."""
    train = points.train_group

    def some(group, request):
      if group[0].labels['variant'] == 'MQA':
        return train(group, request)
      raise RuntimeError('out of luck')

    with mock.patch.object(points, 'train_group', some):
      result = self.call()
    self.assertEqual(result.code, 1)
    self.assertIn('MHA, p=0 at 0.003 failed: RuntimeError: out of', result.out)

  def test_models_that_do_not_fit_are_left_out(self):
    """5 heads have no half, and heads of 3 no pairs for RoPE."""
    for sizes, wanted in (
      (('60', '5'), ['MHA', 'MQA', 'MHA, 1 head', 'MHA, heads of 2']),
      (('42', '7'), ['MHA', 'MQA', 'MHA, 1 head', 'MHA, heads of 2']),
    ):
      config = mla_config.get_config('tiny')
      settings.complete(config, 'tiny')
      config.model.d_model, config.model.num_heads = map(int, sizes)
      models = mla_rank._models(config, 2, [4], [True, False])
      names = [x[0] for x in models]
      self.assertEqual(names, [*wanted, 'MLA r=4', 'MLA r=4, no norm'])

  @parameterized.parameters(
    ('--ranks=4,x', '--ranks=4,x must be positive integers'),
    ('--rotary=3', '--rotary=3 must be even'),
    ('--rotary=', '--rotary= must be even'),
    ('--rotary=²', 'must be even'),
    ('--config.model.num_heads=0', '--config.model.num_heads=0 must be'),
    ('--config.model.kv_lora_rank=4', 'use --ranks and --rotary'),
    ('--config.task.kind=poem', "--config.task.kind='poem' must be in"),
  )
  def test_errors(self, flag, message):
    result = self.call(flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn(message, result.err)

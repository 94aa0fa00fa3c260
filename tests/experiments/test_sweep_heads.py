"""The sweep over head counts, in this process."""

import csv
import json
import math
import os
import pathlib
import signal
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
from absl.testing import parameterized

from configs import copy_task
from experiments import sweep_heads
from experiments.harness import points
from experiments.harness.settings import experiment_from
from mha_jax.training import grid, train

STEPS, SEEDS = 10, [3, 4]
OVERRIDES = (
  '--n_heads=4,1,4',
  '--seeds=2',
  '--threshold=1.5',
  '--learning_rates=0.003',
  '--config.train.seed=3',
  f'--config.train.steps={STEPS}',
  '--config.train.steps_per_dispatch=5',
)
FILES = {
  '.lock',
  'config.json',
  'env.json',
  'results.jsonl',
  'results.csv',
  'sweep_heads.png',
}
train_group = points.train_group
advance_grid = grid._advance


def call(workdir: pathlib.Path, *more: str) -> scripts.Result:
  return scripts.call(
    sweep_heads, scripts.TINY, f'--workdir={workdir}', *OVERRIDES, *more
  )


def training(stub):
  """Replaces the training of each point by stub(point, request)."""

  def train_each(group, request):
    rows = [stub(point, request) for point in group]
    return [] if None in rows else rows

  return mock.patch.object(points, 'train_group', train_each)


def counted(trained: list[int]):
  """The real training, which also notes the head counts it was called with."""

  def train_and_note(point, request):
    trained.append(point.experiment.model.layers[0].num_heads)
    return train_group([point], request)[0]

  return train_and_note


def read(workdir: pathlib.Path) -> list[dict]:
  lines = (workdir / 'results.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def write(workdir: pathlib.Path, rows: list[dict], torn: str = '') -> None:
  workdir.mkdir(exist_ok=True)
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (workdir / 'results.jsonl').write_text(text + torn)


def recorded(row: dict) -> dict:
  """What training returned for a row."""
  head = ('key', 'n_heads', 'head_dim', 'seeds', 'status')
  return {name: x for name, x in row.items() if name not in head}


def numbers(rows: list[dict]) -> dict[int, dict]:
  """The rows by head count, without the speed."""
  return {
    row['n_heads']: {k: x for k, x in row.items() if k != 'steps_per_s'}
    for row in rows
  }


@pytest.fixture(scope='module')
def first(tmp_path_factory):
  """A whole sweep, which the tests below read or go on from."""
  SweepTestCase.folder = tmp_path_factory.mktemp('sweep')
  SweepTestCase.workdir = SweepTestCase.folder / 'first'
  SweepTestCase.trained = []
  with training(counted(SweepTestCase.trained)):
    SweepTestCase.first = call(SweepTestCase.workdir)
  SweepTestCase.rows = read(SweepTestCase.workdir)


@pytest.mark.usefixtures('first')
class SweepTestCase(parameterized.TestCase):
  folder: pathlib.Path
  workdir: pathlib.Path
  first: scripts.Result
  trained: list[int]
  rows: list[dict]


class SweepTest(SweepTestCase):
  @staticmethod
  def never(point, request):
    raise AssertionError('trained again')

  def test_output(self):
    """Progress, a table, a sentence, and where the files are."""
    self.assertEqual(self.first.code, 0, self.first)
    self.assertEqual(self.trained, [1, 4])
    for part in ('n_heads', 'head_dim', 'loss < 1.5', 'lr', 'More heads'):
      self.assertIn(part, self.first.out)
    self.assertIn(f'recorded in {self.workdir}', self.first.out)
    for part in (' 1 head  10/10', ' 4 heads  10/10', 'loss', 'steps/s'):
      self.assertIn(part, self.first.err)
    self.assertEqual({path.name for path in self.workdir.iterdir()}, FILES)
    self.assertEqual(self.first.files, FILES)  # before the first word
    png = (self.workdir / 'sweep_heads.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')

  def test_latent(self):
    """Any variant can be swept; what a score sums over is its head_dim."""
    workdir = self.folder / 'latent'
    with training(lambda point, request: recorded(self.rows[0])):
      result = call(
        workdir,
        '--config.model.attention=mla',
        '--config.model.kv_lora_rank=6',
        '--config.model.positions=rope',
        '--n_heads=2',
      )
    self.assertEqual(result.code, 0, result)
    (row,) = read(workdir)
    self.assertEqual((row['n_heads'], row['head_dim']), (2, 8 + 4))

  def test_heads_that_do_not_fit(self):
    """The error names the flag and the head count."""
    result = call(
      self.folder / 'gqa',
      '--config.model.attention=gqa',
      '--config.model.num_kv_heads=2',
    )
    self.assertEqual(result.code, 2)
    self.assertIn('--n_heads=1: ', result.err)
    self.assertIn('num_kv_heads=2 must divide num_heads=1', result.err)

  def test_layers_that_set_the_heads(self):
    """They would be what is trained, under another label."""
    config = self.folder / 'layers.py'
    config.write_text(
      'from ml_collections import ConfigDict\n'
      'def get_config(): return ConfigDict({"model": {"num_layers": 2, '
      '"layers": ({"num_heads": 4}, {"num_heads": 2})}})\n'
    )
    result = scripts.call(sweep_heads, f'--config={config}', '--n_heads=1')
    self.assertEqual((result.code, result.err.count('\n')), (2, 1), result)
    self.assertIn('--n_heads=1: config.model.layers sets num_heads', result.err)

  def test_rows(self):
    """results.jsonl: a line a point, numbers by seed."""
    self.assertLen({row['key'] for row in self.rows}, 2)
    for row, heads in zip(self.rows, (1, 4), strict=True):
      self.assertEqual(row['status'], 'finished')
      self.assertEqual((row['n_heads'], row['head_dim']), (heads, 16 // heads))
      self.assertEqual(row['seeds'], SEEDS)
      self.assertEqual(row['params'], self.rows[0]['params'])
      self.assertGreater(row['steps_per_s'], 0)
      for name in ('loss', 'accuracy'):
        self.assertEqual(np.shape(row[name]), (len(SEEDS), STEPS))
      self.assertLen(row['final_loss'], len(SEEDS))
      self.assertLess(np.mean(row['final_loss']), row['loss'][0][0])
      self.assertNotEqual(*row['final_loss'])
    self.assertNotEqual(self.rows[0]['loss'], self.rows[1]['loss'])

  def test_a_seed_is_a_run(self):
    """The numbers of a seed are those of training it alone."""
    config = copy_task.get_config('tiny')
    config.model.num_heads = 4
    config.optimizer.learning_rate = 0.003
    config.train.update(steps=STEPS)
    experiment = experiment_from(config)
    key = jax.random.key(4)
    state = train.init(experiment, key)
    advance = jax.jit(train.advance, static_argnums=(0, 1))
    state, history = advance(experiment, STEPS, key, state)
    row = self.rows[1]
    np.testing.assert_allclose(row['loss'][1], history['loss'], rtol=1e-4)
    evaluate = jax.jit(train.evaluate, static_argnums=0)
    final = evaluate(experiment, key, state.params)
    np.testing.assert_allclose(
      row['final_loss'][1], final['eval_loss'], rtol=1e-4
    )
    sizes = [x.size for x in jax.tree.leaves(state.params)]
    self.assertEqual(row['params'], sum(sizes))

  def test_csv(self):
    """results.csv: a line a head count, with median and range."""
    text = (self.workdir / 'results.csv').read_text()
    lines = list(csv.DictReader(text.splitlines()))
    self.assertEqual([line['n_heads'] for line in lines], ['1', '4'])
    for line, row in zip(lines, self.rows, strict=True):
      self.assertEqual(line['head_dim'], str(row['head_dim']))
      self.assertEqual(line['params'], str(row['params']))
      self.assertEqual(line['seeds'], '2')
      found = [float(line[f'final_loss_{x}']) for x in ('min', 'max')]
      self.assertEqual(found, sorted(row['final_loss']))
      self.assertEqual(float(line['steps_per_s']), row['steps_per_s'])
      self.assertEqual(line['model.attention.kind'], 'mha')
      self.assertEqual(line['task.kind'], 'copy')
      self.assertEqual(line['model.attention.num_heads'], str(row['n_heads']))
      self.assertEqual(line['model.attention.num_kv_heads'], '')
      self.assertEqual(line['train.steps'], str(STEPS))
      self.assertIn('final_accuracy_median', line)
      self.assertIn('steps_to_threshold_median', line)

  def test_a_second_call_trains_nothing(self):
    """Only env.json, which holds the command of the last start, may change."""
    before = scripts.contents(self.workdir)
    with training(self.never):
      again = call(self.workdir)
    self.assertEqual((again.code, again.err), (0, ''))
    self.assertEqual(again.out, self.first.out)
    after = scripts.contents(self.workdir)
    for name in FILES - {'env.json'}:
      self.assertEqual(after[name], before[name], name)

  def test_another_threshold_trains_nothing(self):
    """It is a matter of reading the curves."""
    workdir = self.folder / 'threshold'
    write(workdir, self.rows)
    with training(self.never):
      result = call(workdir, '--threshold=1e-6')
    self.assertEqual(result.code, 0)
    self.assertIn('never', result.out)
    self.assertIn('no head count reaches loss < 1e-06', result.out)
    text = (workdir / 'results.csv').read_text()
    line = next(csv.DictReader(text.splitlines()))
    self.assertEqual(float(line['steps_to_threshold_min']), math.inf)

  def test_one_head_count(self):
    """A part of the points is a sweep, too; the others stay recorded."""
    workdir = self.folder / 'one'
    write(workdir, self.rows)
    with training(self.never):
      result = call(workdir, '--n_heads=4')
    self.assertEqual(result.code, 0)
    self.assertIn('One head count alone', result.out)
    self.assertEqual(read(workdir), self.rows)

  @parameterized.parameters(
    ('--seeds=3', 'seeds: 2 -> 3'),
    ('--config.train.seed=4', 'train.seed: 3 -> 4'),
    ('--config.model.attention=mqa', 'model.attention: mha -> mqa'),
    ('--config.optimizer.b1=0.5', 'optimizer.b1: 0.9 -> 0.5'),
    ('--config.task.num_symbols=3', 'task.num_symbols: 4 -> 3'),
    ('--equal_params', 'equal_params: False -> True'),
  )
  def test_another_config_is_refused(self, override, words):
    """As train does: nothing that the first sweep wrote is replaced."""
    before = scripts.contents(self.workdir)
    with training(self.never):
      result = call(self.workdir, override)
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn(
      f'workdir={self.workdir} holds a run with another', result.err
    )
    self.assertIn(words, result.err)
    self.assertEqual(scripts.contents(self.workdir), before)


class GoingOnTest(SweepTestCase):
  """What is missing, failed or was stopped is trained again, alone."""

  def test_a_deleted_line(self):
    """Only that point is trained; its numbers are the same. A torn last line
    is dropped, and one that lacks numbers."""
    workdir = self.folder / 'deleted'
    partial = {k: x for k, x in self.rows[0].items() if k != 'loss'}
    odd = partial | {'key': [1]}
    write(
      workdir,
      [partial, odd, *self.rows[1:]],
      torn=json.dumps(self.rows[0])[:40],
    )
    trained = []

    def stub(point, request):
      trained.append(point.experiment.model.layers[0].num_heads)
      return recorded(self.rows[0])

    with training(stub):
      result = call(workdir)
    self.assertEqual(result.code, 0)
    self.assertEqual(trained, [1])
    self.assertIn(self.rows[0], read(workdir))
    self.assertIn(self.rows[1], read(workdir))
    lines = (workdir / 'results.csv').read_text().splitlines()
    self.assertEqual([line.split(',')[0] for line in lines[1:]], ['1', '4'])

  def test_failed_then_stopped_then_finished(self):
    """A failure is recorded and tried again; SIGTERM keeps what is there."""
    workdir = self.folder / 'unlucky'

    def fail(point, request):
      if point.experiment.model.layers[0].num_heads == 1:
        raise RuntimeError('out of luck\nand of much else')
      return recorded(self.rows[1])

    with training(fail):
      result = call(workdir)
    self.assertEqual(result.code, 1)
    self.assertIn(
      'n_heads=1 at 0.003 failed: RuntimeError: out of luck\n', result.out
    )
    failed, kept = read(workdir)
    self.assertEqual(kept, self.rows[1])
    self.assertEqual(failed['status'], 'failed')
    self.assertEqual(failed['error'], 'RuntimeError: out of luck')
    self.assertEqual(failed['key'], self.rows[0]['key'])
    self.assertEqual({path.name for path in workdir.iterdir()}, FILES)

    dispatches = []

    def advance(experiment, num_steps, keys, rates, state):
      os.kill(os.getpid(), signal.SIGTERM)
      dispatches.append(num_steps)
      return advance_grid(experiment, num_steps, keys, rates, state)

    with mock.patch.object(grid, '_advance', advance):
      result = call(workdir)
    self.assertEqual(result.code, 0)
    self.assertEqual(dispatches, [5])
    self.assertEqual(result.out.count('\n'), 1)
    self.assertStartsWith(result.out, 'SIGTERM: stopped; ')
    self.assertIn(str(workdir / 'results.jsonl'), result.out)
    self.assertEqual(read(workdir), [failed, kept])

    result = call(workdir)
    self.assertEqual(result.code, 0)
    self.assertNotIn('failed', result.out)
    self.assertEqual(numbers(read(workdir)), numbers(self.rows))

  def test_interrupted(self):
    """Ctrl-C: code 130; the points finished before are kept."""
    workdir = self.folder / 'interrupted'

    def stub(point, request):
      if point.experiment.model.layers[0].num_heads == 4:
        os.kill(os.getpid(), signal.SIGINT)
        return None
      return recorded(self.rows[0])

    with training(stub):
      result = call(workdir)
    self.assertEqual(result.code, 130)
    self.assertStartsWith(result.out, 'SIGINT: stopped; ')
    self.assertEqual(read(workdir), self.rows[:1])

  @parameterized.parameters(math.nan, math.inf)
  def test_a_loss_that_is_not_finite(self, loss):
    """Is a result, which counts; it is not trained again."""
    workdir = self.folder / f'loss_{loss}'
    losses = np.array([[[1.0] * 5, [1.0, 2.0, loss, loss, loss]]])
    metrics = {'loss': losses, 'accuracy': np.zeros((1, 2, 5))}
    state = train.TrainState(jnp.zeros(()), jnp.zeros((3,)), ())
    final = {
      'eval_loss': np.array([[0.5, loss]]),
      'eval_accuracy': np.zeros((1, 2)),
    }
    with (
      mock.patch.object(grid, '_advance', return_value=(state, metrics)),
      mock.patch.object(grid, '_evaluate', return_value=final),
    ):
      result = call(workdir, '--n_heads=2')
    self.assertEqual(result.code, 0, result)
    (row,) = read(workdir)
    self.assertEqual(row['final_loss'], [0.5, None])
    self.assertEqual(row['loss'][1][:5], [1, 2, None, None, None])
    self.assertIn('diverged', result.out)
    self.assertTrue((workdir / 'sweep_heads.png').exists())
    with training(SweepTest.never):
      self.assertEqual(call(workdir, '--n_heads=2').out, result.out)


class RatesTest(SweepTestCase):
  """Each head count at each rate, judged at its best."""

  def rate(self, row) -> float:
    return row['config']['optimizer']['learning_rate']

  def test_another_rate_is_added(self):
    """Beside what is there, which is not trained again; all rates at once."""
    workdir = self.folder / 'rates'
    write(workdir, self.rows)
    groups = []

    def noted(group, request):
      groups.append([x.experiment.optimizer.learning_rate for x in group])
      return train_group(group, request)

    with mock.patch.object(points, 'train_group', noted):
      result = call(workdir, '--learning_rates=0.1,0.003,0.01')
    self.assertEqual(result.code, 0, result)
    self.assertEqual(groups, [[0.01, 0.1]] * 2)
    rows = read(workdir)
    self.assertEqual(rows[:2], self.rows)
    self.assertLen(rows, 6)
    text = (workdir / 'results.csv').read_text()
    for line in csv.DictReader(text.splitlines()):
      own = [x for x in rows if str(x['n_heads']) == line['n_heads']]
      best = min(own, key=lambda row: np.median(row['final_loss']))
      self.assertEqual(float(line['learning_rate']), self.rate(best))
      self.assertEqual(float(line['optimizer.learning_rate']), self.rate(best))
      self.assertEqual(line['learning_rates'], '0.003 0.01 0.1')
    self.assertIn('Learning rates tried: 0.003, 0.01, 0.1.', result.out)

  def test_a_rate_is_a_sweep_at_that_rate(self):
    """Up to float32 rounding."""
    workdir = self.folder / 'together'
    result = call(workdir, '--learning_rates=0.003,0.03')
    self.assertEqual(result.code, 0, result)
    rows = [x for x in read(workdir) if self.rate(x) == 0.003]
    for got, wanted in zip(rows, self.rows, strict=True):
      self.assertEqual(got['key'], wanted['key'])
      for name in ('loss', 'final_loss'):
        np.testing.assert_allclose(got[name], wanted[name], 1e-5)

  @parameterized.parameters(
    ('--learning_rates=', 'give one, such as 0.003'),
    ('--learning_rates=0.1,fast', '--learning_rates=0.1,fast must be numbers'),
    ('--learning_rates=0', '--learning_rates=0 must be numbers from 1e-12'),
    ('--learning_rates=nan', '--learning_rates=nan must be numbers'),
    ('--config.optimizer.learning_rate=0.1', 'use --learning_rates'),
  )
  def test_wrong_rates(self, flag, words):
    """One line."""
    result = call(self.folder / 'wrong', flag)
    self.assertEqual((result.code, result.err.count('\n')), (2, 1), result)
    self.assertIn(words, result.err)


class FolderTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)


class DispatchTest(FolderTestCase):
  def test_the_last_dispatch_is_shorter(self):
    """Where steps_per_dispatch does not divide the steps."""
    sizes = []

    def advance(experiment, num_steps, keys, rates, state):
      del experiment, keys, rates
      sizes.append(num_steps)
      first = sum(sizes) - num_steps
      losses = np.stack([[np.arange(first, sum(sizes)) + i for i in (1, 100)]])
      return state, {'loss': losses, 'accuracy': losses}

    state = train.TrainState(jnp.zeros(()), jnp.zeros((3,)), ())
    final = {'eval_loss': jnp.ones(()), 'eval_accuracy': jnp.ones(())}
    with (
      mock.patch.object(train, 'init', return_value=state),
      mock.patch.object(train, 'evaluate', return_value=final),
      mock.patch.object(grid, '_advance', advance),
    ):
      workdir = self.folder / 'uneven'
      result = call(workdir, '--n_heads=2', '--config.train.steps=12')
    self.assertEqual((result.code, sizes), (0, [5, 5, 2]))
    (row,) = read(workdir)
    self.assertEqual(row['loss'], [[*range(1, 13)], [*range(100, 112)]])


class StudyTest(FolderTestCase):
  def test_study(self):
    """Every panel and curve; points that two curves share are trained once."""
    workdir = self.folder / 'study'
    trained = []

    def stub(point, request):
      del request
      trained.append(point.experiment)
      count = points.num_params(point.experiment)
      numbers = {'final_loss': [0.1, 0.2], 'final_accuracy': [1.0, 0.9]}
      curves = [[2.0] * point.experiment.train.steps] * 2
      numbers |= dict.fromkeys(('loss', 'accuracy'), curves)
      return numbers | {'params': count, 'steps_per_s': 1.0}

    with training(stub):
      result = call(workdir, '--study', '--config.model.positions=none')
    self.assertEqual(result.code, 0, result)
    lines = list(
      csv.DictReader((workdir / 'results.csv').read_text().splitlines())
    )
    curves = {(x['panel'], x['curve']): [] for x in lines}
    for line in lines:
      curves[line['panel'], line['curve']].append(line)
    lengths = [('one source', f'L = {x}') for x in (2, 4, 8, 16)]
    ways = ('head_dim = d_model / n_heads', 'head_dim = 4')
    ways += ('head_dim = 4, MLP fills up',)
    controls = [
      (f'{x} source{"s" * (x == "two")}, L = 4', way)
      for x in ('one', 'two')
      for way in ways
    ]
    helps = ('1 layer', '1 layer, fixed separator')
    helps += ('2 layers', '2 layers, RoPE')
    layers = [('variable length, 1 to 4', x) for x in helps]
    self.assertEqual(list(curves), [*lengths, *controls, *layers])
    fewer = {('one source', 'L = 16'), *layers}
    for name, own in curves.items():
      heads = ['1'] if name in fewer else ['1', '4']
      self.assertEqual([x['n_heads'] for x in own], heads, name)
    self.assertLen(trained, 2 * (len(curves) - 1) - len(fewer))
    for (panel, curve), own in curves.items():
      if (panel, curve) in fewer:
        continue
      sizes = [int(x['head_dim']) for x in own]
      params = [int(x['params']) for x in own]
      fixed = curve.startswith('head_dim = 4')
      self.assertEqual(sizes, [4, 4] if fixed else [16, 4], panel)
      self.assertEqual(params[0] < params[1], curve == 'head_dim = 4', panel)
    self.assertEqual(
      {x.train.steps for x in trained}, {i * STEPS for i in (1, 2, 3, 4)}
    )
    for x in trained:  # as many symbols in a batch, as far as may be
      if x.task.min_length is None and not x.task.pairs:
        symbols = x.task.length * x.train.batch_size
        self.assertEqual(symbols, 4 * trained[2].train.batch_size)
    self.assertTrue(any(x.task.pairs for x in trained))
    self.assertTrue(any(x.task.fixed_separator for x in trained))
    png = (workdir / 'sweep_heads.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')

  @parameterized.parameters(
    '--config=configs/copy_task.py:pairs',
    '--config=configs/recall.py',
    '--config=configs/recall.py:induction',
  )
  def test_wants_a_plain_copy_task(self, config):
    result = scripts.call(sweep_heads, config, '--study')
    self.assertEqual(result.code, 2, result)
    self.assertIn('--study wants a plain copy task', result.err)

  @parameterized.parameters('--equal_params', '--config.model.head_dim=4')
  def test_has_its_own_controls(self, flag):
    result = scripts.call(sweep_heads, scripts.TINY, '--study', flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn('--study has its own controls', result.err)


class DefaultsTest(parameterized.TestCase):
  def test_flags(self):
    """Exercise 1: heads 1, 2, 4, 8, 16 with three seeds."""
    self.assertEqual(sweep_heads.N_HEADS.default, ['1', '2', '4', '8', '16'])
    self.assertEqual(sweep_heads.SEEDS.default, 3)
    self.assertEqual(
      points.LEARNING_RATES.default, ['0.003', '0.01', '0.03', '0.1']
    )
    self.assertEqual(sweep_heads.THRESHOLD.default, 0.05)

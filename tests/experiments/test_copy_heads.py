"""What each head does in the copy task, in this process."""

import csv
import json
import pathlib
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest
import scripts
from absl.testing import parameterized

from configs import copy_task
from experiments import copy_heads
from experiments.harness import copying as harness
from experiments.harness.settings import experiment_from
from mha_jax.analysis import copying
from mha_jax.training import grid

OVERRIDES = (
  '--heads=2,1',
  '--scales=1,sqrt',
  '--seeds=2',
  '--learning_rates=0.01,0.03',
  '--config.train.steps=10',
  '--config.train.steps_per_dispatch=5',
)
FILES = {
  '.lock',
  'config.json',
  'env.json',
  'results.jsonl',
  'results.csv',
  'heads.csv',
  'copy_heads.png',
}
measure = harness.measure


def call(workdir: pathlib.Path, *more: str) -> scripts.Result:
  return scripts.call(
    copy_heads, scripts.TINY, f'--workdir={workdir}', *OVERRIDES, *more
  )


def read(workdir: pathlib.Path) -> list[dict]:
  lines = (workdir / 'results.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def table(path: pathlib.Path) -> list[dict[str, str]]:
  return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope='module')
def first(tmp_path_factory):
  """A whole run, stopped once on its way, which the tests below read."""
  folder = tmp_path_factory.mktemp('copy_heads') / 'first'
  calls = []

  def stop_at_third(model, request):
    calls.append((model.n_heads, model.scale))
    if len(calls) == 3:
      request.signal = signal.SIGINT
      return []
    return measure(model, request)

  with mock.patch.object(copy_heads, 'measure', stop_at_third):
    RunTest.stopped = call(folder)
    RunTest.kept = read(folder)
    RunTest.result = call(folder)
  RunTest.workdir, RunTest.calls = folder, calls


@pytest.mark.usefixtures('first')
class RunTest(parameterized.TestCase):
  workdir: pathlib.Path
  stopped: scripts.Result
  result: scripts.Result
  kept: list[dict]
  calls: list[tuple[int, str]]

  def test_goes_on(self):
    """A stop keeps what is finished, and nothing is trained twice."""
    self.assertEqual(self.stopped.code, 130, self.stopped)
    self.assertIn('SIGINT: stopped; what is finished is', self.stopped.out)
    self.assertEqual(self.result.code, 0, self.result)
    asked = [(1, '1'), (1, 'sqrt'), (2, '1'), (2, 'sqrt')]
    self.assertEqual(self.calls, [*asked[:3], *asked[2:]])
    rows = read(self.workdir)
    self.assertEqual([(x['n_heads'], x['scale']) for x in rows], asked)
    self.assertEqual(rows[:2], self.kept)
    never = mock.patch.object(copy_heads, 'measure', side_effect=AssertionError)
    with never:
      again = call(self.workdir, '--heads=1,2')
    self.assertEqual(again.code, 0, again)

  def test_output(self):
    self.assertEqual(self.result.files, FILES)
    for words in (
      'At scale sqrt the accuracy is',
      'whose removal alone costs 0.01',
      'effective rank of',
      'log odds of',
      'heads of 8 features against 1 of 16:',
      'Steps at the fastest other scale against sqrt',
    ):
      self.assertIn(words, self.result.out)
    png = (self.workdir / 'copy_heads.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')
    self.assertLen(table(self.workdir / 'heads.csv'), 2 * 2 * (1 + 2))
    lines = {
      (x['n_heads'], x['scale']): x for x in table(self.workdir / 'results.csv')
    }
    self.assertEqual(lines['2', 'sqrt']['model.attention.kind'], 'mha')
    usual = float(lines['2', 'sqrt']['score_scale'])
    self.assertAlmostEqual(usual, 8**-0.5)
    self.assertEqual(float(lines['2', '1']['score_scale']), 1)
    self.assertEqual(lines['2', '1']['model.attention.score_scale'], '1.0')

  def test_numbers(self):
    """The rows hold what training by itself gives."""
    config = copy_task.get_config('tiny')
    config.model.num_heads = 2
    config.train.update({'steps': 10, 'steps_per_dispatch': 5})
    experiment = experiment_from(config)
    row = read(self.workdir)[3]
    rates, seeds = (0.01, 0.03), (0, 1)
    self.assertEqual(row['snapshots'], [0, 5, 10])
    states = {}

    def note(step, state):
      states[step] = jax.device_get(state.params)

    found = grid.train_grid(
      experiment, rates, seeds, mock.Mock(signal=None), on_dispatch=note
    )
    losses = [x['final_loss'] for x in row['rates']]
    np.testing.assert_allclose(losses, found.final['eval_loss'], rtol=1e-5)
    best = int(np.argmin(np.median(losses, axis=1)))
    self.assertEqual(row['learning_rate'], rates[best])
    model = harness.Model(experiment, 2, 'sqrt', rates, seeds)
    for place, step in enumerate((0, 5, 10)):
      for seed in seeds:
        params = jax.tree.map(lambda x, s=seed: x[best, s], states[step])
        scores = copying.position_scores(
          experiment.model, params, model.batch.inputs
        )
        np.testing.assert_allclose(
          row['rank'][place][seed], copying.effective_rank(scores), rtol=1e-3
        )
        margins = np.asarray(copying.margins(scores))
        for name in ('mean', 'std'):
          recorded = row['margin' if name == 'mean' else 'margin_std']
          np.testing.assert_allclose(
            recorded[place][seed],
            getattr(np, name)(margins, axis=1),
            atol=1e-3,
          )
    without, whole = copying.accuracies_without(
      experiment.model, params, model.batch
    )
    np.testing.assert_allclose(row['accuracy'][1], whole, atol=2e-3)
    np.testing.assert_allclose(row['accuracy_without'][1], without, atol=2e-3)

  def test_without_status(self):
    """Rows of before there was a status are finished."""
    folder = self.workdir.with_name('without_status')
    shutil.copytree(self.workdir, folder)
    rows = [{k: v for k, v in x.items() if k != 'status'} for x in self.kept]
    rows += read(self.workdir)[2:]
    text = ''.join(json.dumps(x) + '\n' for x in rows)
    (folder / 'results.jsonl').write_text(text)
    with mock.patch.object(copy_heads, 'measure', side_effect=AssertionError):
      result = call(folder)
    self.assertEqual(result.code, 0, result)
    for name in ('results.csv', 'heads.csv'):
      self.assertEqual(table(folder / name), table(self.workdir / name))

  def test_failed(self):
    """It is recorded and said, the others go on, and it is tried again."""
    folder = self.workdir.with_name('failed')
    rows = {(x['n_heads'], x['scale']): x for x in read(self.workdir)}

    def numbers_of(model, request):
      del request
      if (model.n_heads, model.scale) == (1, 'sqrt'):
        raise MemoryError('no room\nfor it')
      row = rows[model.n_heads, model.scale]
      return [{name: row[name] for name in harness.FINISHED}]

    with mock.patch.object(harness, 'numbers_of', numbers_of):
      result = call(folder)
    self.assertEqual(result.code, 1, result)
    message = 'n_heads=1 at scale sqrt failed: MemoryError: no room\n'
    self.assertIn(message, result.out)
    self.assertIn('Steps at the fastest other scale', result.out)
    self.assertLen(table(folder / 'results.csv'), 3)
    self.assertEqual(
      [x['status'] for x in read(folder)],
      ['finished', 'failed', 'finished', 'finished'],
    )
    row = {name: rows[1, 'sqrt'][name] for name in harness.FINISHED}
    again = mock.Mock(return_value=[row])
    with mock.patch.object(harness, 'numbers_of', again):
      result = call(folder)
    self.assertEqual(result.code, 0, result)
    again.assert_called_once()
    self.assertEqual(read(folder), list(rows.values()))

  def test_all_failed(self):
    """Nothing but the errors is said."""
    folder = self.workdir.with_name('all_failed')
    never = mock.patch.object(harness, 'numbers_of', side_effect=MemoryError)
    with never:
      result = call(folder)
    self.assertEqual(result.code, 1, result)
    self.assertEqual(result.out.count(' failed: MemoryError: '), 4)
    self.assertNotIn('results.csv', [x.name for x in folder.iterdir()])


class FlagsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('--scales=sqrt,learned', '--scales=sqrt,learned must be sqrt or numbers'),
    ('--scales=0', '--scales=0 must be'),
    ('--scales=', '--scales= must be'),
    ('--heads=3', '--heads=3: --config.model'),
    ('--config.model.num_heads=2', 'use --heads'),
    ('--config.model.positions=rope', 'with learned positions'),
    ('--config.model.num_layers=2', 'num_layers=2'),
    ('--config.task.pairs', 'wants a plain copy task'),
    ('--config.task.length=1', '--config.task.length=1'),
    ('--equal_params', '--equal_params has no effect'),
  )
  def test_refused(self, flag, message):
    result = scripts.call(copy_heads, scripts.TINY, flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn(message, result.err)
    self.assertEqual(result.err.count('\n'), 1)

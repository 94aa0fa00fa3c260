"""What each head does in the copy task, in this process."""

import csv
import json
import pathlib
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
from experiments.reports import copying as reports
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
      return None
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
      'At scale sqrt the copy is carried by',
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


def row(n_heads: int, scale: str, ends, attention=0.9, cost=0.5) -> dict:
  """A row whose seeds reach the threshold at the steps `ends`."""
  shape = (len(ends), n_heads)
  losses = [[1.0] * (end - 1) + [0.01] * (51 - end) for end in ends]
  rate = {'learning_rate': 0.01, 'final_loss': [0.01] * len(ends)}
  head_dim = 64 // n_heads
  return {
    'n_heads': n_heads,
    'head_dim': head_dim,
    'scale': scale,
    'score_scale': head_dim**-0.5 if scale == 'sqrt' else float(scale),
    'seeds': list(range(len(ends))),
    'learning_rate': 0.01,
    'rates': [rate | {'loss': losses}],
    'attention': np.full(shape, attention).tolist(),
    'accuracy': [1.0] * len(ends),
    'accuracy_without': np.full(shape, 1 - cost).tolist(),
    'snapshots': [0, 50],
    'rank': np.full((2, *shape), 2.0).tolist(),
    'margin': np.full((2, *shape), 3.0).tolist(),
    'margin_std': np.full((2, *shape), 1.0).tolist(),
  }


class ReportTest(parameterized.TestCase):
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

  def test_verdicts(self):
    """Sentences that numbers made by hand settle."""
    rows = [
      row(1, 'sqrt', (10, 11, 12)),
      row(1, '1', (40, 41, 42)),
      row(16, 'sqrt', (30, 31, 32), attention=0.05, cost=0.0),
      row(16, '1', (20, 21, 22)),
      row(16, '2', (51, 51, 51)),
    ]
    carried, rank, odds, speed, scales = reports.verdicts(
      [reports.summarise(x) for x in rows]
    )
    self.assertIn('carried by 1 of 1, 0 of 16 heads', carried)
    self.assertIn('idle 0 of 1, 16 of 16', carried)
    self.assertIn('2.0 with 64 features a head, 2.0 with 4', rank)
    self.assertIn('+3.0 with 64 features', odds)
    self.assertIn('16 heads of 4 features against 1 of 64: +20', speed)
    self.assertEndsWith(speed, 'slower.')
    self.assertIn('64 features, 1 against 0.125: +30', scales)
    self.assertIn('4 features, 1 against 0.5: -10', scales)
    self.assertIn('faster', scales)

  def test_never(self):
    rows = [row(1, 'sqrt', (51, 51)), row(4, 'sqrt', (51, 51))]
    *_, speed = reports.verdicts([reports.summarise(x) for x in rows])
    self.assertEndsWith(speed, 'neither gets there.')

"""Runs that stop and go on. This module starts processes.

One folder goes through every way of stopping: SIGKILL, then SIGTERM, then
Ctrl-C, and the last process ends the run. Beside it one process is never
stopped. What they leave must be the same.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from unittest import mock

import jax
import oracles
import scripts
from absl.testing import parameterized

from configs import copy_task
from experiments.harness.settings import experiment_from
from mha_jax.training import run as run_lib
from mha_jax.training import train
from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.record import RecordError, RecordWarning, read_jsonl

STEPS, DISPATCH = 600, 10
# 130 is rounded up to the end of a dispatch; dropout draws by step as well.
OVERRIDES = {
  'train.steps': STEPS,
  'train.steps_per_dispatch': DISPATCH,
  'train.checkpoint_every': 130,
  'model.dropout_rate': 0.1,
}


def make_experiment(overrides: dict) -> train.Experiment:
  config = copy_task.get_config('tiny')
  config.update_from_flattened_dict(overrides)
  return experiment_from(config)


def steps_in(workdir: pathlib.Path) -> int:
  """The step of the last whole line of metrics."""
  rows = read_jsonl(workdir / 'metrics.jsonl')
  return rows[-1]['step'] if rows else 0


def checkpoints_in(workdir: pathlib.Path) -> list[int]:
  found = (workdir / 'checkpoints').iterdir()
  return sorted(int(path.name) for path in found if path.name.isdigit())


def restore(workdir: pathlib.Path, experiment: train.Experiment):
  """The state of the newest checkpoint."""
  like = jax.eval_shape(lambda: train.init(experiment, jax.random.key(0)))
  checkpoints = Checkpoints(workdir)
  try:
    return checkpoints.restore(like)
  finally:
    checkpoints.close()


class ProcessesTest(parameterized.TestCase):
  """Killed, terminated, interrupted: the same bits as never stopped."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.unbroken = pathlib.Path(folder) / 'unbroken'
    cls.broken = pathlib.Path(folder) / 'broken'
    whole = cls.start(cls.unbroken)
    cls.stages = {
      number: cls.stop(number, after)
      for number, after in (
        (signal.SIGKILL, 140),
        (signal.SIGTERM, 270),
        (signal.SIGINT, 400),
      )
    }
    cls.last = scripts.finish(cls.start(cls.broken))
    cls.whole = scripts.finish(whole)

  @classmethod
  def start(cls, workdir: pathlib.Path) -> subprocess.Popen[str]:
    overrides = [f'--config.{name}={x}' for name, x in OVERRIDES.items()]
    process = scripts.start(
      'experiments.train',
      scripts.TINY,
      f'--workdir={workdir}',
      *overrides,
      compilation_cache=workdir.parent / 'compiled',
    )
    cls.addClassCleanup(process.kill)
    return process

  @classmethod
  def stop(cls, number: signal.Signals, after: int):
    """Sends a signal once `after` steps are recorded; how the run stood."""
    process = cls.start(cls.broken)
    while process.poll() is None and steps_in(cls.broken) < after:
      time.sleep(0.005)
    process.send_signal(number)
    result = scripts.finish(process)
    return {
      'result': result,
      'metrics': (cls.broken / 'metrics.jsonl').read_text(),
      'step': steps_in(cls.broken),
      'checkpoints': checkpoints_in(cls.broken),
    }

  def test_unbroken(self):
    """Exit code 0, a line a dispatch, a checkpoint at the end."""
    self.assertEqual(self.whole.code, 0, self.whole.err)
    rows = read_jsonl(self.unbroken / 'metrics.jsonl')
    wanted = list(range(DISPATCH, STEPS + 1, DISPATCH))
    self.assertEqual([row['step'] for row in rows], wanted)
    self.assertEqual(checkpoints_in(self.unbroken), [520, STEPS])
    self.assertIn(f'step {STEPS}  loss ', self.whole.out)
    self.assertIn(f'{STEPS}/{STEPS}', self.whole.err)
    self.assertIn('steps/s', self.whole.err)
    self.assertIn('accuracy', self.whole.err)

  @parameterized.parameters(
    (signal.SIGKILL, -9), (signal.SIGTERM, 0), (signal.SIGINT, 130)
  )
  def test_stopped_in_the_middle(self, number, code):
    """The exit code, and what was recorded is how the unbroken run began."""
    stage = self.stages[number]
    self.assertEqual(stage['result'].code, code, stage['result'].err)
    self.assertBetween(stage['step'], DISPATCH, STEPS - DISPATCH)
    whole = (self.unbroken / 'metrics.jsonl').read_text()
    self.assertStartsWith(whole, stage['metrics'])
    self.assertNotEmpty(stage['checkpoints'])
    self.assertNotIn('Traceback', stage['result'].err)

  @parameterized.parameters(signal.SIGTERM, signal.SIGINT)
  def test_signals_save(self, number):
    """The checkpoint is that of the last line, and one line says so."""
    stage = self.stages[number]
    self.assertEqual(stage['checkpoints'][-1], stage['step'])
    self.assertEqual(
      stage['result'].out.splitlines(),
      [
        f'{number.name}: saved at step {stage["step"]} of {STEPS} in '
        f'{self.broken}; the same command goes on from there'
      ],
    )

  def test_each_process_goes_on(self):
    """No process starts from the beginning."""
    self.assertEqual(self.last.code, 0, self.last.err)
    steps = [stage['step'] for stage in self.stages.values()]
    self.assertEqual(steps, sorted(steps))
    self.assertEqual(
      self.last.out.replace('/broken', '/unbroken'), self.whole.out
    )

  def test_metrics_are_the_same_bytes(self):
    """Those of four processes and those of one."""
    self.assertEqual(
      (self.broken / 'metrics.jsonl').read_bytes(),
      (self.unbroken / 'metrics.jsonl').read_bytes(),
    )

  def test_state_is_the_same_bits(self):
    """Parameters, optimiser state and step."""
    experiment = make_experiment(OVERRIDES)
    broken = restore(self.broken, experiment)
    unbroken = restore(self.unbroken, experiment)
    self.assertEqual(int(broken.step), STEPS)
    oracles.assert_same_bits(broken, unbroken)
    fresh = jax.jit(lambda key: train.init(experiment, key).params)(
      jax.random.key(0)
    )
    moved = jax.tree.map(
      lambda a, b: bool((a != b).any()), broken.params, fresh
    )
    self.assertTrue(all(jax.tree.leaves(moved)))

  def test_config_and_environment(self):
    """config.json holds the overrides, env.json every start."""
    config = json.loads((self.broken / 'config.json').read_text())
    self.assertEqual(config['train']['steps'], STEPS)
    self.assertEqual(config['model']['dropout_rate'], 0.1)
    starts = json.loads((self.broken / 'env.json').read_text())
    for env in starts:
      self.assertEqual(
        env['command'][1:4], ['-m', 'experiments.train', scripts.TINY]
      )
    # The process that was killed had written lines past its checkpoint.
    steps = [env['step'] for env in starts]
    self.assertLen(steps, 4)
    self.assertEqual(steps[0], 0)
    self.assertIn(steps[1], (0, 130, 260, 390, 520))
    self.assertEqual(
      steps[2:],
      [self.stages[x]['step'] for x in (signal.SIGTERM, signal.SIGINT)],
    )


class FolderTest(parameterized.TestCase):
  """What a call finds in its folder, in this process."""

  experiment = make_experiment({'train.steps': 12})

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.workdir = pathlib.Path(folder) / 'run'
    cls.outcome = run_lib.run(cls.experiment, cls.workdir)

  def test_outcome(self):
    """Complete: the last step, its metrics and the saved parameters."""
    self.assertEqual((self.outcome.step, self.outcome.stopped_by), (12, None))
    rows = read_jsonl(self.workdir / 'metrics.jsonl')
    self.assertEqual([row['step'] for row in rows], [10, 12])
    self.assertEqual(rows[-1], self.outcome.metrics)
    saved = restore(self.workdir, self.experiment)
    oracles.assert_same_bits(saved.params, self.outcome.params)

  def test_a_finished_run_trains_nothing(self):
    """A second call gives the same outcome and leaves the files."""
    before = scripts.contents(self.workdir)
    with mock.patch.object(train, 'advance', side_effect=AssertionError):
      again = run_lib.run(self.experiment, self.workdir)
    self.assertEqual(again.metrics, self.outcome.metrics)
    oracles.assert_same_bits(again.params, self.outcome.params)
    self.assertEqual(scripts.contents(self.workdir), before)

  def test_another_config_is_refused(self):
    """Before anything is written, also where shapes differ."""
    before = scripts.contents(self.workdir)
    other = make_experiment({'train.steps': 12, 'model.d_model': 8})
    with self.assertRaisesRegex(ValueError, 'model.attention.d_model: 16 -> 8'):
      run_lib.run(other, self.workdir)
    self.assertEqual(scripts.contents(self.workdir), before)

  def copy(self, name: str) -> pathlib.Path:
    """A copy of the finished run."""
    workdir = self.workdir.parent / name
    shutil.copytree(self.workdir, workdir)
    return workdir

  def test_a_damaged_checkpoint(self):
    """The run goes on from the one before; it ends with the same bytes."""
    experiment = make_experiment({'train.checkpoint_every': 10})
    whole, broken = (self.workdir.parent / x for x in ('whole', 'damaged'))
    run_lib.run(experiment, whole)
    shutil.copytree(whole, broken)
    self.assertEqual(checkpoints_in(broken), [30, 40])
    (broken / 'checkpoints' / '40' / 'default' / '_METADATA').write_text('')
    with self.assertWarnsRegex(RecordWarning, '40 is damaged.* from step 30'):
      outcome = run_lib.run(experiment, broken)
    self.assertEqual(outcome.step, 40)
    self.assertEqual(
      (broken / 'metrics.jsonl').read_bytes(),
      (whole / 'metrics.jsonl').read_bytes(),
    )
    oracles.assert_same_bits(
      restore(broken, experiment), restore(whole, experiment)
    )
    starts = json.loads((broken / 'env.json').read_text())
    self.assertEqual([x['step'] for x in starts], [0, 30])

  def test_lost_metrics(self):
    """Are refused, also where nothing is left to train."""
    workdir = self.copy('lost')
    (workdir / 'metrics.jsonl').unlink()
    before = scripts.contents(workdir)
    with self.assertRaisesRegex(RecordError, 'no line of step 10, 12; restore'):
      run_lib.run(self.experiment, workdir)
    self.assertEqual(scripts.contents(workdir), before)

  def test_other_options(self):
    """JAX's options are those of the start."""
    before = scripts.contents(self.workdir)
    with (
      jax.enable_x64(True),
      self.assertRaisesRegex(RecordError, 'jax_enable_x64: False -> True'),
    ):
      run_lib.run(self.experiment, self.workdir)
    self.assertEqual(scripts.contents(self.workdir), before)

  def test_more_memory_than_there_is(self):
    """Is refused before the folder is made."""
    workdir = self.workdir.parent / 'large'
    large = make_experiment({'model.d_model': 2**24})
    with self.assertRaisesRegex(ValueError, 'model.d_model=16777216'):
      run_lib.run(large, workdir)
    self.assertFalse(workdir.exists())

  def test_a_computation_that_fails(self):
    """Raises; to read its results would wait for ever."""
    signal.alarm(120)  # ends the process
    self.addCleanup(signal.alarm, 0)
    init = train.init

    def large(experiment, key):
      state = init(experiment, key)
      # 64 TiB, which no machine gives.
      noise = jax.random.normal(key, (2**22, 2**22))
      return dataclasses.replace(state, params=state.params | {'x': noise})

    with (
      mock.patch.object(train, 'init', large),
      self.assertRaisesRegex(jax.errors.JaxRuntimeError, '(?i)out of memory'),
    ):
      run_lib.run(self.experiment, self.workdir.parent / 'failed')

  def test_a_loss_that_is_not_finite(self):
    """Ends the run; neither record nor checkpoint takes it in."""
    workdir = self.workdir.parent / 'diverged'
    advance = train.advance

    def diverging(*args):
      state, metrics = advance(*args)
      return state, metrics | {'loss': metrics['loss'] * float('nan')}

    with (
      mock.patch.object(train, 'advance', diverging),
      self.assertRaisesRegex(FloatingPointError, 'learning_rate'),
    ):
      run_lib.run(self.experiment, workdir)
    self.assertEmpty(read_jsonl(workdir / 'metrics.jsonl'))
    self.assertEmpty(checkpoints_in(workdir))

  def test_a_signal_before_the_first_step(self):
    """It ends the run at step 0, saved there, with no metrics."""
    workdir = self.workdir.parent / 'early'
    checkpoints = run_lib.Checkpoints

    def stopped(*args):
      os.kill(os.getpid(), signal.SIGTERM)
      return checkpoints(*args)

    with mock.patch.object(run_lib, 'Checkpoints', stopped):
      outcome = run_lib.run(self.experiment, workdir)
    self.assertEqual((outcome.step, outcome.stopped_by), (0, signal.SIGTERM))
    self.assertEmpty(read_jsonl(workdir / 'metrics.jsonl'))
    self.assertEqual(checkpoints_in(workdir), [0])

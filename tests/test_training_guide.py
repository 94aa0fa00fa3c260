"""docs/training.md: its Python and its commands do what they say."""

import contextlib
import pathlib
import re
import shlex
import sys
import tempfile
from unittest import mock

import jax.numpy as jnp
import pytest
import scripts
from absl.testing import parameterized

import configs
from experiments import probe_heads, prune_heads, sweep_heads, train
from mha_jax.training import loading
from mha_jax.training import train as train_lib

GUIDE = (scripts.ROOT / 'docs' / 'training.md').read_text()
SHORT = (
  '--config.train.steps=4',
  '--config.train.batch_size=2',
  '--config.train.eval_batches=1',
  '--config.model.d_model=8',
  '--config.optimizer.warmup_steps=1',
)
SCRIPTS = {'train': train, 'sweep_heads': sweep_heads}
LOAD, TASK, MIXED, OPTIMIZER = re.findall(
  r'```python\n(.*?)```', GUIDE, re.DOTALL
)


def commands(word: str) -> list[list[str]]:
  """The arguments of the guide's commands that hold a word."""
  found = re.findall(r'^python -m experiments\.(.*)$', GUIDE, re.M)
  return [shlex.split(x) for x in found if word in x]


class GuideTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def in_a_folder(self):
    """What a user writes lies where the guide puts it, beside our configs."""
    with (
      tempfile.TemporaryDirectory() as folder,
      mock.patch.object(configs, '__path__', [*configs.__path__, folder]),
      mock.patch.dict(sys.modules),
    ):
      self.folder = pathlib.Path(folder)
      (self.folder / 'reverse.py').write_text(TASK)
      (self.folder / 'mixed.py').write_text(MIXED)
      (self.folder / 'mine.py').write_text(OPTIMIZER)
      yield

  def run_command(self, command: list[str], *more: str) -> scripts.Result:
    """One of the guide's, with its files in the folder, and short."""
    script, *arguments = command
    text = '\n'.join([*arguments, f'--workdir={self.folder}/out', *more])
    text = text.replace('runs/', f'{self.folder}/')
    for name in ('reverse', 'mixed'):
      text = text.replace(f'configs/{name}', f'{self.folder}/{name}')
    text = text.replace('=my.txt', f'={self.folder}/my.txt')
    return scripts.call(SCRIPTS.get(script, probe_heads), *text.split('\n'))

  def test_text(self):
    """Trained on a file, loaded and generating once the file is gone."""
    text = self.folder / 'my.txt'
    text.write_text('To be, or not to be.\n' * 300)
    (command,) = commands('my.txt')
    run = f'--workdir={self.folder}/mine'
    result = self.run_command(command, *SHORT, run)
    self.assertEqual(result.code, 0, result)
    self.assertIn(f'text: {text}, ', result.out)
    text.unlink()
    names: dict = {}
    with contextlib.chdir(self.folder):
      (self.folder / 'runs').symlink_to(self.folder)
      exec(LOAD.replace('max_new_tokens=100', 'max_new_tokens=9'), names)
    self.assertEqual(names['new'].shape, (1, 9))

  def test_task(self):
    """Trains, is swept, and found again by its run."""
    training, sweep, probe = commands('reverse')
    result = self.run_command(
      training, *SHORT, f'--workdir={self.folder}/reverse'
    )
    self.assertEqual(result.code, 0, result)
    with mock.patch.object(sweep_heads, 'main', return_value=0) as main:
      self.assertEqual(self.run_command(sweep).code, 0)
    (curve,) = main.call_args.args[0].sweeps
    tasks = [x.experiment.task for points in curve.points for x in points]
    self.assertEqual([task.length for task in tasks], [6] * 2 * 4)
    result = self.run_command(
      probe, '--batch_size=2', f'--workdir={self.folder}/heads'
    )
    self.assertEqual(result.code, 0, result)
    self.assertIn('configs.reverse:Reverse task, mha, 2 layers', result.out)

  def test_layers(self):
    """Layers of two kinds train, and come back from the folder."""
    (command,) = commands('mixed')
    result = self.run_command(command, *SHORT, f'--workdir={self.folder}/mixed')
    self.assertEqual(result.code, 0, result)
    model, _ = loading.load_model(self.folder / 'mixed')
    first, second = model.config.layers
    self.assertEqual((first.num_heads, second.num_heads), (4, 2))
    self.assertEqual(second.kv_lora_rank, 8)
    for script in (probe_heads, prune_heads):
      result = scripts.call(
        script, f'--run={self.folder}/mixed', f'--workdir={self.folder}/x'
      )
      self.assertEqual((result.code, result.err.count('\n')), (2, 1), result)
      self.assertIn('have num_heads=[4, 2]', result.err)

  def test_optimizers(self):
    """By name, with options, and one's own."""
    found = commands('--config.optimizer')
    found.append(['train', '--config.optimizer.name=configs.mine:optimizer'])
    self.assertLen(found, 3)
    for i, command in enumerate(found):
      chosen = []
      with mock.patch.object(train, 'main', lambda x, y=chosen: y.append(x)):
        result = self.run_command(command, f'--workdir={self.folder}/{i}')
      self.assertIsNone(result.code, result)
      optimizer = chosen[0].experiment.optimizer
      self.assertIn(str(optimizer.name), ' '.join(command))
      made = train_lib.make_optimizer(chosen[0].experiment)
      made.init({'kernel': jnp.ones((2, 3))})
      if 'momentum' in ' '.join(command):
        self.assertEqual(optimizer.options, (('momentum', 0.9),))

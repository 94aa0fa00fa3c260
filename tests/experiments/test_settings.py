"""From a ConfigDict to frozen dataclasses."""

import json
import os
import pathlib
import tempfile

from absl.testing import parameterized
from ml_collections import ConfigDict

from configs import copy_task, recall
from experiments import settings
from mha_jax.decoder import DecoderConfig
from mha_jax.tasks import CopyTask, InductionTask, RecallTask
from mha_jax.training import record
from mha_jax.training.train import OptimizerConfig, TrainConfig


class ExperimentTest(parameterized.TestCase):
  def test_every_field_arrives(self):
    """A value of each section, and the sizes that the task dictates."""
    config = copy_task.get_config()
    config.update_from_flattened_dict(
      {
        'task.length': 6,
        'task.pairs': True,
        'task.num_symbols': 3,
        'model.num_heads': 8,
        'model.normalize_qk': 'rms',
        'optimizer.b2': 0.9,
        'train.seed': 5,
      }
    )
    experiment = settings.experiment_from(config)
    self.assertEqual(experiment.task, CopyTask(6, 3, pairs=True))
    self.assertEqual(
      experiment.model,
      DecoderConfig(14, 9, num_heads=8, normalize_qk='rms'),
    )
    self.assertEqual(experiment.optimizer, OptimizerConfig(b2=0.9))
    self.assertEqual(experiment.train, TrainConfig(seed=5, steps=300))

  @parameterized.parameters(
    ('task.length', 0, '--config.task: length=0 must be'),
    (
      'model.num_heads',
      3,
      '--config.model: num_heads=3 must divide d_model=64',
    ),
    ('optimizer.b1', 2.0, '--config.optimizer: b1=2.0 must lie'),
    ('train.steps', 0, '--config.train: steps=0 must be'),
    ('train.steps', 20, 'optimizer.warmup_steps=20 must be below train.steps'),
  )
  def test_errors_name_the_section(self, name, value, message):
    """Section, field, value and what it must be."""
    config = copy_task.get_config()
    config.update_from_flattened_dict({name: value})
    with self.assertRaisesRegex(ValueError, message):
      settings.experiment_from(config)

  @parameterized.parameters(
    ({'kind': 'recall', 'num_pairs': 3, 'num_queries': 2}, RecallTask(3, 2)),
    ({'kind': 'induction', 'length': 7}, InductionTask(7)),
    ({'length': 7}, CopyTask(7)),
  )
  def test_kinds(self, section, task):
    """The task's kind picks its class; none is a copy task."""
    config = copy_task.get_config()
    config.task = ConfigDict(section)
    self.assertEqual(settings.experiment_from(config).task, task)

  def test_recorded(self):
    """What a run writes down is the experiment again."""
    config = recall.get_config('induction')
    config.model.num_heads = 2
    config.model.positions = 'rope'
    experiment = settings.experiment_from(config)
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    record.claim(folder, experiment)
    self.assertEqual(settings.recorded_experiment(folder), experiment)
    (folder / 'config.json').write_text('{')
    with self.assertRaisesRegex(ValueError, 'config.json is no JSON'):
      settings.recorded_experiment(folder)

  @parameterized.parameters(
    ('', 'config.json is no JSON'),
    ('[]', 'config.json is no config'),
    ('{}', r"config.json: .* gives no \['task', 'model'"),
    ({'model': None}, r"config.json: .* gives no \['model'"),
    ({'task.kind': []}, r'config.json: --config.task.kind=\[\] must be in'),
    ({'task.length': None}, 'config.json: --config.task: length=None'),
    ({'model.d_model': []}, r'config.json: --config.model: d_model=\[\] must'),
    ({'model.vocab_size': 99}, 'config.json: model.vocab_size=99 is not'),
    ({'model.max_len': None}, 'config.json: model.max_len=None is not'),
    ({'train.steps': '9'}, "config.json: --config.train: steps='9' must"),
  )
  def test_wrong_values(self, changes, message):
    """JSON that is no experiment: file, field, value."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    text = changes
    if isinstance(changes, dict):
      config = record.as_json(settings.experiment_from(copy_task.get_config()))
      for name, value in changes.items():
        *sections, field = name.split('.')
        part = config[sections[0]] if sections else config
        part[field] = value
      text = json.dumps(config)
    (folder / 'config.json').write_text(text)
    with self.assertRaisesRegex(ValueError, message):
      settings.recorded_experiment(folder)

  def test_a_length_past_integers(self):
    """Is the task's, though the model would say so."""
    config = copy_task.get_config()
    config.task.length = 2_000_000_000
    with self.assertRaisesRegex(
      ValueError, '--config.task: max_len=4000000000 '
    ):
      settings.experiment_from(config)

  def test_a_field_that_the_library_lacks(self):
    """A config file's own mistake is named too."""
    config = copy_task.get_config()
    with config.unlocked():
      config.model.depth = 3
    with self.assertRaisesRegex(ValueError, "--config.model: .*'depth'"):
      settings.experiment_from(config)


class WorkdirTest(parameterized.TestCase):
  def test_default(self):
    """runs/<name>."""
    self.assertEqual(
      settings.workdir_from(None, 'copy_task'), pathlib.Path('runs/copy_task')
    )

  def test_flag(self):
    """A folder that is there or not; a file, or below one, is refused."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for path in (folder, folder / 'a' / 'b'):
      self.assertEqual(settings.workdir_from(str(path), 'x'), path)
      self.assertEqual([*folder.iterdir()], [])
    file = folder / 'file'
    file.write_text('')
    for path in (file, file / 'below'):
      with self.assertRaisesRegex(ValueError, f'--workdir={path}.* a file'):
        settings.workdir_from(str(path), 'x')

  def test_another_alphabet(self):
    """A name that the locale could not read, as Python then holds it."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for name in ('größe', '文'):
      self.assertEqual(settings.workdir_from(name, 'x'), pathlib.Path(name))
      garbled = name.encode().decode('ascii', 'surrogateescape')
      with self.assertRaisesRegex(ValueError, '--workdir=.*PYTHONUTF8=1'):
        settings.workdir_from(os.path.join(folder, garbled), 'x')
    self.assertEqual([*folder.iterdir()], [])

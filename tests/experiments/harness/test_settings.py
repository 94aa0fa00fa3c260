"""From a ConfigDict to frozen dataclasses."""

import contextlib
import dataclasses
import io
import json
import pathlib
import sys
import tempfile
import types
from unittest import mock

from absl.testing import parameterized
from ml_collections import ConfigDict

from configs import copy_task, recall, text
from experiments.harness import settings
from experiments.harness.settings import experiment_from
from mha_jax.decoder import decoder_config
from mha_jax.tasks import CopyTask, InductionTask, RecallTask, Task
from mha_jax.training import record
from mha_jax.training.loading import load_model
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
    experiment = experiment_from(config)
    self.assertEqual(experiment.task, CopyTask(6, 3, pairs=True))
    self.assertEqual(
      experiment.model,
      decoder_config(14, 9, num_heads=8, normalize_qk='rms'),
    )
    self.assertEqual(experiment.optimizer, OptimizerConfig(0.01, b2=0.9))
    self.assertEqual(experiment.train, TrainConfig(5, 150, 16, 25))

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
      experiment_from(config)

  @parameterized.parameters(
    ({'kind': 'recall', 'num_pairs': 3, 'num_queries': 2}, RecallTask(3, 2)),
    ({'kind': 'induction', 'length': 7}, InductionTask(7)),
    ({'length': 7}, CopyTask(7)),
  )
  def test_kinds(self, section, task):
    """The task's kind picks its class; none is a copy task."""
    config = copy_task.get_config()
    config.task = ConfigDict(section)
    self.assertEqual(experiment_from(config).task, task)

  def test_recorded(self):
    """What a run writes down is the experiment again."""
    config = recall.get_config('induction')
    config.model.num_heads = 2
    config.model.positions = 'rope'
    experiment = experiment_from(config)
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
    (
      {'model.d_model': 9},
      r"config.json: model records no decoder .*'d_model'",
    ),
    ({'model.attention': 'mha'}, "model.attention='mha' is no recorded"),
    ({'model.attention': {'kind': 'x'}}, "attention.kind='x' cannot be imp"),
    ({'model.attention': {'kind': 'mha'}}, 'records no decoder .*d_model'),
    ({'model.vocab_size': 99}, 'config.json: model.vocab_size=99 is not'),
    ({'model.max_len': None}, 'config.json: max_len=None must be'),
    ({'train.steps': '9'}, "config.json: --config.train: steps='9' must"),
  )
  def test_wrong_values(self, changes, message):
    """JSON that is no experiment: file, field, value."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    written = changes
    if isinstance(changes, dict):
      config = record.as_json(settings.experiment_from(copy_task.get_config()))
      for name, value in changes.items():
        *sections, field = name.split('.')
        part = config[sections[0]] if sections else config
        part[field] = value
      written = json.dumps(config)
    (folder / 'config.json').write_text(written)
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
      experiment_from(config)

  def test_a_run_of_before(self):
    """Its record lacks fields that have come since: it goes on all the same."""
    experiment = experiment_from(copy_task.get_config('tiny'))
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    saved = record.as_json(experiment)
    for name in ('name', 'options'):
      self.assertIsNone(saved['optimizer'].pop(name))
    record.claim(folder, saved)
    record.check_same_config(folder, record.as_json(experiment))
    self.assertEqual(settings.recorded_experiment(folder), experiment)


@dataclasses.dataclass(frozen=True)
class Counting(Task):
  """A task of a user's own."""

  length: int = 3
  start: float | None = None
  kind: str = dataclasses.field(default='own_tasks:Counting', init=False)
  made: str = dataclasses.field(default='', init=False)

  def __post_init__(self):
    object.__setattr__(self, 'made', f'of {self.length}')

  @property
  def vocab_size(self):
    return 7

  @property
  def max_len(self):
    return self.length

  def sample(self, key, batch_size):
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Unnamed(Counting):
  kind: str = dataclasses.field(default='own', init=False)


@dataclasses.dataclass(frozen=True)
class Abstract(Task):
  kind: str = dataclasses.field(default='own_tasks:Abstract', init=False)


@dataclasses.dataclass(frozen=True)
class Bare:
  kind: str = dataclasses.field(default='own_tasks:Bare', init=False)


class OwnTaskTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    module = types.ModuleType('own_tasks')
    for kind in (Counting, Unnamed, Abstract, Bare):
      setattr(module, kind.__name__, kind)
    module.function = print
    self.enter_context(mock.patch.dict(sys.modules, own_tasks=module))

  def config(self, **task) -> ConfigDict:
    config = ConfigDict({'task': task})
    settings.complete(config, 'own')
    return config

  def test_from_config_to_record_and_back(self):
    """Its fields are flags; a run's folder finds it again."""
    config = self.config(kind='own_tasks:Counting')
    self.assertEqual(
      config.task.to_dict(),
      {'kind': 'own_tasks:Counting', 'length': 3, 'start': None},
    )
    with self.assertRaises(TypeError):
      config.task.start = 'x'
    config.task.length = 5
    experiment = experiment_from(config)
    self.assertEqual(experiment.task, Counting(5))
    self.assertEqual(experiment.model.vocab_size, 7)
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    record.claim(folder, experiment)
    self.assertEqual(settings.recorded_experiment(folder), experiment)

  def test_what_a_task_has_by_default(self):
    task = Counting()
    self.assertIs(task.validation, task)
    self.assertEqual((task.separators, task.token_text(3)), ((), '3'))
    self.assertEqual(task.symbols, tuple(range(7)))

  def test_a_vocabulary_past_memory(self):
    """Is refused before a token of it is made."""
    config = copy_task.get_config('tiny')
    config.task.num_symbols = 10**9
    with mock.patch.object(CopyTask, 'symbols', property(self.fail)):
      experiment = experiment_from(config)
      with self.assertRaisesRegex(ValueError, '--config: .*embeddings, by'):
        settings.check_memory(experiment)

  @parameterized.parameters(
    ('nowhere:Task', "kind='nowhere:Task' cannot be imported .*'nowhere'"),
    ('own_tasks:Missing', "own_tasks:Missing' cannot be imported"),
    ('own_tasks:function', 'must be a frozen dataclass'),
    ('own_tasks:Unnamed', "has kind='own', so that no run could find it"),
    ('own_tasks:Abstract', 'abstract method'),
    ('own_tasks:Bare', r"lacks \['vocab_size', 'max_len', 'sample'"),
    ('poem', "kind='poem' must be in .* a class of your own, as"),
    (3, 'kind=3 must be in'),
  )
  def test_refused(self, kind, message):
    """With the kind, and what is wrong with it."""
    with self.assertRaisesRegex(ValueError, f'--config.task.*{message}'):
      experiment_from(
        ConfigDict(
          {'name': 'x', 'model': {}, 'optimizer': {}, 'train': {}}
          | {'task': {'kind': kind}}
        )
      )


class TextTest(parameterized.TestCase):
  def test_announced_once(self):
    """Which text, and how much of it; nothing of a task without one."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    (folder / 'a').write_text('x' * 900 + '\n' + 'y' * 99)
    config = text.get_config('tiny')
    config.task.path = str(folder / 'a')
    of_text = experiment_from(config)
    copy = experiment_from(copy_task.get_config())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      settings.announce([copy, of_text, of_text, copy])
    self.assertEqual(
      out.getvalue(),
      f'text: {folder}/a, 900 bytes to train on, 100 to validate\n',
    )

  def test_empty_path(self):
    """Is no wish for the plays."""
    config = text.get_config('tiny')
    config.task.path = ''
    with self.assertRaisesRegex(ValueError, "--config.task: path='' is empty"):
      experiment_from(config)


class LocaleTest(parameterized.TestCase):
  def test_another_alphabet(self):
    """A name that the locale could not read, as Python then holds it."""
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    for name in ('größe', '文'):
      record.check_name('--workdir', pathlib.Path(name))
      garbled = name.encode().decode('ascii', 'surrogateescape')
      with self.assertRaisesRegex(ValueError, '--workdir=.*PYTHONUTF8=1'):
        record.check_name('--workdir', folder / garbled)
      with self.assertRaisesRegex(
        ValueError, r"--config.name=b'[^/]*' has letters"
      ):
        record.check_name('--config.name', garbled)
      with self.assertRaisesRegex(ValueError, 'workdir=.*PYTHONUTF8=1'):
        load_model(folder / garbled)
    self.assertEqual([*folder.iterdir()], [])

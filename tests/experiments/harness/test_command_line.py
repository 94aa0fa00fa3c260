"""The command line of all experiments. This module starts processes."""

import contextlib
import errno
import importlib
import json
import os
import pathlib
import signal
import tempfile
import types
import warnings
from unittest import mock

import jax
import scripts
from absl.testing import parameterized

from experiments import benchmark, configure_heads, kv_cache, sweep_heads, train
from experiments.harness import command_line, config_files
from mha_jax.training.record import RecordError, RecordWarning
from mha_jax.training.train import OptimizerConfig, TrainConfig

SCRIPTS = {'train': train, 'sweep_heads': sweep_heads}
OWN_FLAGS = {
  'train': ('--tensorboard',),
  'sweep_heads': ('--seeds=', '--n_heads=', '--threshold='),
}

BAD_CALLS = {
  'unknown_flag': (['--nheads=3'], ['nheads']),
  'unknown_field': (
    ['--config.model.num_head=3'],
    ['--config.model.num_head:', 'no such field', 'model.num_heads'],
  ),
  'unknown_section': (['--config.modle.x=3'], ['--config.modle.x']),
  'a_section': (['--config.model=3'], ['--config.model']),
  'wrong_type': (['--config.model.num_heads=two'], ['num_heads', 'two']),
  'wrong_type_of_a_float': (
    ['--config.optimizer.learning_rate=fast'],
    ['learning_rate', 'fast'],
  ),
  'wrong_type_of_none': (['--config.task.min_length=x'], ['min_length', 'x']),
  'wrong_bool': (['--config.task.pairs=perhaps'], ['pairs', 'perhaps']),
  'missing_config': (
    ['--config=configs/no.py'],
    ['--config=configs/no.py', 'name a Python file'],
  ),
  'a_folder': (['--config=configs'], ['--config=configs', 'no file']),
  'no_python': (['--config=pyproject.toml'], ['--config=pyproject.toml']),
  'no_get_config': (['--config=configs/__init__.py'], ['get_config']),
  'empty_config': (['--config='], ['--config=']),
  'no_config': (['--config'], ['--config needs a value', '--config=FILE']),
  'config_swallows': (
    ['--config', '--config.train.seed=3'],
    ['--config needs a value'],
  ),
  'workdir_swallows': (
    ['--workdir', '--config.train.seed=3'],
    ['--workdir needs a value; write --workdir=VALUE'],
  ),
  'field_swallows': (
    ['--config.train.seed', '--workdir=x'],
    ['--config.train.seed needs a value'],
  ),
  'last_without_value': (
    ['--config.train.seed'],
    ['--config.train.seed needs a value'],
  ),
  'short_steps': (['--steps=5'], ['--steps', '--config.train.steps?']),
  'short_symbols': (
    ['--num_symbols=64'],
    ['--num_symbols', '--config.task.num_symbols?'],
  ),
  'short_misspelt': (['--setps', '5'], ['--config.train.steps?']),
  'section_left_out': (
    ['--config.steps=5'],
    ['--config.steps', '--config.train.steps?'],
  ),
  'far_from_all': (['--qqqqqq=5'], ['--qqqqqq', '--help lists']),
  'empty_workdir': (['--workdir='], ['--workdir= is empty']),
  'empty_field': (
    ['--config.model.normalize_qk='],
    ['--config.model.normalize_qk= is empty; give it a value'],
  ),
  'empty_optimizer': (
    ['--config.optimizer.name='],
    ['--config.optimizer.name= is empty'],
  ),
  'other_kind': (
    ['--config.task.kind=text'],
    ["TextTask has no ['fixed_separator', 'min_length'", 'text.py'],
  ),
  'bad_variant': (
    ['--config=configs/copy_task.py:huge'],
    ['huge', 'tiny', '--config='],
  ),
  'bad_value': (
    ['--config.train.steps=0'],
    ['--config.train', 'steps=0', 'lie in'],
  ),
  'bad_rate': (
    ['--config.model.dropout_rate=1.5'],
    ['--config.model', 'dropout_rate=1.5'],
  ),
  'bad_softcap': (
    ['--config.model.logit_softcap=-1'],
    ['--config.model', 'logit_softcap=-1'],
  ),
  'no_float64': (
    ['--config.model.dtype=float64'],
    ['dtype', 'float64', 'JAX_ENABLE_X64'],
  ),
  'stray': (['8'], ["'8'"]),
}
BAD_SWEEPS = {
  'no_number': (['--n_heads=1,x'], ['--n_heads=1,x', '1,2,4']),
  'zero': (['--n_heads=0'], ['--n_heads=0', 'positive']),
  'none': (['--n_heads='], ['--n_heads=', 'positive']),
  'indivisible': (['--n_heads=1,3'], ['num_heads=3 must divide d_model=16']),
  'varied': (
    ['--config.model.num_heads=2'],
    ['--config.model.num_heads', '--n_heads'],
  ),
  'infinite': (['--threshold=inf'], ['--threshold=inf', 'lie in']),
  'many_seeds': (['--seeds=1000000000'], ['seeds', '1000']),
  'no_seeds': (['--seeds=0'], ['seeds', '0']),
  'half_a_seed': (['--seeds=1.5'], ['seeds', '1.5']),
  'big_seed': (
    ['--config.train.seed=4294967295', '--seeds=2'],
    ['seed', '4294967295'],
  ),
  'threshold': (['--threshold=0'], ['--threshold=0', 'lie in']),
  'nan': (['--threshold=nan'], ['--threshold=nan', 'lie in']),
}


class BadCallsTest(parameterized.TestCase):
  """Each ends with code 2 and one line that names the argument."""

  def check(self, script, arguments, words):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    workdir = folder / 'run'
    result = scripts.call(
      script, scripts.TINY, f'--workdir={workdir}', *arguments
    )
    self.assertEqual(result.code, 2, result)
    self.assertEqual(result.out, '')
    self.assertEqual(result.err.count('\n'), 1, result.err)
    self.assertStartsWith(result.err, 'error: ')
    self.assertEndsWith(result.err, '\n')
    for word in words:
      self.assertIn(word, result.err)
    self.assertEmpty([*folder.iterdir()])

  @parameterized.named_parameters(
    (f'{script}_{name}', SCRIPTS[script], *case)
    for script in SCRIPTS
    for name, case in BAD_CALLS.items()
  )
  def test_both(self, script, arguments, words):
    self.check(script, arguments, words)

  @parameterized.named_parameters(
    (name, *case) for name, case in BAD_SWEEPS.items()
  )
  def test_sweep(self, arguments, words):
    self.check(sweep_heads, arguments, words)

  def test_train_indivisible(self):
    self.check(
      train, ['--config.model.num_heads=3'], ['num_heads=3', 'nearest: 2, 4']
    )

  @parameterized.named_parameters(
    (f'{name}_{kind}', script, below)
    for name, script in SCRIPTS.items()
    for kind, below in (('file', ''), ('below', 'x'))
  )
  def test_workdir(self, script, below):
    """A workdir that is a file, or lies below one."""
    with tempfile.NamedTemporaryFile() as file:
      path = pathlib.Path(file.name) / below
      result = scripts.call(script, scripts.TINY, f'--workdir={path}')
    self.assertEqual(result.code, 2)
    self.assertEqual(result.err.count('\n'), 1, result.err)
    self.assertIn(f'--workdir={path}', result.err)

  def test_a_call_leaves_no_flags(self):
    """The helper of these tests: an override does not reach the next call."""
    for value in ('x', 'y'):
      result = scripts.call(train, f'--config.model.num_heads={value}')
      self.assertIn(value, result.err)


class ProcessesTest(parameterized.TestCase):
  """The same as a user's shell sees it."""

  def test_help(self):
    """Exit code 0; the script's words, its own flags, then the fields."""
    processes = {
      name: scripts.start(f'experiments.{name}', '--help', scripts.TINY)
      for name in SCRIPTS
    }
    for name, process in processes.items():
      result = scripts.finish(process)
      self.assertEqual((result.code, result.err), (0, ''))
      self.assertStartsWith(result.out, SCRIPTS[name].__doc__.strip()[:40])
      order = (
        'Flags:',
        scripts.TINY,
        *OWN_FLAGS[name],
        '--workdir',
        'Fields of the config',
        'model.d_model=16',
        'optimizer.learning_rate=0.01',
        'task.min_length=None',
        'train.steps=40',
      )
      start = result.out.index('Flags:')
      places = [result.out.index(word, start) for word in order]
      self.assertEqual(places, sorted(places))
      self.assertRegex(
        result.out, r'model.d_model=16\n +width of the residual stream\n'
      )
      other = OWN_FLAGS['train' if name == 'sweep_heads' else 'sweep_heads']
      self.assertNotIn(other[0], result.out[start:])

  def test_bad_flag(self):
    """Exit code 2 and one line, no traceback."""
    process = scripts.start('experiments.train', '--config.model.num_heads=3')
    result = scripts.finish(process)
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn('num_heads=3', result.err)


class EndsTest(parameterized.TestCase):
  """How an experiment's main may end."""

  def call(self, main, parse=lambda: None) -> scripts.Result:
    script = types.ModuleType('script', 'Does what it is told.')
    script.parse, script.main = parse, main
    return scripts.call(script, scripts.TINY)

  def raising(self, error: BaseException) -> scripts.Result:
    return self.call(mock.Mock(side_effect=error))

  @parameterized.parameters(
    (RecordError('two\nlines'), 'error: two lines\n'),
    (OSError(2, 'no such file', '/x'), "error: [Errno 2] no such file: '/x'\n"),
    (
      jax.errors.JaxRuntimeError('INTERNAL: odd'),
      'error: INTERNAL: odd\n',
    ),
  )
  def test_refused(self, error, line):
    """One line and code 2."""
    self.assertEqual(self.raising(error)[:3], (2, '', line))

  @parameterized.parameters(
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: wants 9 bytes.\nAnd more'),
    jax.errors.JaxRuntimeError('INTERNAL: Out of memory allocating 9 bytes.'),
    MemoryError('Unable to allocate 9 bytes'),
  )
  def test_out_of_memory(self, error):
    """The largest sizes of the config are named."""
    result = self.raising(error)
    self.assertEqual(result.code, 2)
    self.assertRegex(
      result.err,
      r'^error: out of memory \(.* 9 bytes\); the largest sizes are '
      '--config.model.d_model=16, --config.train.batch_size=8, '
      r'--config\.\w+\.\w+=\d+: choose less\n$',
    )

  def test_no_room(self):
    """Where the system does not tell the file, the folder is told."""
    result = self.call(
      mock.Mock(side_effect=OSError(errno.ENOSPC, 'No space left')),
      lambda: types.SimpleNamespace(workdir='/the/run'),
    )
    self.assertEqual(result.code, 2)
    self.assertEndsWith(result.err, 'No space left; make room for /the/run\n')

  def test_interrupted(self):
    """Code 130; JAX is not waited for."""
    with mock.patch.object(command_line, '_leave_at_exit') as leave:
      result = self.raising(KeyboardInterrupt())
    self.assertEqual(result[:3], (130, '', 'SIGINT: stopped\n'))
    leave.assert_called_once_with(130)

  def test_failed(self):
    result = self.raising(FloatingPointError('not finite'))
    self.assertEqual(result[:3], (1, '', 'failed: not finite\n'))

  def test_warnings(self):
    """One line each, without a place in the code."""

    def main(_):
      warnings.warn('something\nis amiss', RecordWarning, stacklevel=1)
      return 0

    with warnings.catch_warnings():
      warnings.simplefilter('always')
      result = self.call(main)
    self.assertEqual(result[:3], (0, '', 'warning: something is amiss\n'))

  @parameterized.parameters(
    (AssertionError(), 'no such device here'),
    (RuntimeError("no backend 'x'. (set JAX_PLATFORMS='')"), "no backend 'x'"),
  )
  def test_platforms(self, error, reason):
    """What JAX raises, in one line, before anything is done."""
    with (
      mock.patch.dict(os.environ, {'JAX_PLATFORMS': 'x'}),
      mock.patch.object(jax, 'devices', side_effect=error),
    ):
      result = self.raising(AssertionError('main was called'))
    self.assertEqual(
      result[:3],
      (
        2,
        '',
        f'error: JAX_PLATFORMS=x: {reason}; unset it to use the devices there '
        'are\n',
      ),
    )


class OtherConfigsTest(parameterized.TestCase):
  @parameterized.parameters(
    'train',
    'sweep_heads',
    'copy_heads',
    'mla_rank',
    'sweep_recall',
    'probe_heads',
    'prune_heads',
    'kv_cache',
    'configure_heads',
    'check_costs',
    'benchmark',
  )
  def test_every_config(self, name):
    """Each script takes a config file, or says in one line why not."""
    module = importlib.import_module(f'experiments.{name}')
    script = types.ModuleType(name, module.__doc__)
    script.parse, script.main = module.parse, lambda chosen: 0
    taken = set()
    for path in sorted((scripts.ROOT / 'configs').glob('[!_]*.py')):
      if path.stem == 'base':
        continue
      variant = ':copy' if path.stem == 'mla_rank' else ''
      result = scripts.call(script, f'--config={path}{variant}')
      self.assertIn(result.code, (0, 2), result)
      self.assertEqual(result.err.count('\n'), result.code // 2, result.err)
      if result.code == 0:
        taken.add(path.stem)
    own = {name} & {'kv_cache', 'configure_heads', 'check_costs', 'benchmark'}
    own |= {'copy_task'} if name == 'copy_heads' else set()
    trains = {'recall', 'sweep_recall'}
    if name != 'sweep_recall':
      trains |= {'copy_task', 'mla_rank'}
    self.assertEqual(taken - {'text'}, own or trains)


class LoadConfigTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.path = folder / 'own.py'

  @parameterized.parameters(
    ('1 / 0', 'ZeroDivisionError: division by zero'),
    ('def get_config(): raise ValueError("no luck")', 'own.py: no luck'),
    ('def get_config(:', 'SyntaxError'),
    ('import not_there', "No module named 'not_there'"),
    ('def get_config(): pass', 'get_config'),
  )
  def test_errors(self, text, message):
    """Whatever the file does is one ValueError that names the file."""
    self.path.write_text(text)
    with self.assertRaisesRegex(ValueError, message) as caught:
      config_files.load_config(str(self.path))
    self.assertIn(f'--config={self.path}', str(caught.exception))

  def test_sections_left_out(self):
    """A config of the sections that differ; the rest is at its defaults."""
    self.path.write_text(
      'from ml_collections import ConfigDict\n'
      'def get_config(x=""): return ConfigDict({"task": {"length": 3}})\n'
    )
    whole = config_files.load_config('configs/copy_task.py')
    whole.task.length = 3
    whole.optimizer.learning_rate = OptimizerConfig().learning_rate
    for name in ('steps', 'batch_size', 'steps_per_dispatch'):
      whole.train[name] = getattr(TrainConfig(), name)
    config = config_files.load_config(str(self.path))
    self.assertEqual(config.name, 'own')
    self.assertEqual(config.to_dict() | {'name': whole.name}, whole.to_dict())
    named = config_files.load_config(f'{self.path}:a,b')
    self.assertEqual(named.name, 'own-a-b')
    for field, bad in (('num_kv_heads', 'x'), ('head_dim', 1.5)):
      with self.assertRaises((TypeError, ValueError)):  # typed as in the class
        config.model[field] = bad

  @parameterized.parameters(
    'FrozenConfigDict(x)',
    'ConfigDict(x).lock()',
    'ConfigDict(x)',
    'ConfigDict()',
  )
  def test_any_config_dict(self, made):
    """Frozen, locked, or without anything: its fields are flags."""
    self.path.write_text(
      'from ml_collections import ConfigDict, FrozenConfigDict\n'
      'x = {"train": {"steps": 30}}\n'
      f'def get_config(): return {made}\n'
    )
    result = scripts.call(
      train, f'--config={self.path}', '--config.train.steps=0'
    )
    self.assertEqual(result.code, 2)
    self.assertIn('steps=0 must be', result.err)

  @parameterized.parameters(
    ('{"modle": {}}', "['modle']"),
    ('{"model": {"num_head": 3}}', "['num_head']"),
    ('{"model": 3}', "['model']"),
    ('{"task": {"kind": "poem"}}', "kind='poem' must be in"),
  )
  def test_sections_that_are_none(self, config, words):
    """What the library does not know is named, by either script."""
    self.path.write_text(
      'from ml_collections import ConfigDict\n'
      f'def get_config(): return ConfigDict({config})\n'
    )
    for script in SCRIPTS.values():
      result = scripts.call(
        script, f'--config={self.path}', f'--workdir={self.path.parent}/run'
      )
      self.assertEqual(result.code, 2)
      self.assertEqual(result.err.count('\n'), 1)
      self.assertIn(words, result.err)

  def test_elsewhere(self):
    """Without the checkout's configs/ it says where to stand."""
    with (
      contextlib.chdir(self.path.parent),
      self.assertRaisesRegex(
        ValueError, 'no folder configs here; start in the checkout'
      ),
    ):
      config_files.load_config('configs/copy_task.py:tiny')

  def test_variants(self):
    """What follows the colon is the file's, or nothing is passed."""
    self.path.write_text(
      'from ml_collections import ConfigDict\n'
      'def get_config(x="none"): return ConfigDict({"x": x})\n'
    )
    for suffix, wanted in (('', 'none'), (':', ''), (':a,b', 'a,b')):
      config = config_files.load_config(f'{self.path}{suffix}')
      self.assertEqual(config.x, wanted)


class ContradictionsTest(parameterized.TestCase):
  @parameterized.parameters(
    (train, ['--config.train.seed=1', '--config.train.seed=2']),
    (train, ['--workdir=a', '--workdir=b']),
    (train, ['--config=configs/text.py', '--config=configs/recall.py']),
    (sweep_heads, ['--n_heads=1', '--n_heads=2']),
    (sweep_heads, ['--study', '--nostudy']),
    (configure_heads, ['--params=1B', '--params=2B']),
  )
  def test_twice(self, script, arguments):
    """A flag has one value."""
    result = scripts.call_as_given(script, *arguments)
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    name = arguments[0].partition('=')[0]
    self.assertIn(f'{name} is given 2 times', result.err)

  @parameterized.parameters(
    (
      kv_cache,
      ['--length=8', '--config.length=16'],
      '--length=8 and --config.length=16 contradict each other',
    ),
    (
      configure_heads,
      ['--params=1B', '--config.params=2B'],
      '--params=1B and --config.params=2B contradict',
    ),
    (
      kv_cache,
      ['--config.kv_heads=3'],
      '--config.kv_heads=3: num_kv_heads=3 must divide num_heads=8',
    ),
    (kv_cache, ['--config.num_heads=3'], '--config.num_heads=3: '),
    (
      benchmark,
      ['--config.train_heads=2,3'],
      '--config.train_heads=3: num_heads=3 must divide d_model=64',
    ),
  )
  def test_names_the_flag(self, script, arguments, words):
    """That two flags say different things, or which one asks for it."""
    name = script.__name__.rpartition('.')[2]
    result = scripts.call(script, f'--config=configs/{name}.py', *arguments)
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn(words, result.err)


class PipeTest(parameterized.TestCase):
  def test_head(self):
    """`2>&1 | head -1`: all files, all points, and the code of a success."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    process = scripts.start(
      'experiments.sweep_heads',
      scripts.TINY,
      f'--workdir={folder}',
      '--n_heads=1,2',
      '--seeds=1',
      into_one=True,
      quick=True,
    )
    self.assertIn('1 head ', process.stdout.readline())
    process.stdout.close()
    self.assertEqual(process.wait(timeout=300), 0)
    rows = (pathlib.Path(folder) / 'results.jsonl').read_text().splitlines()
    states = [json.loads(row)['status'] for row in rows]
    self.assertEqual(states, ['finished'] * 2 * 4)  # at four rates
    self.assertContainsSubset(
      {'results.csv', 'sweep_heads.png'}, scripts.names(folder)
    )


class SmallPartsTest(parameterized.TestCase):
  def test_positive_ints(self):
    self.assertEqual(command_line.positive_ints('n', ['4', ' 1']), [4, 1])
    for bad in ([], ['x'], ['1', '-2'], ['1.5'], ['']):
      with self.assertRaisesRegex(ValueError, f'--n={",".join(bad)} must be'):
        command_line.positive_ints('n', bad)

  def test_exit_code(self):
    """A shell's 128 + 2 after Ctrl-C; SIGTERM is a clean stop."""
    self.assertEqual(command_line.exit_code(signal.SIGTERM), 0)
    self.assertEqual(command_line.exit_code(signal.SIGINT), 130)

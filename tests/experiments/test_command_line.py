"""The command line of all experiments. This module starts processes."""

import errno
import importlib
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

from experiments import command_line, sweep_heads, train
from mha_jax.training.record import RecordError, RecordWarning

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
  'missing_config': (['--config=configs/no.py'], ['--config=configs/no.py']),
  'a_folder': (['--config=configs'], ['--config=configs', 'no file']),
  'no_python': (['--config=pyproject.toml'], ['--config=pyproject.toml']),
  'no_get_config': (['--config=configs/__init__.py'], ['get_config']),
  'empty_config': (['--config='], ['--config=']),
  'no_config': (['--config'], ['--config=']),
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
        'optimizer.learning_rate=0.003',
        'task.min_length=None',
        'train.steps=40',
      )
      start = result.out.index('Flags:')
      places = [result.out.index(word, start) for word in order]
      self.assertEqual(places, sorted(places))
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
    self.assertEqual(self.raising(error), (2, '', line))

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
      '--config.train.checkpoint_every=20, --config.model.d_model=16, '
      '--config.train.batch_size=8: choose less\n$',
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
    self.assertEqual(result, (130, '', 'SIGINT: stopped\n'))
    leave.assert_called_once_with(130)

  def test_failed(self):
    result = self.raising(FloatingPointError('not finite'))
    self.assertEqual(result, (1, '', 'failed: not finite\n'))

  def test_warnings(self):
    """One line each, without a place in the code."""

    def main(_):
      warnings.warn('something\nis amiss', RecordWarning, stacklevel=1)
      return 0

    with warnings.catch_warnings():
      warnings.simplefilter('always')
      result = self.call(main)
    self.assertEqual(result, (0, '', 'warning: something is amiss\n'))

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
      result,
      (
        2,
        '',
        f'error: JAX_PLATFORMS=x: {reason}; unset it to take what there is\n',
      ),
    )


class OtherConfigsTest(parameterized.TestCase):
  @parameterized.parameters(
    'train',
    'sweep_heads',
    'mla_rank',
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
    trains = {'copy_task', 'recall', 'mla_rank'}
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
      command_line.load_config(str(self.path))
    self.assertIn(f'--config={self.path}', str(caught.exception))

  @parameterized.parameters(*SCRIPTS.values())
  def test_a_section_is_missing(self, script):
    """A config without what the script reads: code 2 and one line."""
    self.path.write_text(
      'from ml_collections import ConfigDict\n'
      'def get_config(): return ConfigDict({"task": {"length": 3}})\n'
    )
    result = scripts.call(
      script, f'--config={self.path}', f'--workdir={self.path.parent}/run'
    )
    self.assertEqual(result.code, 2)
    self.assertEqual(result.err.count('\n'), 1)

  def test_variants(self):
    """What follows the colon is the file's, or nothing is passed."""
    self.path.write_text(
      'from ml_collections import ConfigDict\n'
      'def get_config(x="none"): return ConfigDict({"x": x})\n'
    )
    for suffix, wanted in (('', 'none'), (':', ''), (':a,b', 'a,b')):
      config = command_line.load_config(f'{self.path}{suffix}')
      self.assertEqual(config.x, wanted)


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

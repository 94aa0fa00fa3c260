"""The folder of an experiment: its name, and what it is kept for."""

import json
import pathlib
import re
import shlex
import tempfile
from unittest import mock

import scripts
from absl.testing import parameterized

from experiments import (
  benchmark,
  check_costs,
  configure_heads,
  kv_cache,
  mla_rank,
  probe_heads,
  prune_heads,
  sweep_heads,
  train,
)
from experiments.harness import folders
from mha_jax.training import record

GQA = ('--config.model.attention=gqa', '--config.model.num_kv_heads=2')
ROPE = '--config.model.positions=rope'
COPY = '--config=configs/copy_task.py'
TINY = f'{COPY}:tiny'
NAMES = (
  (train, [COPY], 'copy_task'),
  (train, [COPY, *GQA], 'copy_task-attention=gqa-num_kv_heads=2'),
  (train, [TINY, '--config.train.seed=3'], 'copy_task-tiny-seed=3'),
  (train, [TINY, '--config.task.pairs'], 'copy_task-tiny-pairs'),
  (train, [TINY, '--tensorboard'], 'copy_task-tiny'),
  # What is the default already changes nothing.
  (train, [TINY, '--config.train.seed=0'], 'copy_task-tiny'),
  (sweep_heads, [COPY, '--n_heads=1,2,4,8,16'], 'sweep_heads-copy_task'),
  (
    sweep_heads,
    [COPY, ROPE, '--n_heads=2,4,8', *GQA],
    'sweep_heads-copy_task-attention=gqa-n_heads=2,4,8-num_kv_heads=2-'
    'positions=rope',
  ),
  (
    sweep_heads,
    [COPY, '--study', '--seeds=5'],
    'sweep_heads-copy_task-seeds=5-study',
  ),
  (
    mla_rank,
    ['--config=configs/mla_rank.py:tiny', '--ranks=2,4', '--equal_params'],
    'mla_rank-copy-tiny-equal_params-ranks=2,4',
  ),
  (
    kv_cache,
    ['--config=configs/kv_cache.py', '--length=64'],
    'kv_cache-length=64',
  ),
  (
    kv_cache,
    ['--config=configs/kv_cache.py', '--config.length=64'],
    'kv_cache-length=64',
  ),
  (prune_heads, [TINY, '--kind=mean'], 'prune_heads-copy_task-tiny-kind=mean'),
  (
    probe_heads,
    [TINY, '--examples=2'],
    'probe_heads-copy_task-tiny-examples=2',
  ),
  (
    configure_heads,
    ['--config=configs/configure_heads.py', '--params=350M', '--json'],
    'configure_heads-params=350M',
  ),
  (
    check_costs,
    ['--config=configs/check_costs.py', '--config.num_heads=8'],
    'check_costs-num_heads=8',
  ),
  (
    benchmark,
    ['--config=configs/benchmark.py:tiny', '--config.suites=decode'],
    'benchmark-tiny-suites=decode',
  ),
)


def chosen(script, *arguments: str) -> pathlib.Path:
  """The folder that a command line without --workdir names."""
  found = []

  def stop(settings):
    found.append(settings.workdir)
    return 0

  with mock.patch.object(script, 'main', stop):
    result = scripts.call(script, *arguments)
  assert result.code == 0, result
  return found[0]


class NamesTest(parameterized.TestCase):
  @parameterized.parameters(*NAMES)
  def test_default(self, script, arguments, name):
    """Each change of the command line is in it, and nothing else."""
    self.assertEqual(chosen(script, *arguments), pathlib.Path('runs') / name)

  def test_a_path(self):
    """Of a value with slashes the last part, without spaces."""
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'a text'
      path.write_text('x' * 5000)
      name = chosen(
        train, '--config=configs/text.py:tiny', f'--config.task.path={path}'
      ).name
    self.assertEqual(name, 'text-tiny-path=a_text')

  def test_long(self):
    """A long name is cut, and still differs from its like."""
    names = {
      folders._short('x' * 100 + '€' * count) for count in (7, 20, 30, 31)
    }
    self.assertLen(names, 4)
    for name in names:
      self.assertLessEqual(len(name.encode()), folders.LONGEST + 1)

  def test_empty(self):
    """--config.name= would be the folder of all runs."""
    for script in (train, sweep_heads):
      result = scripts.call(script, TINY, '--config.name=')
      self.assertEqual(result.code, 2)
      self.assertIn('--config.name= is empty', result.err)

  def test_a_name_that_is_no_text(self):
    """As a locale of ASCII gives it, too long for a folder or not."""
    name = ('Ü' * 80).encode().decode('ascii', 'surrogateescape')
    for given in (name, name[:2]):
      result = scripts.call(train, TINY, f'--config.name={given}')
      self.assertEqual((result.code, result.err.count('\n')), (2, 1))
      self.assertIn(r"--config.name=b'\xc3\x9c", result.err)
      self.assertIn('PYTHONUTF8=1', result.err)


class KeptTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    self.workdir = self.folder / 'run'

  @parameterized.parameters(
    (kv_cache, 'kv_cache.py:gpt2', '--config.ranks=8', 'ranks: -> 8'),
    (kv_cache, 'kv_cache.py:gpt2', '--length=64', 'length: 2048 -> 64'),
    (
      configure_heads,
      'configure_heads.py:tiny',
      '--params=12M',
      'params: 10M -> 12M',
    ),
  )
  def test_another_question_is_refused(self, script, config, change, words):
    """One line that says in what, and the first answer stays."""
    call = (f'--config=configs/{config}', f'--workdir={self.workdir}')
    self.assertEqual(scripts.call(script, *call).code, 0)
    before = scripts.contents(self.workdir)
    result = scripts.call(script, *call, change)
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn(
      f'workdir={self.workdir} holds a run with another', result.err
    )
    self.assertIn(words, result.err)
    self.assertEqual(scripts.contents(self.workdir), before)
    self.assertEqual(scripts.call(script, *call).code, 0)

  def test_one_process_at_a_time(self):
    with (
      folders.kept(self.workdir, {'x': 1}),
      self.assertRaisesRegex(record.RecordError, 'in use by another'),
      folders.kept(self.workdir, {'x': 1}),
    ):
      pass
    self.assertEqual(
      json.loads((self.workdir / 'config.json').read_text()), {'x': 1}
    )

  def test_the_same_text(self):
    """A text is told by its digest, not by its name."""
    paths = [self.folder / x for x in ('one', 'two', 'three')]
    for path, letter in zip(paths, 'aab', strict=True):
      path.write_text(letter * 5000)
    call = ('--config=configs/text.py:tiny', f'--workdir={self.workdir}')
    steps = ('--config.train.steps=2', '--config.optimizer.warmup_steps=1')
    first, again, other = (
      scripts.call(train, *call, *steps, f'--config.task.path={path}')
      for path in paths
    )
    self.assertEqual((first.code, again.code, other.code), (0, 0, 2), again)
    for result, path in ((first, paths[0]), (again, paths[1])):
      self.assertIn(f'text: {path}, 4,500 bytes to train on', result.out)
    self.assertIn(f'task.path: {paths[1]} -> {paths[2]}', other.err)
    saved = json.loads((self.workdir / 'config.json').read_text())
    self.assertEqual(saved['task']['path'], str(paths[1]))


class PagesTest(parameterized.TestCase):
  def test_commands_do_not_meet(self):
    """Each training and sweep of the pages has a folder of its own."""
    pages = ('README.md', 'docs/experiments.md')
    text = '\n'.join((scripts.ROOT / x).read_text() for x in pages)
    text = text.replace('`', '\n')
    commands = set(
      re.findall(r'^python -m experiments\.(\w+ ?.*)$', text, re.M)
    )
    found = {}
    for command in sorted(commands):
      name, *arguments = shlex.split(command)
      script = {'train': train, 'sweep_heads': sweep_heads}.get(name)
      if script is not None:
        found[command] = str(chosen(script, *arguments))
    self.assertGreater(len(found), 5)
    first = found.pop('sweep_heads --n_heads=1,2,4,8,16')
    self.assertEqual(found['sweep_heads'], first)  # the same question
    self.assertLen(set(found.values()), len(found), found)

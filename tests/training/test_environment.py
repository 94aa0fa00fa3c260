"""env.json: every start, and what a run does not go on with unseen."""

import json
import pathlib
import sys
import tempfile
from unittest import mock

import jax
from absl.testing import parameterized

from mha_jax.training import environment, record


class EnvironmentTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder)
    self.path = self.workdir / 'env.json'

  def change_last(self, **changes) -> None:
    """As if the last start had been elsewhere."""
    starts = json.loads(self.path.read_text())
    starts[-1] |= changes
    self.path.write_text(json.dumps(starts))


class StartsTest(EnvironmentTestCase):
  def test_what_is_noted(self):
    """What is needed to run it again, and what the numbers depend on."""
    with mock.patch.object(sys, 'orig_argv', ['/a/b/python', '-m', 'x', '--y']):
      environment.add_start(self.workdir, step=30)
    (env,) = json.loads(self.path.read_text())
    self.assertEqual(env['command'], ['python', '-m', 'x', '--y'])
    self.assertEqual(env['step'], 30)
    self.assertEqual(env['packages']['jax'], jax.__version__)
    self.assertContainsSubset(
      {'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'}, env['packages']
    )
    self.assertLen(env['devices'], jax.device_count())
    self.assertEqual(
      tuple(map(int, env['python'].split('.')[:2])), sys.version_info[:2]
    )
    self.assertGreaterEqual(env['cpus'], 1)
    commit = env['git_commit']
    self.assertTrue(commit is None or len(commit) == 40)
    self.assertEqual(env['options'], environment.options())
    self.assertEqual(env['options']['jax_default_prng_impl'], 'threefry2x32')

  def test_every_start_stays(self):
    """Also that of a time when the file held the last one alone."""
    self.path.write_text('{"command": ["python"], "cpus": 7}')
    for step in (0, 20):
      environment.add_start(self.workdir, step=step)
    old, *starts = json.loads(self.path.read_text())
    self.assertEqual(old['cpus'], 7)
    self.assertEqual([x['step'] for x in starts], [0, 20])

  @parameterized.parameters('{', '3', '[3]')
  def test_a_broken_file(self, text):
    """Is named, and stays."""
    self.path.write_text(text)
    with self.assertRaisesRegex(record.RecordError, 'env.json is no list'):
      environment.check_same_options(self.workdir)
    self.assertEqual(self.path.read_text(), text)

  def test_without_git(self):
    """Where git is absent the commit is null."""
    with mock.patch.object(environment.subprocess, 'run', side_effect=OSError):
      self.assertIsNone(environment.environment()['git_commit'])


class ChangesTest(EnvironmentTestCase):
  def setUp(self):
    super().setUp()
    environment.add_start(self.workdir)

  @parameterized.parameters(
    (lambda: jax.enable_x64(True), 'jax_enable_x64: False -> True'),
    (
      lambda: jax.default_prng_impl('rbg'),
      'jax_default_prng_impl: threefry2x32 -> rbg',
    ),
    (
      lambda: jax.threefry_partitionable(False),
      'jax_threefry_partitionable: True -> False',
    ),
    (
      lambda: jax.default_matmul_precision('highest'),
      'jax_default_matmul_precision: None -> highest',
    ),
  )
  def test_options(self, changed, message):
    """JAX's options that change the numbers are refused by name."""
    environment.check_same_options(self.workdir)
    with (
      changed(),
      self.assertRaisesRegex(record.RecordError, rf'\({message}\).* --workdir'),
    ):
      environment.check_same_options(self.workdir)

  @parameterized.parameters(
    ({'packages': {'jax': '0.0.1'}}, r'\(packages.jax: 0.0.1 -> \d'),
    ({'devices': ['abacus']}, r"devices: \['abacus'\] -> "),
    ({'cpus': 7777}, 'cpus: 7777 -> '),
    ({'git_commit': 'abc'}, 'git_commit: abc -> '),
    ({'xla_flags': '--x=y'}, 'xla_flags: --x=y -> '),
    ({'jax_disable_jit': True}, 'jax_disable_jit: True -> False'),
  )
  def test_others(self, changes, message):
    """Versions and machines are told in a line; options are as before."""
    self.change_last(**changes)
    environment.check_same_options(self.workdir)
    with self.assertWarnsRegex(record.RecordWarning, message):
      environment.warn_of_changes(self.workdir)

  def test_nothing_changed(self):
    """Warnings are errors here."""
    self.change_last(command=['other'], platform='other', step=7)
    environment.warn_of_changes(self.workdir)

  def test_no_file(self):
    """Nothing is known of a run that was started, and that is said."""
    self.path.unlink()
    environment.check_same_options(self.workdir)
    (self.workdir / 'checkpoints').mkdir()
    with self.assertWarnsRegex(record.RecordWarning, 'no env.json to tell'):
      environment.check_same_options(self.workdir)

  @parameterized.parameters(
    '[]', '[{"options": null}]', '{"step": 1}', '[{"options": {}}, {}]'
  )
  def test_a_start_without_options(self, text):
    """Tells as little as no file."""
    (self.workdir / 'checkpoints').mkdir()
    environment.check_same_options(self.workdir)
    self.path.write_text(text)
    with self.assertWarnsRegex(record.RecordWarning, 'no env.json to tell'):
      environment.check_same_options(self.workdir)

"""Checkpoints: what is saved comes back, complete or not at all."""

import pathlib
import resource
import shutil
import tempfile
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized

from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.record import RecordError, RecordWarning
from mha_jax.training.train import TrainState


def state(value: float) -> dict:
  """A state of several dtypes."""
  value = float(value)
  return {
    'step': jnp.asarray(int(value), jnp.int32),
    'params': {'kernel': jnp.full((3, 5), value)},
    'low': jnp.asarray([value, 1 / 3], jnp.bfloat16),
  }


class CheckpointsTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder)

  def open(self, **options) -> Checkpoints:
    checkpoints = Checkpoints(self.workdir, **options)
    self.addCleanup(checkpoints.close)
    return checkpoints

  def steps(self) -> set[str]:
    return {path.name for path in (self.workdir / 'checkpoints').iterdir()}


class CheckpointsTest(CheckpointsTestCase):
  def test_round_trip(self):
    """Another manager reads the newest state, bits and dtypes."""
    writer = self.open()
    writer.save(10, state(1.1))
    writer.save(20, state(2.3))
    found = self.open().restore(state(0))
    oracles.assert_same_bits(found, state(2.3))
    self.assertEqual(found['low'].dtype, jnp.bfloat16)
    self.assertEqual(found['step'].dtype, jnp.int32)

  def test_nothing_there(self):
    """None, not an error."""
    self.assertIsNone(self.open().restore(state(0)))

  @parameterized.parameters(1, 2)
  def test_keeps_the_last(self, keep):
    """Older checkpoints go, the newest stay."""
    checkpoints = self.open(keep=keep)
    for step in (7, 13, 100):
      checkpoints.save(step, state(step))
    self.assertEqual(
      self.steps(),
      {'7', '13', '100'} - {'7', '13'} | ({'13'} if keep == 2 else set()),
    )
    np.testing.assert_array_equal(self.open().restore(state(0))['step'], 100)

  def test_a_step_that_is_there_stays(self):
    """Saving it again neither fails nor changes it."""
    checkpoints = self.open()
    checkpoints.save(10, state(1))
    checkpoints.save(10, state(2))
    np.testing.assert_array_equal(self.open().restore(state(0))['step'], 1)

  def test_an_unfinished_save_is_ignored(self):
    """What a killed process left half-written is no checkpoint."""
    self.open().save(10, state(1))
    folder = self.workdir / 'checkpoints'
    torn = folder / '20.orbax-checkpoint-tmp'
    torn.mkdir()
    (torn / 'default').write_text('half')
    np.testing.assert_array_equal(self.open().restore(state(0))['step'], 1)
    with self.assertNoLogs():  # orbax would tell of the folder
      self.open().save(20, state(3))
    np.testing.assert_array_equal(self.open().restore(state(0))['step'], 3)


class DamageTest(CheckpointsTestCase):
  """Two checkpoints, 10 and 20, of which something is not as it was."""

  def setUp(self):
    super().setUp()
    writer = self.open()
    writer.save(10, state(1))
    writer.save(20, state(2))
    self.folder = self.workdir / 'checkpoints'

  def damage(self, step: int, how: str = 'flip') -> str:
    """Damages the largest file of a checkpoint; its name."""
    folder = self.folder / str(step)
    path = max(
      (x for x in (folder / 'default').rglob('*') if x.is_file()),
      key=lambda x: x.stat().st_size,
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({'flip': data, 'cut': data[:-9], 'empty': b''}[how])
    return path.relative_to(folder).as_posix()

  @parameterized.parameters('flip', 'cut', 'empty')
  def test_the_one_before(self, how):
    """Is gone on from, with a warning; the next save takes the place."""
    name = self.damage(20, how)
    checkpoints = self.open()
    with self.assertWarnsRegex(
      RecordWarning, rf'20 is damaged \({name} .*going on from step 10'
    ):
      found = checkpoints.restore(state(0))
    oracles.assert_same_bits(found, state(1))
    self.assertEqual(self.steps(), {'10', '20'})
    checkpoints.save(20, state(3))
    oracles.assert_same_bits(self.open().restore(state(0)), state(3))

  def test_an_earlier_step_takes_its_place(self):
    """A run that stops before it has come to the damaged one's step."""
    self.damage(20)
    checkpoints = self.open()
    with self.assertWarns(RecordWarning):
      checkpoints.restore(state(0))
    checkpoints.save(15, state(5))
    self.assertEqual(self.steps(), {'10', '15'})

  def test_none_is_sound(self):
    """The line promises none before where there is none."""
    self.damage(20)
    self.damage(10)
    with self.assertRaisesRegex(RecordError, '20 is damaged .* so are those'):
      self.open().restore(state(0))
    shutil.rmtree(self.folder / '10')
    with self.assertRaisesRegex(
      RecordError,
      '20 is damaged .* there is none before it; remove .*points to',
    ):
      self.open().restore(state(0))
    self.assertEqual(self.steps(), {'20'})

  def test_under_another_step(self):
    """A copy named 999 neither is what it says, nor stops what is saved."""
    shutil.copytree(self.folder / '10', self.folder / '999')
    checkpoints = self.open()
    with self.assertWarnsRegex(RecordWarning, '999 is .* of step 10; name it'):
      found = checkpoints.restore(state(0))
    oracles.assert_same_bits(found, state(2))
    checkpoints.save(20, state(2))  # is there
    self.assertEqual(self.steps(), {'10', '20', '999'})
    checkpoints.save(30, state(3))
    self.assertEqual(self.steps(), {'20', '30'})

  def test_only_under_another_step(self):
    """Its name is the remedy, and nothing is to be removed."""
    shutil.rmtree(self.folder / '10')
    (self.folder / '20').rename(self.folder / '30')
    with self.assertRaisesRegex(
      RecordError, r'30 is .* of step 20; name it so\)$'
    ):
      self.open().restore(state(0))
    (self.folder / '30').rename(self.folder / '20')
    oracles.assert_same_bits(self.open().restore(state(0)), state(2))

  def test_under_another_step_without_digests(self):
    """The state itself tells its step."""
    shutil.rmtree(self.folder)
    made, like = (
      TrainState(jnp.asarray(x, jnp.int32), jnp.full(3, 1.5), ())
      for x in (5, 0)
    )
    self.open().save(5, made)
    (self.folder / '5' / 'digests.json').unlink()
    shutil.copytree(self.folder / '5', self.folder / '999')
    with self.assertWarnsRegex(
      RecordWarning, '999 is .* of step 5; name it so.; going on from step 5'
    ):
      found = self.open().restore(like)
    self.assertEqual(int(found.step), 5)
    shutil.rmtree(self.folder / '5')
    with self.assertRaisesRegex(RecordError, '999 is .* of step 5; name it so'):
      self.open().restore(like)

  def test_an_empty_folder(self):
    (self.folder / '30').mkdir()
    with self.assertWarnsRegex(
      RecordWarning, '30 is damaged .it holds no state'
    ):
      found = self.open().restore(state(0))
    oracles.assert_same_bits(found, state(2))

  @parameterized.parameters('', '{}', '[]', '{"step": 20, "sha256": 3}')
  def test_broken_digests(self, text):
    (self.folder / '20' / 'digests.json').write_text(text)
    with self.assertWarnsRegex(RecordWarning, 'digests.json is no record'):
      found = self.open().restore(state(0))
    oracles.assert_same_bits(found, state(1))

  def test_killed_before_the_digests(self):
    """It is complete, as orbax has it."""
    (self.folder / '20' / 'digests.json').unlink()
    oracles.assert_same_bits(self.open().restore(state(0)), state(2))

  @parameterized.parameters(
    (
      'restore',
      RuntimeError('RESOURCE_EXHAUSTED'),
      'Error: RESOURCE_EXHAUSTED',
    ),
    ('item_metadata', OSError(5, 'I/O error'), 'OSError: .*I/O error'),
  )
  def test_what_is_sound_is_not_passed_over(self, name, error, reason):
    """Where it could not be read this time, perhaps it can be next time."""
    checkpoints = self.open()
    with (
      mock.patch.object(checkpoints._manager, name, side_effect=error),
      self.assertRaisesRegex(RecordError, rf'20 cannot be read \(.*{reason}'),
    ):
      checkpoints.restore(state(0))
    self.assertEqual(self.steps(), {'10', '20'})

  def test_other_shapes(self):
    """A sound checkpoint of another model is none to remove."""
    like = state(0)
    like['params'] = {'kernel': jnp.zeros((5, 3)), 'bias': jnp.zeros(7)}
    with self.assertRaises(RecordError) as caught:
      self.open().restore(like)
    message = str(caught.exception)
    self.assertIn('20 is sound', message)
    self.assertIn('params/kernel float32 (3, 5), not float32 (5, 3)', message)
    self.assertIn('params/bias absent, not float32 (7,)', message)
    self.assertNotIn('remove', message)
    self.assertEqual(self.steps(), {'10', '20'})

  # A write that fails may wake an event loop that orbax has closed by then.
  @pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
  def test_no_room(self):
    """One line that names the folder; those before are kept."""
    big = state(3) | {'params': {'kernel': jnp.arange(2.0**16)}}
    checkpoints = self.open()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
      with self.assertRaisesRegex(
        RecordError,
        r'checkpoints/30 cannot be written \(File too large\); what',
      ):
        checkpoints.save(30, big)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      oracles.assert_same_bits(self.open().restore(state(0)), state(2))
    checkpoints = self.open()
    checkpoints.save(30, state(3))
    oracles.assert_same_bits(self.open().restore(state(0)), state(3))

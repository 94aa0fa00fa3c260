"""Checkpoints: what is saved comes back, complete or not at all."""

import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized

from mha_jax.training.checkpoints import Checkpoints


def state(value: float) -> dict:
  """A state of several dtypes."""
  value = float(value)
  return {
    'step': jnp.asarray(int(value), jnp.int32),
    'params': {'kernel': jnp.full((3, 5), value)},
    'low': jnp.asarray([value, 1 / 3], jnp.bfloat16),
  }


class CheckpointsTest(parameterized.TestCase):
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
    again = self.open()
    again.save(20, state(3))
    np.testing.assert_array_equal(self.open().restore(state(0))['step'], 3)

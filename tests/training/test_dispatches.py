"""The loop that a run and many seeds share, with a training that counts."""

import signal

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from mha_jax.training.dispatches import dispatch_ends, dispatches
from mha_jax.training.signals import StopRequest
from mha_jax.training.train import TrainConfig

CONFIG = TrainConfig(steps=12, steps_per_dispatch=5)


def count(num_steps, state):
  """Adds the steps to the state; the loss of a step is its number."""
  return state + num_steps, {'loss': jnp.arange(state, state + num_steps)}


class DispatchesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.request = StopRequest('stopping')

  def run_from(self, start, advance=count):
    """The dispatches from a step on, where the state is the step."""
    return dispatches(CONFIG, start, start, advance, self.request)

  @parameterized.parameters((0, [5, 10, 12]), (5, [10, 12]), (10, [12]))
  def test_to_the_last_step(self, start, ends):
    """The last dispatch is shorter; each goes on from the state before."""
    found = [*self.run_from(start)]
    self.assertEqual([x.end for x in found], ends)
    self.assertEqual([x.start for x in found], [start, *ends[:-1]])
    for x in found:
      self.assertEqual(x.state, x.end)
      np.testing.assert_array_equal(x.metrics['loss'], range(x.start, x.end))
    done = dispatch_ends(CONFIG, start)
    self.assertEqual(done + ends, dispatch_ends(CONFIG, 12))

  def test_a_finished_one(self):
    """Nothing is left to do."""
    self.assertEmpty([*self.run_from(12)])

  def test_a_stop(self):
    """The dispatch that is under way is the last; before the first: none."""
    ends = []
    for x in self.run_from(0):
      ends.append(x.end)
      self.request.signal = signal.SIGTERM
    self.assertEqual(ends, [5])
    self.assertEmpty([*self.run_from(5)])

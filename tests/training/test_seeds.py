"""Many seeds at once. That each is a run of its own is tested by the sweep."""

import math
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from mha_jax.decoder import decoder_config
from mha_jax.tasks import CopyTask
from mha_jax.training import seeds, train
from mha_jax.training.signals import StopRequest

TASK = CopyTask(2, 3)
EXPERIMENT = train.Experiment(
  decoder_config(TASK.vocab_size, TASK.max_len, d_model=4, num_heads=2),
  TASK,
  train.OptimizerConfig(warmup_steps=0),
  train.TrainConfig(steps=3, steps_per_dispatch=2),
)


class SeedsTest(parameterized.TestCase):
  def train(self, final_loss):
    """Trains seeds 3 and 5, with numbers in place of computations."""

    def advance(experiment, num_steps, keys, state):
      del experiment, keys
      losses = jnp.ones((2, num_steps)) * jnp.array([[3.0], [5.0]])
      return state, {'loss': losses, 'accuracy': losses / 7}

    state = train.TrainState(jnp.zeros(()), {'x': jnp.zeros(11)}, ())
    final = {
      'eval_loss': jnp.asarray(final_loss),
      'eval_accuracy': jnp.ones(()),
    }
    with (
      mock.patch.object(train, 'init', return_value=state),
      mock.patch.object(train, 'evaluate', return_value=final),
      mock.patch.object(seeds, '_advance', advance),
    ):
      return seeds.train_seeds(EXPERIMENT, (3, 5), StopRequest('stopping'))

  def test_outcome(self):
    """Every array leads with the seed; dispatches are joined along steps."""
    got = self.train(0.25)
    np.testing.assert_array_equal(got.history['loss'], [[3] * 3, [5] * 3])
    np.testing.assert_array_equal(got.final['eval_loss'], [0.25, 0.25])
    self.assertEqual(got.params['x'].shape, (2, 11))

  @parameterized.parameters(math.nan, math.inf)
  def test_a_final_loss_that_is_not_finite(self, loss):
    """Is an error, though all losses of the training were finite."""
    with self.assertRaisesRegex(FloatingPointError, 'not finite at the end'):
      self.train(loss)

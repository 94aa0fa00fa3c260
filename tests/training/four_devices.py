"""Rates and seeds over four devices, which test_grid.py simulates."""

from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from mha_jax.decoder import decoder_config
from mha_jax.tasks import CopyTask
from mha_jax.training import grid, train
from mha_jax.training.signals import StopRequest

TASK = CopyTask(2, 3)
EXPERIMENT = train.Experiment(
  decoder_config(TASK.vocab_size, TASK.max_len, d_model=4, num_heads=2),
  TASK,
  train.OptimizerConfig(warmup_steps=0),
  train.TrainConfig(steps=3, steps_per_dispatch=2),
)
RATES, SEEDS = (0.03, 0.01, 0.003), (3, 5, 7, 11)


def train_grid(rates, seeds, *observers):
  request = StopRequest('stopping')
  return grid.train_grid(EXPERIMENT, rates, seeds, request, '', *observers)


class FourDevicesTest(parameterized.TestCase):
  @parameterized.parameters((2, 4, 4), (2, 3, 2), (1, 3, 3), (3, 1, 3))
  def test_values_are_those_of_one(self, num_rates, num_seeds, used):
    rates, seeds = RATES[:num_rates], SEEDS[:num_seeds]

    def observe(step, state):
      del step
      for x in jax.tree.leaves(state):
        self.assertLen({y.device for y in x.addressable_shards}, used)

    spread = train_grid(rates, seeds, observe)
    for x in jax.tree.leaves(spread.params):
      self.assertEqual(x.devices(), {jax.local_devices()[0]})
    only = jax.local_devices()[:1]
    with mock.patch.object(jax, 'local_devices', return_value=only):
      alone = train_grid(rates, seeds)
    for name, curves in alone.history.items():
      np.testing.assert_allclose(spread.history[name], curves, 2e-6)
    for name, values in alone.final.items():
      np.testing.assert_allclose(spread.final[name], values, 2e-6)

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
  train.TrainConfig(steps=4, steps_per_dispatch=2),
)
RATES, SEEDS = (0.03, 0.01, 0.003), (3, 5, 7, 11)


def train_grid(rates, seeds, *observers):
  request = StopRequest('stopping')
  return grid.train_grid(EXPERIMENT, rates, seeds, request, '', *observers)


class FourDevicesTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    only = jax.local_devices()[:1]
    with mock.patch.object(jax, 'local_devices', return_value=only):
      cls.alone = train_grid(RATES, SEEDS)

  @parameterized.parameters((2, 4, 4), (2, 3, 2), (1, 3, 3), (3, 1, 3))
  def test_values_are_those_of_one(self, num_rates, num_seeds, used):
    def observe(step, state):
      del step
      for x in jax.tree.leaves(state):
        self.assertLen({y.device for y in x.addressable_shards}, used)

    spread = train_grid(RATES[:num_rates], SEEDS[:num_seeds], observe)
    for x in jax.tree.leaves(spread.params):
      self.assertEqual(x.devices(), {jax.local_devices()[0]})
    for name in ('history', 'final'):
      wanted, got = getattr(self.alone, name), getattr(spread, name)
      self.assertEqual({*got}, {*wanted})
      for metric, values in wanted.items():
        np.testing.assert_allclose(
          got[metric], values[:num_rates, :num_seeds], 2e-6
        )

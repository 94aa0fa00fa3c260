"""Rates and seeds at once. That each is a run of its own: see the sweep."""

import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys

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


RATES, SEEDS = (0.1, 0.01, 0.003), (3, 5)


def train_grid(rates, seeds=SEEDS):
  return grid.train_grid(EXPERIMENT, rates, seeds, StopRequest('stopping'))


class GridTest(parameterized.TestCase):
  def test_each_rate_is_a_training_at_that_rate(self):
    """Up to rounding, whether it is trained alone, with others, or as a run."""
    together = train_grid(RATES)
    self.assertEqual(together.history['loss'].shape, (3, 2, 3))
    self.assertEqual(together.final['eval_loss'].shape, (3, 2))
    key = jax.random.key(5)
    start = jax.jit(train.init, static_argnums=0)(EXPERIMENT, key)
    advance = jax.jit(train.advance, static_argnums=(0, 1))
    for i, rate in enumerate(RATES):
      alone = train_grid((rate,))
      for name, curves in together.history.items():
        np.testing.assert_allclose(alone.history[name][0], curves[i], 2e-6)
      for name, values in together.final.items():
        np.testing.assert_allclose(alone.final[name][0], values[i], 2e-6)
      optimizer = dataclasses.replace(EXPERIMENT.optimizer, learning_rate=rate)
      experiment = dataclasses.replace(EXPERIMENT, optimizer=optimizer)
      _, metrics = advance(experiment, 3, key, start)
      for name, curves in together.history.items():
        np.testing.assert_allclose(metrics[name], curves[i, 1], 2e-6)

  def test_rates_differ(self):
    """From the second step on; the first sees the same parameters."""
    losses = train_grid(RATES).history['loss']
    np.testing.assert_array_equal(losses[0, :, 0], losses[1, :, 0])
    self.assertTrue(np.all(losses[0, :, 1:] != losses[1, :, 1:]))

  def test_the_greatest_seed(self):
    """A key takes it, and so does a grid."""
    found = train_grid((0.01,), (2**32 - 1, 7))
    self.assertEqual(found.final['eval_loss'].shape, (1, 2))

  def test_all_diverge(self):
    """No error, and no warning of a median of nothing."""
    found = train_grid((math.inf,))
    self.assertFalse(np.any(np.isfinite(found.history['loss'][..., 1:])))

  def test_one_that_diverges(self):
    """It is told by its losses, and leaves the others as they are."""
    together = train_grid((math.inf, *RATES[1:]))
    alone = train_grid((0.01,))
    self.assertFalse(np.any(np.isfinite(together.final['eval_loss'][0])))
    np.testing.assert_allclose(
      together.final['eval_loss'][1], alone.final['eval_loss'][0], 2e-6
    )

  def test_over_devices(self):
    """Each device takes an equal part of them."""
    here = pathlib.Path(__file__).parent
    subprocess.run(
      [sys.executable, '-m', 'pytest', '-x', '-q', here / 'four_devices.py'],
      env=os.environ | {'JAX_NUM_CPU_DEVICES': '4'},
      check=True,
    )

  def test_a_stop(self):
    """Before the last step: nothing."""
    request = StopRequest('stopping')
    request.signal = signal.SIGINT
    self.assertIsNone(grid.train_grid(EXPERIMENT, RATES, SEEDS, request))

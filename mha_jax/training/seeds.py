"""Many seeds of one model trained at once, mapped by `jax.vmap`.

Each seed has the parameters, batches and dropout of `run.run` with that seed.
Nothing is recorded: a training that is stopped is lost.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.training import train
from mha_jax.training.dispatches import dispatches
from mha_jax.training.progress import ProgressBar
from mha_jax.training.signals import StopRequest


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of training all seeds; every array leads with the seed.

  Args:
    params: the parameters at the end.
    history: metrics of the training batches, (seeds, steps) each.
    final: metrics on the validation batches at the end, (seeds,) each.
    steps_per_second: how many steps all seeds together took in a second, the
      first dispatch left out; None: there was no second one.
  """

  params: Any
  history: dict[str, np.ndarray]
  final: dict[str, np.ndarray]
  steps_per_second: float | None


def train_seeds(
  experiment: train.Experiment,
  seeds: Sequence[int],
  request: StopRequest,
  description: str = 'train',
) -> Outcome | None:
  """Trains all seeds in one compiled program.

  Args:
    experiment: all that the training depends on, but for the seed in it.
    seeds: of parameters, batches and dropout.
    request: where it comes before the last step, training ends.
    description: shown beside the progress.

  Returns:
    What became of the seeds; None where a stop was requested.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  config = experiment.train
  keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
  init = functools.partial(train.init, experiment)
  state = jax.jit(jax.vmap(init))(keys)
  history: list[dict[str, np.ndarray]] = []
  step = 0

  def advance(
    num_steps: int, state: train.TrainState
  ) -> tuple[train.TrainState, train.Metrics]:
    return _advance(experiment, num_steps, keys, state)

  with ProgressBar(description, config.steps) as bar:
    for dispatch in dispatches(config, step, state, advance, request):
      step, state = dispatch.end, dispatch.state
      history.append(jax.device_get(dispatch.metrics))
      latest = {x: history[-1][x] for x in ('loss', 'accuracy')}
      bar.update(step, {k: float(np.median(x)) for k, x in latest.items()})
  if step < config.steps:
    return None
  evaluate = functools.partial(train.evaluate, experiment)
  final = jax.jit(jax.vmap(evaluate))(keys, state.params)
  final = jax.device_get(jax.block_until_ready(final))
  if not np.all(np.isfinite(final['eval_loss'])):
    raise FloatingPointError('the loss is not finite at the end')
  curves = {
    name: np.concatenate([chunk[name] for chunk in history], axis=1)
    for name in history[0]
  }
  return Outcome(state.params, curves, final, bar.steps_per_second)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(
  experiment: train.Experiment,
  num_steps: int,
  keys: jax.Array,
  state: train.TrainState,
) -> tuple[train.TrainState, train.Metrics]:
  """`train.advance` of every seed."""
  advance = functools.partial(train.advance, experiment, num_steps)
  return jax.vmap(advance)(keys, state)

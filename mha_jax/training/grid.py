"""Many learning rates and seeds of one model trained at once, by `jax.vmap`.

Each has the parameters, batches and dropout of `run.run` with that learning
rate and seed. They spread over the devices of this process. Nothing is
recorded: a training that is stopped is lost.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mha_jax.training import train
from mha_jax.training.dispatches import dispatches
from mha_jax.training.progress import ProgressBar
from mha_jax.training.signals import StopRequest


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of a grid; every array leads with the rate and the seed.

  A training that diverged stays in it, with losses that are not finite.

  Args:
    params: the parameters at the end, on the first device.
    history: metrics of the training batches, (rates, seeds, steps) each.
    final: metrics on the validation batches at the end, (rates, seeds) each.
    steps_per_second: steps a second, where one step advances every rate and
      seed, the first dispatch left out; None: there was no second one.
  """

  params: Any
  history: dict[str, np.ndarray]
  final: dict[str, np.ndarray]
  steps_per_second: float | None


def train_grid(
  experiment: train.Experiment,
  learning_rates: Sequence[float],
  seeds: Sequence[int],
  request: StopRequest,
  description: str = 'train',
  on_dispatch: Callable[[int, train.TrainState], None] = lambda *_: None,
) -> Outcome | None:
  """Trains all learning rates and seeds in one compiled program.

  Args:
    experiment: all else that the training depends on; the learning rate and the
      seed in it are not used.
    learning_rates: the peaks.
    seeds: of parameters, batches and dropout; all rates share them.
    request: where it comes before the last step, training ends.
    description: shown beside the progress.
    on_dispatch: is given the steps taken and the states, (rates, seeds, ...)
      each, before the first step and after every dispatch; the next dispatch
      takes their buffers.

  Returns:
    What became of them; None where a stop was requested.
  """
  config = experiment.train
  place = _places(len(learning_rates), len(seeds))
  keys = jnp.stack([jax.random.key(seed) for seed in seeds])
  keys = jax.device_put(keys, place('seeds'))
  rates = jnp.asarray(learning_rates, jnp.float32)
  rates = jax.device_put(rates, place('rates'))
  state = _init(experiment, keys, rates)
  state = jax.device_put(state, place('rates', 'seeds'))
  on_dispatch(0, state)
  history: list[dict[str, np.ndarray]] = []
  step = 0

  def advance(
    num_steps: int, state: train.TrainState
  ) -> tuple[train.TrainState, train.Metrics]:
    return _advance(experiment, num_steps, keys, rates, state)

  with ProgressBar(description, config.steps) as bar:
    for dispatch in dispatches(config, step, state, advance, request):
      step, state = dispatch.end, dispatch.state
      on_dispatch(step, state)
      history.append(jax.device_get(dispatch.metrics))
      latest = {x: history[-1][x] for x in ('loss', 'accuracy')}
      bar.update(step, {k: _median(x) for k, x in latest.items()})
  if step < config.steps:
    return None
  final = _evaluate(experiment, keys, state.params)
  final = jax.device_get(jax.block_until_ready(final))
  curves = {
    name: np.concatenate([chunk[name] for chunk in history], axis=2)
    for name in history[0]
  }
  params = jax.device_put(state.params, jax.local_devices()[0])
  return Outcome(params, curves, final, bar.steps_per_second)


def _places(num_rates: int, num_seeds: int) -> Callable[..., NamedSharding]:
  """Spreads rates over devices, and seeds over the devices left to each rate.

  Of either, as many devices are used as divide it: 2 rates of 3 seeds use two
  of four.

  Returns:
    From the names of leading axes, 'rates' and 'seeds', to a place for arrays.
  """
  devices = jax.local_devices()
  over_rates = _divisor(num_rates, len(devices))
  over_seeds = _divisor(num_seeds, len(devices) // over_rates)
  mesh = jax.make_mesh(
    (over_rates, over_seeds),
    ('rates', 'seeds'),
    axis_types=(AxisType.Auto, AxisType.Auto),
    devices=devices[: over_rates * over_seeds],
  )
  return lambda *names: NamedSharding(mesh, PartitionSpec(*names))


def _divisor(count: int, most: int) -> int:
  """The greatest divisor of count that is at most `most`."""
  return max(x for x in range(1, most + 1) if count % x == 0)


def _median(x: np.ndarray) -> float:
  """Of what is finite; nan where nothing is."""
  finite = x[np.isfinite(x)]
  return float(np.median(finite)) if finite.size else math.nan


# A third of the time to compile, of what runs but once.
@functools.partial(
  jax.jit,
  static_argnums=0,
  compiler_options={'xla_backend_optimization_level': 1},
)
def _init(
  experiment: train.Experiment, keys: jax.Array, rates: jax.Array
) -> train.TrainState:
  """The states before the first step, the same for all rates."""
  state = jax.vmap(functools.partial(train.init, experiment))(keys)
  return jax.tree.map(
    lambda x: jnp.broadcast_to(x, (rates.size, *x.shape)), state
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _advance(
  experiment: train.Experiment,
  num_steps: int,
  keys: jax.Array,
  rates: jax.Array,
  state: train.TrainState,
) -> tuple[train.TrainState, train.Metrics]:
  """`train.advance` of all; a seed's batch is made once for all rates."""
  advance = functools.partial(train.advance, experiment, num_steps)
  over_seeds = jax.vmap(advance, in_axes=(0, 0, None))
  return jax.vmap(over_seeds, in_axes=(None, 0, 0))(keys, state, rates)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(
  experiment: train.Experiment, keys: jax.Array, params: Any
) -> train.Metrics:
  """`train.evaluate` of all."""
  evaluate = functools.partial(train.evaluate, experiment)
  return jax.vmap(jax.vmap(evaluate), in_axes=(None, 0))(keys, params)

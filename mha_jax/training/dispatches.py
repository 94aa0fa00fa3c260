"""Dispatches: the compiled calls, of many steps each, that training is cut in.

They end at multiples of steps_per_dispatch, so a training that stops at one and
goes on makes the same calls as one that never stopped.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax

from mha_jax.training.signals import StopRequest
from mha_jax.training.train import Metrics, TrainConfig, TrainState


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """A finished dispatch.

  Args:
    start: steps taken before it.
    end: steps taken after it.
    state: the state after it; the next dispatch takes its buffers.
    metrics: of its steps.
  """

  start: int
  end: int
  state: TrainState
  metrics: Metrics


def dispatches(
  config: TrainConfig,
  start: int,
  state: TrainState,
  advance: Callable[[int, TrainState], tuple[TrainState, Metrics]],
  request: StopRequest,
) -> Iterator[Dispatch]:
  """Trains up to config.steps and yields each dispatch once it is finished.

  Args:
    config: how many steps there are, in all and in a dispatch.
    start: steps taken so far.
    state: the state after them.
    advance: takes a number of steps from a state; gives the state after them
      and their metrics, of any shape.
    request: where it comes, no further dispatch begins.
  """
  while start < config.steps and request.signal is None:
    end = min(start + config.steps_per_dispatch, config.steps)
    state, metrics = advance(end - start, state)
    # A number of a computation that failed hangs when it is read; waiting for
    # it raises the error.
    metrics = jax.block_until_ready(metrics)
    yield Dispatch(start, end, state, metrics)
    start = end


def dispatch_ends(config: TrainConfig, step: int) -> list[int]:
  """Lists the ends of the dispatches that the first `step` steps are cut in."""
  size = config.steps_per_dispatch
  return [min(end, step) for end in range(size, step + size, size)]

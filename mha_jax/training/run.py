"""The loop around a run: record, checkpoint, stop cleanly, resume.

Dispatches end at multiples of steps_per_dispatch and checkpoints lie on their
ends, so a resumed run makes the same dispatches as one that never stopped and
gives the same bits.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.training import train
from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.progress import ProgressBar
from mha_jax.training.record import Recorder, claim, exclusive

STDERR = 2  # the file descriptor


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Args:
    step: steps taken in all.
    metrics: the last line of metrics, with its step.
    params: the parameters.
    stopped_by: the signal that ended the run early; None: it is complete.
  """

  step: int
  metrics: dict[str, float]
  params: Any
  stopped_by: signal.Signals | None


class StopRequest:
  """Remembers the first SIGINT or SIGTERM; a second one acts at once."""

  def __init__(self) -> None:
    self.signal: signal.Signals | None = None

  def __call__(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.signal = signal.Signals(number)
    # Not print: the signal may arrive in the middle of a buffered write.
    text = f'{self.signal.name}: stopping after this dispatch; again: at once\n'
    os.write(STDERR, text.encode())
    signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
  """Turns SIGINT and SIGTERM into a request, within the block."""
  request = StopRequest()
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.signal(number, request) for number in numbers}
  try:
    yield request
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def run(
  experiment: train.Experiment,
  workdir: pathlib.Path,
  tensorboard: bool = False,
) -> Outcome:
  """Trains one model, from the newest checkpoint where there is one.

  Args:
    experiment: all that the run depends on.
    workdir: the run's folder.
    tensorboard: whether to write TensorBoard events too.

  Returns:
    How the run ended. On SIGINT and SIGTERM it saves and returns early.

  Raises:
    RecordError: the folder holds another run, is in use, or cannot be read.
    FloatingPointError: the loss is not finite; the checkpoints before stay.
  """
  key = jax.random.key(experiment.train.seed)
  with contextlib.ExitStack() as stack:
    stack.enter_context(exclusive(workdir))
    # First, since the checkpoint's shapes depend on the config.
    claim(workdir, experiment)
    request = stack.enter_context(stop_on_signal())
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(workdir)))
    state = jax.jit(functools.partial(train.init, experiment))(key)
    state = checkpoints.restore(state) or state
    recorder = stack.enter_context(
      contextlib.closing(Recorder(workdir, int(state.step), tensorboard))
    )
    return _loop(experiment, key, state, recorder, checkpoints, request)


def _loop(
  experiment: train.Experiment,
  key: jax.Array,
  state: train.TrainState,
  recorder: Recorder,
  checkpoints: Checkpoints,
  request: StopRequest,
) -> Outcome:
  config = experiment.train
  advance = jax.jit(
    functools.partial(train.advance, experiment),
    static_argnums=0,
    donate_argnums=2,
  )
  evaluate = jax.jit(functools.partial(train.evaluate, experiment))
  step = int(state.step)
  with ProgressBar('train', config.steps, start=step) as bar:
    while step < config.steps and request.signal is None:
      num_steps = min(config.steps_per_dispatch, config.steps - step)
      state, history = advance(num_steps, key, state)
      evaluation = evaluate(key, state.params)
      step += num_steps
      metrics = {name: float(jnp.mean(x)) for name, x in history.items()}
      metrics |= {name: float(x) for name, x in evaluation.items()}
      if not math.isfinite(metrics['loss']):
        raise FloatingPointError(
          f'the loss is not finite in steps {step - num_steps} to {step}; try '
          'a smaller optimizer.learning_rate'
        )
      recorder.write(step, metrics)
      bar.update(step, {name: metrics[name] for name in ('loss', 'accuracy')})
      every = config.checkpoint_every
      if step // every > (step - num_steps) // every:
        checkpoints.save(step, state)
  checkpoints.save(step, state)
  stopped_by = request.signal if step < config.steps else None
  return Outcome(step, recorder.last, state.params, stopped_by)

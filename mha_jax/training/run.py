"""The loop around a run: record, checkpoint, stop cleanly, resume.

Checkpoints lie on the ends of dispatches, so a resumed run makes the same
dispatches as one that never stopped and gives the same bits.
"""

import contextlib
import dataclasses
import functools
import pathlib
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.training import environment, memory, train
from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.dispatches import Dispatch, dispatch_ends, dispatches
from mha_jax.training.metrics import Recorder
from mha_jax.training.progress import ProgressBar
from mha_jax.training.record import check_name, claim, exclusive
from mha_jax.training.signals import StopRequest, stop_on_signal


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The end of a run: its step, metrics and parameters.

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


def run(
  experiment: train.Experiment,
  workdir: pathlib.Path,
  tensorboard: bool = False,
) -> Outcome:
  """Trains one model, from the newest sound checkpoint where there is one.

  Args:
    experiment: all that the run depends on.
    workdir: the run's folder.
    tensorboard: whether to write TensorBoard events too.

  Returns:
    How the run ended. On SIGINT and SIGTERM it saves and returns early.

  Raises:
    ValueError: a step needs more memory than there is.
    RecordError: the folder holds another run or one of other JAX options, has
      lost a part of its own, is in use, or cannot be read or written.
    FloatingPointError: the loss is not finite; the checkpoints before stay.
  """
  memory.check(experiment)
  check_name('workdir', workdir)
  key = jax.random.key(experiment.train.seed)
  init = functools.partial(train.init, experiment)
  with contextlib.ExitStack() as stack:
    stack.enter_context(exclusive(workdir))
    # First, since the checkpoint's shapes depend on the config.
    claim(workdir, experiment)
    environment.check_same_options(workdir)
    request = stack.enter_context(stop_on_signal())
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(workdir)))
    state = checkpoints.restore(jax.eval_shape(init, key))
    if state is None:
      state = jax.block_until_ready(jax.jit(init)(key))
    step = int(state.step)
    ends = dispatch_ends(experiment.train, step)
    recorder = stack.enter_context(
      contextlib.closing(Recorder(workdir, ends, tensorboard))
    )
    if step < experiment.train.steps:
      if step > 0:
        print(f'going on from step {step}', file=sys.stderr)
        environment.warn_of_changes(workdir)
      environment.add_start(workdir, step=step)
    return _loop(experiment, key, state, recorder, checkpoints, request)


def _loop(
  experiment: train.Experiment,
  key: jax.Array,
  state: train.TrainState,
  recorder: Recorder,
  checkpoints: Checkpoints,
  request: StopRequest,
) -> Outcome:
  config, step = experiment.train, int(state.step)
  train_on = jax.jit(
    functools.partial(train.advance, experiment),
    static_argnums=0,
    donate_argnums=2,
  )
  evaluate = jax.jit(functools.partial(train.evaluate, experiment))

  def advance(
    num_steps: int, state: train.TrainState
  ) -> tuple[train.TrainState, train.Metrics]:
    state, history = train_on(num_steps, key, state)
    return state, history | evaluate(key, state.params)

  with ProgressBar('train', config.steps, start=step) as bar:
    for dispatch in dispatches(config, step, state, advance, request):
      _check_finite(dispatch)
      step, state = dispatch.end, dispatch.state
      metrics = {x: float(jnp.mean(y)) for x, y in dispatch.metrics.items()}
      recorder.write(step, metrics)
      bar.update(step, {name: metrics[name] for name in ('loss', 'accuracy')})
      every = config.checkpoint_every
      if step // every > dispatch.start // every:
        checkpoints.save(step, state)
  checkpoints.save(step, state)
  stopped_by = request.signal if step < config.steps else None
  return Outcome(step, recorder.last, state.params, stopped_by)


def _check_finite(dispatch: Dispatch) -> None:
  """Raises a FloatingPointError unless all losses of a dispatch are finite."""
  if not np.all(np.isfinite(dispatch.metrics['loss'])):
    raise FloatingPointError(
      f'the loss is not finite in steps {dispatch.start} to {dispatch.end}; '
      'try a smaller optimizer.learning_rate'
    )

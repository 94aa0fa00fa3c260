"""Trained models to look into: of a recorded run, or trained first."""

import dataclasses
import functools
import pathlib
import signal
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from experiments import settings
from mha_jax.training import run, train
from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.record import RecordError

RUN = flags.DEFINE_string(
  'run', None, 'folder of a run of experiments.train; default: train the config'
)
BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', 128, 'validation examples that numbers are means over', 1
)


@dataclasses.dataclass(frozen=True)
class Model:
  """A trained decoder.

  Args:
    experiment: how it was trained.
    params: its parameters.
    step: optimiser steps taken.
  """

  experiment: train.Experiment
  params: Any
  step: int


def load(workdir: pathlib.Path) -> Model:
  """The newest checkpoint of a run.

  Raises:
    ValueError: the folder holds no run.
    RecordError: it holds no checkpoint, or one that cannot be read.
  """
  experiment = settings.recorded_experiment(workdir)
  init = functools.partial(train.init, experiment)
  checkpoints = Checkpoints(workdir)
  state = checkpoints.restore(jax.eval_shape(init, jax.random.key(0)))
  checkpoints.close()
  if state is None:
    raise RecordError(f'{workdir} holds no checkpoint; train the model first')
  return Model(experiment, state.params, int(state.step))


def train_seeds(
  config: ConfigDict, count: int, workdir: pathlib.Path
) -> tuple[list[Model], signal.Signals | None]:
  """Trains a model for each seed in `<workdir>/seed-<seed>`; resumes there.

  Returns:
    The models, and the signal that stopped the last one early.
  """
  models: list[Model] = []
  for experiment in experiments(config, count):
    folder = workdir / f'seed-{experiment.train.seed}'
    outcome = run.run(experiment, folder)
    if outcome.stopped_by is not None:
      print(
        f'{outcome.stopped_by.name}: saved at step {outcome.step} of '
        f'{experiment.train.steps} in {folder}; the same command goes on'
      )
      return models, outcome.stopped_by
    models.append(Model(experiment, outcome.params, outcome.step))
  return models, None


def experiments(config: ConfigDict, count: int) -> list[train.Experiment]:
  """The experiment with each of count seeds from train.seed on.

  Raises:
    ValueError: a value of the config does not fit.
  """
  first = settings.experiment_from(config)
  seeds = range(first.train.seed, first.train.seed + count)
  return [
    dataclasses.replace(
      first, train=dataclasses.replace(first.train, seed=seed)
    )
    for seed in seeds
  ]

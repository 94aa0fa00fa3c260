"""Trained models to look into: of a recorded run, or trained first."""

import dataclasses
import pathlib
import signal
import sys
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from experiments.harness import settings
from experiments.reports import head_counts
from mha_jax.attention import variants
from mha_jax.tasks import Batch
from mha_jax.training import record, run, train
from mha_jax.training.loading import newest_state

RUN = flags.DEFINE_string(
  'run', None, 'folder of a run of experiments.train; default: train the config'
)
BATCH_SIZE = flags.DEFINE_integer(
  'batch_size',
  128,
  'validation examples that numbers are means over',
  lower_bound=1,
  upper_bound=2**16,
)

ANALYSIS = 100  # a stream of keys apart from those of training


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


def run_folder(*unused: str) -> pathlib.Path | None:
  """The folder that --run names; None: none.

  Args:
    *unused: flags that have no effect beside --run, as all of --config.

  Raises:
    ValueError: the flag is empty, one of those is given too, or the folder
      holds no run.
  """
  if RUN.value is None:
    return None
  if not RUN.value:
    raise ValueError('--run= is empty; name the folder of a run')
  idle = [a for a in sys.argv if a.startswith(('--config', '-config'))]
  idle += [f'--{name}' for name in unused if flags.FLAGS[name].present]
  if idle:
    raise ValueError(
      f'{idle[0]} has no effect beside --run={RUN.value}; leave one of them out'
    )
  folder = pathlib.Path(RUN.value)
  record.check_name('--run', folder)
  settings.recorded_experiment(folder)
  return folder


def load(workdir: pathlib.Path) -> Model:
  """The newest sound checkpoint of a run.

  Raises:
    ValueError: the folder holds no run.
    RecordError: it holds no sound checkpoint, or one of another model.
  """
  experiment = settings.recorded_experiment(workdir)
  state = newest_state(workdir, experiment)
  return Model(experiment, state.params, int(state.step))


def check_even_heads(experiment: train.Experiment) -> None:
  """Raises a ValueError unless all layers have equally many heads."""
  heads = [layer.num_heads for layer in experiment.model.layers]
  if len(set(heads)) > 1:
    raise ValueError(
      f'model.layers have num_heads={heads}, and heads are removed one by one '
      'where all layers have as many; give them the same num_heads'
    )


def train_models(
  config: ConfigDict, count: int, workdir: pathlib.Path
) -> tuple[list[Model], signal.Signals | None]:
  """Trains a model for each seed in `<workdir>/seed-<seed>`; resumes there.

  Returns:
    The models, and the signal that stopped the last one early.
  """
  models: list[Model] = []
  wanted = experiments(config, count)
  settings.announce(wanted)
  for experiment in wanted:
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
  settings.check_memory(first)
  seeds = settings.seeds_from('--models', first.train.seed, count)
  return [
    dataclasses.replace(
      first, train=dataclasses.replace(first.train, seed=seed)
    )
    for seed in seeds
  ]


def batch(model: Model, index: int, batch_size: int) -> Batch:
  """Validation examples of a model's task; each index has its own."""
  key = jax.random.key(model.experiment.train.seed)
  key = jax.random.fold_in(jax.random.fold_in(key, ANALYSIS), index)
  return model.experiment.task.validation.sample(key, batch_size)


def fields(model: Model) -> dict[str, Any]:
  """All that the model depends on, and its step, as columns of a CSV."""
  return head_counts.fields(record.as_json(model.experiment)) | {
    'step': model.step
  }


def described(model: Model) -> str:
  """The model in a line."""
  config, length = model.experiment.model, model.experiment.train.steps
  names = ', '.join(dict.fromkeys(map(variants.name_of, config.layers)))
  seed = model.experiment.train.seed
  return (
    f'{model.experiment.task.kind} task, {names}, '
    f'{config.num_layers} layer{"s" * (config.num_layers > 1)}, d_model = '
    f'{config.d_model}, step {model.step} of {length}, seed {seed}'
  )

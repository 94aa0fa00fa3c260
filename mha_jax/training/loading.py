"""A trained model, from the folder of its run alone."""

import contextlib
import functools
import json
import pathlib
from typing import Any

import jax

from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.tasks import CopyTask
from mha_jax.training import train
from mha_jax.training.checkpoints import Checkpoints
from mha_jax.training.record import RecordError, check_name


def load_model(workdir: str | pathlib.Path) -> tuple[DecoderLM, Any]:
  """The model of a run and its variables, at the newest checkpoint.

  The task is not needed: the text may have changed or be gone.

  Args:
    workdir: the run's folder, as `run.run` and `experiments.train` leave it.

  Returns:
    The module, and its variables for `apply` and `generate`.

  Raises:
    RecordError: the folder holds no run, no checkpoint, or one that cannot be
      read; or its name is no text in this locale.
  """
  workdir = pathlib.Path(workdir)
  check_name('workdir', workdir)
  path = workdir / 'config.json'
  try:
    saved = json.loads(path.read_text())
    config = DecoderConfig(**saved['model'])
    experiment = train.Experiment(
      model=config,
      task=CopyTask(),  # in place of the run's own, which is not asked
      optimizer=train.OptimizerConfig(**saved['optimizer']),
      train=train.TrainConfig(**saved['train']),
    )
  except (OSError, KeyError, TypeError, ValueError) as error:
    raise RecordError(
      f'{path} records no run ({type(error).__name__}: {error}); name the '
      'folder of one, as experiments.train leaves it'
    ) from error
  state = newest_state(workdir, experiment)
  return DecoderLM(config), {'params': state.params}


def newest_state(
  workdir: pathlib.Path, experiment: train.Experiment
) -> train.TrainState:
  """The state at the newest sound checkpoint of a run.

  Args:
    workdir: the run's folder.
    experiment: how it was trained; its task is not asked.

  Raises:
    RecordError: the folder holds no sound checkpoint, or one of another model.
  """
  state = None
  if (workdir / 'checkpoints').is_dir():
    init = functools.partial(train.init, experiment)
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
      state = checkpoints.restore(jax.eval_shape(init, jax.random.key(0)))
  if state is None:
    raise RecordError(f'{workdir} holds no checkpoint; train the model first')
  return state

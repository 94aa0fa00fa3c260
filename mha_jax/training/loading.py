"""A trained model, from the folder of its run alone."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from mha_jax.attention import AttentionConfig, Rope, variants
from mha_jax.attention.positions.scaling import SCALINGS
from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.importing import imported
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
    config = model_from_json(saved['model'])
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


def model_from_json(saved: Mapping[str, Any]) -> DecoderConfig:
  """Makes a decoder's config again, from what `record.as_json` made of it.

  Raises:
    KeyError, TypeError or ValueError: it records none.
  """
  layers = saved['attention']
  layers = layers if isinstance(layers, list) else [layers]
  attentions = tuple(_attention_from_json(x) for x in layers)
  return DecoderConfig(**{**saved, 'attention': attentions})


def _attention_from_json(saved: Any) -> AttentionConfig:
  if not isinstance(saved, dict) or 'kind' not in saved:
    raise ValueError(
      f'model.attention={saved!r} is no recorded attention, with its kind and '
      'sizes; train the model again'
    )
  fields = {name: x for name, x in saved.items() if name != 'kind'}
  kind = saved['kind']
  if kind in variants.VARIANTS:
    made: type[AttentionConfig] = variants.VARIANTS[kind].config
  else:
    made = imported('model.attention.kind', str(kind))
  if isinstance(rope := fields.get('rope'), dict):
    if isinstance(scaling := rope.get('scaling'), dict):
      sizes = {name: x for name, x in scaling.items() if name != 'kind'}
      rope = {**rope, 'scaling': SCALINGS[scaling['kind']](**sizes)}
    fields['rope'] = Rope(**rope)
  return made(**fields)


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

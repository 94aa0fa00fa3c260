"""From a ConfigDict, as flags leave it, to frozen dataclasses."""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from mha_jax.decoder import DecoderConfig
from mha_jax.tasks import CopyTask
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig

SECTIONS = ('name', 'task', 'model', 'optimizer', 'train')


def check_sections(config: ConfigDict) -> None:
  """Raises a ValueError unless the config has its sections and no others."""
  if unknown := sorted(set(config) - set(SECTIONS)):
    raise ValueError(
      f'--config: the file gives {unknown}; a config has {SECTIONS}'
    )
  kinds = dict.fromkeys(SECTIONS, ConfigDict) | {'name': str}
  missing = [
    name
    for name, kind in kinds.items()
    if not isinstance(config.get(name), kind)
  ]
  if missing:
    raise ValueError(
      f'--config: the file gives no {missing}; a config has {SECTIONS}'
    )


def experiment_from(config: ConfigDict) -> Experiment:
  """The experiment that a config describes.

  Raises:
    ValueError: a value does not fit; the message names the section.
  """
  check_sections(config)
  task = _build('task', CopyTask, config.task)
  sizes = {'vocab_size': task.vocab_size, 'max_len': task.max_len}
  return Experiment(
    model=_build('model', DecoderConfig, config.model, sizes),
    task=task,
    optimizer=_build('optimizer', OptimizerConfig, config.optimizer),
    train=_build('train', TrainConfig, config.train),
  )


def workdir_from(flag: str | None, name: str) -> pathlib.Path:
  """The run's folder: the flag, or runs/<name>.

  Raises:
    ValueError: the path is a file, or lies below one.
  """
  workdir = pathlib.Path(flag or pathlib.Path('runs') / name)
  for path in (workdir, *workdir.parents):
    if path.is_file():
      raise ValueError(f'--workdir={workdir}: {path} is a file; name a folder')
  return workdir


def _build(
  section: str,
  kind: Any,
  config: ConfigDict,
  more: dict[str, Any] | None = None,
) -> Any:
  try:
    return kind(**config.to_dict(), **(more or {}))
  except (TypeError, ValueError) as error:
    raise ValueError(f'--config.{section}: {error}') from error

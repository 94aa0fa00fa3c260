"""From a ConfigDict, as flags leave it, to frozen dataclasses."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from mha_jax.attention import checks
from mha_jax.decoder import DecoderConfig
from mha_jax.tasks import TASKS, Task
from mha_jax.training import memory, record
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


def check_fields(config: ConfigDict, names: Iterable[str]) -> None:
  """Raises a ValueError unless a config has the fields of an experiment."""
  for name in names:
    if name not in config:
      raise ValueError(
        f'--config has no {name!r}; give a config file of this experiment'
      )


def experiment_from(config: ConfigDict) -> Experiment:
  """The experiment that a config describes.

  Raises:
    ValueError: a value does not fit; the message names the section.
  """
  check_sections(config)
  task = _task_from(config.task)
  sizes = {'vocab_size': task.vocab_size, 'max_len': task.max_len}
  for name, size in sizes.items():
    checks.positive(f'--config.task: {name}', size)
  return Experiment(
    model=_build('model', DecoderConfig, config.model, sizes),
    task=task,
    optimizer=_build('optimizer', OptimizerConfig, config.optimizer),
    train=_build('train', TrainConfig, config.train),
  )


def _task_from(config: ConfigDict) -> Task:
  """The task of the kind that the config names."""
  options = config.to_dict()
  kind = options.pop('kind', 'copy')
  if not isinstance(kind, str) or kind not in TASKS:
    raise ValueError(f'--config.task.kind={kind!r} must be in {tuple(TASKS)}')
  task: Task = _build('task', TASKS[kind], ConfigDict(options))
  return task


def recorded_experiment(workdir: pathlib.Path) -> Experiment:
  """The experiment that a run's folder records.

  Raises:
    ValueError: the folder holds no run, or one that cannot be read.
  """
  path = workdir / 'config.json'
  try:
    saved = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(
      f'{workdir} holds no config.json; name the folder of a run, as '
      'experiments.train leaves it'
    ) from error
  except ValueError as error:
    raise ValueError(f'{path} is no JSON ({error})') from error
  if not isinstance(saved, dict):
    raise ValueError(f'{path} is no config; name the folder of a run')
  config = ConfigDict({'name': workdir.name} | saved)
  try:
    check_sections(config)
    model, task = config.model.to_dict(), config.task.to_dict()
    sizes = {k: model.pop(k, None) for k in ('vocab_size', 'max_len')}
    task.pop('digest', None)
    config.model, config.task = ConfigDict(model), ConfigDict(task)
    experiment = experiment_from(config)
    for name, size in sizes.items():
      if size != getattr(experiment.task, name):
        raise ValueError(f'model.{name}={size!r} is not that of the task')
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  now, then = record.as_json(experiment.task), saved['task']
  if changed := [x for x in {**now, **then} if now.get(x) != then.get(x)]:
    what = 'the text has changed' if changed == ['digest'] else f'{changed}'
    raise ValueError(
      f'{path} records another task than it builds: {what}; give back what was '
      'there, or train again'
    )
  return experiment


def check_memory(experiment: Experiment, seeds: int = 1) -> None:
  """Raises a ValueError unless a training step of all seeds can fit."""
  try:
    memory.check(experiment, seeds)
  except ValueError as error:
    raise ValueError(f'--config: {error}') from error


def seeds_from(flag: str, first: int, count: int) -> tuple[int, ...]:
  """count seeds from the first on; a ValueError where they pass 2^32."""
  if first + count > 2**32:
    raise ValueError(
      f'{flag}={count} from --config.train.seed={first} on must stay below 2^32'
    )
  return tuple(range(first, first + count))


def workdir_from(flag: str | None, name: str) -> pathlib.Path:
  """The run's folder: the flag, or runs/<name>.

  Raises:
    ValueError: the path is empty or a file, lies below one, or cannot be
      written in this locale.
  """
  if flag == '':
    raise ValueError('--workdir= is empty; name a folder')
  workdir = pathlib.Path(flag or pathlib.Path('runs') / name)
  for path in (workdir, *workdir.parents):
    if path.exists() and not path.is_dir():
      raise ValueError(f'--workdir={workdir}: {path} is a file; name a folder')
  check_name('--workdir', workdir)
  return workdir


def check_name(flag: str, path: pathlib.Path) -> None:
  """Raises a ValueError unless a path is text, as checkpoints need it."""
  try:
    str(path.absolute()).encode()
  except UnicodeEncodeError as error:
    shown = os.fsencode(path.absolute())
    raise ValueError(
      f'{flag}={shown!r} has letters that this locale does not know; set '
      'PYTHONUTF8=1, or name a folder in ASCII'
    ) from error


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

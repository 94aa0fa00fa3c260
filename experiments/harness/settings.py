"""From a ConfigDict, as flags leave it, to frozen dataclasses."""

import dataclasses
import inspect
import json
import pathlib
import typing
from collections.abc import Iterable
from types import NoneType
from typing import Any

from ml_collections import ConfigDict, config_dict

from mha_jax.attention import checks
from mha_jax.decoder import DecoderConfig
from mha_jax.importing import imported
from mha_jax.tasks import TASKS, Task, TextTask
from mha_jax.training import memory, record
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig

SECTIONS = ('name', 'task', 'model', 'optimizer', 'train')
CONFIGS = {
  'copy': 'configs/copy_task.py',
  'recall': 'configs/recall.py',
  'induction': 'configs/recall.py:induction',
  'text': 'configs/text.py',
}
"""A config of each kind of task."""


def complete(config: ConfigDict, name: str) -> None:
  """Fills in what a config leaves out, at the dataclasses' defaults.

  A config that is read by the script itself, with fields of its own in place
  of sections, stays as it is.

  Args:
    config: of a file.
    name: what it is called where it does not say so.

  Raises:
    ValueError: the task's kind is unknown.
  """
  if not set(config) <= set(SECTIONS):
    return
  with config.unlocked():
    for section in SECTIONS:
      if section not in config:
        config[section] = name if section == 'name' else ConfigDict()
    if isinstance(config.task, ConfigDict) and 'kind' not in config.task:
      config.task.kind = 'copy'
    for section, kind in kinds(config).items():
      _fill(config[section], kind)


def _fill(section: ConfigDict, kind: Any) -> None:
  """Fills in the fields of one dataclass that are plain values, or None."""
  for field in dataclasses.fields(kind):
    value = field.default
    plain = isinstance(value, bool | int | float | str | NoneType)
    if not (field.init and plain) or field.name in section:
      continue
    if value is None:
      first = next(iter(typing.get_args(field.type)), object)
      of = first if first in (bool, int, float, str) else object
      value = config_dict.placeholder(of)
    section[field.name] = value


def kinds(config: ConfigDict) -> dict[str, Any]:
  """The dataclass of each section, of those that a config has."""
  known = {'optimizer': OptimizerConfig, 'train': TrainConfig}
  known |= {'model': DecoderConfig}
  if isinstance(config.get('task'), ConfigDict):
    known['task'] = task_class(config.task.get('kind', 'copy'))
  return {
    section: kind
    for section, kind in known.items()
    if isinstance(config.get(section), ConfigDict)
  }


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
  task = task_from(config.task)
  sizes = {'vocab_size': task.vocab_size, 'max_len': task.max_len}
  for name, size in sizes.items():
    checks.positive(f'--config.task: {name}', size)
  return Experiment(
    model=_build('model', DecoderConfig, config.model, sizes),
    task=task,
    optimizer=_build('optimizer', OptimizerConfig, config.optimizer),
    train=_build('train', TrainConfig, config.train),
  )


def task_from(config: ConfigDict) -> Task:
  """The task of the kind that the section names.

  Raises:
    ValueError: the kind is unknown, a value does not fit, or what the kind
      makes is no `Task`.
  """
  options = config.to_dict()
  kind = options.pop('kind', 'copy')
  task: Task = _build('task', task_class(kind), ConfigDict(options))
  there = dir(task)  # hasattr would make all symbols, however many
  if missing := [x for x in vars(Task) if x[0] != '_' and x not in there]:
    raise ValueError(f'--config.task.kind={kind!r} lacks {missing}, see Task')
  if task.kind != kind or record.as_json(task).get('kind') != kind:
    raise ValueError(
      f'--config.task.kind={kind!r} has kind={task.kind!r}, by which no run '
      f'finds it again; give it the field kind: str = {kind!r}'
    )
  return task


def task_class(kind: Any) -> Any:
  """A class of `TASKS` by its name, another one by module:Class.

  Raises:
    ValueError: there is none.
  """
  if isinstance(kind, str) and kind in TASKS:
    return TASKS[kind]
  if ':' not in str(kind):
    raise ValueError(
      f'--config.task.kind={kind!r} must be in {tuple(TASKS)}, or a class of '
      "your own, as 'configs.my_task:MyTask'"
    )
  found = imported('--config.task.kind', kind)
  if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
    raise ValueError(f'--config.task.kind={kind!r} must be a frozen dataclass')
  return found


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
  if beyond := sorted(set(saved) - set(SECTIONS)):
    raise ValueError(
      f'{path} has {beyond}, as that of a sweep has, which keeps no model; '
      'name a folder of experiments.train, or a folder seed-N of probe_heads'
    )
  config = ConfigDict({'name': workdir.name} | saved)
  try:
    check_sections(config)
    sizes = {x: config.model.get(x) for x in ('vocab_size', 'max_len')}
    config.model = {k: x for k, x in config.model.items() if k not in sizes}
    made = dataclasses.fields(task_class(config.task.get('kind', 'copy')))
    own = {x.name for x in made if not x.init} - {'kind'}  # as a text's digest
    task = {k: x for k, x in config.task.items() if k not in own}
    config.task = ConfigDict(task)
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


def announce(experiments: Iterable[Experiment]) -> None:
  """Prints which text is read, where one is."""
  tasks = [x.task for x in experiments]
  texts = [task.source for task in tasks if isinstance(task, TextTask)]
  for text in dict.fromkeys(texts):
    print(f'text: {text}')


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


def _build(
  section: str,
  kind: Any,
  config: ConfigDict,
  more: dict[str, Any] | None = None,
) -> Any:
  options = config.to_dict() | (more or {})
  if unknown := sorted(set(options) - set(inspect.signature(kind).parameters)):
    of_kind = {TASKS[x]: file for x, file in CONFIGS.items()}.get(kind)
    hint = f'; a config for it is {of_kind}' if of_kind else ''
    raise ValueError(
      f'--config.{section}: {kind.__name__} has no {unknown}{hint}'
    )
  try:
    return kind(**options)
  except (TypeError, ValueError) as error:
    raise ValueError(f'--config.{section}: {error}') from error

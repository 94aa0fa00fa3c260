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
from mha_jax.attention.variants import option_types
from mha_jax.decoder import NUM_HEADS, DecoderConfig, decoder_config
from mha_jax.importing import imported
from mha_jax.tasks import TASKS, Task, TextTask
from mha_jax.training import memory, record
from mha_jax.training.loading import model_from_json
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig

SECTIONS = ('name', 'task', 'model', 'optimizer', 'train')
UNSET = (
  'rope',  # told by positions and rope_theta
  'key_features',
  'value_features',
  'kv_features',
  'out_features',
)
"""Options of attention that no flag sets: a decoder settles them."""
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
  """Fills in the fields of one section that are plain values, or None."""
  for name, (value, types) in _defaults(kind).items():
    plain = isinstance(value, bool | int | float | str | NoneType)
    if not plain or name in section:
      continue
    if value is None:
      of = [x for x in (str, bool, int, float) if x in types]
      value = config_dict.placeholder(of[0] if of else object)
    section[name] = value


def _defaults(kind: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
  """Lists the fields of a section: the default, and the types it may have."""
  if kind is not decoder_config:
    return {
      field.name: (field.default, typing.get_args(field.type))
      for field in dataclasses.fields(kind)
      if field.init
    }
  own = inspect.signature(kind).parameters.values()
  found: dict[str, tuple[Any, tuple[Any, ...]]] = {
    x.name: (x.default, ()) for x in own if x.name != 'layers'
  }
  found['num_heads'] = (NUM_HEADS, ())
  for name, types in option_types().items():
    if name not in UNSET:
      found.setdefault(name, (None, typing.get_args(types) or (types,)))
  return found


def kinds(config: ConfigDict) -> dict[str, Any]:
  """Returns what makes each section, a dataclass, or for models a function."""
  known: dict[str, Any] = {'optimizer': OptimizerConfig, 'train': TrainConfig}
  known |= {'model': decoder_config}
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
    model=_build('model', decoder_config, config.model, sizes),
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
      f'--config.task.kind={kind!r} has kind={task.kind!r}, so that no run '
      f'could find it again; give it the field kind: str = {kind!r}'
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
      f'{path} has {beyond}: it records a sweep, which keeps no model; name '
      'a folder of experiments.train, or a folder seed-N of probe_heads'
    )
  config = ConfigDict({'name': workdir.name} | saved)
  try:
    check_sections(config)
    made = dataclasses.fields(task_class(config.task.get('kind', 'copy')))
    own = {x.name for x in made if not x.init} - {'kind'}  # as a text's digest
    task = task_from(
      ConfigDict({k: x for k, x in config.task.items() if k not in own})
    )
    experiment = Experiment(
      model=_recorded_model(saved['model']),
      task=task,
      optimizer=_build('optimizer', OptimizerConfig, config.optimizer),
      train=_build('train', TrainConfig, config.train),
    )
    for name in ('vocab_size', 'max_len'):
      size = getattr(experiment.model, name)
      if size != getattr(task, name):
        raise ValueError(f'model.{name}={size!r} is not that of the task')
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  now, then = record.as_json(experiment.task), saved['task']
  if changed := [x for x in {**now, **then} if now.get(x) != then.get(x)]:
    what = 'the text has changed' if changed == ['digest'] else f'{changed}'
    raise ValueError(
      f'{path} records a task that is another one now: {what}; restore what it '
      'was made of, or train again'
    )
  return experiment


def _recorded_model(saved: Any) -> DecoderConfig:
  """Makes the recorded config of a model again; a ValueError if it is none."""
  try:
    return model_from_json(saved)
  except (KeyError, TypeError) as error:
    raise ValueError(
      f'model records no decoder ({type(error).__name__}: {error})'
    ) from error


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
  known = set(inspect.signature(kind).parameters)
  known |= set(option_types()) if kind is decoder_config else set()
  if unknown := sorted(set(options) - known):
    of_kind = {TASKS[x]: file for x, file in CONFIGS.items()}.get(kind)
    hint = f'; a config for it is {of_kind}' if of_kind else ''
    raise ValueError(
      f'--config.{section}: {kind.__name__} has no {unknown}{hint}'
    )
  try:
    return kind(**options)
  except (TypeError, ValueError) as error:
    raise ValueError(f'--config.{section}: {error}') from error

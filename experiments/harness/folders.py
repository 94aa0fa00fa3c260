"""The folder of an experiment: its name tells what was asked.

Without --workdir it is runs/<name> and, behind that, each flag and field of the
config that the command line changes, in order of the alphabet:

  runs/sweep_heads-copy_task-attention=gqa-num_kv_heads=2-positions=rope

A folder holds the answer to one question, which config.json keeps: where
another one is asked of it, by --workdir, `kept` refuses.
"""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.harness import flag_parsing, settings
from mha_jax.training import environment, record

LONGEST = 120
"""Bytes of a name; what is beyond becomes a hash."""
ELSEWHERE = ('workdir', 'run', 'json', 'tensorboard', 'config.name')
"""Flags that no answer depends on, or that the name tells already."""


def named(name: str) -> pathlib.Path:
  """The folder: --workdir, or runs/<name>-<what the command line changes>.

  Raises:
    ValueError: the name is empty, or the path is a file, lies below one, or
      cannot be written in this locale.
  """
  if not flags.FLAGS.config.name.strip():
    raise ValueError('--config.name= is empty; it names the folder in runs/')
  record.check_name('--config.name', flags.FLAGS.config.name)
  flag = flags.FLAGS.workdir
  whole = '-'.join([name, *sorted(map(_word, _changed().items()))])
  workdir = pathlib.Path(flag or pathlib.Path('runs') / _short(whole))
  for path in (workdir, *workdir.parents):
    if path.exists() and not path.is_dir():
      raise ValueError(f'--workdir={workdir}: {path} is a file; name a folder')
  record.check_name('--workdir', workdir)
  return workdir


def asked(
  config: ConfigDict, *, run: pathlib.Path | None = None, free: tuple = ()
) -> dict[str, Any]:
  """Gives all that was asked for, config and flags, as JSON has them.

  Args:
    config: what the experiment reads, after its short flags went into it.
    run: the recorded run that is looked into, in place of a config.
    free: names of flags and fields that may differ from call to call, since
      each of their answers is kept.
  """
  fields: dict[str, Any] = {} if run else config.to_dict()
  if 'task' in fields:  # with the digest of a text
    fields['task'] = record.as_json(settings.task_from(config.task))
  own = {
    name: flag.value
    for name, flag in flag_parsing.own_flags().items()
    if flag.value is not None and name not in (*config, *ELSEWHERE)
  }
  every = fields | own | ({'run': str(run.resolve())} if run else {})
  whole: dict[str, Any] = record.as_json(every)
  return {name: x for name, x in whole.items() if name not in free}


@contextlib.contextmanager
def kept(workdir: pathlib.Path, asked: Mapping[str, Any]) -> Iterator[None]:
  """Within the block the folder is this question's and this process's own.

  env.json gets an entry for this start.

  Raises:
    RecordError: it answers another question, was started with options of JAX's
      that give other numbers, or another process is in it.
  """
  with record.exclusive(workdir):
    record.claim(workdir, asked)
    environment.check_same_options(workdir)
    environment.warn_of_changes(workdir)
    environment.add_start(workdir)
    yield


def _changed() -> dict[str, Any]:
  """Flags and fields by name that the command line takes off their defaults."""
  own = flag_parsing.own_flags()
  fields = {x: flags.FLAGS[x] for x in flags.FLAGS if x.startswith('config.')}
  return {
    name: flag.value
    for name, flag in (own | fields).items()
    if flag.value != flag.default and name not in ELSEWHERE
  }


def _word(changed: tuple[str, Any]) -> str:
  """Writes a flag short: num_kv_heads=2, equal_params, a path's last part."""
  name, value = changed[0].rpartition('.')[2], changed[1]
  if isinstance(value, bool):
    return name if value else f'no{name}'
  text = ','.join(value) if isinstance(value, list) else str(value)
  text = pathlib.PurePath(text).name if '/' in text else text
  safe = re.sub(r'[^\w.,+-]+', '_', text)
  return f'{name}={safe}'


def _short(name: str) -> str:
  """A name of LONGEST bytes at most."""
  whole = name.encode()
  if len(whole) <= LONGEST:
    return name
  digest = hashlib.sha256(whole).hexdigest()[:8]
  return f'{whole[: LONGEST - 9].decode(errors="ignore")}-{digest}'

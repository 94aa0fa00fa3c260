"""Reads and writes what a run leaves on disk, and tells whose folder it is.

config.json    all that the run depends on
env.json       where it was started, see environment.py
metrics.jsonl  its metrics, see metrics.py
checkpoints/   its states, see checkpoints.py
"""

import contextlib
import csv
import dataclasses
import errno
import fcntl
import io
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mha_jax.attention import AttentionConfig, variants
from mha_jax.attention.positions.scaling import RopeScaling

Row = dict[str, Any]
"""One line of a JSON-lines file."""


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the system that say that there is no room."""


class RecordError(ValueError):
  """A folder of records cannot be used as it is; the message says why."""


class RecordWarning(UserWarning):
  """A folder of records can be used, but something in it is amiss."""


def check_name(flag: str, name: str | pathlib.Path) -> None:
  """Raises a RecordError unless a name is text, as checkpoints need it.

  Args:
    flag: what gives the name.
    name: a string, or a path, of which all counts from the root on.
  """
  name = str(name.absolute() if isinstance(name, pathlib.Path) else name)
  try:
    name.encode()
  except UnicodeEncodeError as error:
    raise RecordError(
      f'{flag}={os.fsencode(name)!r} has letters that this locale does not '
      'know; set PYTHONUTF8=1, or choose a name in ASCII'
    ) from error


def as_json(config: Any) -> Any:
  """Makes nested dicts of JSON values of a dataclass.

  An attention, and a scaling of RoPE, have the field 'kind' in addition, by
  which `loading.model_from_json` makes them again.
  """
  return json.loads(json.dumps(_plain(config)))


def _plain(value: Any) -> Any:
  """Makes dicts and lists of dataclasses and tuples, at any depth."""
  if isinstance(value, Mapping):
    return {name: _plain(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return value
  kind = {}
  if isinstance(value, AttentionConfig):
    kind = {'kind': variants.name_of(value)}
  elif isinstance(value, RopeScaling):
    kind = {'kind': type(value).__name__}
  fields = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
  return kind | {name: _plain(x) for name, x in fields.items()}


def check_same_config(workdir: pathlib.Path, config: Any) -> None:
  """Raises a RecordError if the folder's run differs, and says in what."""
  path = workdir / 'config.json'
  if not path.exists():
    names = ('checkpoints', 'metrics.jsonl')
    if left := [name for name in names if (workdir / name).exists()]:
      raise RecordError(
        f'workdir={workdir} holds {left} but no config.json to tell of which '
        'run; choose another --workdir or remove it'
      )
    return
  try:
    saved = json.loads(path.read_bytes())
  except ValueError as error:
    raise RecordError(
      f'{path} is no JSON ({error}); choose another --workdir or remove it'
    ) from error
  if not isinstance(saved, dict):
    raise RecordError(
      f'{path} holds no config; choose another --workdir or remove it'
    )
  old, new = flatten(saved), flatten(config)
  digest = 'task.digest'  # a text under another name is the same text
  same_text = old.get(digest) is not None and old[digest] == new.get(digest)
  changed = [
    f'{name}: {old.get(name)} -> {new.get(name)}'
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
    and not (name == 'task.path' and same_text)
  ]
  if changed:
    raise RecordError(
      f'workdir={workdir} holds a run with another config '
      f'({"; ".join(changed)}); choose another --workdir or remove it'
    )


def claim(workdir: pathlib.Path, config: Any) -> None:
  """Makes the folder this config's own: writes config.json.

  Args:
    workdir: the folder; made where absent.
    config: a dataclass or a JSON-like mapping.

  Raises:
    RecordError: the folder holds a run with another config.
  """
  config = as_json(config)
  check_same_config(workdir, config)
  workdir.mkdir(parents=True, exist_ok=True)
  write_json(workdir / 'config.json', config)


@contextlib.contextmanager
def exclusive(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other processes out of the folder, within the block.

  Raises:
    RecordError: another process is in it, or it cannot be written.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / '.lock').open('w')
  except OSError as error:
    raise RecordError(
      f'workdir={workdir} cannot be written ({error.strerror}); mend that, or '
      'choose another --workdir'
    ) from error
  with lock as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise RecordError(
        f'workdir={workdir} is in use by another process; wait for it or '
        'choose another --workdir'
      ) from error
    yield


def read_jsonl(path: pathlib.Path, *needed: str) -> list[Row]:
  """The rows of a JSON-lines file; a last line torn by a crash is dropped.

  Args:
    path: the file; none there: no rows.
    *needed: names that every row must have.

  Raises:
    RecordError: a line is no row.
  """
  rows = []
  for number, row in enumerate(read_lines(path), 1):
    if row is None or any(name not in row for name in needed):
      raise RecordError(
        f'{path}:{number} is no record; remove that line, or the folder'
      )
    rows.append(row)
  return rows


def read_lines(path: pathlib.Path) -> list[Row | None]:
  """The whole lines of a JSON-lines file; None: a line is no JSON object."""
  if not path.exists():
    return []
  text = path.read_bytes()
  rows: list[Row | None] = []
  for line in text[: text.rfind(b'\n') + 1].splitlines():
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    rows.append(row if isinstance(row, dict) else None)
  return rows


def line_of(row: Mapping[str, Any]) -> str:
  """A row as a line of a JSON-lines file."""
  return json.dumps(row) + '\n'


def write_json(path: pathlib.Path, value: Any) -> None:
  write_text(path, json.dumps(value, indent=2) + '\n')


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file as a whole: a crash leaves the old one or the new one.

  Raises:
    RecordError: it cannot be written; the old one stays.
  """
  temporary = path.with_name(path.name + '.tmp')
  with writing(path):
    try:
      temporary.write_text(text, encoding='utf-8')
      temporary.replace(path)
    except OSError:
      temporary.unlink(missing_ok=True)
      raise


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
  """Names the file where writing it fails, within the block.

  Raises:
    RecordError: an OSError was raised.
  """
  try:
    yield
  except OSError as error:
    raise RecordError(
      f'{path} cannot be written ({error.strerror}); what was recorded before '
      'is kept: mend that, and the same command goes on'
    ) from error


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows as a CSV file with a header; what a row lacks stays empty."""
  names = dict.fromkeys(name for row in rows for name in row)
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, [*names], lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  write_text(path, buffer.getvalue())


def flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """{'model': {'d': 1}} -> {'model.d': 1}."""
  if not isinstance(config, dict):
    return {prefix: config}
  flat: dict[str, Any] = {}
  for name, value in config.items():
    flat |= flatten(value, f'{prefix}.{name}' if prefix else name)
  return flat

"""What a run leaves on disk: its config, its surroundings, its metrics.

config.json    all that the run depends on
env.json       versions, devices and command of the last start
metrics.jsonl  one JSON object a line; no times, so that a run which stopped
               and went on leaves the same bytes as one that never stopped
"""

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


class RecordError(ValueError):
  """A folder of records cannot be used as it is; the message says why."""


class Recorder:
  """Writes metrics as JSON lines and, where asked, to TensorBoard.

  What was written after `step`, and a line torn by a crash, is dropped first.

  Args:
    workdir: the run's folder; see `claim`.
    step: the step that the run goes on from.
    tensorboard: whether to write TensorBoard events too.

  Raises:
    ImportError: tensorboard=True without a writer installed.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    step: int = 0,
    tensorboard: bool = False,
  ):
    writer = event_writer() if tensorboard else None
    path = workdir / 'metrics.jsonl'
    kept = [row for row in read_jsonl(path, 'step') if row['step'] <= step]
    write_text(path, ''.join(map(_line, kept)))
    self.last: dict[str, float] = kept[-1] if kept else {}
    self._file = path.open('a')
    self._tensorboard = (
      writer(str(workdir / 'tensorboard'), purge_step=step + 1)
      if writer
      else None
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds one line, and flushes it."""
    self.last = {'step': step} | {k: float(x) for k, x in metrics.items()}
    self._file.write(_line(self.last))
    self._file.flush()
    if self._tensorboard is not None:
      for name, value in metrics.items():
        self._tensorboard.add_scalar(name, float(value), step)

  def close(self) -> None:
    self._file.close()
    if self._tensorboard is not None:
      self._tensorboard.close()


def as_json(config: Any) -> Any:
  """A dataclass as nested dicts of JSON values."""
  if dataclasses.is_dataclass(config) and not isinstance(config, type):
    config = dataclasses.asdict(config)
  return json.loads(json.dumps(config))


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
    saved = json.loads(path.read_text())
  except ValueError as error:
    raise RecordError(
      f'{path} is no JSON ({error}); choose another --workdir or remove it'
    ) from error
  old, new = _flatten(saved), _flatten(config)
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
  """Makes the folder this config's own: writes config.json and env.json.

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
  write_json(workdir / 'env.json', environment())


@contextlib.contextmanager
def exclusive(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other processes out of the folder, within the block.

  Raises:
    RecordError: another process is in it.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / '.lock').open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise RecordError(
        f'workdir={workdir} is in use by another process; wait for it or '
        'choose another --workdir'
      ) from error
    yield


def environment() -> dict[str, Any]:
  """Versions, devices and command: what is needed to run it again."""
  return {
    'command': [pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
    'python': platform.python_version(),
    'platform': platform.platform(),
    'packages': {name: metadata.version(name) for name in PACKAGES},
    'devices': [device.device_kind for device in jax.devices()],
    'cpus': os.cpu_count(),
    'git_commit': _git_commit(),
  }


def read_jsonl(path: pathlib.Path, *needed: str) -> list[dict[str, Any]]:
  """The rows of a JSON-lines file; a last line torn by a crash is dropped.

  Args:
    path: the file; none there: no rows.
    *needed: names that every row must have.

  Raises:
    RecordError: a line is no row.
  """
  if not path.exists():
    return []
  rows = []
  text = path.read_bytes()
  lines = text[: text.rfind(b'\n') + 1].splitlines()
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if not isinstance(row, dict) or any(name not in row for name in needed):
      raise RecordError(
        f'{path}:{number} is no record; remove that line, or the folder'
      )
    rows.append(row)
  return rows


def write_json(path: pathlib.Path, value: Any) -> None:
  write_text(path, json.dumps(value, indent=2) + '\n')


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file as a whole: a crash leaves the old one or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text)
  temporary.replace(path)


def write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows with the same names as a CSV file with a header."""
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, list(rows[0]), lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  write_text(path, buffer.getvalue())


def _line(row: Mapping[str, Any]) -> str:
  return json.dumps(row) + '\n'


def _flatten(config: Any, prefix: str = '') -> dict[str, Any]:
  """{'model': {'d': 1}} -> {'model.d': 1}."""
  if not isinstance(config, dict):
    return {prefix: config}
  flat: dict[str, Any] = {}
  for name, value in config.items():
    flat |= _flatten(value, f'{prefix}.{name}' if prefix else name)
  return flat


def _git_commit() -> str | None:
  """The checkout's commit, where this package lies in one."""
  here = pathlib.Path(__file__).parent
  try:
    done = subprocess.run(
      ['git', 'rev-parse', 'HEAD'],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()


def event_writer() -> Any:
  """The class of TensorBoard writers, from an optional package."""
  try:
    import tensorboardX
  except ImportError as error:
    raise ImportError(
      'TensorBoard events need tensorboardX; install it with: '
      "pip install -e '.[tensorboard]'"
    ) from error
  return tensorboardX.SummaryWriter

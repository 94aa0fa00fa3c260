"""What a run leaves on disk: its config, its surroundings, its metrics.

config.json    all that the run depends on
env.json       versions, devices and command of the last start
metrics.jsonl  one JSON object a line; no times, so that a run which stopped
               and went on leaves the same bytes as one that never stopped
"""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


class Recorder:
  """Writes metrics as JSON lines and, where asked, to TensorBoard.

  What was written after `step`, and a line torn by a crash, is dropped first.

  Args:
    workdir: the run's folder; made where absent.
    config: a dataclass or a JSON-like mapping; see `check_same_config`.
    step: the step that the run goes on from.
    tensorboard: whether to write TensorBoard events too.

  Raises:
    ImportError: tensorboard=True without a writer installed.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    config: Any,
    step: int = 0,
    tensorboard: bool = False,
  ):
    writer = event_writer() if tensorboard else None
    workdir.mkdir(parents=True, exist_ok=True)
    config = as_json(config)
    write_json(workdir / 'config.json', config)
    write_json(workdir / 'env.json', environment())
    path = workdir / 'metrics.jsonl'
    kept = [row for row in read_jsonl(path) if row['step'] <= step]
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
  """Raises a ValueError if the folder's run differs, and says in what."""
  path = workdir / 'config.json'
  if not path.exists():
    return
  old, new = _flatten(json.loads(path.read_text())), _flatten(config)
  changed = [
    f'{name}: {old.get(name)} -> {new.get(name)}'
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  ]
  if changed:
    raise ValueError(
      f'workdir={workdir} holds a run with another config '
      f'({"; ".join(changed)}); choose another --workdir or remove it'
    )


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


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a JSON-lines file; a last line torn by a crash is dropped."""
  if not path.exists():
    return []
  text = path.read_text()
  return [
    json.loads(line) for line in text[: text.rfind('\n') + 1].splitlines()
  ]


def write_json(path: pathlib.Path, value: Any) -> None:
  write_text(path, json.dumps(value, indent=2) + '\n')


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file as a whole: a crash leaves the old one or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text)
  temporary.replace(path)


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

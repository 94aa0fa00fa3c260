"""Checkpoints of a training state, by orbax: atomic, and checked on reading.

Beside what orbax writes lies digests.json, the SHA-256 of every file: orbax
alone gives some flipped bits back as other parameters, without a word.
"""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from mha_jax.training.record import (
  FULL,
  RecordError,
  RecordWarning,
  write_json,
)

DIGESTS = 'digests.json'
ITEM = 'default'  # orbax's folder of the state
SETTLE = 0.5  # seconds

Shapes = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every array, by its path in the state."""


class _Misnamed(ValueError):
  """A checkpoint lies in a folder that is not named by its step."""

  def __init__(self, step: int):
    super().__init__(f'it is that of step {step}; name it so')


class Checkpoints:
  """The last checkpoints of one run, in `<workdir>/checkpoints`.

  A save is complete or absent: a process killed in the middle of it leaves the
  one before.

  Args:
    workdir: the run's folder.
    keep: how many checkpoints to keep.
  """

  def __init__(self, workdir: pathlib.Path, keep: int = 2):
    self._folder = (workdir / 'checkpoints').absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=False
    )
    with _quiet():
      self._manager = ocp.CheckpointManager(
        self._folder,
        item_handlers=ocp.StandardCheckpointHandler(),
        options=options,
      )
    self._damaged: dict[int, str] = {}

  def save(self, step: int, state: Any) -> None:
    """Writes the state of a step; a step that is there stays as it is.

    Damaged ones, which `restore` passed over, go first.

    Raises:
      RecordError: the checkpoint cannot be written; those before are kept.
    """
    folder = self._folder / str(step)
    try:
      with _quiet():
        if step in {*self._manager.all_steps()} - {*self._damaged}:
          return
        while self._damaged:
          self._manager.delete(self._damaged.popitem()[0])
        if not self._manager.save(step, args=ocp.args.StandardSave(state)):
          raise ValueError(f'orbax holds {self._manager.all_steps()}')
      write_json(folder / DIGESTS, {'step': step, 'sha256': _digests(folder)})
    except Exception as error:  # orbax raises many kinds
      raise RecordError(
        f'checkpoint {folder} cannot be written ({_reason(error)}); what was '
        'saved before is kept: mend that, and the same command goes on'
      ) from error

  def restore(self, like: Any) -> Any | None:
    """The newest sound state, shaped as `like`; None where there is none.

    Damaged ones are passed over with a warning; the next `save` removes them.

    Raises:
      RecordError: all are damaged, or one is sound and of other shapes.
    """
    device = jax.device_put(0, jax.devices()[0]).sharding
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like
    )
    wanted = _shapes(like)
    self._damaged = {}
    misnamed: list[int] = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      folder = self._folder / str(step)
      sound = False
      try:
        sound = _check_digests(folder, step)
        found, state = self._read(step, like, wanted)
      except Exception as error:  # orbax raises many kinds
        if sound or isinstance(error, PermissionError):
          raise RecordError(
            f'checkpoint {folder} cannot be read ({_reason(error)})'
          ) from error
        self._damaged[step] = _reason(error)
        if isinstance(error, _Misnamed):
          misnamed.append(step)
        continue
      if found != wanted:
        raise RecordError(
          f'checkpoint {folder} is sound, but config.json tells of another '
          f'model: {_differences(found, wanted)}; write there what it was '
          'trained with'
        )
      for damaged in self._damaged:
        warnings.warn(
          f'{self._described(damaged)}; going on from step {step}',
          RecordWarning,
          stacklevel=2,
        )
      return state
    if not self._damaged:
      return None
    if misnamed:  # sound, under its own name
      raise RecordError(self._described(misnamed[0]))
    newest, *others = self._damaged
    before = 'so are those before it' if others else 'there is none before it'
    raise RecordError(
      f'{self._described(newest)}, and {before}; remove {self._folder} to '
      'train from the start'
    )

  def _read(self, step: int, like: Any, wanted: Shapes) -> tuple[Shapes, Any]:
    """The shapes of a checkpoint, and its state where they are as wanted."""
    with _quiet():
      found = _shapes(self._manager.item_metadata(step))
      if not found:
        raise ValueError('it holds no state')
      if found != wanted:
        return found, None
      args = ocp.args.StandardRestore(like)
      state = self._manager.restore(step, args=args)
    of_step = int(getattr(state, 'step', step))
    if of_step != step:
      raise _Misnamed(of_step)
    return found, state

  def _described(self, step: int) -> str:
    folder = self._folder / str(step)
    return f'checkpoint {folder} is damaged ({self._damaged[step]})'

  def close(self) -> None:
    with _quiet():
      self._manager.close()


def _check_digests(folder: pathlib.Path, step: int) -> bool:
  """Tells whether the files are known to be those that were written.

  Not where there are no digests, as a process leaves it that was killed just
  before writing them.

  Raises:
    ValueError: they are not.
  """
  if not (folder / ITEM).is_dir():
    raise ValueError('it holds no state')
  path = folder / DIGESTS
  if not path.exists():
    return False
  try:
    saved = json.loads(path.read_bytes())
    of_step, before = saved['step'], dict(saved['sha256'])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'{DIGESTS} is no record') from error
  if of_step != step:
    raise _Misnamed(of_step)
  now = _digests(folder)
  for name in sorted(before | now):
    if before.get(name) != now.get(name):
      raise ValueError(f'{name} is not what was written')
  return True


def _digests(folder: pathlib.Path) -> dict[str, str]:
  """The SHA-256 of all files but that of the digests, by name."""
  digests = {}
  for path in sorted(folder.rglob('*')):
    if path.is_file() and path.name != DIGESTS:
      with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
      digests[path.relative_to(folder).as_posix()] = digest
  return digests


def _shapes(tree: Any) -> Shapes:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): (
      tuple(leaf.shape),
      str(leaf.dtype),
    )
    for path, leaf in leaves
  }


def _differences(found: Shapes, wanted: Shapes, most: int = 3) -> str:
  """The first arrays that differ: name, what is there, what should be."""
  names = [x for x in wanted | found if found.get(x) != wanted.get(x)]

  def shown(shapes: Shapes, name: str) -> str:
    shape, dtype = shapes.get(name, (None, ''))
    return 'absent' if shape is None else f'{dtype} {shape}'

  parts = [f'{x} {shown(found, x)}, not {shown(wanted, x)}' for x in names]
  more = [f'{len(parts) - most} more'] if len(parts) > most else []
  return '; '.join([*parts[:most], *more])


def _reason(error: Exception) -> str:
  """An error in a line; orbax wraps those of the system at length."""
  for number in FULL:
    if os.strerror(number) in str(error):
      return os.strerror(number)
  first = str(error).strip().partition('\n')[0][:200]
  return (
    first
    if type(error) in (ValueError, _Misnamed)
    else f'{type(error).__name__}: {first}'
  )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps orbax and its threads from telling what our errors say in a line."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    with contextlib.redirect_stderr(io.StringIO()):
      try:
        yield
      except Exception:
        time.sleep(SETTLE)  # its threads fail one after the other
        raise
  finally:
    logging.set_verbosity(before)

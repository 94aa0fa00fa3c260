"""Checkpoints of a training state, by orbax: atomic and checked on reading."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from mha_jax.training.record import RecordError


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
    self._manager = ocp.CheckpointManager(self._folder, options=options)

  def save(self, step: int, state: Any) -> None:
    """Writes the state of a step; a step that is there stays as it is."""
    if step not in self._manager.all_steps():
      self._manager.save(step, args=ocp.args.StandardSave(state))

  def restore(self, like: Any) -> Any | None:
    """The newest state, shaped as `like`; None where there is none.

    Raises:
      RecordError: the checkpoint cannot be read.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      return self._manager.restore(
        step, args=ocp.args.StandardRestore(abstract)
      )
    except Exception as error:  # orbax raises many kinds
      raise RecordError(
        f'checkpoint {self._folder / str(step)} cannot be read '
        f'({type(error).__name__}); remove that folder to go on from the one '
        'before'
      ) from error

  def close(self) -> None:
    self._manager.close()

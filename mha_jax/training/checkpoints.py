"""Checkpoints of a training state, by orbax: atomic and checked on reading."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
  """The last checkpoints of one run, in `<workdir>/checkpoints`.

  A save is complete or absent: a process killed in the middle of it leaves the
  one before.

  Args:
    workdir: the run's folder.
    keep: how many checkpoints to keep.
  """

  def __init__(self, workdir: pathlib.Path, keep: int = 2):
    folder = (workdir / 'checkpoints').absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(folder, options=options)

  def save(self, step: int, state: Any) -> None:
    """Writes the state of a step; a step that is there stays as it is."""
    if step not in self._manager.all_steps():
      self._manager.save(step, args=ocp.args.StandardSave(state))

  def restore(self, like: Any) -> Any | None:
    """The newest state, shaped as `like`; None where there is none."""
    step = self._manager.latest_step()
    if step is None:
      return None
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

  def close(self) -> None:
    self._manager.close()

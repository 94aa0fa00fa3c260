"""Tasks: batches as pure functions of a key, drawn on the device."""

from typing import Any

from mha_jax.tasks.copying import CopyTask
from mha_jax.tasks.recall import InductionTask, RecallTask
from mha_jax.tasks.task import Batch, Task
from mha_jax.tasks.text import TextTask

__all__ = [
  'TASKS',
  'Batch',
  'CopyTask',
  'InductionTask',
  'RecallTask',
  'Task',
  'TextTask',
]

TASKS: dict[str, Any] = {
  'copy': CopyTask,
  'recall': RecallTask,
  'induction': InductionTask,
  'text': TextTask,
}
"""The tasks by kind, as configs name them."""

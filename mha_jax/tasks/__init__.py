"""Tasks: batches as pure functions of a key, drawn on the device."""

from mha_jax.tasks.copying import CopyTask
from mha_jax.tasks.task import Batch, Task

__all__ = ['Batch', 'CopyTask', 'Task']

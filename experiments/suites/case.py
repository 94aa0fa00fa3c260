"""A case of the benchmark: one task, and those who do it."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

Run = Callable[[], object]
"""Does the task once, and returns when it is done."""


@dataclasses.dataclass(frozen=True)
class Case:
  """One task.

  Args:
    suite: the suite it belongs to.
    task: what is done, in words.
    setting: sizes by name, the numbers that a figure is drawn over.
    contenders: by name, a function that prepares arrays and compiles nothing
      yet, and returns the run. The others are measured against the first one.
  """

  suite: str
  task: str
  setting: dict[str, Any]
  contenders: dict[str, Callable[[], Run]]

  @property
  def key(self) -> str:
    """Tells the cases of a benchmark apart."""
    sizes = ' '.join(f'{name}={x}' for name, x in self.setting.items())
    return f'{self.suite}: {self.task}, {sizes}'


HAS_TORCH = importlib.util.find_spec('torch') is not None


def compiled(function: Callable[..., Any], *arguments: Any) -> Run:
  """A run of a function under jit."""
  jitted = jax.jit(function)
  return lambda: jax.block_until_ready(jitted(*arguments))


def normals(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
  """Arrays of normal numbers in float32."""
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  return [jax.random.normal(k, x) for k, x in zip(keys, shapes, strict=True)]


def torch_tensors(*arrays: jax.Array, gradient: bool = False) -> list[Any]:
  """The same arrays for PyTorch, which gets as many threads as JAX has."""
  import os

  import numpy as np
  import torch

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  tensors = [torch.from_numpy(np.array(x)) for x in arrays]
  return [x.requires_grad_(gradient) for x in tensors]

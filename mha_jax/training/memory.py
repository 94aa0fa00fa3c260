"""Estimates a training step's memory before anything is allocated.

The sum is too small, by a factor of 1.5 to 3 for small decoders on a CPU, so
what `check` refuses cannot be had.
"""

import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import num_params as attention_params
from mha_jax.attention.implementations import LONG_KEYS
from mha_jax.decoder import DecoderConfig
from mha_jax.training.train import Experiment, make_optimizer

HEADS = (
  'model.head_dim',
  'model.v_head_dim',
  'model.kv_lora_rank',
  'model.q_lora_rank',
  'model.qk_nope_head_dim',
  'model.qk_rope_head_dim',
)
MAKES = {
  'embeddings': ('model.d_model', 'task.vocab_size', 'task.max_len'),
  'layers': (
    'model.d_model',
    'model.num_heads',
    'model.mlp_dim',
    'model.num_layers',
    *HEADS,
  ),
  'activations': (
    'train.batch_size',
    'task.max_len',
    'model.d_model',
    'model.mlp_dim',
    'model.num_layers',
    *HEADS,
  ),
  'attention weights': (
    'train.batch_size',
    'task.max_len',
    'model.num_heads',
    'model.num_layers',
  ),
  'logits': ('train.batch_size', 'task.max_len', 'task.vocab_size'),
}
"""The parts of a step's memory, and what of an experiment makes them large."""
FIELDS = {'task.max_len': 'task.length', 'task.vocab_size': 'task.num_symbols'}
"""The fields to name in an error where a task derives a size from them."""
CONTAINER_LIMITS = (
  pathlib.Path('/sys/fs/cgroup/memory.max'),
  pathlib.Path('/sys/fs/cgroup/memory/memory.limit_in_bytes'),
)
"""The files in which Linux tells how much memory a container may use."""
FLOAT32 = 4  # bytes


def check(experiment: Experiment, copies: int = 1) -> None:
  """Raises a ValueError if a training step cannot fit into memory.

  Args:
    experiment: the run.
    copies: trainings at once.
  """
  sizes, have = step_bytes(experiment, copies), available_bytes()
  needed = sum(sizes.values())
  if needed <= have:
    return
  part = max(sizes, key=lambda x: sizes[x])
  task = experiment.task
  own = {x: to for x, to in FIELDS.items() if hasattr(task, to[5:])}
  names = [own.get(x, x) for x in MAKES[part]]
  values = {x: _value(experiment, x) for x in names}
  named = ', '.join(
    f'{name}={value}' for name, value in values.items() if value
  )
  at_once = f' of {copies} trainings at once' if copies > 1 else ''
  raise ValueError(
    f'a training step{at_once} keeps {_gib(needed)} at the least, and there '
    f'are {_gib(have)} of memory; {_gib(sizes[part])} are {part}, by {named}: '
    'choose less'
  )


def step_bytes(experiment: Experiment, copies: int = 1) -> dict[str, int]:
  """Bytes of each of the parts in `MAKES`.

  Embeddings and layers count with their gradients and the optimiser's state.

  Args:
    experiment: the run.
    copies: trainings at once.
  """
  model, task = experiment.model, experiment.task
  tokens = experiment.train.batch_size * task.max_len * copies
  features = scores = 0
  for attention in model.layers:
    heads = attention.num_heads * attention.qk_head_dim
    features += 2 * (model.d_model + heads) + attention.cache_elements
    if model.mlp_dim:
      features += model.d_model + 2 * model.mlp_dim
    scores += 2 * attention.num_heads * task.max_len  # with their gradients
  if task.max_len >= LONG_KEYS or jax.default_backend() != 'cpu':
    scores = 0  # by blocks, or perhaps in a kernel
  embeddings, layers = num_params(model)
  state = _bytes_per_param(experiment) * copies
  return {
    'embeddings': embeddings * state,
    'layers': layers * state,
    'activations': tokens * features * jnp.dtype(model.dtype).itemsize,
    'attention weights': tokens * scores * FLOAT32,
    'logits': tokens * task.vocab_size * FLOAT32,
  }


def _value(experiment: Experiment, name: str) -> Any:
  """Reads a field; one of the attention's off the first layer, None: none."""
  section, field = name.split('.')
  owner = getattr(experiment, section)
  owner = owner if hasattr(owner, field) else owner.layers[0]
  return getattr(owner, field, None)


def num_params(model: DecoderConfig) -> tuple[int, int]:
  """Parameters of a `DecoderLM`: of its two ends, and of its layers."""
  d, f = model.d_model, model.mlp_dim
  learned = model.max_len if model.learned_positions else 0
  norms = d * (1 + (f > 0))
  mlp = 2 * d * f + (f + d) * (f > 0 and model.use_bias)
  layers = sum(
    attention_params(attention.table) + norms + mlp
    for attention in model.layers
  )
  return (2 * model.vocab_size + learned + 1) * d, layers


def available_bytes() -> int:
  """The memory of the device; on a CPU of the machine, or of its container."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'bytes_limit' in stats:
    return int(stats['bytes_limit'])
  limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
  for path in CONTAINER_LIMITS:
    text = path.read_text().strip() if path.exists() else ''
    limits += [int(text)] if text.isdecimal() else []
  return min(limits)


def _bytes_per_param(experiment: Experiment) -> int:
  """Itself, its gradient, and what the optimiser keeps of it."""
  param = jax.ShapeDtypeStruct((1,), jnp.float32)
  state = jax.eval_shape(make_optimizer(experiment).init, param)
  kept = [math.prod(x.shape) for x in jax.tree.leaves(state) if x.ndim]
  return FLOAT32 * (2 + sum(kept))


def _gib(size: int) -> str:
  return f'{size / 2**30:,.1f} GiB'

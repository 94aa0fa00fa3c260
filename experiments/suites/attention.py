"""Attention alone: ours against jax.nn, Flax and PyTorch, by length."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

import mha_jax
from experiments.harness import command_line
from experiments.suites.case import (
  HAS_TORCH,
  Case,
  Run,
  compiled,
  normals,
  torch_tensors,
)

GIB = 2**30


def cases(config: ConfigDict) -> list[Case]:
  """Causal attention at every length, GQA, and a window against none."""
  lengths = command_line.positive_ints(
    'config.lengths', config.lengths.split(',')
  )
  h, k, window = config.num_heads, config.head_dim, config.window
  result = []
  for t in lengths:
    for gradient in (False, True):
      for n in (h, h // 4):
        if n == h or not gradient:
          setting = {'t': t, 'heads': h, 'kv_heads': n, 'head_dim': k}
          result.append(_causal(setting, gradient, config))
    if t > window:
      result.append(_window({'t': t, 'window': window}, h, k))
  return result


def _causal(
  setting: dict[str, int], gradient: bool, config: ConfigDict
) -> Case:
  t, h, n, k = setting.values()
  shapes = (config.batch_size, t, h, k), (config.batch_size, t, n, k)
  functions: dict[str, Callable[..., jax.Array]] = {
    'mha_jax': functools.partial(mha_jax.dot_product_attention, is_causal=True)
  }
  scores = 4 * config.batch_size * h * t * t
  if scores < config.max_scores_gib * GIB:
    functions |= {
      'jax.nn': functools.partial(jax.nn.dot_product_attention, is_causal=True),
      'flax': functools.partial(nnx.dot_product_attention, is_causal=True),
    }

  def of_jax(function: Callable[..., jax.Array]) -> Run:
    q, key, v, cotangent = normals(shapes[0], shapes[1], shapes[1], shapes[0])
    if not gradient:
      return compiled(function, q, key, v)

    def both(*arrays: jax.Array) -> tuple[jax.Array, Sequence[jax.Array]]:
      *inputs, cotangent = arrays
      out, pull = jax.vjp(function, *inputs)
      return out, pull(cotangent)

    return compiled(both, q, key, v, cotangent)

  contenders: dict[str, Callable[[], Run]] = {
    name: functools.partial(of_jax, function)
    for name, function in functions.items()
  }
  if HAS_TORCH:
    contenders['torch'] = functools.partial(_torch, shapes, gradient)
  task = 'forward and backward' if gradient else 'forward'
  return Case('attention', f'causal {task}', setting, contenders)


def _torch(shapes: Sequence[tuple[int, ...]], gradient: bool) -> Run:
  """PyTorch's scaled_dot_product_attention, heads first, its fused kernel."""
  import torch

  q, k, v, cotangent = (
    x.transpose(1, 2).contiguous()
    for x in torch_tensors(*normals(shapes[0], shapes[1], shapes[1], shapes[0]))
  )
  groups = shapes[0][2] != shapes[1][2]
  attention = functools.partial(
    torch.nn.functional.scaled_dot_product_attention,
    is_causal=True,
    enable_gqa=groups,
  )
  if not gradient:

    def forward() -> object:
      with torch.no_grad():
        return attention(q, k, v)

    return forward
  inputs = [x.requires_grad_() for x in (q, k, v)]

  def both() -> object:
    for x in inputs:
      x.grad = None
    return attention(*inputs).backward(cotangent)

  return both


def _window(setting: dict[str, int], h: int, k: int) -> Case:
  """A sliding window against the causal form, both ours."""
  t, window = setting.values()

  def run(**options: Any) -> Run:
    q, key, v = normals(*[(1, t, h, k)] * 3)
    return compiled(
      functools.partial(mha_jax.dot_product_attention, **options), q, key, v
    )

  return Case(
    'attention',
    'a sliding window',
    setting,
    {
      'window': functools.partial(
        run, local_window_size=(window - 1, 0), is_causal=True
      ),
      'causal': functools.partial(run, is_causal=True),
    },
  )

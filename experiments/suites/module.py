"""Whole attention modules: causal self-attention of ours, Flax and PyTorch."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

import mha_jax.linen
import mha_jax.nnx
from experiments.harness import command_line
from experiments.suites.case import (
  HAS_TORCH,
  Case,
  Run,
  compiled,
  normals,
  torch_tensors,
)
from mha_jax.attention import masks


def cases(config: ConfigDict) -> list[Case]:
  """Forward, and forward and backward, at every length."""
  lengths = command_line.positive_ints(
    'config.module_lengths', config.module_lengths.split(',')
  )
  return [
    _case(config, t, gradient) for t in lengths for gradient in (False, True)
  ]


def _case(config: ConfigDict, t: int, gradient: bool) -> Case:
  h, d, b = config.num_heads, config.module_d_model, config.module_batch_size
  linen = (mha_jax.linen.MultiHeadAttention, nn.MultiHeadDotProductAttention)
  nnx_modules = (mha_jax.nnx.MultiHeadAttention, nnx.MultiHeadAttention)
  ours, flax_linen = (
    functools.partial(_linen, module, h, (b, t, d), gradient)
    for module in linen
  )
  ours_nnx, flax_nnx = (
    functools.partial(_nnx, module, h, (b, t, d), gradient)
    for module in nnx_modules
  )
  contenders = {
    'mha_jax.linen': ours,
    'flax.linen': flax_linen,
    'mha_jax.nnx': ours_nnx,
    'flax.nnx': flax_nnx,
  }
  if HAS_TORCH:
    contenders['torch'] = functools.partial(_torch, h, (b, t, d), gradient)
  task = 'forward and backward' if gradient else 'forward'
  setting = {'t': t, 'batch': b, 'd_model': d, 'heads': h}
  return Case('module', f'self-attention {task}', setting, dict(contenders))


def _run(
  function: Callable[[Any, jax.Array], jax.Array],
  params: Any,
  x: jax.Array,
  gradient: bool,
) -> Run:
  """A run of function(params, x), or of it and its gradients."""
  if not gradient:
    return compiled(function, params, x)

  def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(function(params, x) ** 2)

  return compiled(jax.grad(loss, (0, 1)), params, x)


def _mask(module: Any, t: int) -> Any:
  """The causal mask, in the form that the module's makers mean it to have."""
  ours = module.__module__.startswith('mha_jax')
  return masks.causal() if ours else nn.make_causal_mask(jnp.ones((1, t)))


def _linen(
  module: Any, h: int, shape: tuple[int, int, int], gradient: bool
) -> Run:
  (x,) = normals(shape)
  attention = module(num_heads=h)
  params = attention.init(jax.random.key(0), x)
  mask = _mask(module, shape[1])

  def function(params: Any, x: jax.Array) -> jax.Array:
    out: jax.Array = attention.apply(params, x, mask=mask)
    return out

  return _run(function, params, x, gradient)


def _nnx(
  module: Any, h: int, shape: tuple[int, int, int], gradient: bool
) -> Run:
  (x,) = normals(shape)
  attention = module(h, shape[-1], decode=False, rngs=nnx.Rngs(0))
  graph, params = nnx.split(attention)
  mask = _mask(module, shape[1])

  def function(params: Any, x: jax.Array) -> jax.Array:
    out: jax.Array = nnx.merge(graph, params)(x, mask=mask)
    return out

  return _run(function, params, x, gradient)


def _torch(h: int, shape: tuple[int, int, int], gradient: bool) -> Run:
  import torch

  (x,) = torch_tensors(*normals(shape), gradient=gradient)
  attention = torch.nn.MultiheadAttention(shape[-1], h, batch_first=True)
  mask = torch.nn.Transformer.generate_square_subsequent_mask(shape[1])
  attention.eval()

  def forward() -> Any:
    return attention(
      x, x, x, attn_mask=mask, is_causal=True, need_weights=False
    )[0]

  def run() -> object:
    if gradient:
      attention.zero_grad()
      x.grad = None
      return (forward() ** 2).mean().backward()
    with torch.no_grad():
      return forward()

  return run

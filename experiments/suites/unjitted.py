"""What Python costs: calls outside of jit, and tracing a deep model.

A notebook, a test and a decoding loop by hand call modules without jit; every
program is traced and lowered before it is compiled.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from ml_collections import ConfigDict

import mha_jax.linen
import mha_jax.nnx
from experiments.suites.case import Case, Run, normals
from mha_jax.attention import multihead_attention

HEADS, WIDTH, TOKENS = 4, 64, 64


def cases(config: ConfigDict) -> list[Case]:
  """A layer's call, the call of a function, and the tracing of layers."""
  linen = {
    'mha_jax.linen': mha_jax.linen.MultiHeadAttention,
    'flax.linen': nn.MultiHeadAttention,
  }
  nnx_modules = {
    'mha_jax.nnx': mha_jax.nnx.MultiHeadAttention,
    'flax.nnx': nnx.MultiHeadAttention,
  }
  setting = {'t': TOKENS, 'd_model': WIDTH, 'heads': HEADS}
  layers = config.traced_layers
  return [
    Case(
      'unjitted',
      'call of a Linen module',
      setting,
      {k: functools.partial(_linen, x) for k, x in linen.items()},
    ),
    Case(
      'unjitted',
      'call of an NNX module',
      setting,
      {k: functools.partial(_nnx, x) for k, x in nnx_modules.items()},
    ),
    Case(
      'unjitted',
      'call of a function',
      setting,
      {'mha_jax': _ours, 'jax.nn': _theirs},
    ),
    Case(
      'unjitted',
      'tracing and lowering, with gradient',
      {'layers': layers, **setting},
      {k: functools.partial(_traced, x, layers) for k, x in linen.items()},
    ),
  ]


def _linen(module: Any) -> Run:
  (x,) = normals((2, TOKENS, WIDTH))
  attention = module(num_heads=HEADS)
  variables = attention.init(jax.random.key(0), x)
  return lambda: jax.block_until_ready(attention.apply(variables, x))


def _nnx(module: Any) -> Run:
  (x,) = normals((2, TOKENS, WIDTH))
  attention = module(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
  return lambda: jax.block_until_ready(attention(x))


def _ours() -> Run:
  (q,) = normals((2, HEADS, TOKENS, WIDTH // HEADS))
  return lambda: jax.block_until_ready(multihead_attention(q, q, q))


def _theirs() -> Run:
  (q,) = normals((2, TOKENS, HEADS, WIDTH // HEADS))
  attend = jax.nn.dot_product_attention
  return lambda: jax.block_until_ready(attend(q, q, q))


def _traced(module: Any, layers: int) -> Run:
  """Traces and lowers a stack of layers anew, without what is remembered."""

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      for _ in range(layers):
        x = x + module(num_heads=HEADS)(x)
      return x

  (x,) = normals((2, TOKENS, WIDTH))
  stack = Stack()
  variables = jax.eval_shape(stack.init, jax.random.key(0), x)

  def loss(variables: Any, x: jax.Array) -> jax.Array:
    out: jax.Array = stack.apply(variables, x)  # type: ignore[assignment]
    return out.sum()

  def run() -> object:
    jax.clear_caches()
    return jax.jit(jax.grad(lambda v, x: loss(v, x))).lower(variables, x)

  return run

"""A whole training step of one decoder: ours, and the same with Flax's parts.

Pre-norm blocks of attention and MLP, AdamW, one batch of random tokens. The
decoders differ in their attention alone: ours, Flax Linen's module with its own
attention or with `jax.nn.dot_product_attention`, and Flax NNX's module.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.harness import command_line
from experiments.suites.case import Case, Run
from mha_jax.decoder import DecoderConfig, DecoderLM, decoder_config

VOCAB_SIZE = 256
Logits = Callable[[Any, jax.Array], Any]
"""From parameters and tokens (b, t) to logits (b, t, m)."""


def cases(config: ConfigDict) -> list[Case]:
  """A step at every length."""
  lengths = command_line.positive_ints(
    'config.decoder_lengths', config.decoder_lengths.split(',')
  )
  return [_case(config, t) for t in lengths]


def _case(config: ConfigDict, t: int) -> Case:
  d = config.module_d_model
  model = decoder_config(
    VOCAB_SIZE,
    max_len=t,
    d_model=d,
    num_layers=config.decoder_layers,
    num_heads=config.num_heads,
    mlp_dim=4 * d,
  )
  contenders: dict[str, Callable[[], Run]] = {
    'mha_jax': lambda: _linen(DecoderLM(model), t),
    'jax.nn': lambda: _linen(LinenDecoder(model, _jax_nn), t),
    'flax.linen': lambda: _linen(
      LinenDecoder(model, nn.dot_product_attention), t
    ),
    'flax.nnx': lambda: _nnx(model, t),
  }
  sizes = {'t': t, 'd_model': d, 'layers': model.num_layers}
  setting = sizes | {'heads': config.num_heads}
  return Case('decoder', 'a training step', setting, contenders)


class LinenDecoder(nn.Module):
  """DecoderLM from Flax Linen's modules; no MLP where mlp_dim is 0."""

  config: DecoderConfig
  attention_fn: Callable[..., jax.Array]

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    config, d = self.config, self.config.d_model
    x = nn.Embed(config.vocab_size, d)(tokens)
    x = x + nn.Embed(config.max_len, d)(jnp.arange(tokens.shape[1]))[None]
    mask = nn.make_causal_mask(tokens)
    for _ in range(config.num_layers):
      attention = nn.MultiHeadDotProductAttention(
        config.layers[0].num_heads,
        use_bias=False,
        attention_fn=self.attention_fn,
      )
      x = x + attention(nn.RMSNorm()(x), mask=mask)
      if config.mlp_dim:
        y = nn.Dense(config.mlp_dim, use_bias=False)(nn.RMSNorm()(x))
        x = x + nn.Dense(d, use_bias=False)(nn.gelu(y))
    return nn.Dense(config.vocab_size, use_bias=False)(nn.RMSNorm()(x))


class NnxDecoder(nnx.Module):
  """DecoderLM from Flax NNX's modules; without an MLP where mlp_dim is 0."""

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
    d, f = config.d_model, config.mlp_dim
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)

    def block() -> nnx.Dict:
      rows: dict[str, Any] = {
        'attention_norm': nnx.RMSNorm(d, rngs=rngs),
        'attention': nnx.MultiHeadAttention(
          config.layers[0].num_heads,
          d,
          use_bias=False,
          decode=False,
          rngs=rngs,
        ),
      }
      if f:
        rows['mlp_norm'] = nnx.RMSNorm(d, rngs=rngs)
        rows |= {'mlp_in': linear(d, f), 'mlp_out': linear(f, d)}
      return nnx.Dict(rows)

    self.embed = nnx.Embed(config.vocab_size, d, rngs=rngs)
    self.positions = nnx.Embed(config.max_len, d, rngs=rngs)
    self.blocks = nnx.List([block() for _ in range(config.num_layers)])
    self.norm = nnx.RMSNorm(d, rngs=rngs)
    self.output = linear(d, config.vocab_size)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
    mask = nnx.make_causal_mask(tokens)
    for block in self.blocks:
      x = x + block.attention(block.attention_norm(x), mask=mask)
      if 'mlp_in' in block:
        y = nnx.gelu(block.mlp_in(block.mlp_norm(x)))
        x = x + block.mlp_out(y)
    return self.output(self.norm(x))


def _jax_nn(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: jax.Array | None = None,
) -> jax.Array:
  """`jax.nn`'s attention behind the arguments that Flax passes."""
  del mask  # a causal one, which it makes itself
  return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def _linen(model: nn.Module, t: int) -> Run:
  params = model.init(jax.random.key(0), jnp.zeros((1, t), jnp.int32))
  return _steps(model.apply, params, t)


def _nnx(config: DecoderConfig, t: int) -> Run:
  graph, params = nnx.split(NnxDecoder(config, nnx.Rngs(0)))
  return _steps(lambda p, x: nnx.merge(graph, p)(x), params, t)


def _steps(logits_of: Logits, params: Any, t: int) -> Run:
  """An optimiser step on one batch, with the state given away."""
  tokens = jax.random.randint(jax.random.key(1), (1, t + 1), 0, VOCAB_SIZE)
  optimizer = optax.adamw(1e-3)

  def loss_of(params: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_of(params, tokens[:, :-1]), tokens[:, 1:]
    )
    return jnp.mean(losses)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state: Any) -> Any:
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  state = [(params, optimizer.init(params))]

  def run() -> object:
    state[0], loss = step(state[0])
    return jax.block_until_ready((state[0], loss))

  return run

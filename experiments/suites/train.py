"""Optimiser steps of the copy task: ours, and the same model of the peers.

One layer of attention without an MLP, AdamW with clipping; each contender takes
the same number of steps, ours in one dispatch with batches drawn on the way,
the others on one batch, step after step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from experiments.harness import command_line
from experiments.suites.case import HAS_TORCH, Case, Run, torch_tensors
from experiments.suites.decoder import NnxDecoder
from mha_jax.decoder import DecoderConfig, decoder_config
from mha_jax.tasks import Batch, CopyTask
from mha_jax.training import train


def cases(config: ConfigDict) -> list[Case]:
  """The default copy task at every number of heads."""
  heads = command_line.positive_ints(
    'config.train_heads', config.train_heads.split(',')
  )
  return [_case(h, config.train_steps) for h in heads]


def _case(h: int, steps: int) -> Case:
  task = CopyTask(length=32, num_symbols=32)
  try:
    model = decoder_config(task.vocab_size, task.max_len, num_heads=h)
  except ValueError as error:
    raise ValueError(f'--config.train_heads={h}: {error}') from error
  experiment = train.Experiment(
    model,
    task,
    train.OptimizerConfig(warmup_steps=0),
    train.TrainConfig(steps_per_dispatch=steps),
  )
  contenders: dict[str, Callable[[], Run]] = {
    'mha_jax': functools.partial(_ours, experiment, steps),
    'flax.nnx': functools.partial(_flax, experiment, steps),
  }
  if HAS_TORCH:
    for name, compiles in (('torch', False), ('torch compiled', True)):
      contenders[name] = functools.partial(_torch, experiment, steps, compiles)
  d_model = experiment.model.d_model
  setting = {'n_heads': h, 'd_model': d_model, 'steps': steps}
  return Case('train', 'steps of the copy task', setting, contenders)


def _ours(experiment: train.Experiment, steps: int) -> Run:
  key = jax.random.key(0)
  advance = jax.jit(
    functools.partial(train.advance, experiment, steps), donate_argnums=1
  )
  state = [train.init(experiment, key)]

  def run() -> object:
    state[0], metrics = advance(key, state[0])
    return jax.block_until_ready((state[0], metrics))

  return run


def _flax(experiment: train.Experiment, steps: int) -> Run:
  batch = _batch(experiment)
  model = NnxDecoder(experiment.model, nnx.Rngs(0))
  optimizer = nnx.Optimizer(
    model, train.make_optimizer(experiment), wrt=nnx.Param
  )

  def loss_of(model: NnxDecoder, batch: Batch) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
      model(batch.inputs), batch.targets
    )
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)

  @nnx.jit(donate_argnums=(0, 1))
  def step(
    model: NnxDecoder, optimizer: nnx.Optimizer, batch: Batch
  ) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, grads)
    return loss

  # The faster way that Flax has: no graph is walked at each call.
  cached = nnx.cached_partial(step, model, optimizer)

  def run() -> object:
    for _ in range(steps):
      loss = cached(batch)
    return jax.block_until_ready((loss, nnx.state(model)))

  return run


def _torch(experiment: train.Experiment, steps: int, compiles: bool) -> Run:
  import torch

  batch = _batch(experiment)
  inputs, targets, weights = torch_tensors(
    batch.inputs, batch.targets, batch.weights
  )
  inputs, targets = inputs.long(), targets.long()
  config, options = experiment.model, experiment.optimizer
  model = _torch_model(config)
  forward = torch.compile(model) if compiles else model
  optimizer = torch.optim.AdamW(
    model.parameters(),
    options.learning_rate,
    (options.b1, options.b2),
    weight_decay=options.weight_decay,
  )

  def run() -> object:
    for _ in range(steps):
      optimizer.zero_grad()
      losses = torch.nn.functional.cross_entropy(
        forward(inputs).flatten(0, 1), targets.flatten(), reduction='none'
      )
      loss = (losses * weights.flatten()).sum() / weights.sum()
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
      optimizer.step()
    return loss

  return run


def _torch_model(config: DecoderConfig) -> Any:
  """DecoderLM of one layer in PyTorch, on its fused attention."""
  import torch
  from torch import nn

  class Model(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      d = config.d_model
      self.embed = nn.Embedding(config.vocab_size, d)
      self.positions = nn.Embedding(config.max_len, d)
      self.attention_norm, self.norm = nn.RMSNorm(d), nn.RMSNorm(d)
      self.qkv = nn.Linear(d, 3 * d, bias=False)
      self.out = nn.Linear(d, d, bias=False)
      self.output = nn.Linear(d, config.vocab_size, bias=False)

    def forward(self, tokens: Any) -> Any:
      h = config.layers[0].num_heads
      x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
      b, t, d = x.shape
      qkv = self.qkv(self.attention_norm(x))
      q, k, v = qkv.view(b, t, 3, h, -1).permute(2, 0, 3, 1, 4)
      y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
      return self.output(self.norm(x))

  torch.manual_seed(0)
  return Model()


def _batch(experiment: train.Experiment) -> Batch:
  size = experiment.train.batch_size
  return experiment.task.sample(jax.random.key(1), size)

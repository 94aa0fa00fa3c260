"""Training as pure functions of frozen configs, a key and a state.

`advance` runs many optimiser steps in one dispatch (`lax.scan`). The batch and
the dropout of step i depend on the run's key and on i alone, so a run that
stops and goes on gives the very numbers of one that never stopped; and the
functions vmap over keys, states and learning rates, which makes seeds and rates
axes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mha_jax.attention import checks
from mha_jax.attention.notation import ArrayLike
from mha_jax.attention.pytrees import pytree
from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.tasks import Batch, Task
from mha_jax.training import optimizers

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, or another, with linear warm-up, cosine decay and clipping.

  Args:
    learning_rate: the peak.
    warmup_steps: steps of linear warm-up from 0.
    final_fraction: the last learning rate as a fraction of the peak.
    b1: decay of the first moment, for optimisers that take it.
    b2: decay of the second moment, for optimisers that take it.
    weight_decay: decoupled, times the learning rate, for those that take it.
    clip_norm: bound on the gradient's global norm, before all else.
    name: a function of optax with a learning_rate, such as 'sgd' or 'lion', or
      one of your own that returns any chain, 'module:function'; None: 'adamw'.
    options: further arguments of it, such as {'momentum': 0.9}.

  Raises:
    ValueError: a value does not fit, or the optimiser does not take it.
  """

  learning_rate: float = 3e-3
  warmup_steps: int = 20
  final_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.98
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  name: str | None = None
  options: Any = None  # pairs of names and values

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.real('learning_rate', self.learning_rate, 1e-12, 1e3)
    checks.real('clip_norm', self.clip_norm, 1e-12, 1e12)
    checks.real('weight_decay', self.weight_decay, 0, 1e3)
    checks.real('final_fraction', self.final_fraction, 0, 1)
    checks.real('b1', self.b1, 0, 1 - 1e-7)
    checks.real('b2', self.b2, 0, 1 - 1e-7)
    checks.whole('warmup_steps', self.warmup_steps, 0, 2**31 - 1)
    object.__setattr__(self, 'options', optimizers.as_pairs(self.options))
    defaults = {x: getattr(OptimizerConfig, x) for x in self.usual}
    optimizers.check(self.name, self.usual, defaults, self.options)

  @property
  def usual(self) -> dict[str, float]:
    """The arguments that many optimisers take, by name."""
    names = ('b1', 'b2', 'weight_decay')
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The length of a training, and the size of its batches.

  Args:
    seed: of parameters, batches and dropout.
    steps: optimiser steps.
    batch_size: sequences a step.
    steps_per_dispatch: steps in one compiled call; a line of metrics, their
      means over these steps, each.
    eval_batches: fixed batches that each evaluation averages over.
    checkpoint_every: steps between checkpoints, rounded up to dispatches.
  """

  seed: int = 0
  steps: int = 300
  batch_size: int = 32
  steps_per_dispatch: int = 20
  eval_batches: int = 4
  checkpoint_every: int = 100

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    for name in ('batch_size', 'checkpoint_every'):
      checks.positive(name, getattr(self, name))
    checks.whole('seed', self.seed, 0, 2**32 - 1)
    checks.whole('steps', self.steps, 1, 2**31 - 1)
    # A stop on Ctrl-C waits for the end of a dispatch and its evaluation.
    for name in ('steps_per_dispatch', 'eval_batches'):
      checks.whole(name, getattr(self, name), 1, 10_000)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """All that a run depends on."""

  model: DecoderConfig
  task: Task
  optimizer: OptimizerConfig
  train: TrainConfig

  def __post_init__(self) -> None:
    if self.optimizer.warmup_steps >= self.train.steps:
      raise ValueError(
        f'optimizer.warmup_steps={self.optimizer.warmup_steps} must be below '
        f'train.steps={self.train.steps}'
      )


@pytree
class TrainState:
  """The part of a training that changes from step to step."""

  step: jax.Array  # () int32, steps taken
  params: Any
  opt_state: Any


def make_schedule(
  experiment: Experiment, learning_rate: ArrayLike | None = None
) -> optax.Schedule:
  """The learning rate by step.

  Args:
    experiment: its optimiser's config says how the rate rises and falls.
    learning_rate: the peak, also a traced one; None: the config's.
  """
  config = experiment.optimizer
  peak = config.learning_rate if learning_rate is None else learning_rate
  shape = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=1.0,
    warmup_steps=config.warmup_steps,
    decay_steps=experiment.train.steps,
    end_value=config.final_fraction,
  )
  return lambda step: peak * shape(step)


def make_optimizer(
  experiment: Experiment, learning_rate: ArrayLike | None = None
) -> optax.GradientTransformation:
  """The optimiser that the config names, behind clipping.

  Args:
    experiment: names it.
    learning_rate: the peak, also a traced one; None: the config's.
  """
  config = experiment.optimizer
  schedule = make_schedule(experiment, learning_rate)
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optimizers.make(config.name, schedule, config.usual, config.options),
  )


def init(experiment: Experiment, key: jax.Array) -> TrainState:
  """The state before the first step."""
  tokens = jnp.zeros((1, 1), jnp.int32)  # parameters are those of any length
  params = DecoderLM(experiment.model).init(_stream(key, 'init'), tokens)
  opt_state = make_optimizer(experiment).init(params['params'])
  return TrainState(jnp.zeros((), jnp.int32), params['params'], opt_state)


def loss_and_accuracy(
  experiment: Experiment,
  params: Any,
  batch: Batch,
  dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
  """Mean cross-entropy (nats) and accuracy over the targets that count.

  Args:
    experiment: the model's config is in it.
    params: of `DecoderLM`.
    batch: what to predict.
    dropout_key: turns dropout on; None: off.

  Returns:
    The loss, and `{'loss', 'accuracy'}`.
  """
  logits: Any = DecoderLM(experiment.model).apply(
    {'params': params},
    batch.inputs,
    deterministic=dropout_key is None,
    rngs=None if dropout_key is None else {'dropout': dropout_key},
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch.targets
  )
  hits = jnp.argmax(logits, axis=-1) == batch.targets
  hits = hits.astype(batch.weights.dtype)
  loss = batch.mean(losses)
  return loss, {'loss': loss, 'accuracy': batch.mean(hits)}


def train_step(
  experiment: Experiment,
  key: jax.Array,
  state: TrainState,
  learning_rate: ArrayLike | None = None,
) -> tuple[TrainState, Metrics]:
  """One optimiser step on the batch of this step.

  Args:
    experiment: all that the training depends on, but for the seed in it.
    key: of the run.
    state: the state before the step.
    learning_rate: the peak, see `make_schedule`.
  """
  batch_key = jax.random.fold_in(_stream(key, 'batch'), state.step)
  dropout_key = jax.random.fold_in(_stream(key, 'dropout'), state.step)
  batch = experiment.task.sample(batch_key, experiment.train.batch_size)
  grad_fn = jax.grad(
    functools.partial(loss_and_accuracy, experiment), has_aux=True
  )
  grads, metrics = grad_fn(state.params, batch, dropout_key)
  with jax.numpy_dtype_promotion('standard'):  # optax mixes dtypes
    updates, opt_state = make_optimizer(experiment, learning_rate).update(
      grads, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    metrics['grad_norm'] = optax.tree.norm(grads)
    rate = make_schedule(experiment, learning_rate)(state.step)
  metrics['learning_rate'] = jnp.asarray(rate)
  return TrainState(state.step + 1, params, opt_state), metrics


def advance(
  experiment: Experiment,
  num_steps: int,
  key: jax.Array,
  state: TrainState,
  learning_rate: ArrayLike | None = None,
) -> tuple[TrainState, Metrics]:
  """num_steps optimiser steps; metrics lead with the step, (num_steps,).

  The other arguments are those of `train_step`.
  """

  def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
    return train_step(experiment, key, state, learning_rate)

  return jax.lax.scan(step, state, length=num_steps)


def evaluate(experiment: Experiment, key: jax.Array, params: Any) -> Metrics:
  """Loss and accuracy on the run's fixed validation batches."""
  task = experiment.task.validation

  def one(index: jax.Array) -> Metrics:
    batch_key = jax.random.fold_in(_stream(key, 'eval'), index)
    batch = task.sample(batch_key, experiment.train.batch_size)
    return loss_and_accuracy(experiment, params, batch)[1]

  metrics = jax.lax.map(one, jnp.arange(experiment.train.eval_batches))
  return {f'eval_{name}': jnp.mean(x) for name, x in metrics.items()}


def _stream(key: jax.Array, name: str) -> jax.Array:
  """An independent key for each use of randomness."""
  streams = ('init', 'batch', 'dropout', 'eval')
  return jax.random.fold_in(key, streams.index(name))

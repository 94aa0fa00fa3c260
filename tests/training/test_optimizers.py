"""Optimisers by name, their arguments, and what is refused."""

import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from absl.testing import parameterized
from oracles import assert_same_bits

from mha_jax.decoder import decoder_config
from mha_jax.tasks import CopyTask
from mha_jax.training import train
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig

PARAMS = {'a': jnp.linspace(-1, 2, 6).reshape(2, 3), 'b': jnp.ones(5)}
STEPS = 4


def experiment(**options) -> Experiment:
  task = CopyTask(3, 5)
  return Experiment(
    decoder_config(task.vocab_size, task.max_len, d_model=8),
    task,
    OptimizerConfig(warmup_steps=2, **options),
    TrainConfig(steps=11),
  )


def trained(optimizer: optax.GradientTransformation):
  """Parameters after a few steps of a gradient that depends on them."""

  @jax.jit
  def run(params):
    state = optimizer.init(params)
    for _ in range(STEPS):
      grads = jax.tree.map(lambda x: jnp.sin(3 * x), params)
      updates, state = optimizer.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params

  return run(PARAMS)


def own_chain(learning_rate, weight_decay, power=1):
  """An optimiser of a user's own: any chain."""
  return optax.chain(
    optax.scale_by_sign() if power == 1 else optax.scale_by_adam(),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


class NamesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    module = types.ModuleType('my_optimizers')
    module.own_chain, module.number = own_chain, 3
    self.enter_context(mock.patch.dict(sys.modules, my_optimizers=module))

  @parameterized.parameters(
    ({}, lambda rate: optax.adamw(rate, 0.9, 0.98, weight_decay=0.01)),
    (
      {'name': 'adamw', 'b1': 0.5, 'weight_decay': 0.3},
      lambda rate: optax.adamw(rate, 0.5, 0.98, weight_decay=0.3),
    ),
    ({'name': 'sgd'}, optax.sgd),
    (
      {'name': 'sgd', 'options': {'momentum': 0.9, 'nesterov': True}},
      lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    ),
    (
      {'name': 'lion', 'b2': 0.9},
      lambda rate: optax.lion(rate, 0.9, 0.9, weight_decay=0.01),
    ),
    (
      {'name': 'my_optimizers:own_chain', 'weight_decay': 0.2},
      lambda rate: own_chain(rate, 0.2),
    ),
    (
      {'name': 'my_optimizers:own_chain', 'options': [['power', 2]]},
      lambda rate: own_chain(rate, 0.01, 2),
    ),
  )
  def test_same_bits(self, options, wanted):
    """As written out, behind clipping, with the schedule."""
    chosen = experiment(**options)
    optimizer = optax.chain(
      optax.clip_by_global_norm(1.0), wanted(train.make_schedule(chosen))
    )
    assert_same_bits(trained(train.make_optimizer(chosen)), trained(optimizer))
    hash(chosen)

  @parameterized.parameters(
    ({'name': 'adamq'}, "name='adamq' is no function that takes .* adamw"),
    ({'name': 'chain'}, "name='chain' is no function"),
    ({'name': 'nowhere:f'}, "name='nowhere:f' cannot be imported .*nowhere"),
    ({'name': 'my_optimizers:g'}, "my_optimizers:g' cannot be imported"),
    ({'name': 'my_optimizers:number'}, "number' is no function"),
    ({'name': 'lbfgs'}, "name='lbfgs' .* takes no step from gradients"),
    ({'name': 'sgd', 'b1': 0.5}, "b1=0.5 has no effect on name='sgd'"),
    ({'name': 'sgd', 'options': {'speed': 3}}, "{'speed': 3} .*speed"),
    ({'options': {'speed': 3}}, "{'speed': 3} .*speed"),
    ({'options': 3}, "options=3 must be a dict .*{'momentum': 0.9}"),
    ({'options': {'x': [1]}}, 'must be a dict of names and plain values'),
    ({'name': 'sgd', 'options': {'momentum': 'x'}}, "'momentum': 'x'"),
  )
  def test_refused(self, options, message):
    """Before anything is computed, with field, value and remedy."""
    with self.assertRaisesRegex(ValueError, message):
      experiment(**options)

  def test_trains_seeds_at_once(self):
    """Any state of an optimiser goes through scan and vmap."""
    chosen = experiment(name='adafactor')
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    state = jax.vmap(lambda key: train.init(chosen, key))(keys)
    step = jax.jit(
      jax.vmap(lambda key, state: train.advance(chosen, 3, key, state))
    )
    state, metrics = step(keys, state)
    self.assertEqual(metrics['learning_rate'].shape, (2, 3))
    self.assertTrue(jnp.all(jnp.isfinite(metrics['loss'])))

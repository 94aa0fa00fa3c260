"""Schedule, step, scan, seeds, loss, evaluation."""

import dataclasses
import functools
import math
from unittest import mock

import chex
import compiling
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from absl.testing import parameterized

from mha_jax.decoder import DecoderLM, decoder_config
from mha_jax.tasks import Batch, CopyTask
from mha_jax.training import train
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig

TASK = CopyTask(length=3, num_symbols=5)
MODEL = {
  'vocab_size': TASK.vocab_size,
  'max_len': TASK.max_len,
  'd_model': 8,
  'num_heads': 2,
}
BASE = Experiment(
  model=decoder_config(**MODEL),
  task=TASK,
  optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=3),
  train=TrainConfig(steps=11, batch_size=7, eval_batches=3),
)


def make(base: Experiment = BASE, **sections) -> Experiment:
  """BASE with other fields: make(model={'num_heads': 4})."""
  model = sections.pop('model', None)
  changed = {
    name: dataclasses.replace(getattr(base, name), **fields)
    for name, fields in sections.items()
  }
  if model is not None:
    changed['model'] = decoder_config(**MODEL | model)
  return dataclasses.replace(base, **changed)


DROPOUT = make(model={'dropout_rate': 0.3})
init = jax.jit(train.init, static_argnums=0)
step = jax.jit(train.train_step, static_argnums=0)
advance = jax.jit(
  train.advance, static_argnums=(0, 1), compiler_options=compiling.AS_USERS
)
evaluate = jax.jit(train.evaluate, static_argnums=0)
loss_fn = jax.jit(train.loss_and_accuracy, static_argnums=0)


@functools.cache
def start(experiment: Experiment = BASE, seed: int = 0):
  """A key and the state before the first step."""
  key = jax.random.key(seed)
  return key, init(experiment, key)


def learning_rate(i: int, *, peak, warmup, steps, fraction) -> float:
  """Linear from 0 to the peak, then a cosine down to the fraction of it."""
  if i < warmup:
    return peak * i / warmup
  share = min((i - warmup) / (steps - warmup), 1)
  return peak * (
    fraction + (1 - fraction) * (1 + math.cos(math.pi * share)) / 2
  )


class ScheduleTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 3, 10)
  def test_formula(self, warmup):
    """Warm-up, peak at its end, and the final fraction at the last step."""
    optimizer = {'warmup_steps': warmup, 'final_fraction': 0.2}
    schedule = train.make_schedule(make(optimizer=optimizer))
    found = [float(schedule(i)) for i in range(13)]
    wanted = [
      learning_rate(i, peak=0.02, warmup=warmup, steps=11, fraction=0.2)
      for i in range(13)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-9)
    self.assertAlmostEqual(found[warmup], 0.02, places=7)
    self.assertAlmostEqual(found[11], 0.004, places=7)


@pytest.mark.usefixtures('full_compile')
class ScanTest(parameterized.TestCase):
  def test_scan_is_single_steps(self):
    """4 steps at once are 4 single ones, bit for bit."""
    key, state = start(DROPOUT)
    whole, history = advance(DROPOUT, 4, key, state)
    for i in range(4):
      state, metrics = advance(DROPOUT, 1, key, state)
      oracles.assert_same_bits(
        metrics, {name: x[i : i + 1] for name, x in history.items()}
      )
    oracles.assert_same_bits(state, whole)


class StepTest(parameterized.TestCase):
  def test_clipping(self):
    """The optimiser sees the gradient scaled down to norm clip_norm."""
    experiment = make(optimizer={'clip_norm': 1e-3})
    key, state = start()
    state, metrics = step(experiment, key, state)
    mu = optax.tree.get(state.opt_state, 'mu')
    seen = optax.tree.norm(mu) / (1 - experiment.optimizer.b1)
    np.testing.assert_allclose(seen, 1e-3, rtol=1e-4)
    self.assertBetween(float(metrics['grad_norm']), 1e-2, 1e2)

  def test_first_update_is_adamw(self):
    """p - lr (g / (|g| + eps) + decay p), lr(0) being the peak."""
    optimizer = {'warmup_steps': 0, 'weight_decay': 0.3, 'clip_norm': 1e3}
    experiment = make(optimizer=optimizer)
    key, state = start()
    after, metrics = step(experiment, key, state)
    mu = optax.tree.get(after.opt_state, 'mu')

    def updated(p, m):
      p, g = np.asarray(p, np.float64), np.asarray(m, np.float64) / 0.1
      return p - 0.02 * (g / (np.abs(g) + 1e-8) + 0.3 * p)

    wanted = jax.tree.map(updated, state.params, mu)
    for a, b, m in zip(
      *map(jax.tree.leaves, (after.params, wanted, mu)), strict=True
    ):
      clear = np.abs(m) > 1e-6
      np.testing.assert_allclose(a[clear], b[clear], atol=1e-5)
    self.assertEqual(int(after.step), 1)
    norm = float(optax.tree.norm(mu)) / 0.1  # below clip_norm, as it was
    np.testing.assert_allclose(norm, metrics['grad_norm'], rtol=1e-4)
    self.assertAlmostEqual(float(metrics['learning_rate']), 0.02, places=6)

  def test_metrics(self):
    """Names, shapes, and the learning rate of every step."""
    key, state = start(DROPOUT)
    end, metrics = advance(DROPOUT, 4, key, state)
    self.assertEqual(
      {*metrics}, {'loss', 'accuracy', 'grad_norm', 'learning_rate'}
    )
    for values in metrics.values():
      chex.assert_shape(values, (4,))
    wanted = [
      learning_rate(i, peak=0.02, warmup=3, steps=11, fraction=0.1)
      for i in range(4)
    ]
    np.testing.assert_allclose(metrics['learning_rate'], wanted, rtol=1e-5)
    self.assertEqual(int(end.step), 4)

  def test_vmapped_seeds_are_single_runs(self):
    """Seeds as an axis train as each would alone, to float32 rounding."""
    seeds = (3, 5)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds))
    starts = [start(DROPOUT, seed)[1] for seed in seeds]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *starts)
    run = jax.jit(jax.vmap(functools.partial(train.advance, DROPOUT, 4)))
    states, history = run(keys, stacked)
    losses = []
    for i, seed in enumerate(seeds):
      state, single = advance(DROPOUT, 4, *start(DROPOUT, seed))
      losses.append(single['loss'])
      for name, values in single.items():
        np.testing.assert_allclose(history[name][i], values, rtol=2e-5)
      for a, b in zip(
        *map(jax.tree.leaves, (states.params, state.params)), strict=True
      ):
        np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=2e-5)
    self.assertGreater(np.min(np.ptp(losses, axis=0)), 1e-2)

  def test_loss_falls(self):
    """It learns: the loss halves, the accuracy rises."""
    experiment = make(train={'steps': 150, 'batch_size': 32})
    key, state = start()
    before = evaluate(BASE, key, state.params)
    state, history = advance(experiment, 150, key, state)
    after = evaluate(BASE, key, state.params)
    self.assertLess(after['eval_loss'], 0.5 * before['eval_loss'])
    self.assertGreater(after['eval_accuracy'], 0.7)
    self.assertLess(history['loss'][-1], 0.5 * history['loss'][0])


def plain(key: jax.Array) -> tuple[int, ...]:
  """A key as numbers."""
  return tuple(jax.random.key_data(key).tolist())


@dataclasses.dataclass(frozen=True)
class KeyedTask:
  """A copy task that remembers the keys it was asked with."""

  keys: list = dataclasses.field(hash=False, compare=False)
  vocab_size: int = TASK.vocab_size
  max_len: int = TASK.max_len

  @property
  def validation(self):
    return self

  def sample(self, key, batch_size):
    self.keys.append(plain(key))
    return TASK.sample(key, batch_size)


class PromotionTest(parameterized.TestCase):
  def test_strict(self):
    """No dtype is promoted unasked; optax is left to itself."""
    init = functools.partial(train.init, BASE)
    key = jax.random.key(0)
    with jax.numpy_dtype_promotion('strict'):
      state = jax.eval_shape(init, key)
      step = functools.partial(train.train_step, BASE)
      after, metrics = jax.eval_shape(step, key, state)
      evaluate = functools.partial(train.evaluate, BASE)
      jax.eval_shape(evaluate, key, state.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    self.assertEqual({str(x.dtype) for x in metrics.values()}, {'float32'})


class RandomnessTest(parameterized.TestCase):
  """Which keys the batches and dropout get; the model is left out."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.disable_jit())
    self.batch_keys, self.dropout_keys = [], []
    self.experiment = dataclasses.replace(BASE, task=KeyedTask(self.batch_keys))
    params = {'scale': jnp.ones(3)}
    self.state = train.TrainState(
      jnp.asarray(1, jnp.int32),
      params,
      train.make_optimizer(BASE).init(params),
    )
    self.enter_context(mock.patch.object(train, 'loss_and_accuracy', self.loss))

  def loss(self, experiment, params, batch, dropout_key=None):
    del experiment, batch
    if dropout_key is not None:
      self.dropout_keys.append(plain(dropout_key))
    loss = jnp.sum(params['scale'])
    return loss, {'loss': loss, 'accuracy': loss}

  def test_keys(self):
    """They depend on the run's key and the step only; evaluation has others."""
    key, other = jax.random.key(0), jax.random.key(1)
    later = dataclasses.replace(self.state, step=self.state.step + 1)
    changed = dataclasses.replace(self.state, params={'scale': jnp.zeros(3)})
    for k, state in (
      (key, self.state),
      (key, changed),
      (key, later),
      (other, self.state),
    ):
      train.train_step(self.experiment, k, state)
    training = self.batch_keys.copy()
    self.batch_keys.clear()
    self.assertEqual(training[0], training[1])
    self.assertEqual(self.dropout_keys[0], self.dropout_keys[1])
    train.evaluate(self.experiment, key, self.state.params)
    train.evaluate(self.experiment, key, changed.params)
    evaluation, again = self.batch_keys[:3], self.batch_keys[3:]
    self.assertEqual(evaluation, again)
    self.assertLen({*training, *self.dropout_keys, *evaluation}, 3 + 3 + 3)


class LossTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    _, state = start()
    self.params = state.params
    self.batch = TASK.sample(jax.random.key(9), 7)

  def test_numbers(self):
    """Mean cross-entropy and accuracy over the targets that count."""
    logits = DecoderLM(BASE.model).apply(
      {'params': self.params}, self.batch.inputs
    )
    logits, targets = np.asarray(logits, np.float64), self.batch.targets
    counts = np.asarray(self.batch.weights) > 0
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)
    loss, metrics = loss_fn(BASE, self.params, self.batch)
    np.testing.assert_allclose(loss, -picked[..., 0][counts].mean(), rtol=1e-5)
    np.testing.assert_array_equal(loss, metrics['loss'])
    hits = (logits.argmax(-1) == targets)[counts]
    np.testing.assert_allclose(metrics['accuracy'], hits.mean(), rtol=1e-6)

  def test_only_the_answer_counts(self):
    """Other targets elsewhere change neither loss nor gradient."""
    grad = jax.jit(
      jax.value_and_grad(
        lambda p, batch: train.loss_and_accuracy(BASE, p, batch)[0]
      )
    )
    elsewhere = dataclasses.replace(
      self.batch,
      targets=jnp.where(self.batch.weights > 0, self.batch.targets, 0),
    )
    self.assertTrue(np.any(elsewhere.targets != self.batch.targets))
    plain = grad(self.params, self.batch)
    oracles.assert_same_bits(grad(self.params, elsewhere), plain)
    answer = dataclasses.replace(
      self.batch, targets=self.batch.targets.at[0, -1].set(0)
    )
    self.assertNotEqual(float(grad(self.params, answer)[0]), float(plain[0]))

  def test_rows_with_fewer_targets(self):
    """Every target counts alike, whatever its row's length."""
    few = self.batch.weights.at[0].set(0).at[1, 4:].set(0)
    batch = dataclasses.replace(self.batch, weights=few)
    rows = [
      jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(1, 7)
    ]
    parts = [float(loss_fn(BASE, self.params, row)[0]) for row in rows]
    wanted = np.average(parts, weights=[float(r.weights.sum()) for r in rows])
    found, _ = loss_fn(BASE, self.params, batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)

  def test_batch_is_a_pytree(self):
    """Batches pass through jit and vmap as arrays."""
    self.assertLen(jax.tree.leaves(self.batch), 3)
    self.assertIsInstance(jax.tree.map(lambda x: x, self.batch), Batch)


class EvaluateTest(parameterized.TestCase):
  def test_no_dropout_and_the_same_every_time(self):
    """Evaluation ignores dropout, which training does not."""
    key, state = start()
    plain = evaluate(BASE, key, state.params)
    self.assertEqual({*plain}, {'eval_loss', 'eval_accuracy'})
    oracles.assert_same_bits(evaluate(DROPOUT, key, state.params), plain)
    oracles.assert_same_bits(evaluate(BASE, key, state.params), plain)
    batch = TASK.sample(key, 7)
    self.assertNotEqual(
      float(loss_fn(DROPOUT, state.params, batch, key)[0]),
      float(loss_fn(DROPOUT, state.params, batch, jax.random.key(1))[0]),
    )

  def test_mean_over_batches(self):
    """It averages over eval_batches different batches."""
    key, state = start()
    found = evaluate(BASE, key, state.params)
    stream = jax.random.fold_in(key, 3)
    losses, accuracies = [], []
    for i in range(3):
      batch = TASK.sample(jax.random.fold_in(stream, i), 7)
      metrics = loss_fn(BASE, state.params, batch)[1]
      losses.append(float(metrics['loss']))
      accuracies.append(float(metrics['accuracy']))
    self.assertLen({*losses}, 3)
    np.testing.assert_allclose(found['eval_loss'], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(
      found['eval_accuracy'], np.mean(accuracies), rtol=1e-5
    )


class ConfigTest(parameterized.TestCase):
  def test_hashable(self):
    """Equal experiments are one key of jit's cache."""
    self.assertEqual(hash(make()), hash(BASE))
    self.assertEqual(make(), BASE)
    self.assertNotEqual(make(train={'seed': 1}), BASE)
    with self.assertRaises(dataclasses.FrozenInstanceError):
      BASE.train.seed = 2

  @parameterized.parameters(
    (OptimizerConfig, 'learning_rate', 0.0, r'must lie in \[1e-12'),
    (OptimizerConfig, 'learning_rate', math.nan, r'must lie in \[1e-12'),
    (OptimizerConfig, 'learning_rate', math.inf, r'must lie in \[1e-12'),
    (OptimizerConfig, 'clip_norm', -1.0, r'must lie in \[1e-12'),
    (OptimizerConfig, 'b1', 1.0, r'must lie in \[0, 0.999'),
    (OptimizerConfig, 'b2', -0.1, r'must lie in \[0, 0.999'),
    (OptimizerConfig, 'final_fraction', 1.5, r'must lie in \[0, 1\]'),
    (OptimizerConfig, 'warmup_steps', -1, r'integer and lie in \[0'),
    (OptimizerConfig, 'weight_decay', math.nan, r'must lie in \[0'),
    (TrainConfig, 'steps', 0, r'integer and lie in \[1'),
    (TrainConfig, 'batch_size', -2, 'positive integer'),
    (TrainConfig, 'steps_per_dispatch', 10**6, r'lie in \[1, 10000\]'),
    (TrainConfig, 'eval_batches', 0, r'integer and lie in \[1, 10000\]'),
    (TrainConfig, 'checkpoint_every', 0, 'positive integer'),
    (TrainConfig, 'seed', -1, 'integer and lie in'),
    (TrainConfig, 'seed', 2**32, 'integer and lie in'),
    (TrainConfig, 'batch_size', 2.5, 'positive integer'),
    (TrainConfig, 'steps', None, 'integer'),
  )
  def test_errors(self, kind, name, value, remedy):
    """They name the field, its value and what it must be."""
    with self.assertRaisesRegex(ValueError, f'{name}={value}.*{remedy}'):
      kind(**{name: value})

  def test_limits_are_allowed(self):
    """A constant learning rate, no decay and no momentum are settings."""
    constant = OptimizerConfig(final_fraction=1.0, b1=0.0, weight_decay=0.0)
    self.assertEqual((constant.final_fraction, constant.b1), (1.0, 0.0))
    cold = OptimizerConfig(final_fraction=0.0, warmup_steps=0)
    self.assertEqual((cold.final_fraction, cold.warmup_steps), (0.0, 0))

  def test_warmup_must_end(self):
    """The error names both fields."""
    with self.assertRaisesRegex(
      ValueError, r'optimizer.warmup_steps=11 .*train.steps=11'
    ):
      make(optimizer={'warmup_steps': 11})

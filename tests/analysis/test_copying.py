"""What heads do in the copy task, against NumPy and the model's own weights."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, normal

from mha_jax.analysis import circle, copying, probing
from mha_jax.attention import GroupedConfig
from mha_jax.decoder import DecoderConfig, DecoderLM, decoder_config
from mha_jax.tasks import CopyTask

TASK = CopyTask(length=5, num_symbols=3)
D, H, B = 14, 7, 11
ATTENTION = GroupedConfig(D, H, use_bias=False)
SCALED = copying.with_scale(ATTENTION, 0.37)
LENGTHS = st.integers(2, 60)


def decoder(attention: GroupedConfig) -> tuple[DecoderConfig, dict]:
  """A decoder with random parameters, of no use yet."""
  config = DecoderConfig(TASK.vocab_size, TASK.max_len, attention)
  tokens = jnp.zeros((1, 2), jnp.int32)
  shapes = DecoderLM(config).init(jax.random.key(0), tokens)['params']
  leaves, tree = jax.tree.flatten(shapes)
  values = [
    jnp.asarray(normal(i, *x.shape), jnp.float32) for i, x in enumerate(leaves)
  ]
  return config, jax.tree.unflatten(tree, values)


class HeadsTest(parameterized.TestCase):
  @parameterized.parameters(None, 2)
  def test_attention_to_source(self, min_length):
    """Target i of a row of n symbols copies symbol i, wherever n ends."""
    task = CopyTask(length=5, num_symbols=3, min_length=min_length)
    batch = task.sample(jax.random.key(1), B)
    maps = np.abs(normal(2, B, H, task.max_len, task.max_len))
    wanted, count = np.zeros(H), 0
    for b in range(B):
      answers = np.flatnonzero(np.asarray(batch.weights[b]))
      for source, place in enumerate(answers):
        token = batch.inputs[b, source]
        self.assertEqual(token, batch.targets[b, place])
        wanted += maps[b, :, place, source]
        count += 1
    found = copying.attention_to_source(maps, batch)
    assert_close(found, wanted / count, 1e-6)

  def test_accuracies_without(self):
    """A gate of 0 is a head whose output kernel is 0."""
    config, params = decoder(ATTENTION)
    batch = TASK.sample(jax.random.key(3), B)
    without, whole = copying.accuracies_without(config, params, batch)
    self.assertEqual(without.shape, (H,))
    kernel = params['block_0']['attention']['out']['kernel']

    def accuracy(kernel):
      attention = params['block_0']['attention'] | {'out': {'kernel': kernel}}
      block = params['block_0'] | {'attention': attention}
      logits = DecoderLM(config).apply(
        {'params': params | {'block_0': block}}, batch.inputs
      )
      hits = np.argmax(logits, axis=2) == np.asarray(batch.targets)
      return np.mean(hits[np.asarray(batch.weights) > 0])

    wanted = [accuracy(kernel.at[i].set(0)) for i in range(H)]
    assert_close(without, np.asarray(wanted), 1e-6)
    assert_close(whole, accuracy(kernel), 1e-6)
    self.assertGreater(np.ptp(wanted), 0)


class ScoresTest(parameterized.TestCase):
  @parameterized.parameters((ATTENTION, 2**-0.5), (SCALED, 0.37))
  def test_position_scores(self, attention, scale):
    """The formula in loops."""
    config, params = decoder(attention)
    inputs = TASK.sample(jax.random.key(4), B).inputs
    found = copying.position_scores(config, params, inputs)
    e, p = (
      np.asarray(params[x]['embedding'], float) for x in ('embed', 'positions')
    )
    block = jax.tree.map(lambda x: np.asarray(x, float), params['block_0'])
    x = []
    for place, vector in enumerate(p):
      sizes = [np.sqrt(np.mean((e[i] + vector) ** 2)) for i in inputs[:, place]]
      mean = np.mean(1 / np.asarray(sizes))
      x.append(block['attention_norm']['scale'] * vector * mean)
    n = TASK.length
    wanted = np.zeros((H, n, n))
    for h, i, j in np.ndindex(H, n, n):
      q = x[n + i] @ block['attention']['query']['kernel'][:, h]
      k = x[j] @ block['attention']['key']['kernel'][:, h]
      wanted[h, i, j] = scale * (q @ k)
    assert_close(found, wanted, 1e-5)

  @parameterized.parameters(ATTENTION, SCALED)
  def test_without_tokens(self, attention):
    """With embeddings of 0 they are all that the softmax takes."""
    config, params = decoder(attention)
    params['embed'] = {
      'embedding': jnp.zeros_like(params['embed']['embedding'])
    }
    params['positions'] = {
      'embedding': 0.3 * params['positions']['embedding'],
    }
    params['block_0']['attention_norm'] = {'scale': 0.3 * jnp.ones(D)}
    inputs = TASK.sample(jax.random.key(5), B).inputs
    scores = copying.position_scores(config, params, inputs)
    (maps,) = probing.attention_maps(config, params, inputs)
    logs = np.log(maps[0, :, TASK.length :, : TASK.length])
    for found in (scores, logs):
      self.assertGreater(np.std(found), 0.1)
    assert_close(
      scores - scores[:, :, :1], logs - logs[:, :, :1], tolerance=1e-4
    )

  def test_effective_rank(self):
    scores = normal(6, H, 5, 5)
    wanted = []
    for matrix in scores:
      values = np.linalg.svd(matrix - matrix.mean(1)[:, None])[1]
      p = values[values > 1e-9] / values.sum()
      wanted.append(np.exp(-np.sum(p * np.log(p))))
    found = copying.effective_rank(jnp.asarray(scores))
    assert_close(found, np.asarray(wanted), 1e-5)
    more = jnp.asarray(scores + normal(7, H, 5, 1))
    assert_close(copying.effective_rank(more), found, 1e-4)

  @parameterized.parameters(2, 3, 7, 13, 64)
  def test_known_ranks(self, n):
    """The identity has all that a softmax sees; equal scores have none."""
    found = copying.effective_rank(jnp.eye(n))
    assert_close(found, n - 1.0, 1e-4)
    small = copying.effective_rank(1e-20 * jnp.eye(n))
    assert_close(small, n - 1.0, 1e-4)
    for score in (0, 1, 0.1, -1e20 / 3):
      scores = jnp.full((2, n, n), score)
      np.testing.assert_array_equal(copying.effective_rank(scores), [0, 0])
    rows = jnp.asarray(normal(11, n, 1)) * jnp.ones((n, n))
    self.assertEqual(copying.effective_rank(rows), 0)

  def test_rank_without_numbers(self):
    """Scores of a training that diverged have none."""
    scores = jnp.stack([jnp.eye(5), jnp.eye(5).at[1, 2].set(jnp.nan)])
    found = copying.effective_rank(scores)
    np.testing.assert_array_equal(np.isnan(found), [False, True])

  def test_margins(self):
    scores = normal(8, H, 5, 5)
    wanted = np.zeros((H, 5))
    for h, i in np.ndindex(H, 5):
      weights = np.exp(scores[h, i])
      weight = weights[i] / weights.sum()
      wanted[h, i] = np.log(weight / (1 - weight))
    assert_close(copying.margins(jnp.asarray(scores)), wanted, 1e-5)

  @parameterized.parameters(
    ({'positions': 'rope'}, 'learned positions'),
    ({'num_layers': 2}, 'num_layers=2'),
    ({'normalize_qk': 'rms'}, "normalize_qk='rms' must be off"),
    ({'attention': 'mla', 'kv_lora_rank': 2}, 'must be a GroupedConfig'),
  )
  def test_another_decoder(self, options, message):
    config = decoder_config(11, 10, d_model=16, **options)
    with self.assertRaisesRegex(ValueError, message):
      copying.check_decoder(config)

  def test_odd(self):
    config, params = decoder(ATTENTION)
    with self.assertRaisesRegex(ValueError, 'inputs of length 3'):
      copying.position_scores(config, params, jnp.zeros((1, 3), jnp.int32))


class CircleTest(parameterized.TestCase):
  @given(length=LENGTHS, sharpness=st.floats(0.1, 1e3))
  def test_the_right_key(self, length, sharpness):
    """It scores highest, by as much as the docstring says, in rank 2."""
    queries, keys = circle.circle(length, sharpness)
    scores = queries @ keys.T
    np.testing.assert_array_equal(np.argmax(scores, 1), np.arange(length))
    behind = scores - np.diagonal(scores)[:, None]
    behind[np.arange(length), np.arange(length)] = -np.inf
    gap = sharpness * (1 - math.cos(2 * math.pi / length))
    np.testing.assert_allclose(-behind.max(1), gap, rtol=1e-6)
    if length > 2:
      rank = copying.effective_rank(jnp.asarray(scores, jnp.float32))
      np.testing.assert_allclose(rank, 2, rtol=1e-3)

  @given(length=LENGTHS, weight=st.floats(0.6, 0.999))
  def test_sharpness(self, length, weight):
    """Enough, and no more than that."""
    sharpness = circle.sharpness_for(length, weight)

    def least_weight(sharpness):
      queries, keys = circle.circle(length, sharpness)
      weights = np.exp(queries @ keys.T - sharpness)
      return np.min(np.diagonal(weights) / weights.sum(1))

    np.testing.assert_allclose(least_weight(sharpness), weight, rtol=1e-9)
    self.assertLess(least_weight(0.99 * sharpness), weight)
    gap = 1 - math.cos(2 * math.pi / length)
    bound = math.log((length - 1) * weight / (1 - weight)) / gap
    self.assertLessEqual(sharpness, bound * (1 + 1e-12))

  def test_sharpness_by_length(self):
    found = [circle.sharpness_for(x) for x in (16, 32, 64)]
    self.assertAlmostEqual(found[1], 275, delta=0.5)
    for less, more in itertools.pairwise(found):
      self.assertBetween(more / less, 3.9, 4.1)

  @given(length=st.integers(3, 60), seed=st.integers(0, 2**32 - 1))
  def test_one_feature(self, length, seed):
    """No more than two sources ever score highest alone."""
    random = np.random.default_rng(seed)
    q, k = random.standard_normal((2, length))
    q *= random.random(length) < 0.9
    scores = q[:, None] * k[None]
    is_best = scores == scores.max(1, keepdims=True)
    alone = is_best[is_best.sum(1) == 1]
    self.assertLessEqual(np.any(alone, axis=0).sum(), 2)
    self.assertFalse(np.all(np.diagonal(is_best) & (is_best.sum(1) == 1)))

  @parameterized.parameters(3, 13)
  def test_decoder(self, length):
    """It has the parameters of any decoder, and copies with its one head."""
    task = CopyTask(length=length, num_symbols=7)
    sharpness = 2 * circle.sharpness_for(length)
    config, params = circle.circle_decoder(task, sharpness)
    batch = task.sample(jax.random.key(9), B)
    made = DecoderLM(config).init(jax.random.key(0), batch.inputs)['params']
    self.assertEqual(
      jax.tree.map(jnp.shape, params), jax.tree.map(jnp.shape, made)
    )
    without, whole = copying.accuracies_without(config, params, batch)
    self.assertEqual(whole, 1)
    self.assertLess(without[0], 0.5)
    scores = copying.position_scores(config, params, batch.inputs)
    queries, keys = circle.circle(length, sharpness)
    assert_close(scores[0], queries @ keys.T, 1e-4)
    (maps,) = probing.attention_maps(config, params, batch.inputs)
    self.assertGreater(copying.attention_to_source(maps, batch)[0], 0.98)

  @parameterized.parameters((1, 0.99), (4, 1.0), (4, 0.1))
  def test_errors(self, length, weight):
    with self.assertRaisesRegex(ValueError, 'length|weight'):
      circle.sharpness_for(length, weight)

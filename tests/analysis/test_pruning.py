"""Importance, ablation and curves against NumPy and loops; pruning by gates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_close, normal

from mha_jax.analysis import pruning
from mha_jax.attention.variants import VARIANTS
from mha_jax.decoder import DecoderLM, decoder_config, generate
from mha_jax.tasks import Batch

B, T, M, D = 5, 7, 11, 13
CONFIG = decoder_config(
  vocab_size=M,
  max_len=T,
  d_model=D,
  num_layers=2,
  attention='gqa',
  num_heads=4,
  num_kv_heads=2,
  head_dim=3,
  use_bias=True,
)
PRUNED = {
  'mha': (
    {'d_model': 12, 'num_heads': 3, 'mlp_dim': 5, 'normalize_qk': 'layer'},
    ([2, 0], [1]),
  ),
  'mha_named': (
    {
      'd_model': 12,
      'num_heads': 3,
      'num_kv_heads': 3,
      'use_bias': True,
      'v_head_dim': 5,
    },
    ([0], [1, 2]),
  ),
  'gqa': (
    {
      'd_model': 12,
      'num_heads': 6,
      'num_kv_heads': 3,
      'positions': 'rope',
      'normalize_qk': 'rms',
      'use_bias': True,
    },
    ([5, 0], [2, 3]),
  ),
  'mqa': (
    {'num_heads': 5, 'head_dim': 4, 'positions': 'rope', 'logit_softcap': 2.0},
    ([True, False, False, True, True], np.arange(5) == 2),
  ),
  'mla': (
    {
      'd_model': 12,
      'num_heads': 3,
      'kv_lora_rank': 7,
      'q_lora_rank': 5,
      'positions': 'rope',
      'use_bias': True,
    },
    ([2, 1], [0]),
  ),
  'mla_learned': (
    {'num_heads': 3, 'kv_lora_rank': 5, 'qk_nope_head_dim': 4, 'v_head_dim': 2},
    ([1], [2]),
  ),
  'gta': (
    {
      'num_heads': 6,
      'num_kv_heads': 3,
      'head_dim': 4,
      'positions': 'rope',
      'use_bias': True,
    },
    ([2, 3, 4, 5], [1]),
  ),
}
"""Of each case options, and the heads that two layers keep."""


def random_params(config, seed=0):
  """Random parameters, those that start at 0 or 1 too."""
  tree = jax.eval_shape(
    DecoderLM(config).init, jax.random.key(0), np.zeros((1, 2), int)
  )['params']
  leaves, tree = jax.tree.flatten(tree)
  values = [
    jnp.asarray(normal(seed + i, *x.shape) / 2) for i, x in enumerate(leaves)
  ]
  return jax.tree.unflatten(tree, values)


@functools.partial(jax.jit, static_argnums=0)
def predict(config, params, tokens, gates=None):
  return DecoderLM(config).apply({'params': params}, tokens, head_gates=gates)


def draw():
  """A batch of which example 2 has no target that counts."""
  rng = np.random.default_rng(0)
  inputs, targets = rng.integers(0, M, (2, B, T))
  weights = np.where(rng.random((B, T)) < 0.6, 1.0, 0.0)
  weights[2] = 0
  return Batch(inputs, targets, weights)


def gates_of(config, keep):
  """Ones for the heads that stay, zeros for the others."""
  gates = [np.zeros(x.num_heads) for x in config.layers]
  for layer, heads in enumerate(keep):
    gates[layer][heads] = 1
  return gates


def numpy_loss(params, batch, gates, means=None):
  """The loss of CONFIG in float64 NumPy, and the means of its heads (h, d)."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = p['embed']['embedding'][batch.inputs] + p['positions']['embedding'][:T]
  last = [np.flatnonzero(row).max(initial=-1) for row in batch.weights]
  seen = np.arange(T) <= np.asarray(last)[:, None]
  found = []
  for i, factors in enumerate(np.asarray(gates)):
    block = p[f'block_{i}']
    attention = functools.partial(
      oracles.layer,
      block['attention'],
      oracles.norm(x, block['attention_norm']['scale'], 'rms'),
      allowed=np.tri(T, dtype=bool),
    )
    bias, _ = attention(gates=0)
    alone = [attention(gates=one)[0] - bias for one in np.eye(len(factors))]
    found.append(np.mean(np.asarray(alone)[:, seen], axis=1))
    x = x + attention(gates=factors)[0]
    x = x if means is None else x + (1 - factors) @ means[i]
  logits = oracles.norm(x, p['norm']['scale'], 'rms') @ p['output']['kernel']
  total = 0.0
  for at in np.ndindex(B, T):
    chance = oracles.softmax(logits[at])[batch.targets[at]]
    total -= batch.weights[at] * np.log(chance)
  return total / np.sum(batch.weights), found


class GatesTest(oracles.X64TestCase):
  def setUp(self):
    super().setUp()
    self.config = dataclasses.replace(CONFIG, dtype='float64')
    self.params, self.batch = random_params(CONFIG), draw()
    self.loss, means = numpy_loss(self.params, self.batch, np.ones((2, 4)))
    self.means = {'zero': None, 'mean': means}

  def wanted(self, gates, kind):
    return numpy_loss(self.params, self.batch, gates, self.means[kind])[0]

  def test_batch_of_other_shapes(self):
    """Weights (b, 1) would be summed t times too often."""
    batch = dataclasses.replace(
      self.batch, weights=jnp.asarray(self.batch.weights)[:, :1]
    )
    with self.assertRaisesRegex(ValueError, 'batch has arrays of shapes'):
      pruning.loss_with_gates(self.config, self.params, batch, np.ones((2, 4)))

  def test_head_means(self):
    """What a head adds without the bias, up to the last counted target."""
    got = jax.jit(pruning.head_means, static_argnums=0)(
      self.config, self.params, self.batch
    )
    assert_close(list(got), self.means['mean'])

  @parameterized.parameters(*pruning.KINDS)
  def test_ablation(self, kind):
    """In the place of one head stands nothing, or its mean."""
    losses, loss = pruning.ablation_losses(
      self.config, self.params, self.batch, kind
    )
    wanted = np.zeros((2, 4))
    for at in np.ndindex(2, 4):
      gates = np.ones((2, 4))
      gates[at] = 0
      wanted[at] = self.wanted(gates, kind)
    assert_close(loss, self.loss)
    assert_close(losses, wanted)
    self.assertGreater(np.min(np.abs(losses - loss)), 1e-5)

  @parameterized.parameters(*pruning.KINDS)
  def test_curve(self, kind):
    """From all heads, one by one, to none."""
    order = [(1, 2), (0, 3), (1, 0), (0, 0), (0, 1), (1, 1), (1, 3), (0, 2)]
    curve = pruning.removal_curve(
      self.config, self.params, self.batch, order, kind
    )
    gates, wanted = np.ones((2, 4)), [self.loss]
    for at in order:
      gates[at] = 0
      wanted.append(self.wanted(gates, kind))
    assert_close(curve, np.array(wanted))
    some = pruning.removal_curve(
      self.config, self.params, self.batch, np.array(order[:2]), kind
    )
    assert_close(some, np.array(wanted[:3]))

  def test_fractions(self):
    """A gate of 1/4 leaves a quarter of the head and 3/4 of its mean."""
    gates, means = oracles.booleans(0, 2, 4) / 4, self.means['mean']
    loss = jax.jit(pruning.loss_with_gates, static_argnums=0)(
      self.config, self.params, self.batch, gates.tolist(), means
    )
    assert_close(loss, self.wanted(gates, 'mean'))


class ImportanceTest(oracles.X64TestCase):
  def setUp(self):
    super().setUp()
    self.config = dataclasses.replace(CONFIG, dtype='float64')
    self.params = random_params(CONFIG)

  def test_loop(self):
    """The mean of absolute gradients, of one example at a time."""
    config, params, batch = self.config, self.params, draw()

    @jax.jit
    def slope(example):
      loss = functools.partial(pruning.loss_with_gates, config, params, example)
      return jax.grad(loss)(jnp.ones((2, 4)))

    slopes = []
    for row in (0, 1, 3, 4):  # no target of example 2 counts
      slopes.append(slope(jax.tree.map(lambda x, i=row: x[[i]], batch)))
    wanted = np.mean(np.abs(slopes), axis=0)
    self.assertGreater(
      oracles.relative_error(np.abs(np.mean(slopes, axis=0)), wanted), 0.1
    )
    got = pruning.head_importance(
      config, params, batch, normalize=False, chunk_size=2
    )
    assert_close(got, wanted)
    normed = pruning.head_importance(config, params, batch)
    assert_close(normed, wanted / np.linalg.norm(wanted, axis=1)[:, None])

  def test_opposite_gradients(self):
    """Those of a batch cancel to 0; examples by themselves do not.

    The examples are one sequence and all m tokens that may follow, example y as
    often as the model says p(y): its expected score is 0.
    """
    config, params = self.config, self.params
    inputs = np.tile(draw().inputs[:1], (M, 1))
    logits = predict(config, params, inputs[:1])
    targets = np.tile(np.arange(M)[:, None], (1, T))
    weights = np.zeros((M, T))
    weights[:, -1] = jax.nn.softmax(logits[0, -1])
    batch = Batch(inputs, targets, weights)
    loss = functools.partial(pruning.loss_with_gates, config, params, batch)
    slope = jax.jit(jax.grad(loss))(jnp.ones((2, 4)))
    self.assertLess(np.max(np.abs(slope)), 1e-12)
    importance = pruning.head_importance(config, params, batch, normalize=False)
    self.assertGreater(np.min(importance), 1e-2)


class PlantedTest(parameterized.TestCase):
  """One layer that answers token i with i + 1: head 1 does, head 0 a little."""

  def setUp(self):
    super().setUp()
    self.config = decoder_config(
      vocab_size=M,
      max_len=T,
      d_model=M,
      num_heads=3,
      head_dim=M,
      positions='none',
    )
    identity = np.eye(M)
    following = np.roll(identity, 1, axis=1)
    shares = np.array([0.05, 1, 0]) / np.sqrt(M)
    out = shares[:, None, None] * following
    block = random_params(self.config)['block_0']
    block['attention']['value']['kernel'] = np.stack([identity] * 3, axis=1)
    block['attention']['out']['kernel'] = out
    block['attention_norm']['scale'] = np.ones(M)
    self.params = {
      'block_0': block,
      'embed': {'embedding': identity},
      'norm': {'scale': np.ones(M)},
      'output': {'kernel': identity},
    }
    batch = draw()
    weights = np.zeros((B, T))
    weights[:, 0] = 1  # there is but one token to attend to
    self.batch = Batch(batch.inputs, (batch.inputs + 1) % M, weights)

  def test_ranks(self):
    """Head 2 comes first: it does nothing, to the last bit."""
    importance = pruning.head_importance(self.config, self.params, self.batch)
    self.assertEqual(importance[0, 2], 0)
    losses, loss = pruning.ablation_losses(self.config, self.params, self.batch)
    self.assertEqual(losses[0, 2], loss)
    self.assertGreater(losses[0, 1], loss + 0.5)
    for scores in (importance, losses):
      order = pruning.order_by(scores)
      np.testing.assert_array_equal(order, [(0, 2), (0, 0), (0, 1)])

  def test_layer_without_any_use(self):
    """Its scores are 0, not NaN."""
    self.params['block_0']['attention']['out']['kernel'] *= 0
    importance = pruning.head_importance(self.config, self.params, self.batch)
    np.testing.assert_array_equal(importance, np.zeros((1, 3)))


class OrderTest(parameterized.TestCase):
  def test_order_by(self):
    """From the least to the most; equals as they stand."""
    scores = jnp.array([[0.5, -1.0, 2.0], [0.5, 3.0, -2.0]])
    np.testing.assert_array_equal(
      pruning.order_by(scores),
      [(1, 2), (0, 1), (0, 0), (1, 0), (0, 2), (1, 1)],
    )


def with_attention(config, **changes):
  """The decoder with other options of its attention."""
  attention = dataclasses.replace(config.attention, **changes)
  return dataclasses.replace(config, attention=attention)


@functools.cache
def pruned(name):
  """Of a case config, parameters, gates, smaller config and parameters."""
  options, keep = PRUNED[name]
  config = decoder_config(
    vocab_size=M,
    max_len=T,
    num_layers=2,
    attention=name.partition('_')[0],
    dtype='float64',
    **{'d_model': D} | options,
  )
  params = random_params(config)
  gates = gates_of(config, keep)
  return config, params, gates, *pruning.prune_heads(config, params, keep)


class PruneTest(oracles.X64TestCase):
  def test_every_variant_is_pruned(self):
    """A new one needs a case of its name."""
    self.assertEqual({x.partition('_')[0] for x in PRUNED}, VARIANTS.keys())

  @parameterized.parameters(*PRUNED)
  def test_as_gated(self, name):
    """What gates of 0 give, whatever the variant and its options."""
    config, params, gates, smaller, few = pruned(name)
    tokens = draw().inputs
    gated = predict(config, params, tokens, gates)
    whole = predict(config, params, tokens, [np.ones_like(x) for x in gates])
    assert_close(predict(smaller, few, tokens), gated)
    self.assertGreater(oracles.relative_error(whole, gated), 1e-2)
    wanted = jax.eval_shape(DecoderLM(smaller).init, jax.random.key(0), tokens)[
      'params'
    ]
    self.assertEqual(
      jax.tree.map(np.shape, few), jax.tree.map(np.shape, wanted)
    )
    heads = [int(np.sum(x)) for x in gates]
    found = [x.num_heads for x in smaller.layers]
    self.assertEqual(found, heads)

  @parameterized.parameters(
    ('mha', (2, 1), None, 4),
    ('mha_named', (1, 2), (1, 2), 4),
    ('gqa', 2, (2, 1), 2),
    ('mqa', (3, 1), 1, 4),
    ('mla', (2, 1), None, None),
    ('mla_learned', 1, None, None),
    ('gta', (4, 1), (2, 1), 4),
  )
  def test_config(self, name, num_heads, num_kv_heads, head_dim):
    """By layer; a key/value head goes with its queries."""
    _, _, _, smaller, _ = pruned(name)
    for layer, attention in enumerate(smaller.layers):
      found = [
        getattr(attention, x, None)
        for x in ('num_heads', 'num_kv_heads', 'head_dim')
      ]
      at = [
        x[layer] if isinstance(x, tuple) else x
        for x in (num_heads, num_kv_heads, head_dim)
      ]
      self.assertEqual(found, at)
      if name == 'mla':
        self.assertEqual(attention.qk_nope_head_dim, 4)

  def test_all(self):
    """Nothing goes: the very parameters; and the old ones stay as they were."""
    config, params, *_ = pruned('gqa')
    same, kept = pruning.prune_heads(config, params, np.ones((2, 6), bool))
    whole = dataclasses.replace(config.attention, head_dim=2)
    self.assertEqual(same, dataclasses.replace(config, attention=whole))
    oracles.assert_same_bits(kept, params)
    self.assertEqual(params['block_0']['attention']['query']['kernel'].ndim, 3)

  @parameterized.parameters('gqa', 'mla')
  def test_again(self, name):
    """A pruned decoder is pruned like any other."""
    config, params, _, smaller, few = pruned(name)
    last = {'gqa': ([1], [0, 1]), 'mla': ([0], [0])}[name]
    twice = pruning.prune_heads(smaller, few, last)
    once = pruning.prune_heads(
      config, params, {'gqa': ([5], [2, 3]), 'mla': ([1], [0])}[name]
    )
    self.assertEqual(twice[0], once[0])
    oracles.assert_same_bits(twice[1], once[1])

  @parameterized.parameters('gqa', 'mla')
  def test_decoding(self, name):
    """With caches, each of its layer's heads: as the full pass."""
    _, _, _, smaller, few = pruned(name)
    model, tokens = DecoderLM(smaller), draw().inputs
    step = jax.jit(
      lambda x, cache: model.apply({'params': few}, x, cache=cache)
    )
    cache, got = model.init_cache(B, T), []
    for token in np.split(tokens, T, axis=1):
      logits, cache = step(token, cache)
      got.append(logits)
    assert_close(jnp.concatenate(got, axis=1), predict(smaller, few, tokens))
    if name == 'gqa':
      self.assertEqual([x.entries[0].shape[1] for x in cache], [2, 1])
    new, _ = generate(model, {'params': few}, tokens[:, :4], max_new_tokens=3)
    row = np.concatenate([tokens[:, :4], new], axis=1)
    likeliest = np.argmax(predict(smaller, few, row), axis=-1)
    np.testing.assert_array_equal(new, likeliest[:, 3:6])


class ErrorsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.params = random_params(CONFIG)

  @parameterized.parameters(
    (([0],), r'keep of length 1 must hold .* num_layers=2'),
    (([0, 1], []), r'keep\[1\]=\[\] is empty; every layer keeps a head'),
    (([0], np.zeros(4, bool)), r'keep\[1\]=.* is empty'),
    (([0, 4], [0]), r'keep\[0\] has \[4\]; the heads .* are 0 to 3'),
    (([0], [-1]), r'keep\[1\] has \[-1\]; the heads'),
    (([0, 1, 0], [0]), r'keep\[0\]=\[0, 1, 0\] names a head twice'),
    (([True, False], [0]), r'keep\[0\] of shape \(2,\) must be \(4,\)'),
    (([0.5], [0]), r'keep\[0\]=\[0.5\] must be integers'),
    (([[0, 1]], [0]), r'keep\[0\]=\[\[0, 1\]\] must be integers'),
    (
      ([0, 1], [0, 1, 2]),
      r'keep\[1\] leaves \[2, 1\] query heads to the key/value heads of '
      r'layer 1; .* equally many; nearest: \[2, 2\]',
    ),
  )
  def test_keep(self, keep, message):
    """What no decoder could have, and what else to keep."""
    with self.assertRaisesRegex(ValueError, message):
      pruning.prune_heads(CONFIG, self.params, keep)

  @parameterized.parameters(
    ([0, 1, 2, 4], r'\[3, 1, 0\] .* nearest: \[3, 0, 0\]'),
    ([0, 3, 6, 7], r'\[1, 1, 2\] .* nearest: \[1, 1, 1\]'),
    ([0, 1, 3, 4, 5, 6, 7], r'\[2, 3, 2\] .* nearest: \[2, 2, 2\]'),
  )
  def test_nearest(self, heads, message):
    """The fewest heads to bring back or to drop."""
    config = with_attention(CONFIG, num_heads=9, num_kv_heads=3)
    with self.assertRaisesRegex(ValueError, message):
      pruning.prune_heads(config, random_params(config), [heads, [0]])

  def test_params(self):
    """Those of another model are refused."""
    with self.assertRaisesRegex(ValueError, "without 'block_0'.*variables"):
      pruning.prune_heads(CONFIG, {'params': self.params}, ([0], [0]))
    other = with_attention(CONFIG, head_dim=5)
    with self.assertRaisesRegex(ValueError, 'made for another config'):
      pruning.prune_heads(other, self.params, ([0], [0]))

  @parameterized.parameters(
    ([0, 1], r'order of int64 and shape \(2,\) must be integers'),
    ([[0.0, 1.0]], 'order of float64'),
    ([[0, 1, 2]], r'shape \(1, 3\)'),
    ([[0, 1], [2, 0]], r'\(2, 0\), but there are \(num_layers, h\) = \(2, 4'),
    ([[-1, 0]], r'order has \(layer, head\) \(-1, 0\)'),
    ([[0, 4]], r'order has \(layer, head\) \(0, 4\)'),
    ([[0, 1], [1, 0], [0, 1]], 'names a head twice'),
  )
  def test_order(self, order, message):
    """An order names heads of the decoder, each once."""
    with self.assertRaisesRegex(ValueError, message):
      pruning.removal_curve(CONFIG, self.params, draw(), order)

  @parameterized.parameters(
    ([1.0, 2.0], r'scores of shape \(2,\) must be'),
    ([[1.0, np.nan]], 'scores hold NaN'),
  )
  def test_scores(self, scores, message):
    """Scores are numbers, one a head."""
    with self.assertRaisesRegex(ValueError, message):
      pruning.order_by(scores)

  def test_measures(self):
    """Unknown kinds, no chunk, gates of another shape, layers that differ."""
    batch = draw()
    with self.assertRaisesRegex(ValueError, "kind='one' must be in"):
      pruning.ablation_losses(CONFIG, self.params, batch, 'one')
    with self.assertRaisesRegex(ValueError, 'chunk_size=0 must be'):
      pruning.head_importance(CONFIG, self.params, batch, chunk_size=0)
    with self.assertRaisesRegex(ValueError, 'head_gates'):
      pruning.loss_with_gates(CONFIG, self.params, batch, np.ones((2, 3)))
    fewer = with_attention(CONFIG, num_heads=2).attention
    uneven = dataclasses.replace(CONFIG, attention=(CONFIG.attention, fewer))
    for measure in (pruning.head_importance, pruning.ablation_losses):
      with self.assertRaisesRegex(ValueError, r'num_heads=\[4, 2\] .* same'):
        measure(uneven, self.params, batch)


class KeepMostTest(parameterized.TestCase):
  """Which heads stay."""

  CONFIG = decoder_config(7, 9, d_model=16, num_layers=2, num_heads=4)

  SCORES = np.array([[4.0, 1.0, 3.0, 8.0], [0.1, 0.2, 0.4, 0.3]])

  @parameterized.parameters(
    (1.0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
    (0.5, [[0, 2, 3], [2]]),  # one stays in a layer, however little it does
    (0.0, [[3], [2]]),
  )
  def test_heads(self, share, wanted):
    keep = pruning.keep_most(self.CONFIG, self.SCORES, share)
    self.assertEqual([np.flatnonzero(x).tolist() for x in keep], wanted)

  def test_groups(self):
    """Query heads of one key/value head go together: 5 against 11."""
    config = with_attention(self.CONFIG, num_kv_heads=2)
    keep = pruning.keep_most(config, self.SCORES, 0.5)
    self.assertEqual(
      keep.tolist(), [[False, False, True, True], [False, False, True, True]]
    )

  def test_other_groups_by_layer(self):
    """Are refused: their scores cannot be summed alike."""
    grouped = with_attention(self.CONFIG, num_kv_heads=2).attention
    both = (self.CONFIG.attention, grouped)
    config = dataclasses.replace(self.CONFIG, attention=both)
    with self.assertRaisesRegex(ValueError, r'num_kv_heads=\[2, 4\] must'):
      pruning.keep_most(config, self.SCORES, 0.5)

  @parameterized.parameters(
    ([[0.0] * 4, [1.0, 2, 3, 4]], 0.5, [1, 3]), (np.ones((2, 4)), 0.25, [1, 1])
  )
  def test_ties(self, scores, share, counts):
    """Equal scores do not keep more heads than were asked for."""
    keep = pruning.keep_most(self.CONFIG, scores, share)
    self.assertEqual(keep.sum(axis=1).tolist(), counts)

  @parameterized.parameters(
    (np.ones((2, 3)), 0.5, r'scores of shape \(2, 3\)'),
    (np.ones((2, 4)), 2.0, 'share=2.0'),
  )
  def test_errors(self, scores, share, message):
    with self.assertRaisesRegex(ValueError, message):
      pruning.keep_most(self.CONFIG, scores, share)

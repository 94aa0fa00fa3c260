"""The decoder: an oracle, causality, positions, gates, masks, errors."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized

from mha_jax.analysis import probing
from mha_jax.analysis.costs import decoder_shape, num_params
from mha_jax.attention import GroupedConfig, LatentConfig, masks
from mha_jax.decoder import (
  DecoderConfig,
  DecoderLM,
  decoder_config,
  generate,
)
from mha_jax.linen import Parameters
from mha_jax.training import memory

B, T, M, MAX_LEN = 2, 7, 23, 11
OPTIONS = {
  'vocab_size': M,
  'max_len': MAX_LEN,
  'd_model': 12,
  'num_layers': 2,
  'num_heads': 3,
}
CONFIG = decoder_config(**OPTIONS)
UNEVEN = ({'num_heads': 2, 'head_dim': 5}, {'num_heads': 3, 'head_dim': 5})
VARIANTS = {'mha': (6, None), 'gqa': (6, 3), 'mqa': (6, None)}


def make(**options) -> DecoderConfig:
  return decoder_config(**OPTIONS | options)


def variant(name: str, **options) -> DecoderConfig:
  num_heads, num_kv_heads = VARIANTS[name]
  return make(
    attention=name, num_heads=num_heads, num_kv_heads=num_kv_heads, **options
  )


def draw_tokens(seed: int = 0) -> np.ndarray:
  """(b, t) tokens, different within a row."""
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(M)[:T] for _ in range(B)])


def shapes(config: DecoderConfig):
  """The shapes of a decoder's parameters."""
  init = DecoderLM(config).init
  return jax.eval_shape(init, jax.random.key(0), draw_tokens())['params']


def init(config: DecoderConfig, seed: int = 0):
  """Random parameters, those that start at 0 or 1 too."""
  leaves, tree = jax.tree.flatten(shapes(config))
  rng = np.random.default_rng(seed)
  values = [
    jnp.asarray(0.5 * rng.standard_normal(leaf.shape), leaf.dtype)
    for leaf in leaves
  ]
  return jax.tree.unflatten(tree, values)


def apply(config: DecoderConfig, params, tokens=None, rng=None, **options):
  """Logits as NumPy; with sow_weights also the weights of every block."""
  tokens = draw_tokens() if tokens is None else tokens
  sow = options.get('sow_weights', False)
  out = DecoderLM(config).apply(
    {'params': params},
    tokens,
    rngs=None if rng is None else {'dropout': rng},
    mutable=['intermediates'] if sow else False,
    **options,
  )
  if not sow:
    return np.asarray(out)
  sown = out[1]['intermediates']
  weights = [
    np.asarray(sown[f'block_{i}']['attention']['attention_weights'][0])
    for i in range(config.num_layers)
  ]
  return np.asarray(out[0]), weights


def gelu(x: np.ndarray) -> np.ndarray:
  """The tanh form, as `flax.linen.gelu`."""
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def expected(config: DecoderConfig, params, tokens) -> np.ndarray:
  """The logits in float64 NumPy."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def rms(name, x, block):
    return oracles.norm(x, block[name]['scale'], 'rms')

  def dense(name, x, block):
    return x @ block[name]['kernel'] + block[name].get('bias', 0.0)

  x = p['embed']['embedding'][tokens]
  if config.learned_positions:
    x = x + p['positions']['embedding'][: tokens.shape[1]]
  for index, attention in enumerate(config.layers):
    block, rope = p[f'block_{index}'], attention.rope
    options = {
      'allowed': np.tri(tokens.shape[1], dtype=bool),
      'softcap': attention.logit_softcap,
    }
    if isinstance(attention, LatentConfig):
      theta = 10_000.0 if rope is None else rope.theta
      layer = functools.partial(oracles.latent, theta=theta)
    else:
      layer = functools.partial(
        oracles.layer,
        kind=attention.normalize_qk or None,
        rope=None if rope is None else (rope.theta, 'half'),
      )
    normed = rms('attention_norm', x, block)
    x = x + layer(block['attention'], normed, **options)[0]
    if config.mlp_dim:
      y = dense('mlp_in', rms('mlp_norm', x, block), block)
      x = x + dense('mlp_out', gelu(y), block)
  return dense('output', rms('norm', x, p), p)


class OracleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('learned', make()),
    ('one_layer', make(num_layers=1, head_dim=5)),
    ('mlp_bias', make(mlp_dim=17, use_bias=True)),
    ('rope_gqa_rms', variant('gqa', positions='rope', normalize_qk='rms')),
    ('none_mqa_layer', variant('mqa', positions='none', normalize_qk='layer')),
    (
      'theta_softcap',
      make(positions='rope', rope_theta=9.0, logit_softcap=2.0),
    ),
    ('heads_by_layer', make(layers=UNEVEN)),
    (
      'gqa_by_layer',
      make(
        attention='gqa',
        head_dim=5,
        layers=(
          {'num_heads': 6, 'num_kv_heads': 3},
          {'num_heads': 2, 'num_kv_heads': 1},
        ),
      ),
    ),
    ('mla_learned', make(attention='mla', kv_lora_rank=7)),
    (
      'mla_rope',
      make(
        attention='mla',
        positions='rope',
        kv_lora_rank=7,
        q_lora_rank=5,
        qk_nope_head_dim=8,
        v_head_dim=3,
        use_bias=True,
      ),
    ),
  )
  def test_logits(self, config):
    """They are those of a float64 NumPy decoder."""
    params, tokens = init(config), draw_tokens()
    logits = apply(config, params, tokens)
    self.assertEqual(logits.dtype, np.float32)
    oracles.assert_close(logits, expected(config, params, tokens), 2e-5)


class ParametersTest(parameterized.TestCase):
  @parameterized.product(
    name=tuple(VARIANTS), positions=('learned', 'rope', 'none')
  )
  def test_count(self, name, positions):
    """The number of parameters follows from the sizes."""
    config = variant(name, positions=positions)
    d, k, h = 12, 2, 6
    n = {'mha': h, 'gqa': 3, 'mqa': 1}[name]
    block = d * h * k + 2 * d * n * k + h * k * d + d
    wanted = 2 * M * d + 2 * block + d
    wanted += MAX_LEN * d if positions == 'learned' else 0
    found = sum(x.size for x in jax.tree.leaves(shapes(config)))
    self.assertEqual(found, wanted)

  def test_mlp(self):
    """mlp_dim=0 has no MLP parameters, mlp_dim=f adds those of two layers."""
    plain, mlp = shapes(make()), shapes(make(mlp_dim=17))
    self.assertEqual({*plain['block_0']}, {'attention', 'attention_norm'})
    self.assertEqual(mlp['block_1']['mlp_in']['kernel'].shape, (12, 17))
    self.assertEqual(mlp['block_1']['mlp_out']['kernel'].shape, (17, 12))
    self.assertNotIn('bias', mlp['block_1']['mlp_in'])
    self.assertNotIn('bias', mlp['block_0']['attention']['query'])

  def test_parameters_are_float32(self):
    """Whatever the dtype to compute in."""
    for leaf in jax.tree.leaves(shapes(make(dtype='bfloat16', mlp_dim=5))):
      self.assertEqual(leaf.dtype, jnp.float32)

  @parameterized.product(
    name=tuple(VARIANTS), positions=('learned', 'rope', 'none')
  )
  def test_shape_of_logits(self, name, positions):
    """(b, t, m) in float32."""
    config = variant(name, positions=positions, dtype='bfloat16')
    out = jax.eval_shape(
      lambda p: DecoderLM(config).apply({'params': p}, draw_tokens()),
      shapes(config),
    )
    chex.assert_shape(out, (B, T, M))
    self.assertEqual(out.dtype, jnp.float32)

  def test_longer_than_max_len(self):
    """Without learned positions max_len bounds nothing."""
    tokens = np.zeros((B, MAX_LEN + 2), np.int32)
    for positions in ('rope', 'none'):
      config = make(positions=positions)
      logits = apply(config, init(config), tokens)
      self.assertTrue(np.all(np.isfinite(logits)))


class CausalityTest(parameterized.TestCase):
  @parameterized.parameters('learned', 'rope', 'none')
  def test_later_tokens_change_nothing(self, positions):
    """Another token leaves all logits before it as they were, bit for bit."""
    config = make(positions=positions, mlp_dim=5)
    params, tokens = init(config), draw_tokens()
    before = apply(config, params, tokens)
    for i in (1, 4, T - 1):
      changed = tokens.copy()
      changed[:, i] = (changed[:, i] + 1) % M
      after = apply(config, params, changed)
      np.testing.assert_array_equal(after[:, :i], before[:, :i])
      self.assertTrue(np.all(np.any(after[:, i:] != before[:, i:], axis=2)))

  def test_gradients_of_later_tokens_are_zero(self):
    """Logits up to i have zero gradient in the embeddings after i only."""
    config = variant('gqa', positions='rope')
    params, tokens = init(config), draw_tokens()[:1]
    i = 3

    def total(embedding):
      p = params | {'embed': {'embedding': embedding}}
      logits = DecoderLM(config).apply({'params': p}, tokens)
      return jnp.sum(jnp.sin(logits[:, : i + 1]))

    grads = jax.grad(total)(params['embed']['embedding'])[tokens[0]]
    self.assertTrue(np.all(grads[i + 1 :] == 0))
    self.assertTrue(np.all(np.any(grads[: i + 1] != 0, axis=1)))


class PositionsTest(parameterized.TestCase):
  @parameterized.parameters('learned', 'rope', 'none')
  def test_order_of_earlier_tokens(self, positions):
    """One layer without positions cannot tell their order; with, it can."""
    config = make(positions=positions, num_layers=1)
    params, tokens = init(config), draw_tokens()
    shuffled = tokens[:, [4, 2, 0, 5, 1, 3, 6]]
    error = oracles.relative_error(
      apply(config, params, shuffled)[:, -1],
      apply(config, params, tokens)[:, -1],
    )
    if positions == 'none':
      self.assertLess(error, 1e-5)
    else:
      self.assertGreater(error, 1e-2)

  @parameterized.parameters('learned', 'rope', 'none')
  def test_shifted_positions(self, positions):
    """RoPE sees differences of positions only, learned ones see each."""
    config = make(positions=positions)
    params = init(config)
    plain = apply(config, params)
    shifted = apply(config, params, input_positions=np.arange(T) + 4)
    error = oracles.relative_error(shifted, plain)
    if positions == 'learned':
      self.assertGreater(error, 1e-2)
    else:
      self.assertLess(error, 1e-5)

  @parameterized.parameters('learned', 'rope')
  def test_positions_of_every_row(self, positions):
    """(b, t) positions are those of each row; 0 .. t-1 is the default."""
    config = make(positions=positions)
    params, tokens = init(config), draw_tokens()
    rows = np.stack([np.arange(T), [0, 1, 2, 4, 6, 7, 10]])
    both = apply(config, params, tokens, input_positions=rows)
    np.testing.assert_array_equal(both[0], apply(config, params, tokens)[0])
    alone = apply(config, params, tokens[1:], input_positions=rows[1])
    oracles.assert_close(both[1], alone[0], 1e-5)
    self.assertGreater(
      oracles.relative_error(both[1], apply(config, params, tokens)[1]), 1e-2
    )


class HeadGatesTest(parameterized.TestCase):
  def test_ones_change_nothing(self):
    """Gates of 1 are no gates, bit for bit."""
    params = init(CONFIG)
    np.testing.assert_array_equal(
      apply(CONFIG, params, head_gates=np.ones((2, 3))), apply(CONFIG, params)
    )

  @parameterized.parameters((0, 0), (1, 2))
  def test_zero_removes_a_head(self, layer, head):
    """As if that head of that layer had no output weights."""
    params = init(CONFIG)
    gates = np.ones((2, 3))
    gates[layer, head] = 0
    gated = apply(CONFIG, params, head_gates=gates)
    out = params[f'block_{layer}']['attention']['out']
    out['kernel'] = out['kernel'].at[head].set(0)
    oracles.assert_close(gated, apply(CONFIG, params), 1e-6)
    self.assertGreater(
      oracles.relative_error(gated, apply(CONFIG, init(CONFIG))), 1e-2
    )

  def test_lists_are_welcome(self):
    """Gates and tokens may be lists of numbers."""
    params = init(CONFIG)
    gates = [[1, 0.5, 0], [0, 1, 2]]
    np.testing.assert_array_equal(
      apply(CONFIG, params, draw_tokens().tolist(), head_gates=gates),
      apply(CONFIG, params, head_gates=np.asarray(gates)),
    )

  @parameterized.parameters((3,), (1, 3), (3, 3), (2, 4), (2, 3, 1))
  def test_errors(self, *shape):
    """A shape other than (num_layers, h) is refused, not cut or stretched."""
    with self.assertRaisesRegex(ValueError, 'head_gates'):
      apply(CONFIG, init(CONFIG), head_gates=np.ones(shape))


class LayersTest(parameterized.TestCase):
  """Layers with attentions of their own."""

  def test_one_or_many(self):
    """Equal attentions are one, also in a list; num_layers counts them."""
    first, second = make(layers=UNEVEN).layers
    self.assertEqual(CONFIG.layers, (CONFIG.attention,) * 2)
    for config in (
      DecoderConfig(M, MAX_LEN, [CONFIG.attention] * 2),
      DecoderConfig(M, MAX_LEN, CONFIG.attention, 2),
      dataclasses.replace(CONFIG),
    ):
      self.assertEqual(config, CONFIG)
      self.assertEqual(hash(config), hash(CONFIG))
    config = DecoderConfig(M, MAX_LEN, [first, second])
    self.assertEqual(config, make(layers=UNEVEN))
    self.assertEqual((config.num_layers, config.d_model), (2, 12))
    self.assertEqual([x.num_heads for x in config.layers], [2, 3])

  @parameterized.parameters(
    ({}, True),
    ({'positions': 'rope'}, False),
    ({'positions': 'none'}, False),
    ({'layers': ({'positions': 'rope'}, {})}, True),
    ({'layers': ({'positions': 'rope'}, {'positions': 'none'})}, False),
  )
  def test_learned_positions(self, options, wanted):
    """They are added where a layer's options ask for them."""
    config = make(head_dim=4, **options)
    self.assertEqual(config.learned_positions, wanted)
    self.assertEqual('positions' in shapes(config), wanted)

  def test_learned_positions_by_themselves(self):
    """Without a word they are there unless a layer turns its heads."""
    turned = make(positions='rope', head_dim=4).attention
    for attention, wanted in (
      (CONFIG.attention, True),
      (turned, False),
      ((CONFIG.attention, turned), False),
    ):
      config = DecoderConfig(M, MAX_LEN, attention)
      self.assertEqual(config.learned_positions, wanted)

  def test_all_kinds_at_once(self):
    """MHA with RoPE, MLA, and MQA: passes, steps, gradients, scores."""
    config = make(
      num_layers=3,
      mlp_dim=5,
      layers=(
        {'positions': 'rope', 'head_dim': 4},
        {'attention': 'mla', 'kv_lora_rank': 7, 'positions': 'none'},
        {'attention': 'mqa', 'head_dim': 5, 'positions': 'none'},
      ),
    )
    model, params, tokens = DecoderLM(config), init(config), draw_tokens()
    wanted = expected(config, params, tokens)
    oracles.assert_close(apply(config, params), wanted, 1e-5)
    self.assertEqual(sum(memory.num_params(config)), costs_of(params))
    shape = decoder_shape(config)
    self.assertEqual(num_params(shape).total, costs_of(params))
    step, cache = jax.jit(model.apply), model.init_cache(B, T)
    for part, till in ((tokens[:, :3], 3), (tokens[:, 3:], T)):
      logits, cache = step({'params': params}, part, cache=cache)
      oracles.assert_close(logits[:, -1], wanted[:, till - 1], 1e-5)
    made, count = generate(model, {'params': params}, tokens, max_new_tokens=2)
    again = np.concatenate([tokens, made[:, :1]], axis=1)
    best = np.argmax(apply(config, params, again)[:, -2:], axis=-1)
    np.testing.assert_array_equal(made, best)
    np.testing.assert_array_equal(count, 2)
    rows = probing.head_scores(config, params, tokens)
    self.assertLen(rows, 9)
    grads = jax.grad(lambda p: jnp.sum(model.apply({'params': p}, tokens) ** 2))
    chex.assert_tree_all_finite(grads(params))

  def test_gates(self):
    """A sequence of (h,) arrays."""
    config = make(layers=UNEVEN)
    params = init(config)
    gated = apply(config, params, head_gates=[np.array([1, 0]), [0.5, 1, 1]])
    first, second = (params[f'block_{i}']['attention']['out'] for i in (0, 1))
    first['kernel'] = first['kernel'].at[1].set(0)
    second['kernel'] = second['kernel'].at[0].multiply(0.5)
    oracles.assert_close(gated, apply(config, params), 1e-6)
    for gates in ([[1, 1, 1], [1, 1]], [[1, 1]], np.ones((2, 3)), 1.0):
      with self.assertRaisesRegex(
        ValueError, r'head_gates of shapes .* \[\(2,\), \(3,\)\]'
      ):
        apply(config, params, head_gates=gates)

  def test_cache(self):
    """A cache of each layer's own heads, and no other, gives the full pass."""
    config = make(layers=UNEVEN)
    model, params, tokens = DecoderLM(config), init(config), draw_tokens()
    cache = model.init_cache(B, T)
    self.assertEqual([x.entries[0].shape[1] for x in cache], [2, 3])
    step, after, got = jax.jit(model.apply), cache, []
    for token in np.split(tokens, T, axis=1):
      logits, after = step({'params': params}, token, cache=after)
      got.append(logits)
    wanted = apply(config, params)
    oracles.assert_close(np.concatenate(got, axis=1), wanted, 1e-5)
    with self.assertRaisesRegex(ValueError, 'cache has entries'):
      model.apply({'params': params}, tokens, cache=cache[::-1])

  @parameterized.parameters(
    ({'layers': ({},)}, 'layers of length 1 .* num_layers=2'),
    ({'layers': ({'num_heads': 0}, {})}, 'num_heads=0 must be a positive'),
    ({'layers': ({'heads': 2}, {})}, "layers: 'heads' is no option of a layer"),
    ({'layers': ({'rope': None}, {})}, "layers: 'rope' is no option"),
    ({'layers': ({1: 2}, {})}, 'layers: 1 is no option'),
    ({'layers': ({}, None)}, 'must be a tuple of a dict of options'),
    ({'layers': 5}, 'layers=5 must be a tuple of a dict'),
    ({'layers': ({'positions': 'x'}, {})}, "positions='x' must be in"),
    ({'layers': ({'d_model': 6}, {})}, "'d_model' is no option"),
    (
      {'layers': ({'attention': 'gqa', 'num_kv_heads': 2}, {})},
      'num_kv_heads=2 must divide num_heads=3',
    ),
    (
      {'out_features': 5},
      r'takes inputs of \(12, 12, 12\) features and gives 5',
    ),
  )
  def test_errors(self, options, message):
    """What does not fit a layer is refused when the config is made."""
    with self.assertRaisesRegex(ValueError, message):
      make(**options)

  @parameterized.parameters(
    ('mha', "attention='mha' must be an AttentionConfig, as GroupedConfig"),
    ((), 'attention of 0 layers'),
    ([None], 'attention=None must be'),
    ([CONFIG.attention] * 3, 'attention of 3 layers .* num_layers=2'),
    (GroupedConfig(12, 3, key_features=5), r'inputs of \(12, 5, 5\) features'),
  )
  def test_what_is_no_attention(self, attention, message):
    """One line says what to pass."""
    with self.assertRaisesRegex(ValueError, message):
      DecoderConfig(M, MAX_LEN, attention, 2)


def costs_of(params) -> int:
  """The number of all parameters."""
  return sum(x.size for x in jax.tree.leaves(params))


class MaskTest(parameterized.TestCase):
  def test_weights_are_causal_and_asking_changes_nothing(self):
    """(b, h, t, t) rows sum to 1, later keys weigh exactly 0."""
    params = init(CONFIG)
    logits, weights = apply(CONFIG, params, sow_weights=True)
    np.testing.assert_array_equal(logits, apply(CONFIG, params))
    for layer in weights:
      self.assertEqual(layer.shape, (B, 3, T, T))
      self.assertTrue(np.all((layer != 0) == np.tri(T, dtype=bool)))
      np.testing.assert_allclose(layer.sum(-1), 1, rtol=1e-5)
    self.assertGreater(oracles.relative_error(weights[0], weights[1]), 1e-2)

  def test_nothing_is_sown_unasked(self):
    """The collection stays empty."""
    _, sown = DecoderLM(CONFIG).apply(
      {'params': init(CONFIG)}, draw_tokens(), mutable=['intermediates']
    )
    self.assertEmpty(jax.tree.leaves(sown))

  @parameterized.parameters('booleans', 'mask', 'flax')
  def test_extra_mask_joins_the_causal_one(self, kind):
    """A key must be allowed by both; a query without keys gets zeros."""
    params, lengths = init(CONFIG), np.array([3, 5])
    columns = np.arange(T) < lengths[:, None]
    mask = {
      'booleans': columns[:, None, None, :],
      'mask': masks.lengths(lengths),
      'flax': nn.make_attention_mask(np.ones((B, T)), columns),
    }[kind]
    _, weights = apply(CONFIG, params, mask=mask, sow_weights=True)
    wanted = np.tri(T, dtype=bool) & columns[:, None, None, :]
    for layer in weights:
      self.assertTrue(np.all((layer != 0) == wanted))
    first = np.arange(T)[None, None, None, :] >= 2
    _, weights = apply(CONFIG, params, mask=first, sow_weights=True)
    self.assertTrue(np.all(weights[0][:, :, :2] == 0))


class DropoutTest(parameterized.TestCase):
  def test_deterministic_turns_it_off(self):
    """The default is off, and off is the model without dropout."""
    config, params = make(dropout_rate=0.5), init(CONFIG)
    plain = apply(CONFIG, params)
    np.testing.assert_array_equal(apply(config, params), plain)
    np.testing.assert_array_equal(
      apply(config, params, rng=jax.random.key(0), deterministic=True), plain
    )

  def test_draws_follow_the_key(self):
    """The same key drops the same weights, another key others."""
    config, params = make(dropout_rate=0.5), init(CONFIG)
    one, same, other = (
      apply(config, params, rng=jax.random.key(i), deterministic=False)
      for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    self.assertGreater(oracles.relative_error(one, other), 1e-2)
    self.assertGreater(oracles.relative_error(one, apply(CONFIG, params)), 1e-2)


class DtypeTest(parameterized.TestCase):
  @parameterized.parameters(('bfloat16', 5e-2), ('float16', 5e-3))
  def test_lower_precision(self, dtype, tolerance):
    """Close to float32 but computed in that dtype."""
    params = init(CONFIG)
    wanted = apply(CONFIG, params)
    found = apply(make(dtype=dtype), params)
    error = oracles.relative_error(found, wanted)
    self.assertLess(error, tolerance)
    self.assertGreater(error, tolerance / 100)
    rounded = np.asarray(jnp.asarray(found).astype(dtype).astype('float32'))
    np.testing.assert_array_equal(found, rounded)

  def test_every_module_computes_in_it(self):
    """No module falls back to float32 on the way."""
    config = make(dtype='bfloat16', mlp_dim=5, use_bias=True)
    _, sown = DecoderLM(config).apply(
      {'params': init(config)},
      draw_tokens(),
      mutable=['intermediates'],
      capture_intermediates=lambda module, method: (
        method == '__call__' and not isinstance(module, DecoderLM | Parameters)
      ),
    )
    outputs = jax.tree.leaves(sown)
    self.assertLen(outputs, 2 + 2 * (5 + 1) + 2)
    self.assertEqual({str(x.dtype) for x in outputs}, {'bfloat16'})

  def test_float64(self):
    """Under x64 all is computed in float64."""
    with jax.enable_x64(True):
      config = make(dtype='float64', mlp_dim=5, positions='rope')
      params, tokens = init(config), draw_tokens()
      out = np.asarray(apply(config, params, tokens))
      wanted = expected(config, params, tokens)
      oracles.assert_close(out, wanted, 1e-12)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'attention': 'x'}, "attention='x' .*'mha', 'gqa', 'mqa'"),
    ({'attention': 'mla'}, 'kv_lora_rank=None.*features of the latent'),
    ({'kv_lora_rank': 3}, "kv_lora_rank=3 is no option of 'mha'"),
    (
      {'attention': 'mla', 'kv_lora_rank': 3, 'head_dim': 4},
      "head_dim=4 is no option of 'mla'",
    ),
    ({'positions': 'sinus'}, "positions='sinus' .*'learned', 'rope', 'none'"),
    ({'dtype': 'int8'}, "dtype='int8' .*'float32'"),
    ({'attention': 'gqa'}, 'num_kv_heads=None.*divisor of num_heads'),
    ({'num_kv_heads': 2}, "num_kv_heads=2 must be 3 or None in 'mha'.*'gqa'"),
    (
      {'attention': 'mla', 'kv_lora_rank': 3, 'qk_rope_head_dim': 2},
      "qk_rope_head_dim=2 needs positions='rope', got 'learned'",
    ),
    (
      {'attention': 'mqa', 'num_kv_heads': 3},
      "num_kv_heads=3 must be 1 or None in 'mqa'.*'gqa'",
    ),
    ({'num_heads': 5}, 'num_heads=5 must divide d_model=12; nearest: 4, 6'),
    (
      {'attention': 'gqa', 'num_kv_heads': 2},
      'num_kv_heads=2 must divide num_heads=3; nearest: 1, 3',
    ),
    ({'num_heads': 4, 'positions': 'rope'}, 'head_dim=3 must be even'),
    ({'num_layers': 0}, r'num_layers=0 must be an integer and lie in \[1, '),
    ({'d_model': -4}, 'd_model=-4 must be a positive integer'),
    ({'vocab_size': 0}, 'vocab_size=0 must be a positive integer'),
    ({'head_dim': 0}, 'head_dim=0 must be a positive integer'),
    ({'mlp_dim': -1}, 'mlp_dim=-1 must be a positive'),
    ({'dropout_rate': 1.0}, 'dropout_rate=1.0 must lie in'),
    ({'dropout_rate': float('nan')}, 'dropout_rate=nan must lie in'),
    ({'normalize_qk': 'batch'}, "normalize_qk='batch' must be"),
    ({'logit_softcap': -1.0}, 'logit_softcap=-1.0 must be positive'),
    ({'positions': 'rope', 'rope_theta': -1.0}, 'theta=-1.0 must lie in'),
  )
  def test_config(self, options, message):
    """A config that does not fit is refused when it is made."""
    with self.assertRaisesRegex(ValueError, message):
      make(**options)

  @parameterized.parameters(
    (np.zeros((2, 3)), r'tokens must be integers .*float.*\(2, 3\)'),
    (np.zeros(3, int), r'tokens must be integers of shape \(b, t\).*\(3,\)'),
    (np.zeros((1, 2, 3), int), r'tokens must be .*\(1, 2, 3\)'),
    (np.zeros((2, 12), int), 'length 12 exceed max_len=11.*raise max_len'),
  )
  def test_tokens(self, tokens, message):
    """Tokens that do not fit are refused."""
    with self.assertRaisesRegex(ValueError, message):
      apply(CONFIG, init(CONFIG), tokens)

  @parameterized.parameters((T, B), (T + 1,), (3, T))
  def test_input_positions(self, *shape):
    """Positions that do not fit the tokens are refused."""
    with self.assertRaisesRegex(ValueError, 'input_positions'):
      apply(CONFIG, init(CONFIG), input_positions=np.zeros(shape, int))

  def test_known_within_jit(self):
    """Tokens that a jitted function closes over are known, and checked."""
    apply = functools.partial(DecoderLM(CONFIG).apply, {'params': init(CONFIG)})
    good, bad = jnp.array([[0, 1]]), jnp.array([[0, M]])
    jax.jit(lambda: apply(good))()
    with self.assertRaisesRegex(ValueError, 'tokens from 0 to'):
      jax.jit(lambda: apply(bad))()

  @parameterized.parameters(
    ([[0, M]], {}, r'tokens from 0 to .* vocab_size='),
    ([[-1, 0]], {}, r'tokens from -1 to 0 must lie in'),
    ([[0, 1]], {'input_positions': [3, 11]}, r'input_positions .*max_len=11'),
    ([[0, 1]], {'input_positions': [-1, 0]}, r'input_positions from -1 to 0'),
  )
  def test_ranges(self, tokens, options, message):
    """A number past a table would be read as another one, or as NaN."""
    with self.assertRaisesRegex(ValueError, message):
      apply(CONFIG, init(CONFIG), tokens, **options)


class WideTokensTest(parameterized.TestCase):
  def test_are_not_cut(self):
    """A token beyond int32 is refused, not taken for another."""
    params = init(CONFIG)
    with self.assertRaisesRegex(ValueError, 'tokens from 1099511627779'):
      apply(CONFIG, params, np.array([[2**40 + 3]]))

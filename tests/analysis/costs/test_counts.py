"""Costs against published tables, real arrays, traced products and NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from shapes import alone, grouped, latent

from mha_jax.analysis import costs
from mha_jax.analysis.costs.counts import (
  cache_elements,
  decode_intensity,
  num_params,
)
from mha_jax.analysis.costs.published import published
from mha_jax.analysis.costs.shape import (
  Experts,
  Layer,
  Mlp,
  ModelShape,
  decoder_shape,
  stack,
)
from mha_jax.attention import (
  GroupedConfig,
  TiedConfig,
  apply,
  init_cache,
  init_table,
)
from mha_jax.attention.variants import VARIANTS
from mha_jax.decoder import DecoderLM, decoder_config


class PublishedTablesTest(parameterized.TestCase):
  def test_deepseek_v2_table_1(self):
    """Elements of cache a token: DeepSeek-V2 (2024), table 1."""
    h, groups, d_h, layers = 128, 8, 128, 60
    d_c, d_rope = 4 * d_h, d_h // 2

    def per_token(attention):
      return cache_elements(alone(attention, layers))

    self.assertEqual(per_token(grouped(h=h)), 2 * h * d_h * layers)
    self.assertEqual(
      per_token(grouped(h=h, n=groups)), 2 * groups * d_h * layers
    )
    self.assertEqual(per_token(grouped(h=h, n=1)), 2 * d_h * layers)
    self.assertEqual(per_token(latent(h)), (d_c + d_rope) * layers)
    self.assertEqual(per_token(latent(h)), 4.5 * d_h * layers)
    # "Equal to GQA with only 2.25 groups."
    self.assertEqual(per_token(latent(h)), 2.25 * per_token(grouped(h=h, n=1)))

  @parameterized.parameters(
    # The small model: 27 layers of 16 heads of 128 (DeepSeek-V2-Lite's sizes).
    ('MHA', 27, 16, 110.6),
    ('MLA', 27, 16, 15.6),
    # The large one: 60 layers, since 34.6K / 576 = 60. Its heads of 128 are not
    # told; 860.2K over 60 layers is 56 of them.
    ('MHA', 60, 56, 860.2),
    ('MLA', 60, 56, 34.6),
  )
  def test_deepseek_v2_table_9(self, kind, layers, h, thousands):
    """Elements of cache a token: DeepSeek-V2 (2024), table 9."""
    attention = grouped(h=h) if kind == 'MHA' else latent(h)
    elements = cache_elements(alone(attention, layers))
    self.assertAlmostEqual(elements / 1e3, thousands, delta=0.05)

  def test_deepseek_v2_saves(self):
    """93.3 % less cache: DeepSeek-V2 (2024), abstract and section 3.2.3.

    Against DeepSeek 67B (95 layers, 8 key/value heads of 128) in bf16, at 6
    bits an element.
    """
    before = costs.cache_bytes(alone(grouped(n=8), 95))
    after = cache_elements(published('deepseek-v2').shape) * 6 / 8
    self.assertAlmostEqual(1 - after / before, 0.933, delta=0.0005)

  def test_intensity(self):
    """FLOPs a byte of decoding attention in bf16.

    MHA 1: the scaling book, chapter 7. Absorbed MLA, h = 128, r = 512, p = 64:
    2 h (2 r + p) / (2 (r + p)) = 241.8.
    """
    self.assertEqual(decode_intensity(grouped()), 1)
    self.assertEqual(decode_intensity(grouped(n=8)), 8)
    self.assertEqual(decode_intensity(grouped(n=1)), 64)
    self.assertAlmostEqual(decode_intensity(latent()), 242, delta=0.5)
    self.assertAlmostEqual(
      decode_intensity(latent(), dtype='fp8'), 2 * 241.78, delta=0.01
    )

  def test_llama3_70b(self):
    """GQA with 8 key/value heads of 64: an eighth of MHA's cache."""
    shape = published('llama3-70b').shape
    whole = dataclasses.replace(shape.layers[0].attention, num_kv_heads=None)
    self.assertEqual(
      cache_elements(alone(whole, 80)), 8 * cache_elements(shape)
    )
    # The scaling book, chapter 8: 160 KiB a token in int8.
    self.assertEqual(costs.cache_bytes(shape, dtype='int8'), 160 * 1024)

  def test_palm_flops(self):
    """6 N + 12 L H Q T: Chowdhery et al. 2022, appendix B."""
    t, layers, h, k = 2048, 118, 48, 256
    shape = stack(
      grouped(18_432, h, 1, k),
      layers,
      vocab_size=256_000,
      mlp=Mlp(73_728),
      tied=True,
      causal=False,
    )
    params = num_params(shape)
    self.assertAlmostEqual(params.total / 540.35e9, 1, delta=0.001)
    self.assertEqual(
      costs.train_flops_per_token(shape, t),
      6 * params.total + 12 * layers * h * k * t,
    )


def product_flops(jaxpr):
  """2 for each multiplication of the products within."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      summed = math.prod(shape[i] for i in contracted)
      total += 2 * summed * math.prod(equation.outvars[0].aval.shape)
    for inner in jax.tree.leaves(list(equation.params.values())):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        assert equation.primitive.name not in ('scan', 'while')
        total += product_flops(inner)
  return total


DRAWN = {
  'mha': st.fixed_dictionaries(
    {'num_heads': st.sampled_from([1, 3]), 'head_dim': st.sampled_from([2, 4])}
  ),
  'gqa': st.fixed_dictionaries(
    {
      'num_heads': st.sampled_from([6, 12]),
      'num_kv_heads': st.sampled_from([2, 3]),
      'head_dim': st.sampled_from([4, 6]),
      'v_head_dim': st.sampled_from([None, 5]),
      'normalize_qk': st.sampled_from([None, 'rms', 'layer']),
    }
  ),
  'mqa': st.fixed_dictionaries({'num_heads': st.sampled_from([2, 5])})
  | st.just({'head_dim': 4, 'layers': ({'num_heads': 3}, {'num_heads': 2})}),
  'mla': st.fixed_dictionaries(
    {
      'num_heads': st.sampled_from([2, 5]),
      'kv_lora_rank': st.sampled_from([3, 7]),
      'q_lora_rank': st.sampled_from([None, 6]),
      'qk_nope_head_dim': st.sampled_from([4, 8]),
      'v_head_dim': st.sampled_from([None, 3]),
    }
  ),
  'gta': st.fixed_dictionaries(
    {
      'num_heads': st.sampled_from([4, 8]),
      'num_kv_heads': st.sampled_from([2, 4]),
      'head_dim': st.sampled_from([4, 8]),
    }
  ),
}
"""What to draw a variant's options from."""
COUNTED = (
  grouped(512, 8, k=64),
  grouped(512, 8, 2, 64),
  GroupedConfig(512, 8, 1, 64, 96, use_bias=True),
  TiedConfig(512, 8, 2, 64),
  latent(8, 'absorbed', 512, None),
  latent(8, 'expanded', 512, 96),
)
AROUND = {
  'd_model': st.sampled_from([30, 60]),
  'vocab_size': st.sampled_from([11, 29]),
  'max_len': st.sampled_from([13, 17]),
  'mlp_dim': st.sampled_from([0, 19]),
  'positions': st.sampled_from(['learned', 'rope', 'none']),
  'use_bias': st.booleans(),
}


@st.composite
def options_of(draw, attention):
  options = {name: draw(values) for name, values in AROUND.items()}
  options |= draw(DRAWN[attention])
  options['num_layers'] = 2
  return options | {'attention': attention}


class RealModelsTest(parameterized.TestCase):
  @parameterized.parameters(*VARIANTS)
  def test_real_parameters_and_caches(self, attention):
    """Of parameter trees and allocated caches, part by part."""

    @given(options_of(attention), st.data())
    def check(options, data):
      config = decoder_config(**options)
      model = DecoderLM(config)
      tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
      tree = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
      parts = dict.fromkeys(('attention', 'mlp', 'norms', 'embeddings'), 0)
      for path, x in jax.tree_util.tree_leaves_with_path(tree):
        names = [key.key for key in path]
        if 'attention' in names:
          part = 'attention'
        elif names[-2] in ('mlp_in', 'mlp_out'):
          part = 'mlp'
        else:
          part = 'norms' if 'norm' in names[-2] else 'embeddings'
        parts[part] += math.prod(x.shape)
      shape = decoder_shape(config)
      params = num_params(shape)
      for part, count in parts.items():
        self.assertEqual(getattr(params, part), count, part)
      self.assertEqual(params.total, sum(parts.values()))
      looked_up = config.vocab_size
      looked_up += config.max_len * config.learned_positions
      self.assertEqual(params.active, params.total - looked_up * config.d_model)

      batch, length = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 13)),
      )
      dtype = data.draw(st.sampled_from(['bfloat16', 'float32']))
      short = {'bfloat16': 'bf16', 'float32': 'fp32'}[dtype]
      cache = model.init_cache(batch, length, dtype)
      real = sum(x.nbytes for x in cache)
      self.assertEqual(costs.cache_bytes(shape, length, batch, short), real)
      window = data.draw(st.integers(1, 7))
      rings = model.init_cache(batch, dtype=dtype, window=window)
      kept = decoder_shape(config, windows=(window, None))
      self.assertEqual(
        costs.cache_bytes(kept, 13, batch, short),
        rings[0].nbytes + 13 * batch * cache[1].nbytes_per_token,
      )

    check()

  def test_every_variant_is_counted(self):
    """A new one needs its options, and a config of its class."""
    self.assertEqual(DRAWN.keys(), VARIANTS.keys())
    wanted = {variant.config for variant in VARIANTS.values()}
    self.assertEqual({type(x) for x in COUNTED}, wanted)

  @parameterized.parameters(*((x,) for x in COUNTED))
  def test_flops_are_those_of_the_products(self, attention):
    """Exactly: of a step, and of a whole sequence, as they are traced."""
    params = jax.eval_shape(
      lambda: init_table(attention.table, jax.random.key(0))
    )
    b, s, t = 2, 768, 256

    def flops(length, cache=None):
      x = jax.ShapeDtypeStruct((b, length, 512), jnp.float32)
      traced = jax.make_jaxpr(
        lambda params, x, cache: apply(
          attention, params, x, cache=cache, implementation='exact'
        )
      )(params, x, cache)
      return product_flops(traced.jaxpr)

    cache = jax.eval_shape(lambda: init_cache(attention, b, s))
    shape = alone(attention, causal=False)
    kernels = sum(
      math.prod(row.shapes['kernel'])
      for row in attention.table.values()
      if 'kernel' in row.shapes
    )
    others = 2 * (
      num_params(shape).active - kernels
    )  # biases, norms and a vocabulary
    wanted = costs.decode_flops(shape, s, b) - b * others
    self.assertEqual(flops(1, cache), wanted)
    head = 2 * shape.vocab_size * shape.d_model
    wanted = costs.prefill_flops(shape, t, b) - b * head
    self.assertEqual(flops(t), wanted - b * t * (others - head))

  def test_score_bytes_are_the_weights(self):
    """Of the arrays that the exact form returns on request."""
    config = decoder_config(11, 13, d_model=12, num_heads=3, num_layers=2)
    model, tokens = DecoderLM(config), jnp.zeros((5, 7), int)
    _, state = jax.eval_shape(
      lambda key: model.apply(
        model.init(key, tokens),
        tokens,
        sow_weights=True,
        mutable=['intermediates'],
      ),
      jax.random.key(0),
    )
    real = [x.size * 4 for x in jax.tree.leaves(state)]
    wanted = costs.score_bytes(config.layers[0], 7, 5)
    self.assertEqual(real, [wanted] * 2)


class ShapesTest(parameterized.TestCase):
  @parameterized.product(window=[None, 1, 3, 9], causal=[True, False])
  def test_pairs(self, window, causal):
    """Counted one by one."""
    layer = Layer(grouped(), window=window)
    for t in (1, 2, 5, 9, 13):
      i, j = np.indices((t, t))
      seen = (j <= i) & (i - j < (window or t))
      count = seen.sum() if causal else t * min(t, window or t)
      self.assertEqual(layer.pairs(t, causal), count)

  def test_windows_bound_the_cache(self):
    """Alternating local and global layers, as in Gemma 2."""
    shape = alone(grouped(n=8), 5, windows=(4, None))
    each = 2 * 8 * 128
    for length in (1, 3, 4, 9):
      kept = each * (3 * min(length, 4) + 2 * length)
      self.assertEqual(cache_elements(shape, length), kept)
      self.assertEqual(cache_elements(shape, length, 7), 7 * kept)
    linear = 2 * num_params(shape).active
    core = 2 * 64 * 256 * (3 * 4 + 2 * 9)
    self.assertEqual(costs.decode_flops(shape, 9, 3), 3 * (linear + core))

  def test_experts(self):
    """A router, shared and routed experts; how many a batch uses, by chance."""
    d, expert = 8, Mlp(5)
    experts = Experts(expert, routed=13, active=3, shared=2)
    one = 3 * d * 5
    shape = stack(
      grouped(d, 2, k=4), 3, vocab_size=7, mlp=experts, first=(Mlp(17),)
    )
    params = num_params(shape)
    self.assertEqual(params.mlp, 2 * (13 * d + 15 * one) + 3 * d * 17)
    used = params.mlp - 2 * 10 * one
    self.assertEqual(params.active, params.total - 2 * 10 * one - 7 * d)
    self.assertEqual(
      used, params.active - params.attention - params.norms - 7 * d
    )
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 11):
      distinct = np.mean(
        [
          len({x for _ in range(tokens) for x in rng.permutation(13)[:3]})
          for _ in range(1000)
        ]
      )
      got = experts.num_params(d, tokens)
      self.assertAlmostEqual(
        got, 13 * d + (2 + distinct) * one, delta=0.2 * one
      )

  def test_parts_of_layers_sum(self):
    """The whole is its layers, embeddings and the last norm."""
    shape = published('deepseek-v2-lite').shape
    layers = [costs.layer_params(layer) for layer in shape.layers]
    params = num_params(shape)
    outside = shape.d_model * (2 * shape.vocab_size + 1)
    self.assertEqual(params.total, sum(x.total for x in layers) + outside)
    self.assertEqual(
      params.active,
      sum(x.active for x in layers) + shape.d_model * (shape.vocab_size + 1),
    )

  def test_decoders_whose_layers_differ(self):
    """Layers of other numbers of heads, as pruning leaves them."""
    config = decoder_config(
      11,
      13,
      d_model=12,
      num_layers=2,
      head_dim=4,
      layers=({'num_heads': 3}, {'num_heads': 1}),
    )
    shape = decoder_shape(config)
    self.assertEqual(cache_elements(shape), 2 * 4 * (3 + 1))
    self.assertLen(shape.groups, 2)

  @parameterized.parameters(
    (lambda: ModelShape((), 7), 'd_model'),
    (
      lambda: ModelShape((Layer(grouped(8, 2)), Layer(grouped(16, 2))), 7),
      r'd_model \[8, 16\]',
    ),
    (lambda: stack(grouped(), 0, vocab_size=7), 'num_layers=0'),
    (
      lambda: stack(grouped(), 1, vocab_size=7, first=(None,) * 2),
      'first has 2',
    ),
    (lambda: stack(grouped(), 1, vocab_size=7, windows=()), 'windows 0'),
    (lambda: Layer(grouped(), window=0), 'window=0'),
    (lambda: Mlp(0), 'width=0'),
    (lambda: Experts(Mlp(3), 4, 5), r'active=5 .* \[1, 4\]'),
    (lambda: cache_elements(alone(grouped()), 0), 'length=0'),
    (lambda: costs.decode_flops(alone(grouped()), 5, 0), 'batch=0'),
  )
  def test_errors(self, call, message):
    """Name, value and remedy."""
    with self.assertRaisesRegex(ValueError, message):
      call()

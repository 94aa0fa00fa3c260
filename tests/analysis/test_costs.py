"""Costs against published tables, real arrays, XLA's own count and NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from mha_jax.analysis import costs
from mha_jax.analysis.costs import (
  Experts,
  Layer,
  Mlp,
  ModelShape,
  Placement,
  Step,
  cache_elements,
  decode_intensity,
  decode_step,
  decoder_shape,
  num_params,
  stack,
)
from mha_jax.analysis.hardware import Hardware
from mha_jax.analysis.published import PUBLISHED, published
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  TiedConfig,
  apply,
  init_cache,
  init_table,
)
from mha_jax.decoder import DecoderConfig, DecoderLM

CHIP = Hardware('chip', 2e12, 1e10, 1e9)
V5E = Hardware('v5e', 197e12, 8.2e11, 16e9, "the scaling book's, chapter 7")
V4 = Hardware('v4', 275e12, 1.2e12, 32 * 2**30, 'Pope et al. 2022, section 4')


def grouped(d=8192, h=64, n=None, k=128):
  return GroupedConfig(d, h, n, k, use_bias=False)


def latent(h=128, form='auto', d=5120, q=1536):
  return LatentConfig(
    d,
    h,
    kv_lora_rank=512,
    q_lora_rank=q,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    form=form,
  )


def alone(attention, layers=1, **options):
  """Layers of nothing but attention."""
  options = {'vocab_size': 1, 'layer_norms': 0, 'norms': 0} | options
  return stack(attention, layers, **options)


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

  @parameterized.parameters(
    ('multihead', 128, 1320),
    ('multihead', 512, 330),
    ('multiquery', 128, 660),
    ('multiquery', 512, 165),
    ('optimised', 128, 43_000),
    ('optimised', 512, 10_700),
  )
  def test_pope_table_1(self, kind, batch, context):
    """Maximum context of PaLM 540B: Pope et al. 2022, table 1.

    64 TPU v4 of 32 GiB, 30 % of it for the cache in bf16; 118 layers; 48 heads
    padded to 64; features of a head 256, for multi-head 128, so that the
    parameters stay as many. Multi-query caches stand on all devices, optimised
    ones are split by sequences.
    """
    multihead = kind == 'multihead'
    attention = grouped(
      18_432, 64, 64 if multihead else 1, 256 // (1 + multihead)
    )
    split = 'batch' if kind == 'optimised' else 'heads'
    got = costs.max_context(
      alone(attention, 118),
      Placement(V4, 64, split=split),
      batch,
      cache_memory=0.3 * V4.memory,
    )
    self.assertAlmostEqual(got / context, 1, delta=0.015)

  @parameterized.parameters(
    (1, 4.98, 200.61, 4.17, 239.94),
    (8, 12.13, 659.30, 5.60, 1429.19),
    (16, 20.30, 787.99, 7.23, 2212.48),
    (32, 36.65, 873.21, 10.50, 3047.62),
    (64, 69.33, 923.13, 17.04, 3756.62),
    (240, 249.09, 963.53, 52.99, 4529.34),
  )
  def test_scaling_book_serving(self, batch, ms, tokens, ms_gqa, tokens_gqa):
    """LLaMA-2-13B on 8 TPU v5e: How to Scale Your Model, chapter 7, tables.

    Of the book's rounded bytes (26 GB of weights, 6.7 GB of cache a sequence of
    8192 tokens) the formula gives its numbers to the last digit.
    """
    for cache, wanted, rate in (
      (6.7e9, ms, tokens),
      (1.34e9, ms_gqa, tokens_gqa),
    ):
      linear = 2 * batch * 13e9 / 8
      step = Step(V5E, batch, 26e9 / 8, linear, batch * cache / 8, 0)
      self.assertAlmostEqual(step.seconds * 1e3, wanted, delta=0.0051)
      self.assertAlmostEqual(step.tokens_per_second / rate, 1, delta=1e-4)

  def test_scaling_book_model(self):
    """The same of our own shape of LLaMA-2-13B, at batch 1.

    A step does not read the table of input embeddings, only a row: 0.05 ms less
    than the book, which reads all parameters. With it 0.2 % are left, as the
    book rounds 13.02e9 parameters and 6.71e9 bytes.
    """
    shape = published('llama2-13b').shape
    step = decode_step(shape, Placement(V5E, 8), 8192)
    table = 2 * shape.vocab_size * shape.d_model / 8 / V5E.bandwidth
    self.assertAlmostEqual(table * 1e3, 0.05, delta=0.001)
    whole = step.seconds + table
    self.assertAlmostEqual(whole / 4.98e-3, 1, delta=0.0025)
    self.assertAlmostEqual(whole * 200.6, 1, delta=0.0025)
    fifth = dataclasses.replace(step, cache_bytes=step.cache_bytes / 5)
    self.assertAlmostEqual((fifth.seconds + table) / 4.17e-3, 1, delta=0.0025)
    # 8 of 40 key/value heads are that fifth.
    attention = dataclasses.replace(shape.layers[0].attention, num_kv_heads=8)
    self.assertEqual(
      cache_elements(alone(attention, 40)) * 5, cache_elements(shape)
    )

  def test_scaling_book_quiz(self):
    """30B in int8, 16 TPU v5e, 819 MB a cache: chapter 7, the pop quiz."""
    chip = dataclasses.replace(V5E, bandwidth=8.1e11)
    for batch, ms, bound in ((4, 2.5, 'weights'), (256, 21, 'cache')):
      step = Step(
        chip, batch, 30e9 / 16, 2 * batch * 30e9 / 16, batch * 819e6 / 16, 0
      )
      self.assertAlmostEqual(step.seconds * 1e3, ms, delta=0.1)
      self.assertEqual(step.bound, bound)
    self.assertGreater(step.parts['compute'], step.parts['weights'])

  def test_scaling_book_caches(self):
    """LLaMA-3-70B, 16 TPU v5e, 8k tokens: chapter 8, 43 caches in bf16.

    The book divides 116 GB by 2.68 GB a cache. Ours are 40, for three reasons:
    70.55e9 parameters for 70e9, key and value projections of 8 heads that stand
    twice on 16 devices, and whole sequences: two devices share a head's. By
    heads alone the caches stand twice too.
    """
    shape = published('llama3-70b').shape
    spread = costs.max_batch(shape, Placement(V5E, 16, split='batch'), 8192)
    self.assertEqual(spread, 40)
    twice = 2 * 2 * 80 * 8192 * 8 * 128
    room = 16 * 16e9 - 2 * num_params(shape).total - twice
    self.assertEqual(room // costs.cache_bytes(shape, 8192) // 2 * 2, 40)
    self.assertEqual(costs.max_batch(shape, Placement(V5E, 16), 8192), 20)

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


VARIANTS = {
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
  | st.just({'num_heads': (3, 2), 'head_dim': 4}),
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
  options |= draw(VARIANTS[attention])
  options['num_layers'] = 2
  return options | {'attention': attention}


class RealModelsTest(parameterized.TestCase):
  @parameterized.parameters(*VARIANTS)
  def test_real_parameters_and_caches(self, attention):
    """Of parameter trees and allocated caches, part by part."""

    @given(options_of(attention), st.data())
    def check(options, data):
      config = DecoderConfig(**options)
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
      looked_up += config.max_len * (config.positions == 'learned')
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

  @parameterized.parameters(
    (grouped(512, 8, k=64),),
    (grouped(512, 8, 2, 64),),
    (GroupedConfig(512, 8, 1, 64, 96, use_bias=True),),
    (TiedConfig(512, 8, 2, 64),),
    (latent(8, 'absorbed', 512, None),),
    (latent(8, 'expanded', 512, 96),),
  )
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
    config = DecoderConfig(11, 13, d_model=12, num_heads=3, num_layers=2)
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
    wanted = costs.score_bytes(config.attention_config, 7, 5)
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
    config = DecoderConfig(
      11, 13, d_model=12, num_layers=2, num_heads=(3, 1), head_dim=4
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
    (lambda: Placement(CHIP, 0), 'devices=0'),
    (lambda: Placement(CHIP, cache_dtype='fp7'), "cache_dtype='fp7'.*'int4'"),
    (lambda: Placement(CHIP, split='rows'), "split='rows'"),
    (lambda: cache_elements(alone(grouped()), 0), 'length=0'),
    (lambda: costs.decode_flops(alone(grouped()), 5, 0), 'batch=0'),
    (
      lambda: costs.max_batch(alone(grouped()), Placement(CHIP), 5, -1),
      'cache_memory=-1',
    ),
  )
  def test_errors(self, call, message):
    """Name, value and remedy."""
    with self.assertRaisesRegex(ValueError, message):
      call()


class PlacementTest(parameterized.TestCase):
  @parameterized.parameters(
    # attention, devices, split, elements of 12 sequences' token on a device
    (grouped(n=8), 1, 'heads', 12 * 2 * 8 * 128),
    (grouped(n=8), 4, 'heads', 12 * 2 * 2 * 128),
    (grouped(n=8), 3, 'heads', 12 * 2 * 3 * 128),
    (grouped(n=8), 16, 'heads', 12 * 2 * 1 * 128),
    (grouped(n=8), 16, 'batch', 6 * 2 * 1 * 128),
    (grouped(n=8), 12, 'batch', 4 * 2 * 2 * 128),
    (grouped(n=1), 8, 'heads', 12 * 2 * 128),
    (grouped(n=1), 8, 'batch', 2 * 2 * 128),
    (latent(), 8, 'heads', 12 * 576),
    (latent(), 8, 'batch', 2 * 576),
    (TiedConfig(512, 8, 4, 64), 2, 'heads', 12 * (2 * 64 + 32)),
  )
  def test_cache_on_each_device(self, attention, devices, split, elements):
    """Heads are split, past n ways replicated; a latent stands on all."""
    place = Placement(CHIP, devices, cache_dtype='int4', split=split)
    got = costs.device_cache_bytes(alone(attention, 3), place, 5, 12)
    self.assertEqual(got, 3 * 5 * elements / 2)

  def test_weights_on_each_device(self):
    """By hand: heads, hidden features and vocabulary are split, no more."""
    d, h, n, k, f, m = 24, 6, 2, 4, 20, 30
    shape = stack(
      GroupedConfig(d, h, n, k, normalize_qk='rms'),
      3,
      vocab_size=m,
      mlp=Mlp(f, use_bias=True),
      positions=7,
    )
    layer = 2 * d * 2 * k + 2 * k + 2 * (d * k + k) + d + 2 * k + 2 * d
    layer += 3 * d * 7 + 2 * 7 + d
    wanted = 3 * layer + 2 * 10 * d + 7 * d + d
    for dtype, size in costs.BYTES.items():
      place = Placement(CHIP, 3, param_dtype=dtype)
      self.assertEqual(costs.weight_bytes(shape, place), size * wanted)
    tied = dataclasses.replace(shape, tied=True)
    self.assertEqual(
      costs.weight_bytes(tied, Placement(CHIP, 3)), 2 * (wanted - 10 * d)
    )

  def test_latents_weights_on_each_device(self):
    """What leads to the latents stands on every device."""
    d, h, q, r, p, k = 5120, 128, 1536, 512, 64, 128
    down = d * q + q + d * r + r + d * p
    up = q * h * (k + p) + r * h * 2 * k + h * k * d
    for devices in (1, 8, 128):
      got = costs.weight_bytes(alone(latent()), Placement(CHIP, devices))
      self.assertEqual(got, 2 * (down + up / devices + 2 * d))

  @parameterized.parameters(*PUBLISHED)
  def test_one_device_is_the_whole(self, name):
    """Weights of one device are all; a step's FLOPs are those without one."""
    shape = published(name).shape
    place = Placement(CHIP)
    self.assertAlmostEqual(
      costs.weight_bytes(shape, place) / 2 / num_params(shape).total, 1
    )
    step = decode_step(shape, place, 700, 3)
    self.assertAlmostEqual(
      (step.linear_flops + step.attention_flops)
      / costs.decode_flops(shape, 700, 3),
      1,
    )
    self.assertEqual(step.cache_bytes, costs.cache_bytes(shape, 700, 3))
    if not any(isinstance(x.mlp, Experts) for x in shape.layers):
      read = num_params(shape).active
      self.assertEqual(step.weight_bytes, 2 * read)

  def test_experts_of_a_step(self):
    """More sequences read more experts, never more than there are."""
    shape = published('deepseek-v3').shape
    place = Placement(CHIP, param_dtype='fp8')
    read = [decode_step(shape, place, 9, b).weight_bytes for b in (1, 8, 10**4)]
    params = num_params(shape)
    self.assertAlmostEqual(read[0] / params.active, 1)
    self.assertBetween(read[1], 3 * read[0], read[2] / 2)
    head = shape.vocab_size * shape.d_model
    self.assertAlmostEqual(read[2] / (params.total - head), 1)

  def test_naive_and_absorbed_latent(self):
    """One step of DeepSeek-V2's attention over s tokens, by hand.

    Expanded: 2 r h (k + v) FLOPs for each of s - 1 tokens' keys and values,
    which are written and read again, and (k + p) + v features a head.
    """
    s, h, r, p, k, v = 4096, 128, 512, 64, 128, 128
    place = Placement(CHIP)
    naive = decode_step(alone(latent(form='expanded')), place, s)
    absorbed = decode_step(alone(latent(form='absorbed')), place, s)
    self.assertEqual(absorbed.attention_flops, 2 * h * (2 * r + p) * s)
    self.assertEqual(
      naive.attention_flops,
      2 * h * (k + p + v) * s + 2 * r * h * (k + v) * (s - 1),
    )
    self.assertEqual(absorbed.cache_bytes, 2 * (r + p) * s)
    self.assertEqual(naive.cache_bytes, 2 * ((r + p) + 2 * h * (k + v)) * s)
    self.assertEqual(absorbed.linear_flops, naive.linear_flops)
    self.assertGreater(naive.seconds, 2 * absorbed.seconds)
    auto = decode_step(alone(latent()), place, s)
    self.assertEqual(auto, absorbed)
    # A whole sequence is read in the expanded form, whatever decoding does.
    self.assertEqual(
      costs.prefill_flops(alone(latent()), s),
      costs.prefill_flops(alone(latent(form='expanded')), s),
    )

  def test_step(self):
    """max(weights, compute) + max(cache, attention), and what bounds it."""
    machine = Hardware('x', 1e12, 1e9, 1e9)
    for sizes, seconds, bound in (
      ((5e9, 1e12, 2e9, 1e12), 7, 'weights'),
      ((5e9, 6e12, 2e9, 1e12), 8, 'compute'),
      ((1e9, 1e12, 9e9, 3e12), 10, 'cache'),
      ((1e9, 2e12, 1e9, 4e12), 6, 'attention'),
    ):
      step = Step(machine, 3, *sizes)
      self.assertAlmostEqual(step.seconds, seconds)
      self.assertEqual(step.bound, bound)
      self.assertAlmostEqual(step.tokens_per_second, 3 / seconds)

  def test_parallel_step(self):
    """8 devices take an eighth where all is split; MLA's cache is not."""
    shape = alone(grouped(n=8), 3, vocab_size=8, mlp=Mlp(1024))
    one, eight = (
      decode_step(shape, Placement(CHIP, x), 999, 16) for x in (1, 8)
    )
    for name in ('weight_bytes', 'linear_flops', 'cache_bytes'):
      self.assertEqual(getattr(one, name), 8 * getattr(eight, name), name)
    self.assertEqual(one.attention_flops, 8 * eight.attention_flops)
    self.assertAlmostEqual(one.seconds, 8 * eight.seconds)
    shape = alone(latent())
    one, eight = (
      decode_step(shape, Placement(CHIP, x), 999, 16) for x in (1, 8)
    )
    self.assertEqual(one.cache_bytes, eight.cache_bytes)
    self.assertEqual(one.attention_flops, 8 * eight.attention_flops)
    spread = decode_step(shape, Placement(CHIP, 8, split='batch'), 999, 16)
    self.assertEqual(one.cache_bytes, 8 * spread.cache_bytes)
    self.assertEqual(one.attention_flops, 8 * spread.attention_flops)

  def test_prefill_seconds(self):
    """Computing bounds long prompts, reading the weights short ones."""
    shape = published('llama3-8b').shape
    place = Placement(V5E, 8)
    flops = costs.prefill_flops(shape, 8192, 2)
    got = costs.prefill_seconds(shape, place, 8192, 2)
    self.assertAlmostEqual(got * 8 * V5E.flops / flops, 1, delta=1e-3)
    head = shape.vocab_size * shape.d_model
    read = 2 * (num_params(shape).total - head) / 8 / V5E.bandwidth
    got = costs.prefill_seconds(shape, place, 1)
    self.assertAlmostEqual(got / read, 1, delta=1e-3)

  @parameterized.parameters('heads', 'batch')
  def test_what_fits(self, split):
    """The largest that fits, and no more; nothing where weights do not."""
    shape = published('gpt2').shape
    place = Placement(dataclasses.replace(CHIP, memory=0.6e9), 3, split=split)
    left = place.hardware.memory - costs.weight_bytes(shape, place)

    def fits(length, batch):
      used = costs.device_cache_bytes(shape, place, length, batch)
      return used <= left

    batch = costs.max_batch(shape, place, 500)
    self.assertTrue(fits(500, batch))
    self.assertFalse(fits(500, batch + 1))
    length = costs.max_context(shape, place, 7)
    self.assertTrue(fits(length, 7))
    self.assertFalse(fits(length + 1, 7))
    small = Placement(dataclasses.replace(CHIP, memory=1e7), 3, split=split)
    self.assertEqual(costs.max_batch(shape, small, 500), 0)
    self.assertEqual(costs.max_context(shape, small), 0)
    local = alone(grouped(), windows=(5,))
    self.assertIsNone(costs.max_context(local, Placement(CHIP), 9))
    self.assertEqual(
      costs.max_context(local, Placement(CHIP), 1, 2 * 2 * 64 * 128 * 3), 3
    )

"""Times and bytes of devices against published tables and by hand."""

import dataclasses

from absl.testing import parameterized
from shapes import alone, grouped, latent

from mha_jax.analysis import costs
from mha_jax.analysis.costs import roofline
from mha_jax.analysis.costs.counts import cache_elements, num_params
from mha_jax.analysis.costs.hardware import Hardware
from mha_jax.analysis.costs.published import PUBLISHED, published
from mha_jax.analysis.costs.roofline import Placement, Step, decode_step
from mha_jax.analysis.costs.shape import Experts, Mlp, stack
from mha_jax.attention import GroupedConfig, TiedConfig

CHIP = Hardware('chip', 2e12, 1e10, 1e9)
V5E = Hardware('v5e', 197e12, 8.2e11, 16e9, "the scaling book's, chapter 7")
V4 = Hardware('v4', 275e12, 1.2e12, 32 * 2**30, 'Pope et al. 2022, section 4')


class PublishedTablesTest(parameterized.TestCase):
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
    got = roofline.max_context(
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
    spread = roofline.max_batch(shape, Placement(V5E, 16, split='batch'), 8192)
    self.assertEqual(spread, 40)
    twice = 2 * 2 * 80 * 8192 * 8 * 128
    room = 16 * 16e9 - 2 * num_params(shape).total - twice
    self.assertEqual(room // costs.cache_bytes(shape, 8192) // 2 * 2, 40)
    self.assertEqual(roofline.max_batch(shape, Placement(V5E, 16), 8192), 20)


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
    got = roofline.device_cache_bytes(alone(attention, 3), place, 5, 12)
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
      self.assertEqual(roofline.weight_bytes(shape, place), size * wanted)
    tied = dataclasses.replace(shape, tied=True)
    self.assertEqual(
      roofline.weight_bytes(tied, Placement(CHIP, 3)), 2 * (wanted - 10 * d)
    )

  def test_latents_weights_on_each_device(self):
    """What leads to the latents stands on every device."""
    d, h, q, r, p, k = 5120, 128, 1536, 512, 64, 128
    down = d * q + q + d * r + r + d * p
    up = q * h * (k + p) + r * h * 2 * k + h * k * d
    for devices in (1, 8, 128):
      got = roofline.weight_bytes(alone(latent()), Placement(CHIP, devices))
      self.assertEqual(got, 2 * (down + up / devices + 2 * d))

  @parameterized.parameters(*PUBLISHED)
  def test_one_device_is_the_whole(self, name):
    """Weights of one device are all; a step's FLOPs are those without one."""
    shape = published(name).shape
    place = Placement(CHIP)
    self.assertAlmostEqual(
      roofline.weight_bytes(shape, place) / 2 / num_params(shape).total, 1
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
    got = roofline.prefill_seconds(shape, place, 8192, 2)
    self.assertAlmostEqual(got * 8 * V5E.flops / flops, 1, delta=1e-3)
    head = shape.vocab_size * shape.d_model
    read = 2 * (num_params(shape).total - head) / 8 / V5E.bandwidth
    got = roofline.prefill_seconds(shape, place, 1)
    self.assertAlmostEqual(got / read, 1, delta=1e-3)

  @parameterized.parameters('heads', 'batch')
  def test_what_fits(self, split):
    """The largest that fits, and no more; nothing where weights do not."""
    shape = published('gpt2').shape
    place = Placement(dataclasses.replace(CHIP, memory=0.6e9), 3, split=split)
    left = place.hardware.memory - roofline.weight_bytes(shape, place)

    def fits(length, batch):
      used = roofline.device_cache_bytes(shape, place, length, batch)
      return used <= left

    batch = roofline.max_batch(shape, place, 500)
    self.assertTrue(fits(500, batch))
    self.assertFalse(fits(500, batch + 1))
    length = roofline.max_context(shape, place, 7)
    self.assertTrue(fits(length, 7))
    self.assertFalse(fits(length + 1, 7))
    small = Placement(dataclasses.replace(CHIP, memory=1e7), 3, split=split)
    self.assertEqual(roofline.max_batch(shape, small, 500), 0)
    self.assertEqual(roofline.max_context(shape, small), 0)
    local = alone(grouped(), windows=(5,))
    self.assertIsNone(roofline.max_context(local, Placement(CHIP), 9))
    self.assertEqual(
      roofline.max_context(local, Placement(CHIP), 1, 2 * 2 * 64 * 128 * 3), 3
    )

  @parameterized.parameters(
    (lambda: Placement(CHIP, 0), 'devices=0'),
    (lambda: Placement(CHIP, cache_dtype='fp7'), "cache_dtype='fp7'.*'int4'"),
    (lambda: Placement(CHIP, split='rows'), "split='rows'"),
    (
      lambda: roofline.max_batch(alone(grouped()), Placement(CHIP), 5, -1),
      'cache_memory=-1',
    ),
  )
  def test_errors(self, call, message):
    """Name, value and remedy."""
    with self.assertRaisesRegex(ValueError, message):
      call()

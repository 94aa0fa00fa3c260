"""Published models against what their makers state."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import mha_jax.linen as mha
from mha_jax.analysis import costs
from mha_jax.analysis.costs.published import PUBLISHED, published
from mha_jax.attention import Rope

STATED = {
  # Total parameters, and those that are no embeddings, where they are told.
  'gpt2': (124e6, None),  # github.com/openai/gpt-2, README
  'bert-base': (110e6, None),  # Devlin et al. 2018, section 3
  'llama2-7b': (6.7e9, None),  # Touvron et al. 2023a, table 2, same sizes
  'llama2-13b': (13.0e9, None),  # likewise
  'llama2-70b': (69e9, None),  # huggingface.co/meta-llama/Llama-2-70b-hf
  'llama3-8b': (8.03e9, None),  # huggingface.co/meta-llama/Meta-Llama-3-8B
  'llama3-70b': (70.6e9, None),  # and -70B
  'mistral-7b': (7.24e9, None),  # huggingface.co/mistralai/Mistral-7B-v0.1
  'gemma2-9b': (917_962_752 + 8_324_201_984, 8_324_201_984),  # Gemma 2, table 2
  'gemma3-12b': (1_012e6 + 10_759e6, 10_759e6),  # Gemma 3, table 1
  'qwen2.5-7b': (7.61e9, 6.53e9),  # huggingface.co/Qwen/Qwen2.5-7B
  'qwen3-8b': (8.2e9, 6.95e9),  # huggingface.co/Qwen/Qwen3-8B
  'deepseek-v2-lite': (15.7e9, None),  # DeepSeek-V2, appendix B
  'deepseek-v2': (236e9, None),  # DeepSeek-V2, abstract
  'deepseek-v3': (671e9, None),  # DeepSeek-V3, abstract
  'kimi-k2': (1.04e12, None),  # Kimi K2, table 2: 1.3 % above its config's
}
MISSING = {
  # What the shape lacks of the checkpoint, or has beside it.
  'bert-base': -(768 * 768 + 768 + 2 * 768),  # pooler, segments
  'qwen2.5-7b': 28 * 3584,  # biases of the output projections
  'deepseek-v3': -58 * 256,  # biases of the routers
  'kimi-k2': -60 * 384,
}


class PublishedTest(parameterized.TestCase):
  @parameterized.parameters(*PUBLISHED)
  def test_params(self, name):
    """Within 2 % of what the makers state, and exactly the checkpoint's."""
    model = published(name)
    params = costs.num_params(model.shape)
    total, without = STATED[name]
    self.assertAlmostEqual(params.total / total, 1, delta=0.02)
    if without is not None:
      got = params.total - params.embeddings
      self.assertAlmostEqual(got / without, 1, delta=0.002)
    self.assertEqual(params.total - model.params, MISSING.get(name, 0))

  @parameterized.parameters(
    # DeepSeek-V3's README_WEIGHTS has 36.7, Kimi K2's table 2 has 32.6, which
    # the input embeddings are a part of.
    ('deepseek-v2-lite', 2.4),
    ('deepseek-v2', 21),
    ('deepseek-v3', 36.7),
    ('kimi-k2', 32.6),
  )
  def test_active(self, name, billions):
    model = published(name)
    active = costs.num_params(model.shape).active
    self.assertAlmostEqual(active / 1e9 / billions, 1, delta=0.03)
    self.assertAlmostEqual(active / model.active, 1, delta=0.03)

  @parameterized.parameters(
    # Elements of cache a token.
    ('gpt2', 2 * 12 * 768),
    ('llama2-7b', 2 * 32 * 4096),
    ('llama2-70b', 2 * 80 * 8 * 128),
    ('llama3-8b', 2 * 32 * 8 * 128),
    ('mistral-7b', 2 * 32 * 8 * 128),
    ('gemma2-9b', 2 * 42 * 8 * 256),
    ('gemma3-12b', 2 * 48 * 8 * 256),
    ('qwen2.5-7b', 2 * 28 * 4 * 128),
    ('qwen3-8b', 2 * 36 * 8 * 128),
    ('deepseek-v2-lite', 27 * 576),
    ('deepseek-v2', 60 * 576),
    ('deepseek-v3', 61 * 576),
    ('kimi-k2', 61 * 576),
  )
  def test_cache(self, name, elements):
    self.assertEqual(costs.cache_elements(published(name).shape), elements)

  @parameterized.parameters(
    # Layers without and with a window; the bytes at 32k tokens in bf16.
    ('mistral-7b', 0, 32, 4096),
    ('gemma2-9b', 21, 21, 4096),
    ('gemma3-12b', 8, 40, 1024),
  )
  def test_windows(self, name, whole, local, window):
    shape = published(name).shape
    each = 2 * 2 * 8 * shape.layers[0].attention.head_dim
    wanted = each * (whole * 32_768 + local * window)
    self.assertEqual(costs.cache_bytes(shape, 32_768), wanted)
    self.assertEqual(shape.layers[0].window, window)

  def test_rotations(self):
    """Gemma 3 turns local and global layers apart; YaRN sharpens the scores."""
    local, *_, whole = published('gemma3-12b').shape.layers
    self.assertEqual(local.attention.rope.theta, 10_000)
    self.assertEqual(whole.attention.rope.theta, 1e6)
    np.testing.assert_allclose(
      whole.attention.rope.frequencies(256) * 8,
      Rope(1e6).frequencies(256),
    )
    for name, factor in (('deepseek-v2', 0.707), ('deepseek-v3', 1)):
      scale = published(name).shape.layers[0].attention.scale
      sharper = (1 + 0.1 * factor * math.log(40)) ** 2
      self.assertAlmostEqual(scale * math.sqrt(192), sharper)

  @parameterized.parameters(*PUBLISHED)
  def test_attention_builds(self, name):
    """The library's module has as many parameters; the source is told."""
    model = published(name)
    self.assertEqual(model.name, name)
    self.assertNotEmpty(model.source)
    for layer, _ in model.shape.groups:
      attention = layer.attention
      x = jax.ShapeDtypeStruct((1, 3, attention.d_model), jnp.bfloat16)
      tree = jax.eval_shape(mha.Attention(attention).init, jax.random.key(0), x)
      count = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
      self.assertEqual(count, costs.layer_params(layer).attention)
    self.assertGreaterEqual(model.context, 512)
    self.assertIn(model.shape.positions, (0, model.context))

  @parameterized.parameters(
    ('Llama-3 70B', 'llama3-70b'),
    ('GPT2', 'gpt2'),
    ('qwen25_7b', 'qwen2.5-7b'),
    ('DeepSeek V3', 'deepseek-v3'),
  )
  def test_spellings(self, text, name):
    self.assertIs(published(text), PUBLISHED[name])

  @parameterized.parameters(
    ('llama3-7b', "model='llama3-7b' is unknown; nearest: llama3-70b"),
    ('deepseek-v4', 'nearest: deepseek-v'),
    ('x', 'nearest: gpt2, .*, kimi-k2'),
  )
  def test_unknown(self, text, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      published(text)
    self.assertNotIn('\n', str(caught.exception))

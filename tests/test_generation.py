"""Generation against a loop over full passes, and sampling against NumPy."""

import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from oracles import normal

from mha_jax import generation
from mha_jax.decoder import DecoderLM, decoder_config, generate

M, B, T, NEW = 11, 3, 5, 4
LENGTHS = np.array([5, 2, 3])


def make(**options):
  config = decoder_config(
    vocab_size=M, max_len=T + NEW, d_model=12, num_layers=2, **options
  )
  model = DecoderLM(config)
  prompts = np.random.default_rng(0).integers(0, M, (B, T))
  variables = jax.jit(model.init)(jax.random.key(0), prompts)
  return model, variables, prompts


def by_hand(model, variables, prompt, new: int = NEW) -> list[int]:
  """The likeliest tokens, one full pass for each."""
  apply, tokens = jax.jit(model.apply), list(prompt)
  for _ in range(new):
    row = np.zeros((1, T + NEW), np.int32)
    row[0, : len(tokens)] = tokens
    logits = apply(variables, row)
    tokens.append(int(np.argmax(logits[0, len(tokens) - 1])))
  return tokens[len(prompt) :]


class GreedyTest(parameterized.TestCase):
  @parameterized.parameters(
    {'num_heads': 4},
    {
      'attention': 'gqa',
      'num_heads': 6,
      'num_kv_heads': 2,
      'positions': 'rope',
      'mlp_dim': 7,
    },
    {
      'attention': 'mla',
      'num_heads': 3,
      'kv_lora_rank': 5,
      'positions': 'rope',
    },
  )
  def test_rows_of_other_lengths(self, **options):
    """Each row continues as it would alone, whatever pads it."""
    model, variables, prompts = make(**options)
    got, count = generate(
      model, variables, prompts, lengths=LENGTHS, max_new_tokens=NEW
    )
    for row in range(B):
      prompt = prompts[row, : LENGTHS[row]]
      self.assertEqual(got[row].tolist(), by_hand(model, variables, prompt))
    np.testing.assert_array_equal(count, NEW)

  def test_stop_tokens(self):
    """A row ends with its stop token; padding follows, others go on."""
    model, variables, prompts = make(num_heads=4)
    rows = [by_hand(model, variables, prompt) for prompt in prompts]
    stop = rows[0][1]
    got, count = generate(
      model,
      variables,
      prompts,
      max_new_tokens=NEW,
      stop_tokens=(stop,),
      pad_token=M,
    )
    for row, tokens in enumerate(rows):
      n = tokens.index(stop) + 1 if stop in tokens else NEW
      self.assertEqual(got[row].tolist(), tokens[:n] + [M] * (NEW - n))
      self.assertEqual(count[row], n)

  def test_continues_a_cache(self):
    """In two calls as in one; the cache that goes in is donated."""
    model, variables, prompts = make(num_heads=4)
    wanted, _ = generate(model, variables, prompts, max_new_tokens=NEW)
    cache = model.init_cache(B, T + NEW)
    first, _, after = generate(
      model, variables, prompts, max_new_tokens=2, cache=cache
    )
    self.assertTrue(cache[0].entries[0].is_deleted())
    second, _, _ = generate(
      model, variables, first[:, -1:], max_new_tokens=2, cache=after
    )
    np.testing.assert_array_equal(jnp.concatenate([first, second], 1), wanted)

  @parameterized.parameters(False, True)
  def test_one_compilation(self, passed):
    """Prompts and lengths of one padded shape are one program."""
    model, variables, prompts = make(num_heads=4)
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(n=1)(generation._generate.__wrapped__)
    names = ('model', 'choice', 'capacity')
    jitted = jax.jit(counted, static_argnames=names)
    with mock.patch.object(generation, '_generate', jitted):
      # Learned positions suffice for the longest prompt, not for T tokens.
      for lengths in ([4, 2, 3], [1, 2, 3]):
        generate(
          model,
          variables,
          np.roll(prompts, 1, axis=0),
          lengths=lengths,
          max_new_tokens=NEW + 2,
          cache=model.init_cache(B, window=3) if passed else None,
        )


class SamplingTest(parameterized.TestCase):
  @parameterized.product(top_k=(None, 1, 4, 50), top_p=(1.0, 0.6, 0.05))
  def test_restrict(self, top_k, top_p):
    """Token by token: the k likeliest, then up to probability p."""
    logits = normal(0, 3, M).astype(np.float32)
    got = generation.restrict(jnp.asarray(logits), top_k, top_p)
    for row, kept in zip(logits, np.asarray(got), strict=True):
      order = np.argsort(-row)[:top_k]
      p = np.exp(row[order]) / np.sum(np.exp(row[order]))
      n = int(np.sum(np.cumsum(p) - p < top_p))
      wanted = np.full(M, -np.inf, np.float32)
      wanted[order[:n]] = row[order[:n]]
      np.testing.assert_array_equal(kept, wanted)

  def test_draws(self):
    """One key draws one text; a low temperature is greedy; top_k holds."""
    model, variables, prompts = make(num_heads=4)
    options = {'max_new_tokens': NEW}
    greedy, _ = generate(model, variables, prompts, **options)

    def draw(seed, **more):
      tokens, _ = generate(
        model, variables, prompts, key=jax.random.key(seed), **options | more
      )
      return np.asarray(tokens)

    np.testing.assert_array_equal(draw(0, temperature=1e-4), greedy)
    np.testing.assert_array_equal(draw(0, temperature=9.0, top_k=1), greedy)
    a, b = draw(0, temperature=5.0), draw(1, temperature=5.0)
    np.testing.assert_array_equal(a, draw(0, temperature=5.0))
    self.assertFalse(np.array_equal(a, b))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'capacity': 7}, 'capacity=7 is less than the 8 tokens of prompt and'),
    ({'lengths': [1, 2]}, r'lengths=\[1, 2\] must be 3 numbers from 1 to t=5'),
    ({'lengths': [0, 1, 1]}, r'lengths=\[0, 1, 1\] must be 3 numbers'),
    ({'prompts': np.ones(3, int)}, r'prompts must be integers of shape \(b'),
    ({'max_new_tokens': 0}, 'max_new_tokens=0 must be a positive'),
    ({'temperature': -1.0}, 'temperature=-1.0 must lie in'),
    ({'temperature': 1.0}, 'key=None with temperature=1.0: pass a random key'),
    ({'top_k': 0}, 'top_k=0 must be a positive'),
    ({'top_p': 0.0}, 'top_p=0.0 must lie in'),
  )
  def test_before_tracing(self, changes, message):
    """Refused with the name and the value before anything is traced."""
    prompts = np.ones((B, T), int)
    arguments = {'prompts': prompts, 'max_new_tokens': NEW} | changes
    with (
      mock.patch.object(generation, '_generate', side_effect=AssertionError),
      self.assertRaisesRegex(ValueError, message),
    ):
      generate(None, None, **arguments)

  def test_learned_positions(self):
    """Past max_len there are none: the likeliest token of NaN would be 0."""
    model = DecoderLM(decoder_config(vocab_size=M, max_len=9))
    ring = model.init_cache(B, window=3)
    used = tuple(
      dataclasses.replace(layer, lengths=np.array([4, 0, 0])) for layer in ring
    )
    for cache, new in (None, NEW + 2), (ring, NEW + 2), (used, 2):
      self.check(model, cache, new, 'max_len of learned positions=9 is less')

  def test_a_full_cache(self):
    """A cache that is passed in must have room too."""
    model = DecoderLM(decoder_config(vocab_size=M, max_len=9))
    cache = model.init_cache(B, T)
    self.check(model, cache, 2, 'capacity of the cache=5 is less')

  @parameterized.parameters(
    (lambda cache: cache[0], 'cache must be a tuple of caches.* got KVCache'),
    (lambda cache: (1, 2), 'cache must be a tuple of caches.* got tuple'),
    (lambda cache: cache, r'cache has lengths of shape \(4,\) for 3 prompts'),
  )
  def test_another_cache(self, change, message):
    """A cache must be the model's, with a row for each prompt."""
    model = DecoderLM(decoder_config(vocab_size=M, max_len=9))
    self.check(model, change(model.init_cache(B + 1, 9)), 2, message)

  def check(self, model, cache, new, message):
    prompts = np.ones((B, T), int)
    with (
      mock.patch.object(generation, '_generate', side_effect=AssertionError),
      self.assertRaisesRegex(ValueError, message),
    ):
      generate(model, None, prompts, max_new_tokens=new, cache=cache)

  @parameterized.parameters(
    ({'prompts': [[1, M]]}, r'prompts from 1 to 11 must lie in \[0, 10\]'),
    ({'prompts': [[-1, 2]]}, 'prompts from -1 to 2'),
    (
      {'prompts': np.zeros((0, 3), int)},
      r'prompts of shape \(0, 3\) must hold',
    ),
    ({'lengths': [1.5]}, r'lengths=\[1.5\] must be 1 numbers'),
    ({'stop_tokens': 3}, 'stop_tokens=3 must be integers'),
    ({'stop_tokens': (2.5,)}, 'stop_tokens='),
    ({'pad_token': 0.5}, 'pad_token='),
  )
  def test_tokens(self, options, message):
    """Tokens are whole numbers of the vocabulary."""
    model, variables, _ = make(num_heads=4)
    options = {'prompts': [[1, 2]]} | options
    prompts = options.pop('prompts')
    with self.assertRaisesRegex(ValueError, message):
      generate(model, variables, prompts, max_new_tokens=2, **options)

  def test_padding_is_no_token(self):
    """What pads a prompt may lie outside the vocabulary."""
    model, variables, _ = make(num_heads=4)
    f = functools.partial(
      generate, model, variables, lengths=[1, 2], max_new_tokens=2
    )
    got, wanted = f([[3, -1], [4, 5]]), f([[3, 0], [4, 5]])
    np.testing.assert_array_equal(got[0], wanted[0])

  def test_narrow_prompts(self):
    """Tokens that do not fit the prompts' dtype come out whole."""
    config = decoder_config(vocab_size=300, max_len=9, d_model=8, num_heads=2)
    model, prompts = DecoderLM(config), np.array([[1, 2, 3], [4, 5, 6]])
    variables = model.init(jax.random.key(0), prompts)
    wanted, _ = generate(model, variables, prompts, max_new_tokens=5)
    self.assertGreater(int(wanted.max()), 127)
    got, _ = generate(
      model, variables, prompts.astype(np.int8), max_new_tokens=5
    )
    np.testing.assert_array_equal(got, wanted)

  def test_nothing_is_cut_without_top_p(self):
    """Unlikely tokens stay possible, however sums of floats are rounded."""
    logits = jnp.asarray(4 * normal(0, 32_000), jnp.float32)
    self.assertTrue(np.all(np.isfinite(generation.restrict(logits, None))))

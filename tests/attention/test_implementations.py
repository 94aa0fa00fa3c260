"""Who serves which call, and why not: implementations.choose, fused kernels."""

import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from oracles import assert_close, normal

from mha_jax.attention import (
  Dropout,
  heads,
  implementations,
  masks,
  multihead_attention,
)

GPU = SimpleNamespace(platform='gpu', compute_capability='9.0')
OLD_GPU = SimpleNamespace(platform='gpu', compute_capability='7.5')
AMD = SimpleNamespace(platform='gpu', compute_capability='gfx942')
TPU = SimpleNamespace(platform='tpu')
CPU = SimpleNamespace(platform='cpu')


def call(**changes) -> implementations.Traits:
  """A long causal call in bfloat16, which every implementation serves."""
  standard = {
    't': 2048,
    's': 2048,
    'widths': ((128,), 128),
    'dtype': jnp.bfloat16,
    'mask': masks.causal(),
  }
  return implementations.Traits(**standard | changes)


def on(device):
  return mock.patch.object(jax, 'devices', return_value=[device])


CHOSEN = (
  # The device, what is unlike the standard call, what 'auto' takes.
  (CPU, {}, 'blockwise'),
  (GPU, {}, 'cudnn'),
  (OLD_GPU, {}, 'blockwise'),
  (AMD, {}, 'blockwise'),
  (TPU, {}, 'splash'),
  (GPU, {'mask': None}, 'cudnn'),
  (GPU, {'mask': masks.causal() & masks.window(99, None)}, 'cudnn'),
  (GPU, {'mask': masks.window(9, 9)}, 'blockwise'),
  (TPU, {'mask': masks.window(9, 9)}, 'splash'),
  (GPU, {'mask': masks.lengths([4])}, 'blockwise'),
  (GPU, {'mask': masks.causal() | masks.window(1, 1)}, 'blockwise'),
  (GPU, {'s': 4096}, 'blockwise'),
  (GPU, {'dtype': jnp.float32}, 'blockwise'),
  (TPU, {'dtype': jnp.float32}, 'splash'),
  (GPU, {'widths': ((128, 64), 128)}, 'blockwise'),
  (GPU, {'widths': ((128,), 64)}, 'blockwise'),
  (GPU, {'widths': ((60,), 60)}, 'blockwise'),
  (TPU, {'widths': ((64,), 64)}, 'blockwise'),
  (TPU, {'t': 2000, 's': 2000}, 'blockwise'),
  (GPU, {'given': ('bias',)}, 'blockwise'),
  (GPU, {'given': ('dropout',)}, 'blockwise'),
  (GPU, {'given': ('return_residual',)}, 'blockwise'),
  (GPU, {'given': ('return_weights',)}, 'exact'),
  (GPU, {'t': 64, 's': 64}, 'exact'),
  (CPU, {'t': 64, 's': 1024}, 'blockwise'),
  (CPU, {'t': 16384, 's': 64}, 'blockwise'),
  (CPU, {'t': 0}, 'exact'),
  (CPU, {'t': 1}, 'blockwise'),
  (GPU, {'t': 1}, 'exact'),
  (GPU, {'given': ('k and v with different numbers of heads',)}, 'blockwise'),
)
REFUSED = (
  # The device, what is asked for, what is unlike the standard call, why not.
  (CPU, 'cudnn', {}, 'wants an NVIDIA GPU'),
  (CPU, 'splash', {}, 'wants a TPU'),
  (GPU, 'cudnn', {'given': ('bias',)}, 'takes no bias'),
  (GPU, 'cudnn', {'s': 4096}, 'as many queries as keys, not 2048 and 4096'),
  (GPU, 'cudnn', {'widths': ((8, 8), 8)}, 'no keys in parts'),
  (GPU, 'cudnn', {'mask': masks.lengths([3])}, 'but causal and window'),
  (GPU, 'cudnn', {'mask': masks.window(9, 9)}, 'end at the query'),
  (GPU, 'cudnn', {'dtype': jnp.float32}, 'bfloat16 or float16'),
  (GPU, 'cudnn', {'widths': ((60,), 60)}, 'not 60 and 60'),
  (TPU, 'splash', {'t': 130, 's': 130}, 't=130'),
  (TPU, 'splash', {'dtype': jnp.float16}, 'bfloat16 or float32'),
  (CPU, 'blockwise', {'given': ('return_weights',)}, 'return_weights'),
  (TPU, 'splash', {'given': ('return_weights',)}, 'return_weights'),
)


class AutoTest(parameterized.TestCase):
  def test_every_implementation_has_a_row(self):
    """Each is taken somewhere, and all but the exact form refused somewhere."""
    names = {*implementations.NAMES} - {'auto'}
    self.assertEqual({name for _, _, name in CHOSEN}, names)
    self.assertEqual({x[1] for x in REFUSED}, names - {'exact'})
    self.assertEqual({*implementations.OURS, *implementations.KERNELS}, names)

  @parameterized.parameters(*CHOSEN)
  def test_auto(self, device, changes, wanted):
    """A fused kernel where it keeps the contracts, blocks for long calls."""
    with on(device):
      self.assertEqual(implementations.choose('auto', call(**changes)), wanted)

  @parameterized.parameters(*REFUSED)
  def test_a_forced_choice_says_why_not(self, device, name, changes, reason):
    """And what to do instead."""
    with (
      on(device),
      self.assertRaisesRegex(
        ValueError, f"(?s)implementation='{name}' cannot.*{reason}.*use 'auto'"
      ),
    ):
      implementations.choose(name, call(**changes))

  def test_of_several_devices(self):
    """Splash attention cannot be partitioned; the default device decides."""
    with on(TPU), mock.patch.object(jax, 'device_count', return_value=4):
      self.assertEqual(implementations.choose('auto', call()), 'blockwise')
    with on(GPU), jax.default_device(jax.local_devices(backend='cpu')[0]):
      self.assertEqual(implementations.choose('auto', call()), 'blockwise')

  def test_can_be_asked(self):
    """Which implementation a call takes, by its arguments."""
    x = jnp.zeros((1, 2, 1024, 8))
    of = heads.implementation_of
    self.assertEqual(of(x, x, x, mask=masks.causal()), 'blockwise')
    self.assertEqual(of(x, x, x, return_weights=True), 'exact')
    self.assertEqual(of(x[:, :, :9], x[:, :, :9], x[:, :, :9]), 'exact')
    self.assertEqual(of(x, x, x, implementation='exact'), 'exact')

  @parameterized.parameters(
    ({'bias': np.zeros((1, 1, 9, 9), np.float32)}, 'bias'),
    ({'logit_softcap': 2.0}, 'logit_softcap'),
    ({'query_positions': np.arange(9)}, 'query_positions'),
    ({'scale': jnp.asarray(0.5)}, 'scale of an array'),
    ({'dropout': Dropout(jax.random.key(0), 0.1)}, 'dropout'),
  )
  def test_what_is_given_is_seen(self, options, name):
    """Every argument that a kernel cannot take reaches the choice."""
    x = jnp.zeros((1, 2, 9, 8))
    with self.assertRaisesRegex(ValueError, f'takes no {name}'):
      multihead_attention(x, x, x, implementation='cudnn', **options)

  def test_heads_and_rates_are_seen(self):
    """A rate of 0 is no dropout; a value that all heads share is noticed."""
    x = jnp.zeros((1, 2, 9, 8), jnp.bfloat16)
    off = Dropout(jax.random.key(0), 0.0)
    of = functools.partial(heads.implementation_of, implementation='cudnn')
    with on(GPU):
      self.assertEqual(of(x, x, x, dropout=off), 'cudnn')
      with self.assertRaisesRegex(ValueError, 'different numbers of heads'):
        of(x, x, x[:, :1])


class KernelTest(parameterized.TestCase):
  @parameterized.parameters(
    (masks.causal(), (None, 0)),
    (masks.causal() & masks.window(70, None), (70, 0)),
  )
  def test_splash(self, mask, reach):
    """Splash attention, interpreted: outputs and gradients of GQA."""
    self.assertEqual(masks.reach(mask), reach)
    q, cotangent = (normal(i, 1, 2, 128, 128) for i in (0, 1))
    k, v = (normal(i, 1, 1, 128, 128) for i in (2, 3))
    q, k, v, cotangent = (x.astype(np.float32) for x in (q, k, v, cotangent))

    def kernel(q, k, v):
      return implementations.splash(q, k, v, 128**-0.5, reach, interpret=True)

    def exact(q, k, v):
      return multihead_attention(q, k, v, mask=mask, implementation='exact')

    wanted, got = (jax.vjp(f, q, k, v) for f in (exact, kernel))
    assert_close(got[0], wanted[0], 1e-5)
    assert_close(got[1](cotangent), wanted[1](cotangent), 1e-5)

  @parameterized.parameters(
    (None, {'is_causal': False, 'local_window_size': None}),
    (masks.causal(), {'is_causal': True, 'local_window_size': None}),
    (
      masks.causal() & masks.window(9, None),
      {'is_causal': True, 'local_window_size': (9, 0)},
    ),
  )
  def test_cudnn(self, mask, wanted):
    """What goes to cuDNN; without a GPU its XLA twin computes it."""
    q = jnp.asarray(normal(0, 2, 4, 24, 16), jnp.bfloat16)
    k, v = (jnp.asarray(normal(i, 2, 2, 24, 16), jnp.bfloat16) for i in (1, 2))
    real, seen = jax.nn.dot_product_attention, {}

    def twin(*args, implementation, **options):
      seen.update(options, implementation=implementation)
      return real(*args, implementation='xla', **options)

    with on(GPU), mock.patch.object(jax.nn, 'dot_product_attention', twin):
      got = multihead_attention(
        q, k, v, mask=mask, scale=0.3, implementation='cudnn'
      )
    exact = multihead_attention(
      q, k, v, mask=mask, scale=0.3, implementation='exact'
    )
    assert_close(got, exact, 2e-2)
    self.assertContainsSubset(
      (wanted | {'scale': 0.3, 'implementation': 'cudnn'}).items(), seen.items()
    )

"""Scaled RoPE against the papers' formulas, pair by pair."""

import math

import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from oracles import assert_close, normal

from mha_jax.attention import (
  LinearScaling,
  Llama3Scaling,
  Rope,
  YarnScaling,
)

SIZE, THETA = 46, 10_000.0
PLAIN = [THETA ** (-2 * i / SIZE) for i in range(SIZE // 2)]


def llama3(factor, low, high, length) -> list[float]:
  """Wave by wave: long, short or between."""
  scaled = []
  for w in PLAIN:
    wavelength = 2 * math.pi / w
    if wavelength > length / low:
      scaled.append(w / factor)
    elif wavelength < length / high:
      scaled.append(w)
    else:
      smooth = (length / wavelength - low) / (high - low)
      scaled.append((1 - smooth) * w / factor + smooth * w)
  return scaled


def yarn(factor, length, fast, slow, truncate) -> list[float]:
  """Pair by pair, from the pairs that turn `fast` and `slow` times."""
  low, high = (
    SIZE * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(THETA))
    for turns in (fast, slow)
  )
  if truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, SIZE - 1)
  scaled = []
  for i, w in enumerate(PLAIN):
    share = min(max((i - low) / (high - low), 0), 1)
    scaled.append(w * (1 - share) + w / factor * share)
  return scaled


class FrequenciesTest(parameterized.TestCase):
  def check(self, scaling, wanted):
    got = Rope(THETA, scaling=scaling).frequencies(SIZE)
    np.testing.assert_allclose(got, wanted, rtol=1e-13)

  def test_linear(self):
    """w / factor."""
    self.check(LinearScaling(4.0), np.array(PLAIN) / 4)

  @parameterized.parameters((8.0, 1.0, 4.0, 512), (3.0, 0.5, 7.0, 8192))
  def test_llama3(self, *options):
    """Long waves interpolated, short kept, smooth between."""
    self.check(Llama3Scaling(*options), llama3(*options))

  @parameterized.product(
    factor=(4.0, 40.0),
    length=(64, 512, 4096),
    betas=((32.0, 1.0), (16.0, 3.0)),
    truncate=(True, False),
  )
  def test_yarn(self, factor, length, betas, truncate):
    """Interpolation by parts."""
    scaling = YarnScaling(factor, length, *betas, truncate=truncate)
    self.check(scaling, yarn(factor, length, *betas, truncate))

  def test_equal_bounds(self):
    """Bounds that fall together make a step, not 0 / 0."""
    scaling = YarnScaling(4.0, 6, beta_fast=1.0, beta_slow=0.999)
    got = Rope(THETA, scaling=scaling).frequencies(SIZE)
    self.assertTrue(np.all(np.isfinite(got)))
    np.testing.assert_allclose(got[1:], np.array(PLAIN[1:]) / 4)

  @parameterized.parameters(
    ({}, 1 + 0.1 * math.log(40), 1.0),
    ({'attention_factor': 0.7}, 0.7, 1.0),
    ({'mscale': 0.707}, 1 + 0.1 * math.log(40), 1.0),
    (
      {'mscale': 0.5, 'mscale_all_dim': 2.0},
      (1 + 0.05 * math.log(40)) / (1 + 0.2 * math.log(40)),
      (1 + 0.2 * math.log(40)) ** 2,
    ),
  )
  def test_factors(self, options, rotary, score):
    """Of cosine and sine, and of latent attention's scores."""
    scaling = YarnScaling(40.0, 4096, **options)
    self.assertAlmostEqual(scaling.rotary_factor, rotary, 12)
    self.assertAlmostEqual(scaling.score_factor, score, 12)
    self.assertEqual(Rope(scaling=scaling).score_factor, scaling.score_factor)
    self.assertEqual(Rope().score_factor, 1.0)


class RotationTest(oracles.X64TestCase):
  @parameterized.parameters('half', 'interleaved')
  def test_frequencies_and_factor_are_used(self, layout):
    """Angles turn with the scaled frequencies; lengths grow by the factor."""
    x, positions = normal(0, 5, SIZE), np.array([0, 1, 7, 400, 9001])
    scaling = YarnScaling(4.0, 512)
    rope = Rope(THETA, layout, scaling)
    got = rope.rotate(jnp.asarray(x), jnp.asarray(positions))
    half = SIZE // 2
    pairs = np.arange(SIZE).reshape(2, half)
    if layout == 'interleaved':
      pairs = np.arange(SIZE).reshape(half, 2).T
    turn = np.exp(1j * positions[:, None] * rope.frequencies(SIZE))
    z = (x[:, pairs[0]] + 1j * x[:, pairs[1]]) * turn * scaling.rotary_factor
    wanted = np.empty_like(x)
    wanted[:, pairs[0]], wanted[:, pairs[1]] = z.real, z.imag
    assert_close(got, wanted, 1e-11)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: LinearScaling(0.5), r'factor=0.5 must lie in \[1,'),
    (lambda: Llama3Scaling(low_freq_factor=0.0), 'low_freq_factor=0.0 must'),
    (
      lambda: Llama3Scaling(low_freq_factor=4.0),
      'high_freq_factor=4.0 must be above low_freq_factor=4.0',
    ),
    (lambda: YarnScaling(4.0, 0), 'original_max_position_embeddings=0 must be'),
    (
      lambda: YarnScaling(4.0, 64, beta_fast=0.5),
      'beta_fast=0.5 must be at least beta_slow=1.0',
    ),
    (lambda: YarnScaling(4.0, 64, mscale=-1.0), 'mscale=-1.0 must lie in'),
    (
      lambda: Rope(1.0, scaling=YarnScaling(4.0, 64)).frequencies(4),
      'theta=1.0 .*above 1',
    ),
  )
  def test_bad_scalings(self, make, message):
    """Each is refused with the name and the value."""
    with self.assertRaisesRegex(ValueError, message):
      make()

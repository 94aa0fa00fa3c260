"""Scaled rotary frequencies, for contexts longer than those trained on.

A scaling maps the frequencies w_i of RoPE (radians per position) to others, and
may multiply cosine and sine by a factor. Everything here is NumPy: it is known
before anything is traced.
"""

import dataclasses
import math

import numpy as np

from mha_jax.attention import checks


class RopeScaling:
  """A scaling of RoPE's frequencies."""

  @property
  def rotary_factor(self) -> float:
    """The factor of cosine and sine."""
    return 1.0

  @property
  def score_factor(self) -> float:
    """The factor of latent attention's scores."""
    return 1.0

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    """The scaled frequencies.

    Args:
      frequencies: w_i = theta^(-2 i / k), i = 0 .. k/2 - 1.
      theta: the base.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
  """Position interpolation: w / factor.

  Args:
    factor: how many times longer the context becomes.

  Source: Chen et al. 2023, Extending Context Window of Large Language Models
  via Position Interpolation, equation 4.
  """

  factor: float

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.real('factor', self.factor, 1, 1e6)

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
  """Llama 3.1: long waves are interpolated, short ones kept, smooth between.

    turns  = trained length x w / 2 pi     the turns within the trained context
    smooth = clip((turns - low) / (high - low), 0, 1)
    w      -> smooth w + (1 - smooth) w / factor

  Args:
    factor: how many times longer the context becomes.
    low_freq_factor: at so many turns or fewer a wave is interpolated.
    high_freq_factor: at so many turns or more a wave is kept.
    original_max_position_embeddings: the trained length, tokens.

  Source: Llama 3.1's reference code (Meta 2024).
  """

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 8192

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.real('factor', self.factor, 1, 1e6)
    checks.real('low_freq_factor', self.low_freq_factor, 1e-6, 1e6)
    if not self.high_freq_factor > self.low_freq_factor:
      raise ValueError(
        f'high_freq_factor={self.high_freq_factor!r} must be above '
        f'low_freq_factor={self.low_freq_factor!r}'
      )
    _check_trained_length(self.original_max_position_embeddings)

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    del theta
    turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = self.low_freq_factor, self.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (smooth + (1 - smooth) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
  """YaRN: interpolates by parts, and sharpens the softmax.

  Pairs that turn more than beta_fast times within the trained context are
  kept, those that turn less than beta_slow times are interpolated, and the
  share of interpolation is linear in the pair's index between. (Where all pairs
  turn more, or all less, the bounds cross after clipping, and the rule is that
  of the released code, which the formulas are held against.) With
  m(a) = 1 + 0.1 a ln(factor):

    rotary_factor = m(1), or m(mscale) / m(mscale_all_dim) where both are given
    score_factor  = m(mscale_all_dim)^2 where given (latent attention only)

  Args:
    factor: how many times longer the context becomes.
    original_max_position_embeddings: the trained length, tokens.
    beta_fast: turns from which a pair is kept.
    beta_slow: turns up to which a pair is interpolated.
    mscale: DeepSeek's weight of ln(factor) in the rotary factor.
    mscale_all_dim: DeepSeek's weight of ln(factor) in the score factor.
    attention_factor: the rotary factor itself; None: as above.
    truncate: whether the bounds between the parts are rounded outwards to
      whole pairs.

  Source: Peng et al. 2023, YaRN, sections 3.2 to 3.4; mscale: DeepSeek-V2
  (2024), section 3.1.4 and its released code.
  """

  factor: float
  original_max_position_embeddings: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float | None = None
  mscale_all_dim: float | None = None
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.real('factor', self.factor, 1, 1e6)
    _check_trained_length(self.original_max_position_embeddings)
    checks.real('beta_slow', self.beta_slow, 1e-6, 1e6)
    if not self.beta_fast >= self.beta_slow:
      raise ValueError(
        f'beta_fast={self.beta_fast!r} must be at least '
        f'beta_slow={self.beta_slow!r}'
      )
    for name in ('mscale', 'mscale_all_dim', 'attention_factor'):
      value = getattr(self, name)
      if value is not None:
        checks.real(name, value, 0, 1e6)

  def _sharpness(self, weight: float) -> float:
    return 1 + 0.1 * weight * math.log(self.factor)

  @property
  def rotary_factor(self) -> float:
    if self.attention_factor is not None:
      return self.attention_factor
    if self.mscale and self.mscale_all_dim:
      return self._sharpness(self.mscale) / self._sharpness(self.mscale_all_dim)
    return self._sharpness(1.0)

  @property
  def score_factor(self) -> float:
    return self._sharpness(self.mscale_all_dim or 0.0) ** 2

  def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
    if theta <= 1:
      raise ValueError(f'theta={theta} must be above 1 for YarnScaling')
    features, length = (
      2 * frequencies.size,
      self.original_max_position_embeddings,
    )

    def pair_that_turns(times: float) -> float:
      """The index of the pair, not whole, that turns so many times."""
      wavelength = length / (times * 2 * math.pi)
      return features * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    # Equal bounds make a step; the released code widens it by this much.
    width = (high - low) or 0.001
    share = np.clip((np.arange(frequencies.size) - low) / width, 0, 1)
    return frequencies * (1 - share + share / self.factor)


def _check_trained_length(length: int) -> None:
  checks.positive('original_max_position_embeddings', length)


SCALINGS: dict[str, type[RopeScaling]] = {
  x.__name__: x for x in (LinearScaling, Llama3Scaling, YarnScaling)
}
"""The scalings by name, as records tell them."""

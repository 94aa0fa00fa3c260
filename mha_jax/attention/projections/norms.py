"""Norms: the rows of a variant's table that are no projection."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.dtypes import wide_dtype
from mha_jax.attention.notation import Array
from mha_jax.attention.projections.rows import Params, Row


@dataclasses.dataclass(frozen=True)
class Norm(Row):
  """Normalises the last axis and scales it by a learned vector.

    layer: (x - mean x) / sqrt(var x + epsilon) * scale, without a bias
    rms:   x / sqrt(mean x^2 + epsilon) * scale

  Statistics are taken in float32 at least.

  Source: Ba et al. 2016 (layer), Zhang and Sennrich 2019 (rms).
  """

  kind: str
  size: int
  epsilon: float = 1e-6

  KINDS = ('layer', 'rms')

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    if self.kind not in self.KINDS:
      raise ValueError(f'kind={self.kind!r} must be one of {self.KINDS}')
    checks.positive('size', self.size)

  @functools.cached_property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    return {'scale': (self.size,)}

  @property
  def logical_axes(self) -> dict[str, tuple[str, ...]]:
    return {'scale': ('norm',)}

  def __str__(self) -> str:
    return f'{self.kind} norm'

  def compute(self, params: Params, x: Array, dtype: Any) -> Array:
    """Normalises x (..., size); returns the same shape in `dtype`."""
    wide = wide_dtype(dtype)
    scale, x = params['scale'].astype(wide), x.astype(wide)
    if self.kind == 'layer':
      x = x - jnp.mean(x, axis=-1, keepdims=True)
    power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.reshape(scale, (1,) * (x.ndim - 1) + (self.size,))
    return (x * (jax.lax.rsqrt(power + self.epsilon) * scale)).astype(dtype)

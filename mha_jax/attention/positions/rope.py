"""Rotary position embedding: queries and keys turned by their positions.

A pair of features (x_i, y_i) at position p becomes

  (x_i cos(p w_i) - y_i sin(p w_i), x_i sin(p w_i) + y_i cos(p w_i)),
  w_i = theta^(-2 i / k),   i = 0 .. k/2 - 1,

so a score depends on the difference of two positions only. Two layouts of
the pairs are in use: 'half' pairs feature i with i + k/2 (GPT-NeoX, Llama in
Hugging Face's form), 'interleaved' pairs 2 i with 2 i + 1 (the paper, GPT-J).
They are the same up to a permutation of the weights, `layout_permutation`.
A scaling changes the w_i for contexts longer than those trained on, see
`scaling`.

Source: Su et al. 2021, RoFormer, section 3.4.2.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.notation import Array
from mha_jax.attention.positions.scaling import RopeScaling

LAYOUTS = ('half', 'interleaved')


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotates the last axis of queries and keys.

  Args:
    theta: the base of the wavelengths.
    layout: which features form a pair, 'half' or 'interleaved'.
    scaling: how to reach longer contexts, as `YarnScaling(4.0, 4096)`; None: as
      trained.
  """

  theta: float = 10_000.0
  layout: str = 'half'
  scaling: RopeScaling | None = None

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    _check_layout('layout', self.layout)
    checks.real('theta', self.theta, 1, 1e12)
    if self.scaling is not None and not isinstance(self.scaling, RopeScaling):
      raise ValueError(
        f'scaling={self.scaling!r} must be a RopeScaling, for instance '
        'LinearScaling(4.0), or None'
      )
    self.frequencies(2)  # the scaling may object to theta

  @property
  def score_factor(self) -> float:
    """The factor of latent attention's scores: YaRN's mscale^2, or 1."""
    return 1.0 if self.scaling is None else self.scaling.score_factor

  def frequencies(self, size: int) -> np.ndarray:
    """The angle per position of each of the size / 2 pairs, in radians."""
    half = size // 2
    plain = self.theta ** (-np.arange(half) / half)
    if self.scaling is None:
      return plain
    return self.scaling.scale(plain, self.theta)

  def rotate_heads(self, x_BHTK: Array, positions: Array | None) -> Array:
    """Turns x (b, heads, t, k) by positions (b, t), None: 0 .. t-1."""
    if positions is None:
      positions = jnp.arange(x_BHTK.shape[2])[None, :]
    return self.rotate(x_BHTK, positions[:, None, :])

  def rotate(self, x: Any, positions: Any) -> Array:
    """Turns x (..., t, k) by positions that broadcast to (..., t).

    Angles and products are taken in float32 at least; the result has x's
    dtype.

    Raises:
      ValueError: k is odd, or positions have another rank.
    """
    x, positions = jnp.asarray(x), jnp.asarray(positions)
    x = x.astype(compute_dtype(None, x))  # integers turn into fractions
    checks.even('head_dim', x.shape[-1])
    if positions.ndim != x.ndim - 1:
      raise ValueError(
        f'positions of shape {positions.shape} must have one dimension less '
        f'than x of shape {x.shape}'
      )
    checks.broadcast(
      'positions', positions.shape, x.shape[:-1], '.' * positions.ndim
    )
    half = x.shape[-1] // 2
    wide = wide_dtype(x.dtype)
    frequencies = jnp.asarray(self.frequencies(2 * half), wide)
    angles = positions.astype(wide)[..., None] * jnp.reshape(
      frequencies, (1,) * (x.ndim - 1) + (half,)
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if self.scaling is not None:
      factor = float(self.scaling.rotary_factor)  # a float64 would promote
      cos, sin = factor * cos, factor * sin
    if self.layout == 'half':
      a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
      parts = (a * cos - b * sin, a * sin + b * cos)
      return jnp.concatenate(parts, axis=-1).astype(x.dtype)
    a, b = x[..., 0::2].astype(wide), x[..., 1::2].astype(wide)
    parts = (a * cos - b * sin, a * sin + b * cos)
    return jnp.reshape(jnp.stack(parts, axis=-1), x.shape).astype(x.dtype)


def layout_permutation(head_dim: int, source: str, target: str) -> np.ndarray:
  """The feature order that carries weights from one layout to the other.

    kernel_target = kernel_source[..., layout_permutation(k, source, target)]

  applied to the query's and the key's kernel (and bias, and norm scale) alike,
  leaves every score as it was.

  Args:
    head_dim: k, the number of features that rotate, even.
    source: the layout that the weights have, 'half' or 'interleaved'.
    target: the layout wanted.

  Returns:
    (k,) indices.
  """
  checks.even('head_dim', head_dim)
  _check_layout('source', source)
  _check_layout('target', target)
  features = np.arange(head_dim)
  if source == target:
    return features
  if source == 'interleaved':
    return features.reshape(-1, 2).T.reshape(-1)
  return features.reshape(2, -1).T.reshape(-1)


def _check_layout(name: str, layout: str) -> None:
  if layout not in LAYOUTS:
    raise ValueError(f'{name}={layout!r} must be one of {LAYOUTS}')

"""Copies without training: positions on a circle, in two features.

queries, keys = circle(length, sharpness_for(length))
config, params = circle_decoder(task, sharpness_for(task.length))
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import GroupedConfig, checks
from mha_jax.decoder import DecoderConfig
from mha_jax.tasks import CopyTask


def circle(length: int, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
  """Queries and keys of two features that copy: the sources on a circle.

    k_j = (cos 2 pi j / L, sin 2 pi j / L),    q_i = sharpness k_i
    q_i k_j = sharpness cos(2 pi (i - j) / L)

  The right key always scores highest, by sharpness (1 - cos(2 pi / L)) more
  than the next, some sharpness 2 pi^2 / L^2. Two features are the fewest for
  L >= 3: with one, q_i k_j is greatest at the greatest key, or where q_i < 0 at
  the least, or it is equal everywhere, so that at most two sources can ever
  score highest.

  Args:
    length: L.
    sharpness: a factor of the queries; the scores have no other.

  Returns:
    (L, 2) queries and (L, 2) keys, float64.
  """
  checks.positive('length', length)
  angle = 2 * np.pi * np.arange(length) / length
  keys = np.stack([np.cos(angle), np.sin(angle)], axis=1)
  return sharpness * keys, keys


def sharpness_for(length: int, weight: float = 0.99) -> float:
  """The sharpness from which on `circle` puts this weight on the right source.

    weight = 1 / sum_j exp(sharpness (cos(2 pi j / L) - 1))

  It grows as L^2: 275 for a weight of 0.99 at L = 32. No more than
  log((L - 1) weight / (1 - weight)) / (1 - cos(2 pi / L)) is ever needed, as
  if all other sources were neighbours.

  Args:
    length: L, from 2 on.
    weight: above 1 / L and below 1.

  Raises:
    ValueError: the length is less, or no sharpness gives the weight.
  """
  checks.whole('length', length, 2, 2**20)
  checks.real('weight', weight, 1 / length, 1 - 1e-12)
  behind = np.cos(2 * np.pi * np.arange(1, length) / length) - 1
  low = 0.0
  high = math.log((length - 1) * weight / (1 - weight)) / -behind[0]
  for _ in range(100):
    middle = (low + high) / 2
    enough = 1 / (1 + np.sum(np.exp(middle * behind))) >= weight
    low, high = (low, middle) if enough else (middle, high)
  return high


def circle_decoder(
  task: CopyTask, sharpness: float
) -> tuple[DecoderConfig, dict[str, Any]]:
  """A decoder of one head with two features a query and key, made to copy.

  A token is a unit vector of the first m features; behind them a source has
  its place on the `circle` as a key in two more, an answer as a query in the
  last two. All inputs have the square sum 2, which the norm brings to d_model.
  A value is the token itself, and counts four times what stands there already.
  The answers are keys too, of score 0, and take a little of the weight: a share
  of some L exp(-sharpness).

  Args:
    task: a plain copy task.
    sharpness: of the circle; from `sharpness_for` on it copies.

  Returns:
    The decoder's config, and its parameters, float32.
  """
  m, length = task.vocab_size, task.length
  d = m + 4
  attention = GroupedConfig(d, 1, head_dim=2, v_head_dim=m, use_bias=False)
  queries, keys = circle(length, sharpness * math.sqrt(2) * 2 / d)
  place = np.zeros((2 * length, d))
  place[:length, m : m + 2] = keys
  place[length:, m + 2 :] = keys
  factor = np.linalg.norm(queries[0])
  feature = np.eye(d)
  kernels = {
    'query': factor * feature[:, m + 2 :],
    'key': feature[:, m : m + 2],
    'value': feature[:, :m],
    'out': 4 * math.sqrt(2 / d) * feature[:m],
  }
  kernels = {
    name: x[None] if name == 'out' else x[:, None]
    for name, x in kernels.items()
  }
  ones = {'scale': np.ones(d)}
  params = {
    'embed': {'embedding': feature[:m]},
    'positions': {'embedding': place},
    'block_0': {
      'attention_norm': ones,
      'attention': {name: {'kernel': x} for name, x in kernels.items()},
    },
    'norm': ones,
    'output': {'kernel': feature[:, :m]},
  }
  config = DecoderConfig(m, 2 * length, attention)
  return config, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)

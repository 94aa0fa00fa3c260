"""Measures what each head of a decoder of one layer does in the copy task.

  maps = probing.attention_maps(config, params, batch.inputs)[0]
  attention_to_source(maps, batch)                  (h,) in [0, 1]
  without, whole = accuracies_without(config, params, batch)
  scores = position_scores(config, params, batch.inputs)       (h, L, L)
  effective_rank(scores), margins(scores)           of each head

A head copies by position: answer i attends to source i whatever tokens stand
there. `position_scores` wants L answers behind L sources, as `CopyTask` has
them at a fixed length. `circle` makes positions that copy, without training.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from mha_jax.attention import GroupedConfig, checks
from mha_jax.attention.notation import Parts
from mha_jax.attention.variants.config import Heads, HeadsAttention, Project
from mha_jax.decoder import DecoderConfig, DecoderLM
from mha_jax.tasks import Batch
from mha_jax.tasks.copying import SEP

EPSILON = 1e-6
"""What Flax's RMSNorm adds to the mean square."""


@dataclasses.dataclass(frozen=True)
class ScaledConfig(GroupedConfig):
  """Multi-head attention whose scores are multiplied by a number of one's own.

    weights = softmax(score_scale q k^T)      in place of 1 / sqrt(k)

  Args:
    score_scale: the number, positive.
  """

  score_scale: float = 1.0

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.real('score_scale', self.score_scale, 1e-12, 1e12)

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    del project
    scale, cap = self.score_scale, self.logit_softcap
    return attention(q, *entries, scale=scale, logit_softcap=cap)


def with_scale(config: GroupedConfig, score_scale: float) -> ScaledConfig:
  """The same attention with its scores multiplied by score_scale."""
  names = [x.name for x in dataclasses.fields(GroupedConfig)]
  options = {name: getattr(config, name) for name in names}
  return ScaledConfig(**options, score_scale=score_scale)


def scale_of(config: GroupedConfig) -> float:
  """The number that the scores q k^T are multiplied by."""
  if isinstance(config, ScaledConfig):
    return config.score_scale
  return 1 / math.sqrt(config.qk_head_dim)


def sources(batch: Batch) -> jax.Array:
  """The place of the symbol that each target copies, (b, t) integers.

    source of place i = i - n,    n = the place of the separator

  Only where the target counts does it mean anything.
  """
  separator = jnp.argmax(batch.inputs == SEP, axis=1)
  places = jnp.arange(batch.inputs.shape[1])
  return jnp.maximum(places[None] - separator[:, None], 0)


def attention_to_source(maps: ArrayLike, batch: Batch) -> jax.Array:
  """The attention that answers pay to the symbol they have to say.

    mean of A_{i, source(i)} over the targets i that count

  Args:
    maps: (b, h, t, t), the weights of one layer.
    batch: of the copy task without pairs; each answer has one source.

  Returns:
    (h,) in [0, 1].
  """
  rows = sources(batch)[:, None, :, None]
  weights = jnp.take_along_axis(jnp.asarray(maps), rows, axis=3)[..., 0]
  counts = batch.weights[:, None]
  return jnp.sum(weights * counts, axis=(0, 2)) / jnp.sum(batch.weights)


@functools.partial(jax.jit, static_argnums=0)
def accuracies_without(
  config: DecoderConfig, params: Any, batch: Batch
) -> tuple[jax.Array, jax.Array]:
  """The accuracy with each single head gated off.

  Args:
    config: a decoder of one layer.
    params: of `DecoderLM`.
    batch: what to predict.

  Returns:
    (h,) without each head, and () with all: shares of the targets that count.
  """
  h = config.layers[0].num_heads
  gates = jnp.concatenate([1 - jnp.eye(h), jnp.ones((1, h))])

  def accuracy(gate_H: jax.Array) -> jax.Array:
    logits: Any = DecoderLM(config).apply(
      {'params': params}, batch.inputs, head_gates=gate_H[None]
    )
    hits = jnp.argmax(logits, axis=-1) == batch.targets
    return batch.mean(hits.astype(batch.weights.dtype))

  found = jax.lax.map(accuracy, gates)
  return found[:-1], found[-1]


def position_scores(
  config: DecoderConfig, params: Any, inputs: jax.Array
) -> jax.Array:
  """The part of the scores that positions alone make, answers by sources.

    norm(e + p) = g e / r + g p / r,    r = rms(e + p)
    x_i = g p_i (mean over examples of 1 / r_i)
    scores_ij = scale (x_{L+i} W_q) (x_j W_k)^T,    0 <= i, j < L

  The norm is that of the whole input, tokens e and all; then the part of the
  tokens is left out. Where there are biases of queries and keys, they count as
  the positions' own. Answer i stands at place L + i, in which the separator is
  answer 0.

  Args:
    config: a decoder of one layer with learned positions.
    params: of `DecoderLM`.
    inputs: (b, 2 L) tokens, for the mean of 1 / r.

  Returns:
    (h, L, L), as the softmax takes them.

  Raises:
    ValueError: the decoder is another one, or inputs are of odd length.
  """
  attention = check_decoder(config)
  t = inputs.shape[1]
  if t % 2:
    raise ValueError(f'inputs of length {t} must have L sources and L answers')
  position = params['positions']['embedding'][:t]
  whole = params['embed']['embedding'][inputs] + position[None]
  square = jnp.mean(jnp.square(whole), axis=2) + EPSILON
  size = jnp.mean(jax.lax.rsqrt(square), axis=0)
  block = params['block_0']
  gain = block['attention_norm']['scale']
  x = position * size[:, None] * gain[None]
  project = Project(attention.table, block['attention'], x.dtype)
  q_HLK = project('query', x[None, t // 2 :])[0]
  k_HLK = project('key', x[None, : t // 2])[0]
  k_HLK = jnp.repeat(k_HLK, q_HLK.shape[0] // k_HLK.shape[0], axis=0)
  return scale_of(attention) * jnp.einsum('hik,hjk->hij', q_HLK, k_HLK)


def check_decoder(config: DecoderConfig) -> GroupedConfig:
  """The attention of a decoder of one layer whose scores are sums of parts.

  Raises:
    ValueError: there are more layers, no learned positions, or RoPE, a norm of
      queries and keys, a softcap or a latent between input and scores.
  """
  attention = config.layers[0]
  if config.num_layers > 1 or not config.learned_positions:
    raise ValueError(
      f'num_layers={config.num_layers} with learned_positions='
      f'{config.learned_positions} must be one layer with learned positions'
    )
  if not isinstance(attention, GroupedConfig):
    raise ValueError(f'attention={attention} must be a GroupedConfig')
  for name in ('rope', 'normalize_qk', 'logit_softcap'):
    if getattr(attention, name):
      raise ValueError(
        f'{name}={getattr(attention, name)!r} must be off, so that scores are '
        'sums of parts'
      )
  return attention


def effective_rank(scores: jax.Array) -> jax.Array:
  """How many dimensions a matrix of scores uses, as the softmax sees it.

    exp(-sum_l p_l log p_l),    p_l = s_l / sum s,    s: singular values

  of the matrix less the mean of each row, which no softmax over the row
  depends on. A head of k features has k at most, and L scores a row L - 1.

  Args:
    scores: (..., L, L).

  Returns:
    (...) from 1 to L - 1; 0 where all scores of each row are equal, up to
    rounding; nan where a score is not finite.

  Source: Roy & Vetterli 2007, The effective rank.
  """
  n = scores.shape[-1]
  centred = scores - jnp.mean(scores, axis=-1, keepdims=True)
  s = jnp.linalg.svd(centred, compute_uv=False)
  total = jnp.sum(s, axis=-1, keepdims=True)
  # A mean of n scores is off by n eps of the greatest at most; rows that are
  # off by that much have a sum s of n times as much.
  rounding = n**2 * jnp.finfo(s.dtype).eps
  greatest = jnp.max(jnp.abs(scores), axis=(-2, -1))[..., None]
  flat = total <= rounding * greatest
  p = s / jnp.where(flat, 1, total)
  entropy = -jnp.sum(jnp.where(p <= 0, 0, p * jnp.log(p)), axis=-1)
  return jnp.where(flat[..., 0], 0, jnp.exp(entropy))


def margins(scores: jax.Array) -> jax.Array:
  """How far the right source stands out: its log odds among the sources.

    margin_i = s_ii - log sum_{j != i} exp s_ij

  The weight of the right source among all is 1 / (1 + exp(-margin_i)): half at
  0, 0.99 at 4.6, and 1 / L at -log(L - 1), where all scores are equal.

  Args:
    scores: (..., L, L), answers by sources.

  Returns:
    (..., L), of each answer.
  """
  right = jnp.eye(scores.shape[-1], dtype=bool)
  right = jnp.broadcast_to(right, scores.shape)
  others = jnp.where(right, -jnp.inf, scores)
  own = jnp.diagonal(scores, axis1=-2, axis2=-1)
  return own - jax.nn.logsumexp(others, axis=-1)

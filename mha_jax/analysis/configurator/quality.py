"""The proxy of quality: what fewer keys and values lost in two papers.

No prediction, and blind to all else: to head_dim, depth, width, data and
training.
"""

import math

from mha_jax.analysis.configurator.candidates import kv_heads
from mha_jax.attention import AttentionConfig, LatentConfig

MQA_LOSS, GQA_LOSS = 0.6, 0.1
"""Points of T5-XXL's average score that one and eight key/value heads lose."""
LOW_RANK_LOSS = 0.6
"""Points for half of DeepSeek's rank: our guess, the most that is known."""
QUALITY_SOURCE = (
  "points below multi-head attention's average score over seven tasks: T5-XXL "
  '47.2 with 64 key/value heads, 47.1 with 8, 46.6 with 1, both uptrained from '
  'the first with 5 % of its compute (Ainslie et al. 2023, GQA, table 1); in '
  'between by the logarithm, which is our interpolation. Latent attention 0: '
  'better than multi-head in seven of eight scores (DeepSeek-V2 2024, table '
  '9); half of its rank 0.6, our guess. Depth against width counts nothing '
  '(Kaplan et al. 2020, figure 5, at equal parameters without embeddings)'
)


def quality(attention: AttentionConfig) -> float:
  """The proxy: points that fewer key/value heads cost, 0 at most.

    n = h      0
    n >= 8     -0.1 (1 - log(n / 8) / log(h / 8))
    n < 8      -0.6 + 0.5 log2(n) / 3
    latent     -0.6 max(0, log2(4 k / r))

  No prediction: it orders, see `QUALITY_SOURCE`. DeepSeek-V2's table 8 finds
  the same order for 7B models trained from scratch, with far wider gaps: of
  MMLU 45.2, 8 key/value heads lose 4.0 and one 7.3.

  Args:
    attention: its config.

  Source: Ainslie et al. 2023, GQA, table 1; DeepSeek-V2 (2024), table 9.
  """
  n, h = kv_heads(attention), attention.num_heads
  if isinstance(attention, LatentConfig):
    halvings = math.log2(4 * attention.sizes['k'] / attention.kv_lora_rank)
    return -LOW_RANK_LOSS * max(0.0, halvings)
  if n is None or n == h:
    return 0.0
  if n >= 8:
    return -GQA_LOSS * (1 - math.log(n / 8) / math.log(h / 8))
  return -MQA_LOSS + (MQA_LOSS - GQA_LOSS) * math.log2(n) / 3

"""Attention configs and shapes that tests of costs are about."""

from mha_jax.analysis.costs.shape import stack
from mha_jax.attention import GroupedConfig, LatentConfig


def grouped(d=8192, h=64, n=None, k=128):
  return GroupedConfig(d, h, n, k, use_bias=False)


def latent(h=128, form='auto', d=5120, q=1536):
  return LatentConfig(
    d,
    h,
    kv_lora_rank=512,
    q_lora_rank=q,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    form=form,
  )


def alone(attention, layers=1, **options):
  """Layers of nothing but attention."""
  options = {'vocab_size': 1, 'layer_norms': 0, 'norms': 0} | options
  return stack(attention, layers, **options)

"""Attention by the fused kernels that JAX ships, heads first.

Each takes (b, h, t, k), (b, n, s, k), (b, n, s, v) and what a mask reaches,
(left, right) tokens from a query, None: all. `choice` says which calls they
serve.

Source: cuDNN's attention behind `jax.nn.dot_product_attention`; splash
attention: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention.notation import Array

Reach = tuple[int | None, int | None]


def cudnn(
  q_BHTK: Array, k_BNSK: Array, v_BNSV: Array, scale: float, reach: Reach
) -> Array:
  """cuDNN's attention."""
  left, right = reach
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BHTK, k_BNSK, v_BNSV))
  out = jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=scale,
    is_causal=right == 0,
    local_window_size=None if left is None else (left, 0),
    implementation='cudnn',
  )
  return jnp.swapaxes(out, 1, 2)


def splash(
  q_BHTK: Array,
  k_BNSK: Array,
  v_BNSV: Array,
  scale: float,
  reach: Reach,
  interpret: bool = False,
) -> Array:
  """Splash attention: one key/value head with its queries at a time.

  Args:
    q_BHTK: queries, k_BNSK: keys, v_BNSV: values.
    scale: of the scores.
    reach: of the mask.
    interpret: runs the kernel without a TPU, slowly.
  """
  b, h, t, k = q_BHTK.shape
  n, s = k_BNSK.shape[1:3]
  kernel = _splash_kernel(h // n, t, s, reach, interpret)
  q = jnp.reshape((q_BHTK * scale).astype(q_BHTK.dtype), (b, n, h // n, t, k))
  out = jax.vmap(jax.vmap(kernel))(q, k_BNSK, v_BNSV)
  return jnp.reshape(out, (b, h, t, out.shape[-1]))


def _splash_kernel(
  g: int, t: int, s: int, reach: Reach, interpret: bool
) -> Any:
  # Imported here: Pallas takes long, and most calls never want it.
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  mask: Any = library.FullMask((t, s))
  if reach == (None, 0):
    mask = library.CausalMask((t, s))
  elif reach != (None, None):
    mask = library.LocalMask((t, s), reach, 0)
  side = next(x for x in (512, 256, 128) if t % x == 0)
  sizes = library.BlockSizes(
    block_q=side,
    block_kv=side,
    block_q_dkv=side,
    block_kv_dkv=side,
    block_q_dq=side,
    block_kv_dq=side,
  )
  return library.make_splash_mqa_single_device(
    mask=library.MultiHeadMask([mask] * g),
    block_sizes=sizes,
    interpret=interpret,
  )


KERNELS = {'cudnn': cudnn, 'splash': splash}

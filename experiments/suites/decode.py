"""Decoding: one step over a cache of 4,096 tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from experiments.suites.case import Case, Run, compiled, normals
from mha_jax.attention import (
  AttentionConfig,
  GroupedConfig,
  LatentConfig,
  apply,
  init_cache,
  init_table,
  masks,
  multihead_attention,
)
from mha_jax.attention.caches import Cache

STEPS_LEFT = 64
"""Slots that are free at first: more than a benchmark takes steps."""


def cases(config: ConfigDict) -> list[Case]:
  """A GQA step, and a step of latent attention at DeepSeek-V2-Lite's sizes."""
  return [_grouped(config), _latent(config)]


def _grouped(config: ConfigDict) -> Case:
  """Attention of 4 key/value heads with 8 queries each, head_dim 128."""
  b, s = config.decode_batch_size, config.decode_tokens
  n, g, k = (4, 8, 128) if not config.tiny else (2, 2, 8)
  shape = GroupedConfig(k, n * g, num_kv_heads=n, head_dim=k)

  def ours() -> Run:
    q, new_k, new_v = normals((b, n * g, 1, k), (b, n, 1, k), (b, n, 1, k))

    def step(
      cache: Cache, q: jax.Array, new_k: jax.Array, new_v: jax.Array
    ) -> tuple[jax.Array, Cache]:
      at = cache.positions(1)
      cache, view = cache.extend((new_k, new_v))
      mask = masks.causal() & masks.dense(view.usable[:, None, None, :])
      out = multihead_attention(
        q,
        *view.entries,
        mask=mask,
        query_positions=at,
        key_positions=view.positions,
      )
      return out, cache

    return _stepping(step, _filled(shape, b, s), q, new_k, new_v)

  def flax() -> Run:
    q, keys, values = normals((b, 1, n * g, k), (b, s, n, k), (b, s, n, k))
    usable = (jnp.arange(s) < max(1, s - STEPS_LEFT))[None, None, None]

    def attention(*arrays: jax.Array) -> jax.Array:
      q, keys, values, usable = arrays
      return nnx.dot_product_attention(q, keys, values, mask=usable)

    return compiled(attention, q, keys, values, usable)

  def sums() -> Run:
    keys, values = normals((b, n, s, k), (b, n, s, k))
    return compiled(lambda x, y: (jnp.sum(x), jnp.sum(y)), keys, values)

  setting = {'tokens': s, 'batch': b, 'kv_heads': n, 'group': g, 'head_dim': k}
  return Case(
    'decode',
    'attention of a GQA step, cache updated',
    setting,
    {'mha_jax': ours, 'flax': flax, 'a sum over the cache': sums},
  )


def _latent(config: ConfigDict) -> Case:
  """A whole MLA layer, absorbed and expanded."""
  b, s = config.decode_batch_size, config.decode_tokens
  d, h, r, k, p = (2048, 16, 512, 128, 64)
  if config.tiny:
    d, h, r, k, p = 32, 2, 8, 8, 4

  def ours(form: str) -> Run:
    shape = LatentConfig(
      d,
      h,
      r,
      qk_nope_head_dim=k,
      qk_rope_head_dim=p,
      v_head_dim=k,
      form=form,
    )
    params = init_table(shape.table, jax.random.key(0))
    (x,) = normals((b, 1, d))

    def step(
      cache: Cache, params: Any, x: jax.Array
    ) -> tuple[jax.Array, Cache]:
      return apply(shape, params, x, cache=cache, mask=masks.causal())

    return _stepping(step, _filled(shape, b, s), params, x)

  def einsum() -> Run:
    q, c = normals((b, h, 2 * r + p), (b, s, 2 * r + p))
    return compiled(lambda q, c: jnp.einsum('bhr,bsr->bhs', q, c), q, c)

  return Case(
    'decode',
    'a step of an MLA layer',
    {'tokens': s, 'batch': b, 'd_model': d, 'heads': h, 'rank': r},
    {
      'absorbed': functools.partial(ours, 'absorbed'),
      'expanded': functools.partial(ours, 'expanded'),
      "einsum('bhr,bsr->bhs'), r := 2 r + p": einsum,
    },
  )


def _filled(shape: AttentionConfig, b: int, s: int) -> Cache:
  """A cache of s slots with random entries, nearly full."""
  cache = init_cache(shape, b, s)
  lengths = jnp.full(b, max(0, s - STEPS_LEFT), jnp.int32)
  entries = tuple(normals(*(x.shape for x in cache.entries)))
  return dataclasses.replace(cache, entries=entries, lengths=lengths)


def _stepping(
  step: Callable[..., tuple[jax.Array, Cache]], cache: Cache, *arguments: Any
) -> Run:
  """Step after step, the cache donated, so that nothing is copied."""
  jitted = jax.jit(step, donate_argnums=0)
  state = [cache]

  def run() -> object:
    out, state[0] = jitted(state[0], *arguments)
    return jax.block_until_ready((out, state[0]))

  return run

"""Modules against Flax and NumPy where hypothesis chooses the case.

Shapes come from small sets, since each new one compiles; masks, values and
dtypes are free.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, booleans, normal, random_params

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import attention
from mha_jax.attention import masks
from mha_jax.attention.variants import build

B, T, S, D = 2, 5, 7, 6
TOLERANCES = {'float64': 1e-12, 'float32': 1e-5, 'bfloat16': 2**-6}
dtypes = st.sampled_from(tuple(TOLERANCES))
seeds = st.integers(0, 999)
mask_shapes = st.sampled_from(
  (None, (T, S), (1, 1, T, S), (B, 1, T, S), (B, 1, 1, S), (1, 2, T, S))
)


def some_mask(seed: int, shape) -> np.ndarray | None:
  """Booleans in which every query may attend to some key."""
  if shape is None:
    return None
  array = booleans(seed, *shape)
  return array | (np.arange(S) == seed % S)


@functools.partial(jax.jit, static_argnums=0)
def linen_apply(module, variables, x, y, mask):
  return module.apply(variables, x, y, mask=mask)


@functools.partial(jax.jit, static_argnums=0)
def pure_apply(config, params, x, y, mask, positions):
  return attention.apply(
    config,
    params,
    x,
    y,
    mask=mask,
    input_positions=positions[0],
    key_positions=positions[1],
    return_weights=True,
  )


class FlaxTest(oracles.X64TestCase):
  @given(
    sizes=st.sampled_from(((2, None, True), (2, 10, False))),
    normalize_qk=st.booleans(),
    mask_shape=mask_shapes,
    numbers=st.booleans(),
    dtype=dtypes,
    seed=seeds,
  )
  def test_linen(self, sizes, normalize_qk, mask_shape, numbers, dtype, seed):
    """flax.linen.MultiHeadDotProductAttention, in any dtype, with any mask."""
    num_heads, qkv_features, use_bias = sizes
    options = {
      'num_heads': num_heads,
      'qkv_features': qkv_features,
      'use_bias': use_bias,
      'normalize_qk': normalize_qk,
      'dtype': jnp.dtype(dtype),
    }
    ours = linen.MultiHeadAttention(**options)
    theirs = nn.MultiHeadDotProductAttention(**options)
    x, y = normal(seed, B, T, D), normal(seed + 1, B, S, D)
    tree = jax.eval_shape(ours.init, jax.random.key(0), x, y)['params']
    params = jax.tree.map(lambda a: normal(seed, *a.shape) / 2, tree)
    mask = some_mask(seed, mask_shape)
    if numbers and mask is not None:
      mask = mask.astype(np.float32)
    got = linen_apply(ours, {'params': params}, x, y, mask)
    self.assertEqual(got.dtype, dtype)
    if dtype == 'bfloat16':  # theirs takes the softmax in bfloat16: no oracle
      theirs = theirs.clone(dtype=jnp.dtype('float64'))
    wanted = linen_apply(theirs, {'params': params}, x, y, mask)
    assert_close(got, wanted, TOLERANCES[dtype])

  @given(
    num_kv_heads=st.sampled_from((1, 2, 4)),
    mask_shape=mask_shapes,
    is_causal=st.booleans(),
    dtype=st.sampled_from(('float32', 'bfloat16')),
    seed=seeds,
  )
  def test_nnx(self, num_kv_heads, mask_shape, is_causal, dtype, seed):
    """flax.nnx.MultiHeadAttention with any group size (its own softmax is
    float32 at most)."""
    if mask_shape is not None and mask_shape[:2] == (1, 2):
      mask_shape = (1, 4, T, S)
    options = {
      'num_heads': 4,
      'in_features': D,
      'qkv_features': 12,
      'num_kv_heads': num_kv_heads,
    }
    theirs = nnx.MultiHeadAttention(**options, decode=False, rngs=nnx.Rngs(0))
    state = nnx.state(theirs)
    state = jax.tree.map(lambda a: normal(seed, *a.shape) / 2, state)
    state = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), state)
    ours = mha_nnx.MultiHeadAttention(
      **options, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)
    )
    nnx.update(theirs, state)
    nnx.update(ours, state)
    x = normal(seed, B, T, D).astype(np.float32)
    y = normal(seed + 1, B, S, D).astype(np.float32)
    mask = some_mask(seed, mask_shape)
    if mask is not None and is_causal:
      # Flax broadcasts its causal mask to the mask's own shape.
      mask = np.broadcast_to(mask | (np.arange(S) == 0), (B, 4, T, S))
    call = nnx.jit(lambda m, x, y: m(x, y, mask=mask, is_causal=is_causal))
    got, wanted = call(ours, x, y), call(theirs, x, y)
    self.assertEqual(got.dtype, dtype)
    assert_close(got, wanted, TOLERANCES[dtype])


class NumpyTest(oracles.X64TestCase):
  """Where Flax has no such feature: loops in float64."""

  def check(self, config, oracle, dtype, seed, mask_shape, causal):
    params = random_params(config, seed)
    x, y = normal(seed, B, T, D), normal(seed + 1, B, S, D)
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 99, (B, T)), rng.integers(0, 99, (B, S))
    allowed = some_mask(seed, mask_shape)
    allowed = np.ones((1, 1), bool) if allowed is None else allowed
    mask = masks.dense(allowed)
    if causal:
      before = positions[1][:, None, None, :] <= positions[0][:, None, :, None]
      mask, allowed = masks.causal() & mask, before & allowed
    cast = functools.partial(
      jax.tree.map, lambda a: jnp.asarray(a, jnp.dtype(dtype))
    )
    out, weights = pure_apply(
      config, cast(params), cast(x), cast(y), mask, positions
    )
    self.assertEqual(out.dtype, dtype)
    wanted = oracle(
      cast(params), cast(x), cast(y), positions=positions, allowed=allowed
    )
    assert_close((out, weights), wanted, 4 * TOLERANCES[dtype])

  @given(
    heads=st.sampled_from(((4, 1), (4, 2), (2, 2))),
    kind=st.sampled_from((None, 'rms', 'layer')),
    mask_shape=mask_shapes,
    causal=st.booleans(),
    dtype=dtypes,
    seed=seeds,
  )
  def test_grouped(self, heads, kind, mask_shape, causal, dtype, seed):
    """RoPE, QK norm, value heads of another width, any group size."""
    if mask_shape is not None and mask_shape[:2] == (1, 2):
      mask_shape = (1, heads[0], T, S)
    config = build(
      'gqa',
      d_model=D,
      num_heads=heads[0],
      num_kv_heads=heads[1],
      head_dim=4,
      v_head_dim=3,
      rope=attention.Rope(10.0),
      normalize_qk=kind or False,
    )
    oracle = functools.partial(oracles.layer, kind=kind, rope=(10.0, 'half'))
    self.check(config, oracle, dtype, seed, mask_shape, causal)

  @given(
    form=st.sampled_from(('expanded', 'absorbed')),
    ranks=st.sampled_from(((3, None, 0), (3, 5, 2))),
    mask_shape=mask_shapes,
    causal=st.booleans(),
    dtype=dtypes,
    seed=seeds,
  )
  def test_latent(self, form, ranks, mask_shape, causal, dtype, seed):
    """Both forms, with and without query latent and rotary part."""
    rank, query_rank, rotary = ranks
    config = build(
      'mla',
      d_model=D,
      num_heads=2,
      kv_lora_rank=rank,
      q_lora_rank=query_rank,
      qk_nope_head_dim=4,
      qk_rope_head_dim=rotary,
      v_head_dim=7,
      form=form,
    )
    self.check(config, oracles.latent, dtype, seed, mask_shape, causal)

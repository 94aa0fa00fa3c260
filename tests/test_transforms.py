"""Layers stacked by scan and remat, in both front ends, with dropout on.

Scan and remat of the grouped family are tested in test_linen and test_nnx.
"""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from examples import D, config_of
from flax import nnx
from oracles import assert_close, normal

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import attention
from mha_jax.attention import masks

B, T = 2, 7


class Block(nn.Module):
  """A residual layer, in the form that nn.scan wants."""

  config: attention.AttentionConfig
  deterministic: bool = False

  @nn.compact
  def __call__(self, x, cache=None):
    layer = linen.Attention(
      self.config, dropout_rate=0.3, deterministic=self.deterministic
    )
    out = layer(x, mask=masks.causal(), cache=cache)
    out, cache = (out, None) if cache is None else out
    return x + out, cache


class NnxBlock(nnx.Module):
  """The same in NNX."""

  def __init__(self, config, rngs):
    self.attention = mha_nnx.Attention(
      config, dropout_rate=0.3, deterministic=False, rngs=rngs
    )

  def __call__(self, x, cache=None):
    out = self.attention(x, mask=masks.causal(), cache=cache)
    out, cache = (out, None) if cache is None else out
    return x + out, cache


class TransformsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.x = normal(0, B, T, D).astype('f')

  @parameterized.product(kind=('mla', 'gta'))
  def test_linen_scan_and_remat(self, kind):
    """nn.scan of nn.remat over layers: finite gradients of all parameters."""
    stack = nn.scan(
      nn.remat(Block),
      variable_axes={'params': 0},
      split_rngs={'params': True, 'dropout': True},
      length=3,
    )(config_of(kind))
    rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    variables = jax.jit(stack.init)(rngs, self.x)

    def loss(variables):
      out, _ = stack.apply(variables, self.x, rngs={'dropout': rngs['dropout']})
      return jnp.sum(out**2)

    self.check_grads(jax.jit(jax.grad(loss))(variables), variables)

  @parameterized.product(kind=('mla', 'gta'))
  def test_nnx_scan_and_remat(self, kind):
    """The same of nnx.scan and nnx.remat."""
    layers = self.nnx_layers(config_of(kind))

    def loss(layers):
      @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
      @nnx.remat
      def forward(x, layer):
        return layer(x)[0]

      return jnp.sum(forward(self.x, layers) ** 2)

    grads = nnx.jit(nnx.grad(loss))(layers)
    state = nnx.state(layers, nnx.Param)
    self.check_grads(nnx.to_pure_dict(grads), nnx.to_pure_dict(state))

  def test_linen_scan_of_caches(self):
    """nn.scan over layers and their stacked caches: chunks are the whole."""
    config = config_of('gqa')
    stack = nn.scan(
      Block,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=3,
    )(config, deterministic=True)
    init = linen.Attention(config).init_cache
    variables = jax.jit(stack.init)(jax.random.key(0), self.x)
    self.check_chunks(jax.jit(functools.partial(stack.apply, variables)), init)

  def test_nnx_scan_of_caches(self):
    """The same of nnx.scan."""
    layers = self.nnx_layers(config_of('mla'))
    layers.eval()

    @nnx.jit
    def apply(layers, x, caches=None):
      @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
      def forward(x, layer, cache):
        return layer(x, cache)

      return forward(x, layers, caches)

    init = layers.attention.init_cache
    self.check_chunks(functools.partial(apply, layers), init)

  def nnx_layers(self, config):
    """Three blocks, their parameters stacked."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0)
    def make(rngs):
      return NnxBlock(config, rngs)

    return make(nnx.Rngs(0))

  def check_chunks(self, apply, init_cache):
    caches = jax.vmap(lambda _: init_cache(B, T))(np.arange(3))
    outs = []
    for chunk in np.split(self.x, (3, 6), axis=1):
      out, caches = apply(chunk, caches)
      outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), apply(self.x)[0], 1e-5)
    np.testing.assert_array_equal(caches.lengths, np.full((3, B), T))

  def check_grads(self, grads, params):
    chex.assert_trees_all_equal_shapes(grads, params)
    chex.assert_tree_all_finite(grads)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
      self.assertEqual(grad.shape[0], 3)
      self.assertTrue(np.any(grad != 0), jax.tree_util.keystr(path))

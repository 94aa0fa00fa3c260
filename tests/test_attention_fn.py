"""Flax's own modules on our attention train to the same losses."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from flax import nnx
from oracles import assert_close, normal

import mha_jax.linen
import mha_jax.nnx
from mha_jax.attention.implementations import OURS

B, T, D = 2, 11, 12


def losses(apply, params, steps: int = 5) -> np.ndarray:
  """Of a few steps of Adam towards a random target."""
  x, target = (normal(i, B, T, D).astype(np.float32) for i in (0, 1))
  optimizer = optax.adam(1e-2)

  def loss(params):
    return jnp.mean(
      (apply(params, x, nn.make_causal_mask(x[..., 0])) - target) ** 2
    )

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value

  state, values = optimizer.init(params), []
  for _ in range(steps):
    params, state, value = step(params, state)
    values.append(float(value))
  return np.asarray(values)


class TrainingTest(parameterized.TestCase):
  @parameterized.parameters(*OURS)
  def test_linen(self, implementation):
    """A model of Flax Linen's module."""

    def run(**options):
      layer = nn.MultiHeadDotProductAttention(num_heads=3, **options)
      params = layer.init(jax.random.key(0), jnp.zeros((B, T, D)))
      return losses(lambda p, x, mask: layer.apply(p, x, mask=mask), params)

    attention = functools.partial(
      mha_jax.linen.attention_fn, implementation=implementation
    )
    wanted = run()
    self.assertLess(wanted[-1], wanted[0])
    assert_close(run(attention_fn=attention), wanted, 1e-5)

  @parameterized.parameters(*OURS)
  def test_nnx(self, implementation):
    """A model of NNX's module."""

    def run(**options):
      layer = nnx.MultiHeadAttention(
        3, D, decode=False, rngs=nnx.Rngs(0), **options
      )
      graph, params = nnx.split(layer)

      def apply(params, x, mask):
        return nnx.merge(graph, params)(x, mask=mask)

      return losses(apply, params)

    attention = functools.partial(
      mha_jax.nnx.attention_fn, implementation=implementation
    )
    wanted = run()
    self.assertLess(wanted[-1], wanted[0])
    assert_close(run(attention_fn=attention), wanted, 1e-5)

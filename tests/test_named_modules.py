"""The named modules of both front ends, and what they keep of keys and values.

`test_variants` asks of `Attention(config)` what holds for every variant.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import oracles
from absl.testing import parameterized
from examples import EXAMPLES, D, config_of, nnx_module, params_of
from flax import nnx
from oracles import assert_close, assert_same_bits, normal

import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import attention
from mha_jax.attention import Rope, masks

B, T, S = 2, 7, 11
NAMED = {
  'mha': 'MultiHeadAttention',
  'gqa': 'GroupedQueryAttention',
  'mqa': 'MultiQueryAttention',
  'mla': 'MultiHeadLatentAttention',
}


class NamedModulesTest(oracles.X64TestCase):
  def setUp(self):
    super().setUp()
    self.x, self.y = (
      normal(i, B, n, D).astype('f') for i, n in ((0, T), (1, S))
    )

  @parameterized.parameters(*NAMED)
  def test_named_modules(self, kind):
    """The named modules are their configs, in both front ends."""
    config, name = config_of(kind), NAMED[kind]
    params = params_of(config)
    options = {**EXAMPLES[kind]}
    wanted = attention.apply(config, params, self.x, mask=masks.causal())
    module = getattr(linen, name)(**options)
    self.assertEqual(module.config_for(self.x, None, None).table, config.table)
    got = module.apply({'params': params}, self.x, mask=masks.causal())
    assert_same_bits(got, wanted)
    other = getattr(mha_nnx, name)(in_features=D, rngs=nnx.Rngs(0), **options)
    self.assertEqual(other.config.table, config.table)
    got = nnx_module(other, params)(self.x, mask=masks.causal())
    assert_same_bits(got, wanted)

  @parameterized.parameters('gqa', 'mla')
  def test_keys_values(self, kind):
    """Cross-attention over what was projected once, in both front ends."""
    config = config_of(kind)
    params = params_of(config)
    lengths = [5, 9]

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(call, keys_values, x, y):
      cache = keys_values(y, lengths=lengths)
      out, after = call(x, cache=cache)
      return cache, after, out, call(x, y, mask=masks.lengths(lengths))

    pure = functools.partial(attention.apply, config, params)
    wanted = functools.partial(attention.keys_values, config, params)
    wanted = run(pure, wanted, self.x, self.y)
    module = linen.Attention(config)
    apply = functools.partial(module.apply, {'params': params})
    project = functools.partial(apply, method='keys_values')
    other = nnx_module(mha_nnx.Attention(config, rngs=nnx.Rngs(0)), params)
    for functions in (apply, project), (other, other.keys_values):
      got = run(*functions, self.x, self.y)
      assert_same_bits(got, wanted)
    cache, after, out, full = wanted
    assert_same_bits(after, cache)
    assert_close(out, full, 1e-5)

  @parameterized.parameters(
    (linen.GroupedQueryAttention(6, num_kv_heads=3, head_dim=4),),
    (linen.MultiHeadLatentAttention(3, 5, q_lora_rank=7, qk_nope_head_dim=4),),
  )
  def test_keys_values_of_another_width(self, module):
    """Linen's named modules know the widths from their parameters."""
    x, y = normal(0, 2, 3, D), normal(1, 2, 5, D + 2)
    wanted, variables = module.init_with_output(jax.random.key(0), x, y)
    cache = module.apply(variables, y, method='keys_values')
    got, _ = module.apply(variables, x, cache=cache)
    assert_close(got, wanted, 1e-5)

  @parameterized.parameters(*NAMED)
  def test_init_cache(self, kind):
    """Modules, also unbound ones, make the caches of their configs."""
    name, example = NAMED[kind], EXAMPLES[kind]
    module = getattr(linen, name)(**example)
    other = getattr(mha_nnx, name)(in_features=D, rngs=nnx.Rngs(0), **example)
    for options in {'capacity': S}, {'window': 3, 'dtype': jnp.bfloat16}:
      wanted = attention.init_cache(config_of(kind), B, **options)
      for front_end in (module, other):
        got = front_end.init_cache(B, **options)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, wanted)

  @parameterized.parameters(
    (linen.MultiHeadAttention(3), 'make the module with head_dim='),
    (
      linen.MultiHeadLatentAttention(3, 5, rope=Rope()),
      'qk_rope_head_dim=None and qk_nope_head_dim=None: w',
    ),
  )
  def test_init_cache_without_a_size(self, module, message):
    """A size that a module infers from its inputs must be given."""
    with self.assertRaisesRegex(ValueError, message):
      module.init_cache(B, S)

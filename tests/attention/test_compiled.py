"""What the core compiles: once, without constants, for any length."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from absl.testing import parameterized
from compiling import count_compilations
from flax import nnx
from jax import export
from oracles import assert_close, booleans, normal

import mha_jax
import mha_jax.nnx as mha_nnx
from mha_jax import linen
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  Rope,
  apply,
  attend,
  constants,
  init_cache,
  init_table,
  keys_values,
  masks,
  multihead_attention,
)
from mha_jax.attention.implementations import OURS

FLOAT32 = 1e-5


def tensor(seed, *shape):
  return jnp.asarray(normal(seed, *shape).astype(np.float32))


class OnceTest(parameterized.TestCase):
  @parameterized.parameters(*OURS)
  def test_second_call(self, implementation):
    """An equal call without jit compiles nothing anew."""
    q, other = tensor(0, 2, 3, 11, 5), tensor(1, 2, 3, 11, 5)
    f = functools.partial(
      multihead_attention,
      mask=masks.causal() & masks.lengths([3, 7]),
      scale=0.3,
      implementation=implementation,
    )
    f(q, q, q)
    with count_compilations() as count:
      f(other, q, q)
    self.assertEqual(count(), 0)

  @parameterized.product(implementation=OURS, kept=[None, 'capacity', 'window'])
  def test_second_call_of_a_layer(self, implementation, kept):
    """The pure function and both front ends, cached or not."""
    config = GroupedConfig(15, 3, head_dim=6, rope=Rope())
    params = init_table(config.table, jax.random.key(0))
    module = linen.Attention(config, implementation=implementation)
    other = mha_nnx.Attention(
      config, implementation=implementation, rngs=nnx.Rngs(0)
    )
    layers = (
      functools.partial(apply, config, params, implementation=implementation),
      functools.partial(module.apply, {'params': params}),
      other,
    )
    cache = None if kept is None else init_cache(config, 2, **{kept: 13})
    steps = (tensor(0, 2, 3, 15), tensor(1, 2, 1, 15), tensor(2, 2, 1, 15))
    for layer in layers:
      after = cache
      for x in steps[:2]:
        out = layer(x, mask=masks.causal(), cache=after)
        after = None if kept is None else out[1]
      with count_compilations() as count:
        layer(steps[2], mask=masks.causal(), cache=after)
      self.assertEqual(count(), 0)

  def test_second_projection_of_another_sequence(self):
    """keys_values, and the cross-attention to what it gives."""
    config = LatentConfig(15, 3, kv_lora_rank=7)
    params = init_table(config.table, jax.random.key(0))

    def run(x, y):
      kept = keys_values(config, params, y)
      return apply(config, params, x, cache=kept)

    run(tensor(0, 2, 5, 15), tensor(1, 2, 7, 15))
    with count_compilations() as count:
      run(tensor(2, 2, 5, 15), tensor(3, 2, 7, 15))
    self.assertEqual(count(), 0)


BITS = r'u8\[10513\]'
"""290 x 290 bits in bytes."""
SHAPE = r'\w+\[[\d,]+\]'
"""As XLA writes an array that is no single number."""


@pytest.mark.usefixtures('full_compile')
class ConstantsTest(parameterized.TestCase):
  """XLA's interpreter folded what follows from a mask, for up to a minute."""

  @parameterized.product(
    implementation=OURS,
    given=['mask', 'bias', 'joined', 'numbers', 'many values'],
  )
  def test_nothing_follows_from_a_constant(self, implementation, given):
    t = 290
    allowed = booleans(0, t, t)
    allowed[5], allowed[:, 7] = False, False  # else any() is True throughout
    allowed = jnp.asarray(allowed)
    if given == 'numbers':
      numbers = allowed.astype(jnp.float32)
      module = self.module(implementation)
      f = functools.partial(module, mask=numbers)
      self.assert_one_constant(f, tensor(0, 1, t, 4), BITS)
      return
    options = {
      'mask': {'mask': allowed},
      'bias': {'bias': jnp.where(allowed, 0.0, -jnp.inf)},
      'joined': {'mask': masks.dense(allowed) & masks.lengths([t - 3])},
      'many values': {'bias': normal(1, 1, 1, t, t).astype('f')},
    }[given]

    def f(q):
      return multihead_attention(
        q, q, q, implementation=implementation, **options
      )

    wanted = r'f32\[1,1,290,290\]' if given == 'many values' else BITS
    self.assert_one_constant(f, tensor(0, 1, 1, t, 5), wanted)

  @parameterized.named_parameters(
    ('booleans', lambda x: x),
    ('all', np.ones_like),
    ('numbers', lambda x: x.astype('f')),
    ('additive', lambda x: np.where(x, 0.5, -np.inf)),
    ('many values', lambda x: np.where(x, normal(0, *x.shape), -np.inf)),
    ('of JAX', jnp.asarray),
    ('narrow', lambda x: jnp.where(x, 3.0, -7.0).astype(jnp.bfloat16)),
  )
  def test_a_constant_has_its_values(self, make):
    """Also where its size is no multiple of eight."""
    values = make(booleans(0, 3, 151, 149))
    got = jax.jit(lambda: constants.as_array(values))()
    wanted = jnp.asarray(values)
    self.assertEqual(got.dtype, wanted.dtype)
    np.testing.assert_array_equal(got, wanted)

  def module(self, implementation):
    """A Linen module, which takes Flax's masks of numbers."""
    module = linen.MultiHeadAttention(
      num_heads=1, use_bias=False, implementation=implementation
    )
    names = ('query', 'key', 'value')
    params = {name: {'kernel': jnp.ones((4, 1, 4))} for name in names}
    params['out'] = {'kernel': jnp.ones((1, 4, 4))}
    return functools.partial(module.apply, {'params': params})

  def assert_one_constant(self, f, x, wanted):
    """The mask itself is the program's only large constant.

    From JAX 0.12 on, a large one is a hidden argument, called `Arg_0`.
    """
    program = jax.jit(f).lower(x).compile().as_text()
    entry = program[program.index('\nENTRY ') :]
    found = [
      *re.findall(rf'= ({SHAPE})\S* constant\(\{{\.\.\.\}}\)', program),
      *re.findall(rf'%Arg_\S+ = ({SHAPE})\S* parameter\(', entry),
    ]
    self.assertLen(found, 1, found)
    self.assertRegex(found[0], wanted)


class InfinitiesTest(parameterized.TestCase):
  @parameterized.parameters(*OURS)
  def test_debug_infs(self, implementation):
    """Scores of -inf, and queries of nothing, are no result."""
    q = tensor(0, 2, 3, 11, 5)
    mask = masks.causal() & masks.lengths([0, 7])

    def loss(q):
      out = multihead_attention(
        q, q, q, mask=mask, implementation=implementation
      )
      return jnp.sum(out**2)

    with jax.debug_infs(True):
      found = (
        jax.grad(loss)(q),
        loss(q),
        attend(q[1, 0], q[1, 0], q[1, 0], mask=masks.causal()),
      )
      with self.assertRaises(FloatingPointError):
        jnp.log(jnp.zeros(3))  # the option is on
    chex.assert_tree_all_finite(found)


def grouped_and_latent():
  for config in (
    GroupedConfig(16, 4, 2, rope=Rope()),
    LatentConfig(16, 4, kv_lora_rank=6, qk_rope_head_dim=4),
  ):
    params = init_table(config.table, jax.random.key(0))
    yield functools.partial(apply, config, params, mask=masks.causal())


class SymbolicTest(parameterized.TestCase):
  """Programs for any batch size and length, as `jax.export` makes them."""

  def setUp(self):
    super().setUp()
    # A symbolic dimension is no int, which annotations say.
    jaxtyping.config.update('jaxtyping_disable', True)
    self.addCleanup(jaxtyping.config.update, 'jaxtyping_disable', False)

  def assert_serves(self, f, *features):
    b, t = export.symbolic_shape('b, t')
    exported = export.export(jax.jit(f))(
      jax.ShapeDtypeStruct((b, t, *features), jnp.float32)
    )
    for shape in ((1, 5), (3, 1031)):
      x = tensor(0, *shape, *features)
      assert_close(exported.call(x), f(x), FLOAT32)

  def test_dot_product(self):
    f = functools.partial(
      mha_jax.dot_product_attention, is_causal=True, local_window_size=(7, 0)
    )
    self.assert_serves(lambda x: f(x, x, x), 3, 5)

  def test_layers(self):
    for f in grouped_and_latent():
      self.assert_serves(f, 16)

  def test_attention_fn(self):
    """Within Flax's module, with a mask of Flax's."""
    module = nn.MultiHeadDotProductAttention(
      num_heads=4, attention_fn=linen.attention_fn
    )
    x = tensor(0, 1, 2, 16)
    variables = module.init(jax.random.key(0), x)
    self.assert_serves(
      lambda x: module.apply(
        variables, x, mask=nn.make_causal_mask(x[..., 0], dtype=bool)
      ),
      16,
    )

  def test_cached_step(self):
    """Of any number of rows, with many keys."""
    config = GroupedConfig(16, 4, 2)
    params = init_table(config.table, jax.random.key(0))
    (b,) = export.symbolic_shape('b')
    cache, x = init_cache(config, 3, 1100), tensor(0, 3, 1, 16)

    def f(x, cache):
      return apply(config, params, x, mask=masks.causal(), cache=cache)[0]

    symbolic = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), (x, cache)
    )
    exported = export.export(jax.jit(f))(*symbolic)
    assert_close(exported.call(x, cache), f(x, cache), FLOAT32)

  def test_blocks_say_why_not(self):
    (t,) = export.symbolic_shape('t')
    x = jax.ShapeDtypeStruct((1, 2, t, 5), jnp.float32)
    f = functools.partial(multihead_attention, implementation='blockwise')
    with self.assertRaisesRegex(ValueError, 'lengths that are known, not t=t'):
      export.export(jax.jit(lambda x: f(x, x, x)))(x)

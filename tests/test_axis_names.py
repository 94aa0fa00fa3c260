"""Axis names of parameters: what Flax takes, and the metadata that it leaves.

Initialisers see a kernel flattened to two dimensions, so that foreign code
often names two of the three that it has.
"""

import functools
import warnings

import flax.linen as nn
import jax
import numpy as np
from absl.testing import parameterized
from flax import nnx
from flax.core import meta
from jax.sharding import AxisType, NamedSharding
from oracles import assert_same_bits, normal

import mha_jax.linen
import mha_jax.nnx
from mha_jax import axis_names
from mha_jax.attention import GroupedConfig

B, T, D, H = 2, 5, 6, 3
X = normal(0, B, T, D).astype(np.float32)
BOXES = {
  'partitioned': nn.with_partitioning,
  'logical': nn.with_logical_partitioning,
}
NAMES = {
  'lm1b': ('embed', 'heads'),
  'minigpt': (None, 'heads'),
  'list': ['embed'],
  'spec': jax.P('embed', 'heads'),
  'none': (),
  'full': ('embed', 'heads', None),
}
SHORT = [name for name in NAMES if name not in ('none', 'full')]


def mesh():
  return jax.make_mesh((1, 1), ('embed', 'heads'), (AxisType.Auto,) * 2)


def caught(function):
  """What a function returns, and the warnings that it gives."""
  axis_names.warn_once.cache_clear()
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter('always')
    result = function()
  return result, [str(x.message) for x in found]


def boxes(front, box, names, **options):
  """The initial parameters of a Linen module with named kernels."""
  kernel_init = BOXES[box](nn.initializers.xavier_uniform(), names)
  bias_init = BOXES[box](nn.initializers.normal(), ('heads',))
  module = front.MultiHeadDotProductAttention(
    H, kernel_init=kernel_init, bias_init=bias_init, **options
  )
  rules = nn.logical_axis_rules((('embed', 'embed'), ('heads', 'heads')))
  with rules:
    return module.init(jax.random.key(0), X)['params']


def described(params):
  """Class and content of every box, and the shape in it."""
  return jax.tree.map(
    lambda x: (type(x), x.names, x.mesh, x.value.shape),
    params,
    is_leaf=lambda x: isinstance(x, meta.AxisMetadata),
  )


class LinenTest(parameterized.TestCase):
  @parameterized.product(box=tuple(BOXES), names=tuple(NAMES))
  def test_as_in_flax(self, box, names):
    """The same boxes around the same bits, without a mesh."""
    got, _ = caught(lambda: boxes(mha_jax.linen, box, NAMES[names]))
    wanted = boxes(nn, box, NAMES[names])
    self.assertEqual(described(got), described(wanted))
    assert_same_bits(nn.unbox(got), nn.unbox(wanted))

  @parameterized.product(box=tuple(BOXES), names=('lm1b', 'spec'))
  def test_in_a_mesh(self, box, names):
    """And in one. The arrays lie as their names say."""
    with jax.set_mesh(mesh()):
      got, _ = caught(lambda: boxes(mha_jax.linen, box, NAMES[names]))
      wanted = boxes(nn, box, NAMES[names])
    self.assertEqual(described(got), described(wanted))
    for row in ('query', 'out'):
      sharding = got[row]['kernel'].value.sharding
      self.assertEqual(sharding.spec, jax.P(*NAMES[names]))

  @parameterized.product(box=tuple(BOXES))
  def test_all_names_in_a_mesh(self, box):
    """What the warning says to write works there, and is as silent."""
    names = ('embed', 'heads', None)
    with jax.set_mesh(mesh()):
      got, messages = caught(
        lambda: boxes(mha_jax.linen, box, names, use_bias=False)
      )
    kernel = got['out']['kernel']
    self.assertEqual(kernel.names, names)
    wanted = NamedSharding(kernel.value.sharding.mesh, jax.P(*names))
    self.assertTrue(kernel.value.sharding.is_equivalent_to(wanted, 3))
    self.assertEmpty(messages)

  def test_warning(self):
    """One for all layers, with every parameter's names in full."""
    kernel_init = nn.with_partitioning(nn.initializers.ones, NAMES['lm1b'])

    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        for _ in range(2):
          x = mha_jax.linen.MultiHeadAttention(H, kernel_init=kernel_init)(x)
        return x

    def twice():
      variables = Model().init(jax.random.key(0), X)
      Model().init(jax.random.key(1), X)
      return Model().apply(variables, X)

    (message,) = caught(twice)[1]
    for part in (
      "query.kernel (embed, heads, head_dim) gets ('embed', 'heads', None)",
      "key.kernel (embed, kv_heads, head_dim) gets ('embed', 'heads', None)",
      "value.kernel (embed, kv_heads, v_head_dim) gets ('embed', 'heads', No",
      "out.kernel (heads, v_head_dim, embed) gets ('embed', 'heads', None)",
      'Write these in full',
    ):
      self.assertIn(part, message)
    self.assertNotIn('.bias', message)

  @parameterized.parameters(*((name,) for name in SHORT))
  def test_who_is_warned(self, name):
    """Whoever names some dimensions, and not all, in whatever form."""
    for wanted, names in ((1, NAMES[name]), (0, ()), (0, NAMES['full'])):
      make = functools.partial(
        boxes, mha_jax.linen, 'logical', names, use_bias=False
      )
      _, messages = caught(lambda make=make: jax.eval_shape(make))
      self.assertLen(messages, wanted)

  @parameterized.parameters((('a', None, None, None),), (jax.P(*4 * 'a'),))
  def test_more_than_dimensions(self, names):
    """The parameter, the names, its shape and where to find them."""
    with self.assertRaisesRegex(
      ValueError,
      r"kernel_init of 'query': 4 axis names \('a', .*\(6, 3, 2\); give one",
    ):
      boxes(mha_jax.linen, 'partitioned', names)

  def test_beside_others(self):
    """A subclass has parameters of its own, and submodules."""

    class Gated(mha_jax.linen.MultiHeadAttention):
      @nn.compact
      def __call__(self, x, **options):
        gate = nn.Dense(1, name='gate')(x)
        scale = self.param('scale', nn.initializers.ones, (1, 1, 1))
        return gate * scale * super().__call__(x, **options)

    init = nn.with_partitioning(nn.initializers.ones, NAMES['lm1b'])
    module = Gated(H, kernel_init=init)
    params, messages = caught(
      lambda: jax.eval_shape(module.init, jax.random.key(0), X)['params']
    )
    self.assertLen(messages, 1)
    self.assertContainsSubset({'gate', 'scale', 'query', 'out'}, params)

  def test_latent(self):
    """Kernels of two dimensions have two names, the others are told."""
    kernel_init = nn.with_partitioning(nn.initializers.ones, NAMES['lm1b'])
    module = mha_jax.linen.MultiHeadLatentAttention(
      H, kv_lora_rank=5, kernel_init=kernel_init
    )
    _, (message,) = caught(
      lambda: jax.eval_shape(module.init, jax.random.key(0), X)
    )
    self.assertNotIn('key_down', message)
    self.assertIn('key.kernel (kv_lora_rank, heads, head_dim) gets', message)


def parameters(front, **options):
  """The parameters of an NNX module, by path."""
  module = front.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **options)
  return dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))


def in_metadata(names):
  return {'kernel_metadata': {'out_sharding': names}}


def in_initialiser(names):
  init = nnx.initializers.xavier_uniform()
  return {'kernel_init': nnx.with_partitioning(init, names)}


class NNXTest(parameterized.TestCase):
  @parameterized.product(
    where=(in_metadata, in_initialiser),
    names=tuple(NAMES),
    meshed=(True, False),
  )
  def test_as_in_flax(self, where, names, meshed):
    """The same metadata; in a mesh the arrays lie as in Flax too."""
    if names == 'list' and meshed:
      names = 'minigpt'  # a list is not taken there, by Flax either
    got, wanted = self.both(where, NAMES[names], meshed)
    self.assertEqual(list(got), list(wanted))
    for path, parameter in got.items():
      theirs = wanted[path]
      self.assertEqual(parameter.get_metadata(), theirs.get_metadata())
      self.assertEqual(parameter[...].sharding, theirs[...].sharding)

  def both(self, where, names, meshed):
    options = {**where(names), 'bias_metadata': {'out_sharding': ('heads',)}}
    fronts = (mha_jax.nnx, nnx)
    if meshed:
      with jax.set_mesh(mesh()):
        return caught(lambda: [parameters(x, **options) for x in fronts])[0]
    with nnx.use_eager_sharding(False):
      return caught(lambda: [parameters(x, **options) for x in fronts])[0]

  @parameterized.parameters(in_metadata, in_initialiser)
  def test_warning(self, where):
    """One, however many layers are made."""

    def twice():
      with nnx.use_eager_sharding(False):
        for _ in range(2):
          parameters(mha_jax.nnx, **where(jax.P(None, 'heads')))

    (message,) = caught(twice)[1]
    self.assertIn(
      "out.kernel (heads, v_head_dim, embed) gets (None, 'heads', None)",
      message,
    )
    self.assertEqual(message.count('gets'), 4)

  def test_a_sharding(self):
    """A NamedSharding's spec is read, as Flax reads it."""
    sharding = NamedSharding(mesh(), jax.P('embed'))

    def make():
      config = GroupedConfig(D, H, use_bias=False)
      return mha_jax.nnx.Attention(
        config, rngs=nnx.Rngs(0), **in_metadata(sharding)
      )

    module, (message,) = caught(make)
    self.assertIn("gets ('embed', None, None)", message)
    self.assertEqual(module.query.kernel[...].sharding, sharding)
    too_many = NamedSharding(mesh(), jax.P(None, None, None, None))
    with self.assertRaisesRegex(ValueError, '4 axis names'):
      parameters(mha_jax.nnx, **in_metadata(too_many))

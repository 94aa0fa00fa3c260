"""What foreign code does with Flax's modules: it works, or is told what to do.

Arguments are walked in test_flax_arguments.py, members here: docs/modules.md
has a list of all that differs, and a test holds it against Flax.
"""

import fnmatch
import functools
import inspect
import pathlib
import re
import warnings
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracles
from absl.testing import parameterized
from flax import nnx
from oracles import assert_close, assert_same_bits, booleans, normal

import mha_jax.linen
import mha_jax.nnx
from mha_jax import attention, generation
from mha_jax.attention import (
  Dropout,
  GroupedConfig,
  LinearScaling,
  Norm,
  Rope,
  YarnScaling,
  checks,
  masks,
)
from mha_jax.attention.implementations import OURS
from mha_jax.decoder import DecoderLM, decoder_config, generate
from tests import test_flax_arguments

B, T, D, H = 2, 5, 6, 3
X = normal(0, B, T, D).astype(np.float32)
CAUSAL = np.asarray(nn.make_causal_mask(np.ones((B, T))))


def linen(**options):
  module = mha_jax.linen.MultiHeadAttention(H, **options)
  params = jax.eval_shape(module.init, jax.random.key(0), X)
  return module.bind(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params))


def nnx_layer(**options):
  return mha_jax.nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0), **options)


FRONTS = {'linen': linen, 'nnx': nnx_layer}


class SelfAttentionTest(oracles.X64TestCase):
  """Linen's `SelfAttention`, which Flax keeps with a warning."""

  def test_as_in_flax(self):
    """Arguments by position, parameters, outputs and gradients."""
    theirs, ours = nn.SelfAttention(H), mha_jax.linen.SelfAttention(H)
    x, mask = (
      normal(0, B, T, D),
      booleans(1, B, H, T, T) | np.eye(T, dtype=bool),
    )

    def results(module):
      params = module.init(jax.random.key(0), x, mask, True)
      moved = jax.tree.map(lambda p: jnp.cos(3 * p + 1), params)

      def loss(params, x):
        out, state = module.apply(
          params, x, mask, True, None, True, mutable='intermediates'
        )
        return jnp.sum(jnp.sin(out)), (out, state)

      grads, out = jax.grad(loss, has_aux=True)(moved, x)
      del grads['params']['key']['bias']  # 0 up to rounding
      return params, grads, out

    with warnings.catch_warnings():
      warnings.simplefilter('ignore', DeprecationWarning)
      wanted = jax.jit(functools.partial(results, theirs))()
    got = jax.jit(functools.partial(results, ours))()
    assert_same_bits(got[0], wanted[0])
    assert_close(got[1:], wanted[1:])

  def test_arguments(self):
    """The same, in the same order; those of the call with the same defaults."""
    theirs, ours = nn.SelfAttention, mha_jax.linen.SelfAttention
    call = list(inspect.signature(ours.__call__).parameters.values())
    wanted = inspect.signature(theirs.__call__).parameters.values()
    for a, b in zip(call, wanted, strict=False):
      self.assertEqual((a.name, a.kind, a.default), (b.name, b.kind, b.default))
    self.assertLen(call, len(wanted) + 1)  # and **options
    self.assertEqual(
      inspect.signature(ours),
      inspect.signature(mha_jax.linen.MultiHeadDotProductAttention),
    )

  def test_options(self):
    """Ours by keyword, dropout by its own key; others are refused."""
    module = mha_jax.linen.SelfAttention(H, head_dim=2, dropout_rate=0.5)
    params = module.init(jax.random.key(0), X, None, True)
    apply = functools.partial(jax.jit, static_argnums=3)(module.apply)
    wanted = apply(params, X, masks.causal(), True)
    cache = module.init_cache(B, T)
    got, _ = apply(params, X, masks.causal(), True, cache=cache)
    assert_close(got, wanted, 1e-5)
    f = functools.partial(apply, params, X, None, False)
    dropped = [f(jax.random.key(seed)) for seed in (0, 0, 1)]
    assert_same_bits(dropped[0], dropped[1])
    self.assertGreater(oracles.relative_error(dropped[2], dropped[0]), 1e-3)
    with self.assertRaisesRegex(TypeError, 'inputs_kx'):
      module.apply(params, X, inputs_kx=X)


class MisplacedTest(parameterized.TestCase):
  """Calls of Flax's and other signatures: a line that says what to write."""

  @parameterized.product(
    front=tuple(FRONTS),
    mask=(
      CAUSAL,
      CAUSAL[0],
      CAUSAL.astype(bool),
      CAUSAL[0, 0].astype(bool),
      masks.causal(),
      masks.causal,
    ),
  )
  def test_mask_by_position(self, front, mask):
    """As the second argument, or as the third, of an older Flax."""
    if np.shape(mask) == (1, T, T):
      mask = mask[None]
    layer = FRONTS[front]()
    for arguments in ((mask,), (X, mask)):
      with self.assertRaisesRegex(
        ValueError, r'inputs_[kv]=.* looks like a mask, .* write mask='
      ):
        layer(X, *arguments)

  @parameterized.product(front=['linen', 'nnx'])
  def test_variables(self, front):
    """Flax's variables, which can be called, are arrays: keys and masks."""
    layer, keys = FRONTS[front](), normal(1, B, 7, D).astype(np.float32)
    assert_same_bits(layer(X, nnx.Param(jnp.asarray(keys))), layer(X, keys))
    causal = CAUSAL.astype(bool)
    assert_same_bits(
      layer(X, mask=nnx.Variable(jnp.asarray(causal))), layer(X, mask=causal)
    )

  def test_booleans_as_keys(self):
    """An array as wide as the inputs is no mask."""
    keys = booleans(0, B, 7, D)
    wanted = linen()(X, keys.astype(np.float32))
    assert_same_bits(linen()(X, keys), wanted)

  def test_mask_where_parameters_are_made(self):
    """By Linen's modules of either kind, and by the pure function."""
    config = GroupedConfig(D, H)
    for call in (
      mha_jax.linen.MultiHeadAttention(H).init,
      mha_jax.linen.Attention(config).init,
      functools.partial(attention.apply, config),
    ):
      with self.assertRaisesRegex(ValueError, 'write mask='):
        call(jax.random.key(0), X, CAUSAL)

  def test_a_mask_of_as_many_dimensions(self):
    """Numbers that could be keys; the message has it all the same."""
    x = normal(0, B, 2, T, D)
    with self.assertRaisesRegex(ValueError, 'made for 6 features'):
      nnx_layer()(x, CAUSAL)
    wide = np.ones((B, 1, T, D))
    with self.assertRaisesRegex(ValueError, 'is passed as mask='):
      nnx_layer()(x, wide)

  def test_inputs_stay_inputs(self):
    """Lists and arrays of keys and values, of another length and batch."""
    layer, y = nnx_layer(), normal(1, B, T + 2, D).astype(np.float32)
    assert_same_bits(layer(X, y.tolist(), y.tolist()), layer(X, y))

  @parameterized.parameters(
    ((2, 12, 16), {}, r'init_cache\(2, 12\)'),
    ([3, 2, 12, 16], {}, r'init_cache\(6, 12\)'),
    ((2, 12, 16), {'dtype': jnp.float32}, r'init_cache\(2, 12\)'),
    ((12, 16), {'capacity': jnp.float32}, r'init_cache\(1, 12\)'),
  )
  def test_cache_of_a_shape(self, shape, options, remedy):
    """Flax's `init_cache(input_shape, dtype)`."""
    as_users_run(self)
    with self.assertRaisesRegex(
      ValueError, rf'batch_size=.* is a shape, as Flax.*{remedy}.*cache='
    ):
      nnx_layer().init_cache(shape, **options)
    with self.assertRaisesRegex(
      ValueError, 'input_shape=.* no argument .*init_cache; write batch_size='
    ):
      nnx_layer().init_cache(input_shape=shape)

  @parameterized.parameters('query', 'out', 'query_ln')
  def test_a_layer_called(self, name):
    """`m.query(x)`: what to write, which does it."""
    layer = nnx_layer(normalize_qk=True)
    with self.assertRaisesRegex(
      ValueError, r"table\['query'\].apply\(layer.qu"
    ):
      getattr(layer, name)(X)
    theirs = nnx.MultiHeadAttention(H, D, normalize_qk=True, rngs=nnx.Rngs(0))
    got = layer.config.table['query'].apply(layer.query(), X)
    assert_close(np.swapaxes(got, 1, 2), theirs.query(X), 1e-5)

  def test_a_layer_called_in_linen(self):
    """By an interceptor, say."""
    row = GroupedConfig(D, H).table['query']
    layer = mha_jax.linen.Parameters(row, dict(row.initializers))
    with self.assertRaisesRegex(ValueError, 'compute nothing; for layer.query'):
      layer.init(jax.random.key(0), X)

  def test_decode_from_outside(self):
    """`set_attributes`, as NNX code sets it, is not lost on the way."""
    layer = nnx_layer()
    layer.set_attributes(decode=False)
    wanted = layer(X)
    layer.set_attributes(decode=True)
    with self.assertRaisesRegex(
      ValueError, 'decode=True is not taken; .*cache='
    ):
      layer(X[:, :1])
    assert_same_bits(layer(X, decode=False), wanted)
    viewed = nnx.view(nnx_layer(), decode=False, batch_size=B, max_length=T)
    assert_same_bits(viewed(X), wanted)


def latent(front, **options):
  if front == 'linen':
    return mha_jax.linen.MultiHeadLatentAttention(H, kv_lora_rank=4, **options)
  return mha_jax.nnx.MultiHeadLatentAttention(
    H, D, kv_lora_rank=4, rngs=nnx.Rngs(0), **options
  )


class UnknownTest(parameterized.TestCase):
  """An argument that a module does not have."""

  @parameterized.product(
    front=('linen', 'nnx'),
    case=(
      ('num_kv_heads', 'GroupedQueryAttention has it; .*write kv_lora_rank='),
      ('head_dim', 'write qk_nope_head_dim= and qk_rope_head_dim='),
      ('normalize_qk', 'the latents are normalised'),
      ('broadcast_dropout', 'leave it out'),
      ('decode', 'pass cache='),
      ('drop_out_rate', 'write dropout_rate=$'),
      ('kernel_initializer', 'write kernel_init=$'),
      ('xyz', 'write num_heads=, .*rope=.*kernel_init=.*implementation='),
    ),
  )
  def test_latent(self, front, case):
    """The name, the value, the module and what to write."""
    name, remedy = case
    with self.assertRaisesRegex(
      ValueError,
      f'^{name}=7 is no argument of MultiHeadLatentAttention; .*{remedy}',
    ):
      latent(front, **{name: 7})

  @parameterized.product(front=('linen', 'nnx'))
  def test_others(self, front):
    """Every module, and a user's own with an argument more."""
    module = {'linen': mha_jax.linen, 'nnx': mha_jax.nnx}[front]
    options = (
      {} if front == 'linen' else {'in_features': D, 'rngs': nnx.Rngs(0)}
    )

    class Own(module.GroupedQueryAttention):
      if front == 'linen':
        note: int = 3
      else:

        def __init__(self, *args, note=3, **options):
          super().__init__(*args, **options)

    for cls, more in (
      (module.MultiHeadAttention, {}),
      (module.MultiQueryAttention, {}),
      (Own, {'num_kv_heads': 1, 'note': 5}),
    ):
      cls(num_heads=H, **more, **options)
      with self.assertRaisesRegex(
        ValueError,
        f'^q_lora_rank=2 is no argument of {cls.__name__}; MultiHeadLatent',
      ):
        cls(num_heads=H, q_lora_rank=2, **more, **options)
    config = GroupedConfig(D, H)
    with self.assertRaisesRegex(
      ValueError, 'in_features=6 .*of Attention; the'
    ):
      module.Attention(config, **{**options, 'in_features': D})


NUMBERS = {
  'python': lambda x: x,
  'numpy': np.float32,
  'array': np.array,
  'jax': jnp.float32,
  'bfloat16': jnp.bfloat16,
}


def as_users_run(case: parameterized.TestCase) -> None:
  """Without the shape checks of tests, which look at annotations alone."""
  case.enter_context(
    mock.patch.object(jaxtyping.config, 'jaxtyping_disable', True)
  )


class NumbersTest(parameterized.TestCase):
  """A number is one also as an array without dimensions."""

  def setUp(self):
    super().setUp()
    as_users_run(self)

  def assert_same_program(self, function, number):
    """What is computed for one half is what is computed for 0.5."""
    one, other = (
      str(jax.make_jaxpr(functools.partial(function, x))(X))
      for x in (number(0.5), 0.5)
    )
    self.assertEqual(one, other)

  @parameterized.product(front=tuple(FRONTS), kind=tuple(NUMBERS))
  def test_dropout_rate(self, front, kind):
    """Of a module, where all else is traced."""

    def out(rate, x):
      layer = FRONTS[front](dropout_rate=rate, deterministic=False)
      if front == 'linen':
        return layer(x, dropout_rng=jax.random.key(1))
      return layer(x, rngs=nnx.Rngs(dropout=1))

    self.assert_same_program(out, NUMBERS[kind])

  @parameterized.product(front=tuple(FRONTS), kind=tuple(NUMBERS))
  def test_functions(self, front, kind):
    """The rate and the softcap of attention_fn, the scale of ours."""
    function = {'linen': mha_jax.linen, 'nnx': mha_jax.nnx}[front].attention_fn

    def theirs(number, x):
      x = x[:, :, None]
      options = {'dropout_rate': number, 'logit_softcap': number}
      return function(x, x, x, dropout_rng=jax.random.key(0), **options)

    def ours(number, x):
      x = x[:, None]
      options = {'scale': 0.5, 'logit_softcap': number}
      return [
        attention.multihead_attention(x, x, x, implementation=name, **options)
        for name in OURS
      ]

    self.assert_same_program(theirs, NUMBERS[kind])
    self.assert_same_program(ours, NUMBERS[kind])

  @parameterized.parameters(*NUMBERS)
  def test_scale(self, kind):
    """An array's scale is one of the arguments."""
    x = normal(0, B, H, T, 2).astype(np.float32)
    got, wanted = (
      attention.multihead_attention(x, x, x, scale=scale)
      for scale in (NUMBERS[kind](0.5), 0.5)
    )
    assert_close(got, wanted, 1e-6)

  @parameterized.parameters(*NUMBERS)
  def test_configs(self, kind):
    """Frozen configs hold Python's numbers: equal, and hashable."""
    number = NUMBERS[kind]
    for cls, options in (
      (Rope, {'theta': 1024.0}),
      (Rope, {'scaling': LinearScaling(2.0)}),
      (LinearScaling, {'factor': 2.0}),
      (YarnScaling, {'factor': 2.0, 'original_max_position_embeddings': 16}),
      (Norm, {'kind': 'rms', 'size': 5, 'epsilon': 0.5}),
      (GroupedConfig, {'d_model': D, 'num_heads': H, 'logit_softcap': 2.0}),
      (decoder_config, {'vocab_size': 7, 'max_len': 5, 'dropout_rate': 0.5}),
      (Dropout, {'key': jax.random.key(0), 'rate': 0.5}),
    ):
      given = {
        name: number(x) if isinstance(x, float) else x
        for name, x in options.items()
      }
      got = cls(**given)
      self.assertEqual(got, cls(**options))
      self.assertEqual(hash(got), hash(cls(**options)))

  def test_whole_numbers(self):
    """Sizes too, where they are known."""
    three, one = jnp.int32(3), np.array(1)
    config = GroupedConfig(jnp.int32(D), three, one)
    self.assertEqual(config, GroupedConfig(D, 3, 1))
    plain = GroupedConfig(D, H, use_bias=jnp.bool_(False))
    self.assertIs(plain.use_bias, False)
    module = mha_jax.linen.MultiHeadAttention(three, num_kv_heads=three)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X)
    self.assertEqual(shapes['params']['query']['kernel'].shape, (D, 3, 2))
    cache = attention.init_cache(config, np.array(B), jnp.int32(T))
    self.assertEqual(cache, attention.init_cache(config, B, T))
    self.assertEqual(masks.window(three, one), masks.window(3, 1))

  def test_generation(self):
    """Temperature, top_p, top_k and the number of tokens."""
    model = DecoderLM(decoder_config(vocab_size=7, max_len=9, num_heads=1))
    run = mock.Mock(return_value=(None, None, None))
    for number, whole in ((float, int), (jnp.float32, np.array)):
      with mock.patch.object(generation, '_generate', run):
        generate(
          model,
          {},
          np.array([[1, 2]]),
          key=jax.random.key(1),
          max_new_tokens=whole(3),
          temperature=number(0.5),
          top_p=number(0.75),
          top_k=whole(5),
        )
    (wanted, got) = run.call_args_list
    self.assertEqual(got.kwargs, wanted.kwargs)
    hash(tuple(got.kwargs.values()))
    self.assertEqual(got.args[5:7], (0.5, 0.75))
    self.assertEqual(wanted.args[5:7], (0.5, 0.75))

  def test_what_is_no_number(self):
    """Traced ones, arrays of one element and booleans are refused."""
    with self.assertRaisesRegex(ValueError, 'must lie in .*it is traced: let'):
      jax.jit(lambda rate: Dropout(jax.random.key(0), rate))(0.5)
    for function in (checks.real, checks.whole):
      with self.assertRaisesRegex(ValueError, 'must .*it is traced: let'):
        jax.jit(lambda x, f=function: f('x', x, 0, 1))(1)
    with self.assertRaisesRegex(ValueError, 'x=.* must be a pos.*it is traced'):
      jax.jit(lambda x: checks.positive('x', x))(1)
    with self.assertRaisesRegex(ValueError, 'softcap=.*it is traced'):
      jax.jit(checks.softcap)(1.0)
    for rate in (np.ones(1) / 2, jnp.bool_(True), 'x'):
      with self.assertRaisesRegex(ValueError, 'must lie in'):
        nnx_layer(dropout_rate=rate)


PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'modules.md'


def listed() -> list[str]:
  """What the page's list of differences names, with * for any letters."""
  text = PAGE.read_text()
  start = text.index('An argument\nthat is not taken')
  return re.findall(
    r'`([\w*]+)`', text[start : text.index('You can also keep Flax')]
  )


def unlisted(names) -> set[str]:
  names = {name for name in names if not name.startswith('_')}
  patterns = listed()
  return {
    name
    for name in names
    if not any(fnmatch.fnmatchcase(name, x) for x in patterns)
  }


MEMBERS = {
  'MultiHeadDotProductAttention': (
    nn.MultiHeadDotProductAttention(H),
    mha_jax.linen.MultiHeadDotProductAttention(H),
  ),
  'MultiHeadAttention': (
    nn.MultiHeadAttention(H),
    mha_jax.linen.MultiHeadAttention(H),
  ),
  'SelfAttention': (nn.SelfAttention(H), mha_jax.linen.SelfAttention(H)),
  'nnx': (nnx.MultiHeadAttention(H, D, rngs=nnx.Rngs(0)), nnx_layer()),
  'nnx with all': (
    nnx.MultiHeadAttention(
      H, D, rngs=nnx.Rngs(0), normalize_qk=True, dropout_rate=0.1
    ),
    nnx_layer(normalize_qk=True, dropout_rate=0.1),
  ),
}


def is_of_attention(member) -> bool:
  """Whether Flax's attention module, and none above it, defines a method."""
  module = getattr(member, '__module__', None) or ''
  method = inspect.isfunction(member) and '.' in member.__qualname__
  return method and module.endswith('.attention')


class DifferencesTest(parameterized.TestCase):
  """The page's list of what differs from Flax is complete."""

  @parameterized.parameters(*MEMBERS)
  def test_members(self, name):
    """Every method, attribute and property is there, or is listed."""
    theirs, ours = MEMBERS[name]
    missing = unlisted(set(dir(theirs)) - set(dir(ours)))
    self.assertEmpty(missing, 'neither there nor in docs/modules.md')

  @parameterized.parameters(*MEMBERS)
  def test_arguments_of_methods(self, name):
    """So is every argument of every method that Flax's module has."""
    theirs, ours = MEMBERS[name]
    methods = {
      method
      for method in dir(type(ours))
      if method not in ('__init__', '__class__')
      and is_of_attention(getattr(type(theirs), method, None))
    }
    self.assertContainsSubset(
      {'init_cache', 'set_view'} if 'nnx' in name else {'__call__'}, methods
    )
    for method in methods:
      wanted, got = (
        inspect.signature(getattr(type(x), method)).parameters
        for x in (theirs, ours)
      )
      self.assertEmpty(unlisted(set(wanted) - set(got)), method)

  @parameterized.parameters(*test_flax_arguments.SURFACES)
  def test_arguments(self, surface):
    """So is every argument that is ignored or refused."""
    x = test_flax_arguments.SURFACES[surface]
    self.assertEmpty(unlisted([*x.ignored, *x.refused]))

  def test_nothing_too_much(self):
    """What NNX's module is said to lack it lacks."""
    text = PAGE.read_text()
    start, end = (
      text.index('has no `num_heads`'),
      text.index('`init_cache(batch_s'),
    )
    names = re.findall(r'`(\w+)`', text[start:end])
    self.assertLen(names, 15)
    self.assertEmpty([x for x in names if hasattr(nnx_layer(), x)])

  def test_a_gap_would_be_seen(self):
    """A member that nobody lists."""
    self.assertEqual(unlisted(['planted', 'num_heads']), {'planted'})
    self.assertGreater(len(listed()), 20)

  def test_layers(self):
    """Parameters are where Flax has them, as the page says of submodules."""
    theirs, ours = MEMBERS['nnx with all']
    for name in ('query', 'key', 'value', 'out', 'query_ln', 'key_ln'):
      for parameter in ('kernel', 'bias', 'scale'):
        wanted = getattr(getattr(theirs, name), parameter, None)
        got = getattr(getattr(ours, name), parameter, None)
        self.assertEqual(type(got), type(wanted))
        if wanted is not None:
          assert_same_bits(got[...], wanted[...])

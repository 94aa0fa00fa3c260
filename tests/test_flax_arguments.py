"""Flax's arguments: each is honoured, ignored or refused, and none is new.

The tables below hold every argument of Flax's modules and attention functions.
An argument that a newer Flax adds is in none of them and fails `TableTest`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from flax import nnx
from jax.extend.core import jaxprs_in_params
from oracles import assert_close, assert_same_bits, booleans, normal

import mha_jax.linen
import mha_jax.nnx
from mha_jax import attention, dot_product_attention, flax_arguments
from mha_jax.attention import LatentConfig, Rope, masks
from mha_jax.decoder import DecoderLM, decoder_config

B, T, S, D, E = 2, 7, 11, 6, 17
X, Y = normal(0, B, T, D), normal(1, B, S, D)
RATE = 0.3
SINGLE = 1e-5
"""The relative error that float32 rounding may cause."""

Name = str


@dataclasses.dataclass(frozen=True)
class Is:
  """An honoured argument: with `value` ours does what Flax's does.

  And something else than without it. Arguments `beside` it are given in both
  cases; those that it `needs` are refused without it.
  """

  value: Any
  tolerance: float = oracles.ROUNDING
  beside: dict[Name, Any] = dataclasses.field(default_factory=dict)
  needs: dict[Name, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class By:
  """An honoured argument that a test of its own checks."""

  test: Name


@dataclasses.dataclass(frozen=True)
class Refused:
  """An argument that is answered by an error which says what to use."""

  value: Any
  remedy: str


@dataclasses.dataclass(frozen=True)
class Surface:
  """A callable of Flax, ours in its place, and what becomes of arguments."""

  theirs: Callable[..., Any]
  ours: Callable[..., Any]
  honoured: dict[Name, Is | By]
  ignored: dict[Name, Any]
  refused: dict[Name, Refused]
  skipped: tuple[Name, ...] = ()

  def parameters(self, function: Callable[..., Any]) -> dict[Name, Any]:
    found = inspect.signature(function).parameters
    return {x: p for x, p in found.items() if x not in self.skipped}


def other(*arguments, **options):
  """A function that no argument has as its default."""


PROMOTION = Refused(other, 'use dtype= and param_dtype=')
PRECISION = Refused(other, 'use precision=')
DOT_GENERALS = {
  name: Refused(other, 'attention_fn=attention_fn from mha_jax')
  for name in (
    'qkv_dot_general',
    'out_dot_general',
    'qkv_dot_general_cls',
    'out_dot_general_cls',
  )
}
CONSTRUCTOR = {
  'num_heads': Is(2),
  'dtype': Is(jnp.float32, SINGLE),
  'param_dtype': Is(jnp.float64),
  'qkv_features': Is(15),
  'out_features': Is(13),
  'dropout_rate': By('test_dropout_of_modules'),
  'deterministic': By('test_deterministic'),
  'precision': By('test_precision_of_modules'),
  'kernel_init': Is(nn.initializers.xavier_uniform()),
  'out_kernel_init': Is(nn.initializers.normal(0.3)),
  'bias_init': Is(nn.initializers.normal(0.1)),
  'out_bias_init': Is(nn.initializers.normal(0.2)),
  'use_bias': Is(False),
  'normalize_qk': Is(True, beside={'qkv_features': 21}),
}
CONSTRUCTOR_REFUSED = {
  'attention_fn': Refused(other, 'implementation='),
  'decode': Refused(True, 'cache='),
  **DOT_GENERALS,
}
KEEP = np.asarray(booleans(2, B, 3, T, T) | np.eye(T, dtype=bool))
CALL = {
  'inputs_q': Is(normal(3, B, T, D)),
  'inputs_k': Is(Y),
  'inputs_v': Is(normal(4, B, S, D), beside={'inputs_k': Y}),
  'mask': Is(KEEP),
  'deterministic': By('test_deterministic'),
  'sow_weights': By('test_sow_weights'),
}
FUNCTION = {
  'query': Is(normal(5, B, T, 3, 5)),
  'key': Is(normal(6, B, S, 3, 5)),
  'value': Is(normal(7, B, S, 3, 5)),
  'bias': Is(normal(8, B, 3, T, S)),
  'mask': Is(booleans(9, B, 3, T, S) | np.eye(T, S, dtype=bool)),
  'dropout_rng': By('test_dropout_of_functions'),
  'dropout_rate': By('test_dropout_of_functions'),
  'deterministic': By('test_dropout_of_functions'),
  'dtype': Is(jnp.float32, SINGLE),
  'precision': By('test_precision_of_functions'),
  'module': By('test_sow_weights'),
}

SURFACES = {
  'linen': Surface(
    theirs=nn.MultiHeadDotProductAttention,
    ours=mha_jax.linen.MultiHeadDotProductAttention,
    honoured=CONSTRUCTOR,
    ignored={'broadcast_dropout': False, 'force_fp32_for_softmax': True},
    refused=CONSTRUCTOR_REFUSED
    | {
      'qk_attn_weights_einsum_cls': PRECISION,
      'attn_weights_value_einsum_cls': PRECISION,
    },
    skipped=('parent', 'name'),  # every Linen module's
  ),
  'linen_call': Surface(
    theirs=nn.MultiHeadDotProductAttention.__call__,
    ours=mha_jax.linen.MultiHeadDotProductAttention.__call__,
    honoured=CALL | {'dropout_rng': By('test_dropout_of_modules')},
    ignored={},
    refused={'inputs_kv': Refused(Y, 'pass it as inputs_k')},
    skipped=('self',),
  ),
  'linen_function': Surface(
    theirs=nn.dot_product_attention,
    ours=mha_jax.linen.attention_fn,
    honoured=FUNCTION,
    ignored={'broadcast_dropout': False, 'force_fp32_for_softmax': True},
    refused={
      'einsum_dot_general': PRECISION,
      'qk_attn_weights_einsum': PRECISION,
      'attn_weights_value_einsum': PRECISION,
    },
  ),
  'nnx': Surface(
    theirs=nnx.MultiHeadAttention.__init__,
    ours=mha_jax.nnx.MultiHeadAttention.__init__,
    honoured=CONSTRUCTOR
    | {
      'in_features': Is(
        E, needs={'inputs_q': normal(3, B, T, E), 'qkv_features': 15}
      ),
      'num_kv_heads': Is(1),
      'in_kv_features': Is(E, needs={'inputs_k': normal(3, B, S, E)}),
      'rngs': By('test_rngs'),
      'keep_rngs': By('test_rngs'),
      'kernel_metadata': By('test_metadata'),
      'out_kernel_metadata': By('test_metadata'),
      'bias_metadata': By('test_metadata'),
      'out_bias_metadata': By('test_metadata'),
      'query_ln_scale_metadata': By('test_metadata'),
      'key_ln_scale_metadata': By('test_metadata'),
    },
    ignored={'broadcast_dropout': False},
    refused=CONSTRUCTOR_REFUSED
    | {
      'qkv_promote_dtype': PROMOTION,
      'out_promote_dtype': PROMOTION,
      'ln_promote_dtype': PROMOTION,
    },
    skipped=('self',),
  ),
  'nnx_call': Surface(
    theirs=nnx.MultiHeadAttention.__call__,
    ours=mha_jax.nnx.MultiHeadAttention.__call__,
    honoured=CALL
    | {
      'rngs': By('test_dropout_of_modules'),
      'is_causal': Is(True),
      'input_positions': By('test_input_positions'),
    },
    ignored={},
    refused={
      'decode': Refused(True, 'cache='),
      'out_sharding': Refused(jax.P('x'), 'jax.sharding.reshard'),
      'qkv_sharding': Refused(jax.P('x'), 'kernel_metadata='),
    },
    skipped=('self',),
  ),
  'nnx_function': Surface(
    theirs=nnx.dot_product_attention,
    ours=mha_jax.nnx.attention_fn,
    honoured=FUNCTION | {'is_causal': Is(True)},
    ignored={'broadcast_dropout': False},
    refused={'promote_dtype': PROMOTION},
  ),
}
NEWER = ('input_positions',)
"""Arguments that Flax 0.12.8 does not have."""


def of_kind(*kinds):
  """(surface, argument) for every entry of the surfaces' tables."""
  return [
    (surface, name)
    for surface, x in SURFACES.items()
    for table in (x.honoured, x.ignored, x.refused)
    for name, entry in table.items()
    if isinstance(entry, kinds)
  ]


IGNORED = [(x, name) for x, y in SURFACES.items() for name in y.ignored]


class Unnamed(nn.Module):
  """A module in which Linen names an attention layer after its class."""

  attention: type[nn.Module]

  @nn.compact
  def __call__(self, x):
    return self.attention(3)(x)


class TableTest(parameterized.TestCase):
  """Every argument of Flax is ours, in its place, and in one table."""

  @parameterized.product(surface=tuple(SURFACES))
  def test_every_argument_is_in_one_table(self, surface):
    """And ours has it."""
    x = SURFACES[surface]
    tables = [*x.honoured, *x.ignored, *x.refused]
    theirs, ours = x.parameters(x.theirs), x.parameters(x.ours)
    new = sorted(set(theirs) - set(tables))
    self.assertEmpty(
      new,
      f'{x.theirs.__qualname__} has new arguments: honour, ignore or refuse '
      'each, and add it to the tables of this file',
    )
    self.assertLen(set(tables), len(tables), 'an argument is in two tables')
    self.assertEmpty(set(tables) - set(ours), 'ours lacks it')
    gone = set(tables) - set(theirs) - set(NEWER)
    self.assertEmpty(gone, 'Flax has it no more')

  @parameterized.product(surface=tuple(SURFACES))
  def test_same_place(self, surface):
    """Calls by position keep their meaning; ours come after Flax's."""
    x = SURFACES[surface]
    theirs, ours = x.parameters(x.theirs), x.parameters(x.ours)
    by_position = [n for n, p in theirs.items() if p.kind != p.KEYWORD_ONLY]
    self.assertEqual(list(ours)[: len(by_position)], by_position)
    for name, parameter in theirs.items():
      self.assertEqual(ours[name].kind, parameter.kind, name)

  @parameterized.product(surface=tuple(SURFACES))
  def test_same_default(self, surface):
    """None stands for Flax's own function where no other is taken."""
    x = SURFACES[surface]
    ours = x.parameters(x.ours)
    for name, parameter in x.parameters(x.theirs).items():
      got, wanted = ours[name].default, parameter.default
      if name.endswith('_init') and wanted is not None:
        draws = (
          f(jax.random.key(0), (5, 3), jnp.float32) for f in (got, wanted)
        )
        assert_same_bits(*draws)
      elif name in x.refused and callable(wanted):
        self.assertIsNone(got, name)
      else:
        self.assertEqual(got, wanted, name)

  def test_alias(self):
    """MultiHeadAttention has the same arguments, in Flax and here.

    Each finds the parameters of Flax's unnamed module of its name.
    """
    for front in (nn, mha_jax.linen):
      alias, module = (
        inspect.signature(x)
        for x in (front.MultiHeadAttention, front.MultiHeadDotProductAttention)
      )
      self.assertEqual(alias, module)
    for name in ('MultiHeadAttention', 'MultiHeadDotProductAttention'):
      theirs, ours = (
        jax.eval_shape(Unnamed(getattr(front, name)).init, jax.random.key(0), X)
        for front in (nn, mha_jax.linen)
      )
      self.assertEqual(ours, theirs)

  def test_checks_are_there(self):
    """The tests that the tables point at."""
    for surface, name in of_kind(By):
      test = SURFACES[surface].honoured[name].test
      there = any(x.startswith(test) for x in dir(HonouredTest))
      self.assertTrue(there, f'{test} for {name} of {surface}')


MODULES = {
  'linen': (
    nn.MultiHeadDotProductAttention,
    mha_jax.linen.MultiHeadDotProductAttention,
  ),
  'nnx': (nnx.MultiHeadAttention, mha_jax.nnx.MultiHeadAttention),
}
FUNCTIONS = {
  'linen': (nn.dot_product_attention, mha_jax.linen.attention_fn),
  'nnx': (nnx.dot_product_attention, mha_jax.nnx.attention_fn),
}


class Layer:
  """A module of either front end: its parameters, and its call.

  Without a dropout rate Flax's NNX module would take the softmax in float32, so
  there is one, and dropout is off where `deterministic` says so.
  """

  def __init__(self, front: str, ours: bool, **options):
    self.front = front
    options = {'num_heads': 3, 'dropout_rate': RATE} | options
    if front == 'nnx':
      more = {} if ours else {'decode': False}
      options = {'in_features': D, 'rngs': nnx.Rngs(0), **more, **options}
    self.module = MODULES[front][ours](**options)

  def params(self, **call) -> Any:
    """Initial parameters."""
    if self.front == 'nnx':
      return nnx.to_pure_dict(nnx.state(self.module, nnx.Param))
    call = {'inputs_q': X} | call
    return self.module.init(jax.random.key(0), **call)['params']

  def __call__(self, params: Any, key: Any = None, **call) -> Any:
    """The output; `key` is for dropout."""
    return self.sown(params, key, **call)[0]

  def sown(self, params: Any, key: Any = None, **call) -> Any:
    """The output, and what was sown."""
    call = {'inputs_q': X} | call
    if self.front == 'linen':
      return self.module.apply(
        {'params': params}, **call, dropout_rng=key, mutable=['intermediates']
      )
    graphdef, state, rest = nnx.split(self.module, nnx.Param, ...)
    state = nnx.clone(state)
    nnx.replace_by_pure_dict(state, params)
    module = nnx.merge(graphdef, state, rest, copy=True)
    if key is not None:
      call['rngs'] = nnx.RngStream(key, tag='dropout')
    out, sown = nnx.capture(module, nnx.Intermediate)(**call)
    return out, {'intermediates': nnx.to_pure_dict(sown)}


@functools.cache
def params_of(front: str) -> Any:
  """Random parameters of the plain layer."""
  return shifted(Layer(front, True, deterministic=True).params())


def result(surface: str, ours: bool, arguments: dict[Name, Any]) -> Any:
  """What arguments give: initial parameters, and the output, dropout off."""
  front, _, part = surface.partition('_')
  if part == 'function':
    base = {n: FUNCTION[n].value + 1 for n in ('query', 'key', 'value')}
    given = {**base, 'dropout_rate': RATE, 'deterministic': True, **arguments}
    return jitted(FUNCTIONS[front][ours], given)
  call = {n: v for n, v in arguments.items() if n in CALL or part == 'call'}
  options = {n: v for n, v in arguments.items() if n not in call}
  layer = Layer(front, ours, deterministic=True, **options)
  params = layer.params(**call)
  return params, jitted(functools.partial(layer, shifted(params)), call)


@functools.cache
def plain_result(surface: str) -> Any:
  """What comes of no arguments but the necessary ones, in ours."""
  return result(surface, True, {})


def jitted(function: Callable[..., Any], arguments: dict[Name, Any]) -> Any:
  """The function of its arguments, compiled for its arrays."""
  arrays = {n: v for n, v in arguments.items() if isinstance(v, np.ndarray)}
  rest = {n: v for n, v in arguments.items() if n not in arrays}
  return jax.jit(lambda arrays: function(**arrays, **rest))(arrays)


def shifted(params: Any) -> Any:
  """The parameters, and random numbers added, to biases and scales too."""
  leaves, tree = jax.tree.flatten(params)
  return tree.unflatten(
    x + jnp.asarray(normal(i, *x.shape) / 2, x.dtype)
    for i, x in enumerate(leaves)
  )


def contents(tree: Any) -> list[Any]:
  """Names, shapes, dtypes and bits of all arrays."""
  return [
    (jax.tree_util.keystr(path), x.shape, x.dtype, np.asarray(x).tobytes())
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]


def dot_generals(jaxpr: Any) -> list[Any]:
  """The precisions of all products, also in inner functions."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      found.append(equation.params['precision'])
    for inner in jaxprs_in_params(equation.params):
      found += dot_generals(inner)
  return found


class HonouredTest(oracles.X64TestCase):
  """Each honoured argument does what it does in Flax."""

  @parameterized.parameters(*of_kind(Is))
  def test_as_in_flax(self, surface, name):
    """Same initial bits, same output, and other ones than without it."""
    entry = SURFACES[surface].honoured[name]
    given = {**entry.beside, **entry.needs, name: entry.value}
    got, wanted = (result(surface, ours, given) for ours in (True, False))
    if not surface.endswith('function'):
      assert_same_bits(got[0], wanted[0])
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
      self.assertEqual(a.dtype, b.dtype)
    assert_close(got, wanted, entry.tolerance)
    if entry.needs:
      with self.assertRaisesRegex(ValueError, 'inputs_[qk] of shape'):
        result(surface, True, {**entry.beside, **entry.needs})
      return
    if entry.beside:
      without = result(surface, True, entry.beside)
    else:
      without = plain_result(surface)
    self.assertNotEqual(contents(got), contents(without))

  @parameterized.product(front=tuple(FUNCTIONS))
  def test_dropout_of_functions(self, front):
    """Drops at the rate, scales the rest; off where it is said to be."""
    b, t, h, s = 5, 37, 3, 41
    q, k = jnp.zeros((b, t, h, 2)), jnp.zeros((b, s, h, 2))
    v = jnp.broadcast_to(jnp.eye(s)[:, None], (b, s, h, s))
    f = functools.partial(FUNCTIONS[front][True], q, k, v)
    g = jax.jit(lambda key: f(dropout_rng=key, dropout_rate=RATE))
    key = jax.random.key(0)
    weights = np.asarray(g(key))  # the values are unit vectors
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], 1 / s / (1 - RATE), rtol=1e-12)
    deviation = np.sqrt(RATE * (1 - RATE) / kept.size)
    self.assertLess(np.abs(np.mean(~kept) - RATE), 4 * deviation)
    for axis in range(4):  # independent along each
      both = np.mean(kept & np.roll(kept, 1, axis))
      self.assertLess(np.abs(both - (1 - RATE) ** 2), 5 * deviation)
    assert_same_bits(g(key), weights)
    self.assertFalse(np.array_equal(g(jax.random.key(1)), weights))
    for off in (
      {'dropout_rate': RATE, 'deterministic': True},
      {'dropout_rate': 0.0, 'dropout_rng': key},
      {},
    ):
      np.testing.assert_allclose(f(**off), 1 / s, rtol=1e-12)
    with self.assertRaisesRegex(
      ValueError, '(?s)dropout_rng=None.*dropout_rate=0.3.*pass a key'
    ):
      f(dropout_rate=RATE)
    with self.assertRaisesRegex(ValueError, 'dropout_rate=1.0 must lie in'):
      f(dropout_rate=1.0, dropout_rng=key)

  @parameterized.product(front=tuple(MODULES))
  def test_dropout_of_modules(self, front):
    """The key of the call and the rate decide what is dropped."""
    params = params_of(front)

    def out(rate, seed):
      layer = Layer(front, True, dropout_rate=rate, deterministic=False)
      return jax.jit(functools.partial(layer, params))(jax.random.key(seed))

    one = out(RATE, 1)
    assert_same_bits(out(RATE, 1), one)
    for another in (out(RATE, 2), out(0.6, 1), out(0.0, 1)):
      self.assertGreater(oracles.relative_error(another, one), 1e-3)

  @parameterized.product(
    front=tuple(MODULES),
    constructor=(None, True, False),
    call=(None, True, False),
    rate=(0.0, RATE),
  )
  def test_deterministic(self, front, constructor, call, rate):
    """Dropout is on, off or an error where it is in Flax."""
    params = params_of(front)

    def is_on(ours):
      layer = Layer(front, ours, deterministic=constructor, dropout_rate=rate)
      f = functools.partial(layer, params, deterministic=call)
      try:
        return 'random_bits' in str(jax.make_jaxpr(f)(jax.random.key(0)))
      except ValueError as error:
        self.assertIn('deterministic', str(error))
        return 'error'

    got = is_on(True)
    self.assertEqual(got, is_on(False))
    if constructor is None and call is not None:
      self.assertEqual(got, rate > 0 and not call)

  @parameterized.product(
    layer=(*MODULES, 'absorbed'),
    precision=(
      jax.lax.Precision.HIGHEST,
      jax.lax.DotAlgorithmPreset.F32_F32_F32,
      'high',
      'float32',
      None,
    ),
  )
  def test_precision_of_modules(self, layer, precision):
    """Reaches every product, forward and backward, and is not left set."""
    if layer == 'absorbed':
      config = LatentConfig(D, 3, 5, qk_rope_head_dim=4, form='absorbed')
      params = attention.init_table(config.table, jax.random.key(0))
      f = functools.partial(
        attention.apply, config, inputs_q=X, precision=precision
      )
    else:
      f = Layer(layer, True, deterministic=True, precision=precision)
      params = params_of(layer)
    grad = jax.grad(lambda params: jnp.sum(f(params)))
    for outside in ('highest', None):
      with jax.default_matmul_precision(outside):
        got = dot_generals(jax.make_jaxpr(grad)(params).jaxpr)
        wanted = jax.make_jaxpr(
          lambda x: jnp.einsum('td,sd->ts', x, x, precision=precision)
        )(X[0])
        self.assertEqual(jax.config.jax_default_matmul_precision, outside)
      # Six products, and back: two of each, but none for the inputs.
      self.assertGreaterEqual(len(got), 6 + 2 * 6 - 3)
      self.assertEqual(set(got), set(dot_generals(wanted.jaxpr)))

  @parameterized.product(
    front=tuple(FUNCTIONS), precision=(jax.lax.Precision.HIGH, 'highest')
  )
  def test_precision_of_functions(self, front, precision):
    """Both products of attention_fn have it, as in Flax's function."""
    arrays = [FUNCTION[n].value for n in ('query', 'key', 'value')]
    options = {'dropout_rate': RATE, 'deterministic': True}
    theirs, ours = (
      dot_generals(
        jax.make_jaxpr(functools.partial(f, precision=precision, **options))(
          *arrays
        ).jaxpr
      )
      for f in FUNCTIONS[front]
    )
    self.assertLen(ours, 2)
    self.assertEqual(ours, theirs)

  @parameterized.product(
    front=tuple(MODULES), deterministic=(True, False), own=(True, False)
  )
  def test_sow_weights(self, front, deterministic, own):
    """The weights before dropout, in Flax's place; the output stays.

    By our module, and by Flax's with our attention_fn.
    """
    options = {} if own else {'attention_fn': FUNCTIONS[front][True]}
    ours = Layer(front, own, deterministic=deterministic, **options)
    theirs = Layer(front, False, deterministic=deterministic)
    params, key = params_of(front), jax.random.key(0)

    def sown(layer, sow_weights=True):
      f = functools.partial(layer.sown, params, mask=KEEP, inputs_k=X)
      return jax.jit(lambda key: f(key, sow_weights=sow_weights))(key)

    (out, got), (_, wanted) = sown(ours), sown(theirs)
    assert_close(got, wanted)
    (weights,) = got['intermediates']['attention_weights']
    self.assertEqual(weights.shape, (B, 3, T, T))
    plain, nothing = sown(ours, False)
    assert_same_bits(plain, out)
    self.assertEmpty(jax.tree.leaves(nothing))

  def test_rngs(self):
    """Parameters by the seed, as Flax's; keep_rngs keeps a stream."""
    for keep in (False, True):
      options = {'rngs': nnx.Rngs(7), 'keep_rngs': keep}
      theirs = nnx.state(Layer('nnx', False, **options).module)
      ours = nnx.state(
        Layer('nnx', True, **options | {'rngs': nnx.Rngs(7)}).module
      )
      self.assertEqual('rngs' in ours, keep)
      self.assertEqual(jax.tree.structure(ours), jax.tree.structure(theirs))
      assert_same_bits(ours['query'], theirs['query'])
    another = Layer('nnx', True).params()
    self.assertNotEqual(
      contents(nnx.to_pure_dict(ours['query'])), contents(another['query'])
    )

  @parameterized.product(
    name=[n for n in SURFACES['nnx'].honoured if n.endswith('_metadata')]
  )
  def test_metadata(self, name):
    """Reaches the parameters that it reaches in Flax."""

    def notes(ours, metadata):
      options = {name: metadata, 'normalize_qk': True}
      module = Layer('nnx', ours, **options).module
      state = nnx.to_flat_state(nnx.state(module, nnx.Param))
      return {path: param.get_metadata().get('note') for path, param in state}

    got = notes(True, {'note': 7})
    self.assertEqual(got, notes(False, {'note': 7}))
    self.assertIn(7, got.values())
    self.assertNotIn(7, notes(True, {}).values())

  def test_input_positions(self):
    """Flax hands them to a rotating attention_fn, ours to `rope`.

    Flax's module gets them at the call where it takes them.
    """
    positions = np.array([3, 1, 4, 0, 5, 9, 2])

    def rotating(query, key, value, *, input_positions, **options):
      q, k = (
        oracles.rotate(x, input_positions[:, None], 10_000.0, 'half')
        for x in (query, key)
      )
      return nnx.dot_product_attention(q, k, value, **options)

    options = {'deterministic': True, 'qkv_features': 12}
    ours = Layer('nnx', True, rope=Rope(), **options)
    params = shifted(ours.params())
    got = ours(params, input_positions=positions)
    call = {'input_positions': positions}
    x = SURFACES['nnx_call']
    if 'input_positions' in x.parameters(x.theirs):
      rotate = rotating
    else:
      call, rotate = {}, functools.partial(rotating, **call)
    theirs = Layer('nnx', False, attention_fn=rotate, **options)
    assert_close(got, theirs(params, **call))
    self.assertGreater(oracles.relative_error(ours(params), got), 1e-3)


class IgnoredTest(parameterized.TestCase):
  """What an ignored argument says changes nothing, dropout on."""

  @parameterized.parameters(*IGNORED)
  def test_changes_nothing(self, surface, name):
    """Not a bit of the output, in bfloat16."""
    front, _, part = surface.partition('_')
    given = {name: SURFACES[surface].ignored[name]}
    self.assertNotEqual(given[name], default_of(surface, name))
    key = jax.random.key(0)

    def out(given):
      if not part:
        options = {'dtype': jnp.bfloat16, 'deterministic': False, **given}
        return jax.jit(Layer(front, True, **options))(params_of(front), key)
      arrays = [
        jnp.asarray(FUNCTION[n].value, jnp.bfloat16)
        for n in ('query', 'key', 'value')
      ]
      f = functools.partial(
        FUNCTIONS[front][True], dropout_rng=key, dropout_rate=RATE, **given
      )
      return jax.jit(f)(*arrays)

    got = out(given)
    self.assertEqual(got.dtype, jnp.bfloat16)
    assert_same_bits(got, out({}))


def default_of(surface: str, name: str) -> Any:
  """Flax's default of an argument."""
  x = SURFACES[surface]
  return x.parameters(x.theirs)[name].default


class MaskTest(parameterized.TestCase):
  @parameterized.parameters('linen', 'nnx', 'attention_fn', 'decoder', 'core')
  def test_a_text(self, entry):
    """mask='causal', as other libraries have it: what to pass instead."""
    key, attention_fn = jax.random.key(0), mha_jax.linen.attention_fn
    tokens, qkv = jnp.ones((B, T), int), [X.reshape(B, T, 3, 2)] * 3
    flax = nn.MultiHeadDotProductAttention(3, attention_fn=attention_fn)
    linen = mha_jax.linen.MultiQueryAttention(3)
    model = DecoderLM(decoder_config(5, T, D, num_heads=3))
    calls = {
      'linen': functools.partial(linen.init, key, X),
      'nnx': lambda mask: mha_jax.nnx.MultiHeadAttention(
        3, D, rngs=nnx.Rngs(0)
      )(X, mask=mask),
      'attention_fn': functools.partial(flax.init, key, X),
      'decoder': functools.partial(model.init, key, tokens),
      'core': functools.partial(dot_product_attention, *qkv),
    }
    with self.assertRaisesRegex(
      ValueError, r"mask='causal' is a string; pass a mask, as masks.causal\(\)"
    ):
      calls[entry](mask='causal')


class RefusedTest(oracles.X64TestCase):
  """What is not taken: an error with the argument, the value, the remedy."""

  @parameterized.parameters(*of_kind(Refused))
  def test_error(self, surface, name):
    """Any other value than the default is refused."""
    entry = SURFACES[surface].refused[name]
    with self.assertRaises(ValueError) as caught:
      result(surface, True, {name: entry.value})
    message = str(caught.exception)
    self.assertStartsWith(message, f'{name}=')
    self.assertIn('is not taken; ', message)
    self.assertIn(entry.remedy, message)
    array = isinstance(entry.value, np.ndarray)
    self.assertIn(str(entry.value.shape if array else entry.value), message)

  @parameterized.parameters(*SURFACES['linen'].refused)
  def test_error_in_apply(self, name):
    """A Linen module says so where it is used, not only where it is made."""
    value = SURFACES['linen'].refused[name].value
    layer = Layer('linen', True, deterministic=True, **{name: value})
    with self.assertRaisesRegex(ValueError, f'{name}=.* is not taken'):
      layer(params_of('linen'))

  @parameterized.product(surface=tuple(SURFACES))
  def test_defaults_are_taken(self, surface):
    """Flax's own default, given explicitly, is no other than none."""
    defaults = {n: default_of(surface, n) for n in SURFACES[surface].refused}
    got = result(surface, True, defaults)
    self.assertEqual(contents(got), contents(plain_result(surface)))

  def test_no_decoding(self):
    """decode=False and decode=None, which NNX wants to be told."""
    for value in (None, False):
      for surface in ('linen', 'nnx', 'nnx_call'):
        got = result(surface, True, {'decode': value})
        self.assertEqual(contents(got), contents(plain_result(surface)))

  def test_replacements(self):
    """There is a remedy for what the tables refuse, and for nothing else."""
    refused = {n for x in SURFACES.values() for n in x.refused}
    self.assertEqual(refused, set(flax_arguments.REPLACEMENTS))

  @parameterized.product(front=tuple(MODULES), name=tuple(DOT_GENERALS))
  def test_remedy(self, front, name):
    """Flax's own module takes them, beside our attention_fn."""
    dot_general = jax.lax.dot_general
    value = (lambda: dot_general) if name.endswith('_cls') else dot_general
    layer = Layer(
      front,
      False,
      deterministic=True,
      attention_fn=FUNCTIONS[front][True],
      **{name: value},
    )
    plain = Layer(front, False, deterministic=True)
    params = params_of(front)
    assert_close(layer(params), plain(params))


def padding(*batch: int) -> np.ndarray:
  """Flax's helper: 0/1 numbers, the last two keys are padding."""
  there = np.ones((*batch, T), np.float32)
  there[..., -2:] = 0
  return np.asarray(nn.make_attention_mask(np.ones((*batch, T)), there))


def causal(*batch: int) -> np.ndarray:
  """Flax's helper: 0/1 numbers."""
  return np.asarray(nn.make_causal_mask(np.ones((*batch, T))))


WIDE = normal(0, 2, 3, T, D)
MODELS = {
  # options, arguments of the call
  'plain': ({}, {}),
  'booleans': ({'qkv_features': 15}, {'mask': KEEP}),
  'padding': ({'use_bias': False}, {'mask': padding(B)}),
  'causal': ({}, {'mask': np.asarray(nn.combine_masks(causal(B), padding(B)))}),
  'qk_norm': (
    {'normalize_qk': True, 'qkv_features': 21},
    {'mask': causal(B)},
  ),
  'cross': (
    {'out_features': 13},
    {'inputs_k': Y, 'mask': booleans(1, B, 1, T, S) | np.eye(T, S, dtype=bool)},
  ),
  'batches': ({}, {'inputs_q': WIDE, 'mask': padding(2, 3)}),
  'no_batch': ({}, {'inputs_q': X[0], 'mask': causal()}),
}
NNX_MODELS = {
  'is_causal': ({}, {'is_causal': True}),
  'gqa': (
    {'num_heads': 6, 'num_kv_heads': 2},
    {'mask': padding(B), 'is_causal': True},
  ),
  'mqa_batches': (
    {'num_kv_heads': 1},
    {'inputs_q': WIDE, 'is_causal': True},
  ),
}


class FlaxModelsTest(oracles.X64TestCase):
  """Flax's own modules with our attention_fn."""

  def layers(self, front, attention_fn=None, **options):
    """Flax's module with our attention_fn, and with its own."""
    options = {'deterministic': True} | options
    ours = attention_fn or FUNCTIONS[front][True]
    return (
      Layer(front, False, **options, attention_fn=ours),
      Layer(front, False, **options),
    )

  @parameterized.parameters(
    *(('linen', x) for x in MODELS), *(('nnx', x) for x in MODELS | NNX_MODELS)
  )
  def test_same(self, front, model):
    """The output."""
    options, call = (MODELS | NNX_MODELS)[model]
    ours, theirs = self.layers(front, **options)
    params = shifted(theirs.params(**call))
    got, wanted = (
      jitted(functools.partial(f, params), call) for f in (ours, theirs)
    )
    assert_close(got, wanted)

  @parameterized.parameters(
    ('linen', 'causal'), ('linen', 'qk_norm'), ('nnx', 'gqa')
  )
  def test_gradients(self, front, model):
    """The gradients of all parameters."""
    options, call = (MODELS | NNX_MODELS)[model]
    ours, theirs = self.layers(front, **options)
    params = jax.tree.map(
      lambda x: x.astype(jnp.float64), shifted(theirs.params(**call))
    )

    def grads(layer):
      def loss(params):
        return jnp.sum(jnp.sin(layer(params, **call)))

      found = jax.jit(jax.grad(loss))(params)
      if 'normalize_qk' not in options:
        found['key'].pop('bias')  # its gradient is 0 up to rounding
      return found

    assert_close(grads(ours), grads(theirs))

  @parameterized.product(front=tuple(MODULES))
  def test_and_mask(self, front):
    """and_mask, given once, is joined with what the module passes."""
    with_causal = functools.partial(
      FUNCTIONS[front][True], and_mask=masks.causal()
    )
    ours, theirs = self.layers(front, with_causal)
    params = params_of(front)
    for mask in (None, padding(B)):
      both = nn.combine_masks(causal(B), mask)
      wanted = jitted(functools.partial(theirs, params), {'mask': both})
      got = jitted(functools.partial(ours, params), {'mask': mask})
      assert_close(got, wanted)

  @parameterized.product(front=tuple(MODULES))
  def test_a_mask_of_ours(self, front):
    """Flax's module passes a Mask on as it is."""
    ours, theirs = self.layers(front)
    params, lengths = params_of(front), np.array([5, 3])
    there = np.arange(T) < lengths[:, None]
    both = causal(B).astype(bool) & there[:, None, None]
    got = ours(params, mask=masks.causal() & masks.lengths(lengths))
    assert_close(got, theirs(params, mask=both))

  @parameterized.product(front=tuple(MODULES))
  def test_dropout(self, front):
    """The module's key drops the same weights as in our own module."""
    ours, _ = self.layers(front, deterministic=False)
    own = Layer(front, True, deterministic=False)
    params, key = params_of(front), jax.random.key(3)
    got, wanted = (jax.jit(f)(params, key) for f in (ours, own))
    assert_close(got, wanted)
    another = jax.jit(ours)(params, jax.random.key(4))
    self.assertGreater(oracles.relative_error(another, got), 1e-3)

  def test_decode_linen(self):
    """Token by token over the cache of Flax's module."""

    def outputs(**options):
      module = nn.MultiHeadDotProductAttention(3, decode=True, **options)
      cache, outs = module.init(jax.random.key(0), X)['cache'], []
      step = jax.jit(functools.partial(module.apply, mutable=['cache']))
      for i in range(3):
        variables = {'params': params_of('linen'), 'cache': cache}
        out, state = step(variables, X[:, i : i + 1])
        cache = state['cache']
        outs.append(out)
      return outs

    ours = outputs(attention_fn=mha_jax.linen.attention_fn)
    assert_close(ours, outputs())

  def test_decode_nnx(self):
    """Token by token over the cache of Flax's module, with fewer k and v."""

    def outputs(**options):
      options = {'dropout_rate': RATE, 'deterministic': True, **options}
      module = nnx.MultiHeadAttention(
        3, D, num_kv_heads=1, decode=True, rngs=nnx.Rngs(0), **options
      )
      module.init_cache(X.shape, jnp.float64)
      step = nnx.jit(lambda module, x: module(x))
      return [step(module, X[:, i : i + 1]) for i in range(3)]

    ours = outputs(attention_fn=mha_jax.nnx.attention_fn)
    assert_close(ours, outputs())

  @parameterized.product(front=tuple(FUNCTIONS))
  def test_one_query(self, front):
    """A causal and_mask wants to know where a lone query stands."""
    q, k, v = (FUNCTION[n].value for n in ('query', 'key', 'value'))
    f = functools.partial(FUNCTIONS[front][True], and_mask=masks.causal())
    positions = np.arange(T)[::-1]
    whole = f(q, k, v, query_positions=positions)
    one = f(q[:, 4:5], k, v, query_positions=positions[4:5])
    assert_close(one, whole[:, 4:5])
    assert_close(f(q, k, v), f(q, k, v, query_positions=np.arange(T)))
    self.assertGreater(oracles.relative_error(f(q, k, v), whole), 1e-3)
    with self.assertRaisesRegex(
      ValueError, '(?s)and_mask=.*one query for 11 keys.*query_positions'
    ):
      f(q[:, 4:5], k, v)

  @parameterized.product(front=tuple(FUNCTIONS))
  def test_own_options(self, front):
    """logit_softcap bounds the scores; values may have another width."""
    q, k, v = (normal(i, B, T, 6, 5) for i in range(3))
    k, v = k[:, :, :2], normal(3, B, T, 2, 7)
    wanted = oracles.attention(
      *(np.swapaxes(x, 1, 2) for x in (q, k, v)), softcap=2.0
    ).out
    got = FUNCTIONS[front][True](q, k, v, logit_softcap=2.0)
    assert_close(got, np.swapaxes(wanted, 1, 2))
    for name in ('xla', 'exact'):
      f = functools.partial(FUNCTIONS[front][True], q, k, v, logit_softcap=2.0)
      assert_same_bits(f(implementation=name), got)
    with self.assertRaisesRegex(ValueError, "implementation='x' is unknown"):
      f(implementation='x')

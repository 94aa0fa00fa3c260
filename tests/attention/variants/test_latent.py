"""Latent attention: two forms of one function, against loops and MHA."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from absl.testing import parameterized
from oracles import (
  assert_close,
  assert_same_bits,
  booleans,
  normal,
  random_params,
)

from mha_jax import attention
from mha_jax.attention import (
  Dropout,
  GroupedConfig,
  LatentConfig,
  Rope,
  YarnScaling,
  init_table,
  masks,
  num_params,
)

B, T, S, D = 2, 7, 11, 5
SIZES = {
  'd_model': D,
  'num_heads': 3,
  'kv_lora_rank': 13,
  'qk_nope_head_dim': 17,
  'v_head_dim': 19,
}
VARIANTS = {
  'plain': {},
  'rope': {'qk_rope_head_dim': 6},
  'interleaved': {'qk_rope_head_dim': 6, 'rope': Rope(100.0, 'interleaved')},
  'query_latent': {'q_lora_rank': 23, 'qk_rope_head_dim': 2},
  'bias': {'q_lora_rank': 23, 'qk_rope_head_dim': 6, 'use_bias': True},
  'widths': {'qk_rope_head_dim': 4, 'kv_features': 29, 'out_features': 31},
  'softcap': {'qk_rope_head_dim': 4, 'logit_softcap': 0.7},
  'no_norm': {'q_lora_rank': 23, 'qk_rope_head_dim': 6, 'latent_norm': False},
}
FORMS = ('expanded', 'absorbed')
apply = jax.jit(
  attention.apply,
  static_argnums=0,
  static_argnames=('return_weights', 'dtype', 'implementation'),
)


def config_of(variant: str, **more) -> LatentConfig:
  return LatentConfig(**SIZES | VARIANTS[variant] | more)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(config, params, x, y, cotangent, **options):
  """Output, weights and the gradients of parameters and inputs."""

  def loss(params, x, y):
    out, weights = attention.apply(
      config, params, x, y, return_weights=True, **options
    )
    return jnp.sum(out * cotangent), (out, weights)

  grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, y)
  return out, grads


class LoopTest(oracles.X64TestCase):
  @parameterized.product(variant=tuple(VARIANTS), form=FORMS)
  def test_against_numpy(self, variant, form):
    """Output and weights, self- and cross-attention, in both forms."""
    config = config_of(variant, form=form)
    cross = variant in ('rope', 'interleaved', 'bias', 'widths')
    x = normal(1, B, T, D)
    y = normal(2, B, S, config.kv_features or D) if cross else None
    s = S if cross else T
    at_q = np.random.default_rng(0).integers(0, 50, (B, T))
    at_k = np.random.default_rng(1).integers(0, 50, (B, s)) if cross else at_q
    p = random_params(config)
    mask = booleans(4, B, 3, T, s)
    gates = normal(5, 3)
    got = apply(
      config,
      p,
      x,
      y,
      mask=mask,
      head_gates=gates,
      input_positions=at_q,
      key_positions=at_k,
      return_weights=True,
    )
    rope = config.rotary or Rope()
    wanted = oracles.latent(
      p,
      x,
      y,
      theta=rope.theta,
      layout=rope.layout,
      positions=(at_q, at_k),
      gates=gates,
      allowed=mask,
      softcap=config.logit_softcap,
    )
    assert_close(got, wanted)

  def test_the_score_factor(self):
    """YaRN's mscale^2 multiplies the scores."""
    scaling = YarnScaling(40.0, 64, mscale=0.7, mscale_all_dim=0.9)
    config = config_of('rope', rope=Rope(scaling=scaling))
    factor = (1 + 0.09 * np.log(40)) ** 2
    self.assertAlmostEqual(config.scale, factor / np.sqrt(17 + 6), 12)
    self.assertEqual(config_of('rope').scale, (17 + 6) ** -0.5)


class FormsTest(oracles.X64TestCase):
  """Expanded and absorbed: the same parameters, the same function."""

  @parameterized.product(variant=tuple(VARIANTS), dtype=('float64', 'float32'))
  def test_agree(self, variant, dtype):
    """Outputs, weights and gradients: 1e-12 in float64, 1e-5 in float32.

    In float32 with dropout on: both forms drop the same weights.
    """
    config = config_of(variant)
    p = random_params(config, dtype=np.dtype(dtype))
    x = normal(1, B, T, D).astype(dtype)
    y = normal(2, B, S, config.kv_features or D).astype(dtype)
    cotangent = normal(3, B, T, config.out_features or D).astype(dtype)
    options = {'mask': booleans(4, B, 3, T, S)}
    if dtype == 'float32':
      options['dropout'] = Dropout(jax.random.key(0), 0.3)
    expanded, absorbed = (
      value_and_grads(
        dataclasses.replace(config, form=form), p, x, y, cotangent, **options
      )
      for form in FORMS
    )
    chex.assert_trees_all_equal_dtypes(expanded, absorbed)
    self.assertEqual(expanded[0][0].dtype, dtype)
    tolerance = {'float64': 1e-12, 'float32': 1e-5}[dtype]
    assert_close(absorbed, expanded, tolerance)

  @parameterized.parameters(
    (13, 'expanded', 'absorbed'), (2, *['absorbed'] * 2)
  )
  def test_auto(self, rank, square, few):
    """'auto' is the form with fewer multiplications at the call's lengths."""
    config = config_of('rope', kv_lora_rank=rank)
    config = dataclasses.replace(config, qk_nope_head_dim=5, v_head_dim=7)
    p, x = random_params(config), normal(1, B, T, D)
    y = normal(2, B, 97, D)
    for inputs, form in (((x,), square), ((x[:, :1], y), few)):
      fixed = dataclasses.replace(config, form=form)
      other = {'expanded': 'absorbed', 'absorbed': 'expanded'}[form]
      got = apply(config, p, *inputs)
      assert_same_bits(got, apply(fixed, p, *inputs))
      other = apply(dataclasses.replace(config, form=other), p, *inputs)
      self.assertFalse(np.array_equal(got, other))

  @parameterized.parameters(*FORMS)
  def test_nothing_is_inert(self, form):
    """NaN in an input that nobody may see leaves the output as it was."""
    config = config_of('bias', form=form)
    p, x, y = random_params(config), normal(1, B, T, D), normal(2, B, S, D)
    mask = masks.lengths([5, 9])
    y_nan = y.copy()
    y_nan[0, 5:], y_nan[1, 9:] = np.nan, np.inf
    got = apply(config, p, x, y_nan, mask=mask)
    assert_same_bits(got, apply(config, p, x, y, mask=mask))
    nobody = apply(config, p, x, y, mask=np.zeros((T, S), bool))
    bias = np.broadcast_to(p['out']['bias'], nobody.shape)
    assert_same_bits(nobody, bias)

  @parameterized.parameters('float64', float)
  def test_float64_by_any_name(self, dtype):
    """The norms are then in float64 too."""
    config = config_of('rope')
    p, x = random_params(config), normal(1, B, T, D)
    assert_same_bits(apply(config, p, x, dtype=dtype), apply(config, p, x))

  @parameterized.parameters(*FORMS)
  def test_bfloat16(self, form):
    """bfloat16 in and out, the same up to its rounding."""
    config = config_of('query_latent', form=form)
    p, x = random_params(config, dtype=np.float32), normal(1, B, T, D)
    got = apply(config, p, x.astype(np.float32), dtype=jnp.bfloat16)
    self.assertEqual(got.dtype, jnp.bfloat16)
    wanted, _ = oracles.latent(p, x)
    assert_close(got, wanted, 2**-5)


class FullRankTest(oracles.X64TestCase):
  """With as many latent features as inputs, MLA is MHA."""

  @parameterized.parameters(*FORMS)
  def test_represents_mha(self, form):
    """Constructed weights: the latent is the input, its norm undone."""
    h, k, v = 3, 4, 7
    mha = GroupedConfig(D, h, head_dim=k, v_head_dim=v, use_bias=False)
    mla = LatentConfig(
      D, h, D, qk_nope_head_dim=k, v_head_dim=v, form=form, use_bias=False
    )
    p = random_params(mha)
    x = normal(1, B, T, D)
    # RMSNorm divides by each token's size: on inputs of size 1 it does nothing.
    x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True))
    latent = {name: p[name] for name in ('query', 'key', 'value', 'out')} | {
      'key_down': {'kernel': np.eye(D)},
      'key_norm': {'scale': np.full(D, np.sqrt(1 + 1e-6))},
    }
    options = {'mask': masks.causal(), 'return_weights': True}
    assert_close(apply(mla, latent, x, **options), apply(mha, p, x, **options))

  def test_without_norms_it_is_mha(self):
    """On inputs of any size."""
    mha = GroupedConfig(D, 3, head_dim=4, v_head_dim=7, use_bias=False)
    mla = LatentConfig(
      D, 3, D, qk_nope_head_dim=4, v_head_dim=7, latent_norm=False
    )
    p, x = random_params(mha), normal(1, B, T, D)
    latent = {name: p[name] for name in ('query', 'key', 'value', 'out')}
    latent['key_down'] = {'kernel': np.eye(D)}
    assert_close(apply(mla, latent, x), apply(mha, p, x))


@pytest.mark.usefixtures('full_compile')
class ProgramTest(parameterized.TestCase):
  """What the compiled program holds; all sizes are distinct primes."""

  d, h, t, s, k, p, r, v = 29, 5, 7, 11, 13, 6, 17, 31

  def text(self, form: str, gradient: bool, **options) -> str:
    config = LatentConfig(
      self.d,
      self.h,
      self.r,
      qk_nope_head_dim=self.k,
      qk_rope_head_dim=self.p,
      v_head_dim=self.v,
      form=form,
    )
    p = random_params(config, dtype=np.float32)
    x, y = (
      normal(0, B, length, self.d).astype('f') for length in (self.t, self.s)
    )

    def forward(p, x, y):
      return attention.apply(config, p, x, y, **options)

    def loss(p, x, y):
      return jnp.sum(jnp.sin(forward(p, x, y)))

    f = jax.grad(loss, (0, 1, 2)) if gradient else forward
    return jax.jit(f).lower(p, x, y).compile().as_text()

  @parameterized.product(
    form=FORMS, gradient=(False, True), masked=(False, True)
  )
  def test_nothing_is_concatenated_or_repeated(self, form, gradient, masked):
    """No array has the two parts' features together, none repeats a latent."""
    mask = {'mask': masks.causal() & masks.lengths([3, 9])} if masked else {}
    text = self.text(form, gradient, **mask)
    shapes = [
      tuple(map(int, x.split(',')))
      for x in re.findall(r'\bf32\[([\d,]+)\]', text)
    ]
    self.assertIn(B * self.h * self.t * self.s, map(np.prod, shapes))
    wide = {'absorbed': self.r}.get(form, self.k) + self.p
    for shape in shapes:
      self.assertNotIn(wide, shape)
    sizes = {int(np.prod(x)) for x in shapes}
    self.assertNotIn(B * self.h * self.s * self.p, sizes, 'the rotary key')
    keys = B * self.h * self.s * self.k
    if form == 'absorbed':
      self.assertNotIn(keys, sizes, 'keys by head')
      self.assertNotIn(B * self.h * self.s * self.r, sizes, 'the latent')
    else:
      self.assertIn(keys, sizes)

  def test_the_check_has_teeth(self):
    """A concatenated key is seen."""

    def f(q, w, k, u):
      u = jnp.broadcast_to(u, (B, self.h, self.s, self.p))
      q, k = jnp.concatenate([q, w], -1), jnp.concatenate([k, u], -1)
      return attention.multihead_attention(q, k, k)

    shapes = ((self.h, self.t, self.k), (self.h, self.t, self.p))
    shapes += ((self.h, self.s, self.k), (1, self.s, self.p))
    arrays = [normal(i, B, *x).astype('f') for i, x in enumerate(shapes)]
    text = jax.jit(f).lower(*arrays).compile().as_text()
    self.assertIn(f',{self.k + self.p}]', text)


class ConfigTest(parameterized.TestCase):
  def test_counts(self):
    """Parameters of DeepSeek-V2-Lite's and V2's attention, and the cache.

    Source: the models' released configs; the counts are the products of the
    sizes of their weights.
    """
    lite = LatentConfig(
      2048,
      16,
      512,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
    )
    self.assertEqual(
      num_params(lite.table),
      2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048,
    )
    self.assertEqual(lite.cache_elements, 576)
    v2 = LatentConfig(
      5120,
      128,
      512,
      1536,
      qk_nope_head_dim=128,
      qk_rope_head_dim=64,
      v_head_dim=128,
    )
    self.assertEqual(
      num_params(v2.table),
      5120 * 1536
      + 1536
      + 1536 * 128 * 192
      + 5120 * 576
      + 512
      + 512 * 128 * 256
      + 128 * 128 * 5120,
    )
    drawn = jax.eval_shape(
      functools.partial(init_table, v2.table), jax.random.key(0)
    )
    sizes = [x.size for x in jax.tree.leaves(drawn)]
    self.assertEqual(sum(sizes), num_params(v2.table))

  def test_defaults(self):
    """k = d / h, v = k; rotary features only with a rope, half of k."""
    plain = LatentConfig(60, 3, 7)
    self.assertEqual(plain.sizes, {'h': 3, 'k': 20, 'p': 0, 'r': 7, 'v': 20})
    self.assertIsNone(plain.rotary)
    self.assertEqual(LatentConfig(60, 3, 7, rope=Rope()).sizes['p'], 10)
    self.assertEqual(LatentConfig(12, 4, 7, rope=Rope()).sizes['p'], 2)
    given = LatentConfig(60, 3, 7, qk_rope_head_dim=4)
    self.assertEqual((given.rope, given.rotary), (None, Rope()))
    without = dataclasses.replace(given, qk_rope_head_dim=0)
    self.assertIsNone(without.rotary)
    self.assertNotIn('key_rope', plain.table)

  @parameterized.parameters(
    ({'num_heads': 7}, 'num_heads=7', 'divide d_model=60; nearest: 6, 10'),
    ({'kv_lora_rank': 0}, 'kv_lora_rank=0', 'positive integer'),
    ({'q_lora_rank': 0}, 'q_lora_rank=0', 'positive integer'),
    ({'qk_nope_head_dim': 0}, 'qk_nope_head_dim=0', 'positive integer'),
    ({'qk_rope_head_dim': -2}, 'qk_rope_head_dim=-2', 'positive integer'),
    ({'qk_rope_head_dim': 5}, 'qk_rope_head_dim=5', 'even .*nearest: 4, 6'),
    (
      {'qk_rope_head_dim': 0, 'rope': Rope()},
      'qk_rope_head_dim=0',
      'rope=None',
    ),
    ({'latent_norm': 'no'}, "latent_norm='no'", 'True or False'),
    ({'form': 'both'}, "form='both'", "'expanded', 'absorbed'"),
    ({'logit_softcap': 0.0}, 'logit_softcap=0.0', 'finite; None turns'),
    ({'v_head_dim': -1}, 'v_head_dim=-1', 'positive integer'),
  )
  def test_bad_configs(self, changes, value, remedy):
    """A config that cannot be is refused when it is made."""
    options = {'d_model': 60, 'num_heads': 3, 'kv_lora_rank': 7}
    with self.assertRaisesRegex(ValueError, f'{value}.*{remedy}'):
      LatentConfig(**options | changes)

  def test_values_of_their_own(self):
    """Keys and values share a latent: inputs_v has no place."""
    config = config_of('plain')
    p, x = random_params(config), normal(1, B, T, D)
    with self.assertRaisesRegex(ValueError, 'inputs_v .*leave inputs_v None'):
      attention.apply(config, p, x, x, x)

  def test_keys_need_positions(self):
    """The default rope turns keys too: positions of both or of neither."""
    config = config_of('rope')
    p, x, y = random_params(config), normal(1, B, T, D), normal(2, B, S, D)
    with self.assertRaisesRegex(ValueError, 'pass key_positions'):
      attention.apply(config, p, x, y, input_positions=np.arange(T))

"""Batch rows over four devices, which test_sharded_rows.py simulates.

Values are those of one device, and what comes out keeps the rows' sharding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from compiling import patched
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracles import assert_close, booleans, normal

from mha_jax.attention import (
  Dropout,
  GroupedConfig,
  LatentConfig,
  Rope,
  apply,
  init_cache,
  init_table,
  masks,
  multihead_attention,
)
from mha_jax.attention.one_head import block_pairs
from mha_jax.decoder import DecoderLM, decoder_config, generate

B, H, N, K, V = 8, 6, 3, 5, 7
ROWS = PartitionSpec('data')
KINDS = 'Explicit', 'Auto'
FLOAT32 = 1e-5
CONFIGS = {
  'gqa': GroupedConfig(16, 4, 2, rope=Rope()),
  'mla': LatentConfig(16, 4, kv_lora_rank=6, qk_rope_head_dim=4),
}


def mesh_of(kind: str):
  """A mesh of all devices, along which batch rows are sharded."""
  types = (AxisType[kind],)
  return jax.make_mesh((jax.device_count(),), ('data',), axis_types=types)


def put(mesh, tree):
  """The arrays of a tree, with their rows sharded."""
  return jax.device_put(tree, NamedSharding(mesh, ROWS))


def tensors(t: int):
  shapes = (B, H, t, K), (B, N, t, K), (B, N, t, V)
  return tuple(
    jnp.asarray(normal(i, *x).astype(np.float32)) for i, x in enumerate(shapes)
  )


class RowsTest(parameterized.TestCase):
  def assert_rows(self, tree):
    """Each array has its rows over the devices."""
    for x in jax.tree.leaves(tree):
      self.assertEqual(x.sharding.spec[0], 'data', x.shape)

  @parameterized.parameters('exact', 'blockwise', 'head by head')
  def test_core(self, implementation):
    """Masks of all kinds, lengths and a bias that all devices have, dropout."""
    t = 11
    if implementation == 'head by head':
      t, implementation = 131, 'blockwise'  # a loop within each device
      whole = block_pairs.block_sizes.__wrapped__
      self.enter_context(patched(block_pairs, block_sizes=whole))
    mask = (
      masks.causal()
      & masks.lengths(np.arange(1, 9) * t // 8)
      & masks.dense(booleans(3, 1, 1, t, t))
    )

    def loss(q, k, v, bias):
      out = multihead_attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        dropout=Dropout(jax.random.key(0), 0.3),
        implementation=implementation,
      )
      return jnp.sum(jnp.sin(out)), out

    f = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
    bias = normal(7, 1, H, t, t).astype(np.float32)
    wanted = f(*tensors(t), bias)
    for kind in KINDS:
      with self.subTest(kind):
        mesh = mesh_of(kind)
        whole = NamedSharding(mesh, PartitionSpec())
        got = f(*put(mesh, tensors(t)), jax.device_put(bias, whole))
        assert_close(got, wanted, FLOAT32)
        grads, out = got
        self.assert_rows((grads[:3], out))

  @parameterized.parameters('exact', 'blockwise')
  def test_unjitted(self, implementation):
    """Without jit, and with keys that all devices have whole."""
    q, k, v = tensors(11)
    mesh = mesh_of('Explicit')
    f = functools.partial(multihead_attention, implementation=implementation)
    got = f(put(mesh, q), k, v)
    assert_close(got, f(q, k, v), FLOAT32)
    self.assert_rows(got)

  @parameterized.parameters(
    ((4,), PartitionSpec(), None),
    ((4,), PartitionSpec(), masks.causal()),
    ((2, 2), PartitionSpec('data', 'model'), masks.causal()),
    ((2, 2), PartitionSpec(('data', 'model')), masks.causal()),
  )
  def test_explicit_blocks(self, shape, spec, mask):
    """Blocks where no device, or more than one axis, has rows of its own."""
    mesh = jax.make_mesh(shape, ('data', 'model')[: len(shape)])
    q = jnp.asarray(normal(0, B, H, 131, K).astype(np.float32))
    whole = block_pairs.block_sizes.__wrapped__
    self.enter_context(patched(block_pairs, block_sizes=whole))

    @jax.jit
    def f(q):
      return multihead_attention(q, q, q, mask=mask, implementation='blockwise')

    got = f(jax.device_put(q, NamedSharding(mesh, spec)))
    assert_close(got, f(q), FLOAT32)
    self.assertEqual(tuple(got.sharding.spec)[: len(spec)], tuple(spec))

  def test_vmap_over_devices(self):
    """The sharded axis is one that jax.vmap maps."""
    q = jnp.asarray(normal(0, 4, 2, H, 11, K).astype(np.float32))

    @jax.jit
    @jax.vmap
    def f(q):
      return multihead_attention(q, q, q, implementation='blockwise')

    got = f(put(mesh_of('Explicit'), q))
    assert_close(got, f(q), FLOAT32)
    self.assert_rows(got)

  def test_positions_on_the_axis_of_rows(self):
    """What all rows share may be sharded on their axis: it is put together."""
    mesh, at = mesh_of('Explicit'), jnp.arange(12)
    q, k, v = tensors(12)

    @jax.jit
    def f(q, k, v, at):
      return multihead_attention(
        q, k, v, mask=masks.causal(), query_positions=at, key_positions=at
      )

    got = f(*put(mesh, (q, k, v, at)))
    assert_close(got, f(q, k, v, at), FLOAT32)
    self.assert_rows(got)

  @parameterized.parameters(  # every pair of two arguments
    ('Explicit', 'gqa', None),
    ('Explicit', 'mla', 5),
    ('Auto', 'gqa', 5),
    ('Auto', 'mla', None),
  )
  def test_cached_steps(self, kind, name, window):
    """Several tokens and one, into caches that are sharded or not yet."""
    config, mesh = CONFIGS[name], mesh_of(kind)
    params = init_table(config.table, jax.random.key(0))
    x = jnp.asarray(normal(0, B, 9, 16).astype(np.float32))
    capacity = 12 if window is None else None
    cache = init_cache(config, B, capacity, window=window)
    valid = booleans(1, B, 8)

    @jax.jit
    def run(params, x, cache):
      step = functools.partial(apply, config, params, mask=masks.causal())
      first, cache = step(x[:, :8], cache=cache, valid=valid)
      return first, *step(x[:, 8:], cache=cache)

    wanted = run(params, x, cache)
    everywhere = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    for kept in (put(mesh, cache), cache):
      got = run(everywhere, put(mesh, x), kept)
      assert_close(got, wanted, FLOAT32)
      self.assert_rows(got[:2])

  @parameterized.parameters(
    (('data',),),
    ((None, 'data'),),
    (('model', 'data'),),
    ((None, ('data', 'model')),),
  )
  def test_several_batch_dimensions(self, spec):
    """Whichever of them is sharded: the output is sharded like the input."""
    mesh = jax.make_mesh((2, 2), ('data', 'model'))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    everywhere = NamedSharding(mesh, PartitionSpec())
    config = CONFIGS['gqa']
    params = init_table(config.table, jax.random.key(0))
    x = jnp.asarray(normal(0, 4, 4, 3, 16).astype(np.float32))
    mask = booleans(1, 4, 4, 1, 3, 3) | np.eye(3, dtype=bool)
    at = np.arange(48).reshape(4, 4, 3)

    @jax.jit
    def run(params, x, mask, at):
      return apply(
        config, params, x, mask=mask, input_positions=at, return_weights=True
      )

    wanted = run(params, x, mask, at)
    params = jax.device_put(params, everywhere)
    got = run(params, *jax.device_put((x, mask, at), sharding))
    assert_close(got, wanted, FLOAT32)
    for array in got:
      self.assertTrue(array.sharding.is_equivalent_to(sharding, array.ndim))

  def test_generate(self):
    """A whole model continues prompts of several devices; its gradient too."""
    model = DecoderLM(decoder_config(vocab_size=11, max_len=16, num_heads=4))
    prompts = jnp.asarray(np.arange(B * 5).reshape(B, 5) % 11)
    variables = model.init(jax.random.key(0), prompts)
    grad = jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
    wanted = generate(model, variables, prompts, max_new_tokens=4)
    gradient = grad(variables, prompts)
    for kind in KINDS:
      with self.subTest(kind):
        mesh = mesh_of(kind)
        whole = NamedSharding(mesh, PartitionSpec())
        everywhere, rows = jax.device_put(variables, whole), put(mesh, prompts)
        got = generate(model, everywhere, rows, max_new_tokens=4)
        np.testing.assert_array_equal(got[0], wanted[0])
        self.assert_rows(model.apply(everywhere, rows))
        assert_close(grad(everywhere, rows), gradient, FLOAT32)

"""RoPE against complex multiplication, and what it promises."""

import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, normal

from mha_jax import attention
from mha_jax.attention import GroupedConfig, Rope, layout_permutation
from mha_jax.attention.positions.rope import LAYOUTS


def params(seed: int, config: GroupedConfig) -> dict:
  """Random float64 parameters for every row of the table."""
  return {
    name: {
      parameter: jnp.asarray(normal(seed + 10 * i + j, *shape) / 3)
      for j, (parameter, shape) in enumerate(row.shapes.items())
    }
    for i, (name, row) in enumerate(config.table.items())
  }


class RopeTest(oracles.X64TestCase):
  @parameterized.product(
    layout=LAYOUTS, theta=(10_000.0, 3.0), per_row=(True, False)
  )
  def test_against_complex_numbers(self, layout, theta, per_row):
    """(x + i y) exp(i p w), in both layouts, positions per row or shared."""
    x = normal(0, 3, 5, 7, 14)
    positions = np.random.default_rng(0).integers(
      0, 1000, (3 if per_row else 1, 1, 7)
    )
    got = Rope(theta, layout).rotate(jnp.asarray(x), jnp.asarray(positions))
    assert_close(got, oracles.rotate(x, positions, theta, layout))

  @parameterized.parameters(*LAYOUTS)
  def test_position_0_changes_nothing(self, layout):
    """The first token is not turned."""
    x = jnp.asarray(normal(0, 5, 6))
    oracles.assert_same_bits(
      Rope(layout=layout).rotate(x, jnp.zeros(5, int)), x
    )

  def test_integers(self):
    """They become fractions."""
    got = Rope().rotate([[1, 0]], [1])
    assert_close(got, np.array([[np.cos(1), np.sin(1)]]), 1e-6)

  @parameterized.parameters(*LAYOUTS)
  def test_bfloat16(self, layout):
    """In bfloat16 only the result is rounded, at position 4001 too."""
    x = jnp.asarray(normal(0, 5, 6), jnp.bfloat16)
    positions = np.array([0, 1, 40, 401, 4001])
    got = Rope(layout=layout).rotate(x, jnp.asarray(positions))
    self.assertEqual(got.dtype, jnp.bfloat16)
    wanted = oracles.rotate(x, positions, 10_000.0, layout)
    assert_close(got, wanted, 2**-8)

  @given(
    shift=st.integers(-1000, 100_000),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 99),
  )
  def test_only_differences_matter(self, shift, layout, seed):
    """Through a whole layer: shifting all positions changes nothing."""
    config = GroupedConfig(
      d_model=5, num_heads=3, head_dim=4, rope=Rope(layout=layout)
    )
    p, x = params(seed, config), normal(seed, 2, 7, 5)
    positions = np.random.default_rng(seed).integers(0, 50, (2, 7))
    got = attention.apply(config, p, x, input_positions=positions + shift)
    wanted = attention.apply(config, p, x, input_positions=positions)
    # sin and cos of angles up to 1e5 lose 5 digits of 16.
    assert_close(got, wanted, 1e-9)
    plain = attention.apply(config, p, x)
    self.assertGreater(oracles.relative_error(plain, wanted), 1e-3)

  @parameterized.product(
    layout=LAYOUTS, cross=(False, True), kind=(None, 'layer', 'rms')
  )
  def test_in_a_layer(self, layout, cross, kind):
    """Queries and keys are turned after the norm, by their own positions."""
    config = GroupedConfig(
      d_model=5,
      num_heads=3,
      head_dim=4,
      rope=Rope(100.0, layout),
      normalize_qk=kind or False,
    )
    p, x = params(0, config), normal(0, 2, 7, 5)
    at_q = np.random.default_rng(1).integers(0, 30, (2, 7))
    y = normal(1, 2, 11, 5) if cross else None
    at_k = np.random.default_rng(2).integers(0, 30, (2, 11)) if cross else at_q
    got = attention.apply(
      config,
      p,
      x,
      y,
      input_positions=at_q,
      key_positions=at_k if cross else None,
    )
    wanted, _ = oracles.layer(
      p, x, y, kind=kind, rope=(100.0, layout), positions=(at_q, at_k)
    )
    assert_close(got, wanted)
    count = attention.apply(config, p, x, y)
    wanted, _ = oracles.layer(p, x, y, kind=kind, rope=(100.0, layout))
    assert_close(count, wanted)


class LayoutTest(oracles.X64TestCase):
  @parameterized.parameters(2, 6, 14)
  def test_permutation(self, head_dim):
    """Half and interleaved are one rotation, up to a permutation."""
    x, positions = normal(0, 5, head_dim), jnp.arange(5)
    for source, target in (LAYOUTS, LAYOUTS[::-1]):
      order = layout_permutation(head_dim, source, target)
      back = layout_permutation(head_dim, target, source)
      np.testing.assert_array_equal(order[back], np.arange(head_dim))
      got = Rope(layout=target).rotate(jnp.asarray(x[:, order]), positions)
      wanted = Rope(layout=source).rotate(jnp.asarray(x), positions)
      assert_close(got, wanted[:, order])
      same = layout_permutation(head_dim, source, source)
      np.testing.assert_array_equal(same, np.arange(head_dim))

  def test_order(self):
    """The indices themselves, for six features."""
    np.testing.assert_array_equal(
      layout_permutation(6, 'interleaved', 'half'), [0, 2, 4, 1, 3, 5]
    )
    np.testing.assert_array_equal(
      layout_permutation(6, 'half', 'interleaved'), [0, 3, 1, 4, 2, 5]
    )

  @parameterized.parameters(False, 'rms', 'layer')
  def test_weights_carry_over(self, normalize_qk):
    """Permuted query and key weights give the same scores and outputs."""
    source = GroupedConfig(
      d_model=5,
      num_heads=4,
      num_kv_heads=2,
      head_dim=6,
      rope=Rope(layout='half'),
      normalize_qk=normalize_qk,
    )
    target = GroupedConfig(
      d_model=5,
      num_heads=4,
      num_kv_heads=2,
      head_dim=6,
      rope=Rope(layout='interleaved'),
      normalize_qk=normalize_qk,
    )
    p, x = params(0, source), normal(1, 2, 7, 5)
    order = layout_permutation(6, 'half', 'interleaved')
    carried = {
      name: {
        parameter: array[..., order]
        if name in ('query', 'key', 'query_ln', 'key_ln')
        else array
        for parameter, array in row.items()
      }
      for name, row in p.items()
    }
    wanted = attention.apply(source, p, x, return_weights=True)
    got = attention.apply(target, carried, x, return_weights=True)
    assert_close(got, wanted)
    wrong = attention.apply(target, p, x, return_weights=True)
    self.assertGreater(oracles.relative_error(wrong[1], wanted[1]), 1e-3)


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda: Rope(layout='halves'), r"layout='halves' must be one of \('half'"),
    (lambda: Rope(theta=0.0), r'theta=0.0 must lie in'),
    (lambda: Rope(theta=float('nan')), r'theta=nan must lie in'),
    (lambda: Rope(theta=float('inf')), r'theta=inf must lie in'),
    (
      lambda: Rope().rotate(jnp.ones((2, 7)), jnp.arange(2)),
      r'head_dim=7 must be even for RoPE; nearest: 6, 8',
    ),
    (
      lambda: Rope().rotate(jnp.ones((1, 2, 4)), jnp.arange(2)),
      r'positions of shape \(2,\) must have one dimension less.*\(1, 2, 4\)',
    ),
    (
      lambda: layout_permutation(7, 'half', 'interleaved'),
      r'head_dim=7 must be even.*6, 8',
    ),
    (lambda: layout_permutation(6, 'x', 'half'), r"source='x' must be one of"),
    (lambda: layout_permutation(6, 'half', 'x'), r"target='x' must be one of"),
  )
  def test_bad_calls(self, call, message):
    """Each is refused with the name and the value."""
    with self.assertRaisesRegex(ValueError, message):
      call()

"""Against PyTorch: scaled_dot_product_attention and MultiheadAttention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import torch
from absl.testing import parameterized
from oracles import assert_close, booleans, normal

from mha_jax import attention
from mha_jax.attention import GroupedConfig, masks, multihead_attention
from mha_jax.attention.implementations import OURS

B, T, S, K, V = 2, 7, 11, 13, 17
HEADS = {'mha': (5, 5), 'gqa': (15, 3), 'mqa': (5, 1)}
TOLERANCE = {'float64': oracles.ROUNDING, 'float32': 3e-6}


def tensors(*arrays, grad: bool = True) -> list[torch.Tensor]:
  return [torch.tensor(x, requires_grad=grad) for x in arrays]


def numpy(*arrays: torch.Tensor) -> list[np.ndarray]:
  return [x.detach().numpy() for x in arrays]


class ScaledDotProductTest(oracles.X64TestCase):
  """torch.nn.functional.scaled_dot_product_attention, heads first as ours."""

  @parameterized.product(
    kind=tuple(HEADS),
    mask=('none', 'causal', 'boolean', 'float', 'scale'),
    dtype=tuple(TOLERANCE),
    implementation=OURS,
  )
  def test_same(self, kind, mask, dtype, implementation):
    """Output and gradients of q, k, v and a float mask."""
    h, n = HEADS[kind]
    q, k, v, cotangent = (
      normal(i, *shape).astype(dtype)
      for i, shape in enumerate(
        ((B, h, T, K), (B, n, S, K), (B, n, S, V), (B, h, T, V))
      )
    )
    keep = booleans(4, B, h, T, S) | np.eye(T, S, dtype=bool)
    bias = np.where(keep, normal(5, B, h, T, S), -np.inf).astype(dtype)
    ours, theirs = {
      'none': ({}, {}),
      'causal': ({'mask': masks.causal()}, {'is_causal': True}),
      'boolean': ({'mask': keep}, {'attn_mask': torch.tensor(keep)}),
      'float': ({'bias': bias}, {}),
      'scale': ({'scale': 0.3}, {'scale': 0.3}),
    }[mask]
    arrays = [q, k, v] + ([bias] if mask == 'float' else [])

    @jax.jit
    def f(q, k, v, *bias):
      options = ours | ({'bias': bias[0]} if bias else {})
      return multihead_attention(
        q, k, v, implementation=implementation, **options
      )

    out, back = jax.vjp(f, *arrays)
    inputs = tensors(*arrays)
    if mask == 'float':
      theirs = {'attn_mask': inputs[3]}
    wanted = torch.nn.functional.scaled_dot_product_attention(
      *inputs[:3], enable_gqa=h != n, **theirs
    )
    wanted.backward(torch.tensor(cotangent))
    grads = numpy(*(x.grad for x in inputs))
    self.assertEqual(out.dtype, jnp.dtype(dtype))
    assert_close(
      [out, *back(cotangent)],
      [*numpy(wanted), *grads],
      TOLERANCE[dtype],
    )


MODULES = {
  'self': {},
  'no_bias': {'bias': False},
  'cross': {'kdim': 17, 'vdim': 19},
}


def carried_over(module: torch.nn.MultiheadAttention) -> dict:
  """PyTorch's weights (out, in) as our kernels (d, h, k) and (h, v, d)."""
  h, k = module.num_heads, module.head_dim
  if module.in_proj_weight is not None:
    weights = module.in_proj_weight.chunk(3)
  else:
    weights = (
      module.q_proj_weight,
      module.k_proj_weight,
      module.v_proj_weight,
    )
  params = {}
  for i, (name, weight) in enumerate(
    zip(('query', 'key', 'value'), numpy(*weights), strict=True)
  ):
    params[name] = {'kernel': jnp.asarray(weight.T.reshape(-1, h, k))}
    if module.in_proj_bias is not None:
      (bias,) = numpy(module.in_proj_bias.chunk(3)[i])
      params[name]['bias'] = jnp.asarray(bias.reshape(h, k))
  (weight,) = numpy(module.out_proj.weight)
  params['out'] = {'kernel': jnp.asarray(weight.T.reshape(h, k, -1))}
  if module.out_proj.bias is not None:
    params['out']['bias'] = jnp.asarray(numpy(module.out_proj.bias)[0])
  return params


def carried_over_grads(module: torch.nn.MultiheadAttention) -> dict:
  """The gradients of PyTorch's parameters in our shapes."""
  with torch.no_grad():
    for parameter in module.parameters():
      parameter.copy_(parameter.grad)
  return carried_over(module)


class MultiheadAttentionTest(oracles.X64TestCase):
  """torch.nn.MultiheadAttention, weights carried over here."""

  @parameterized.product(
    case=tuple(MODULES),
    mask=('none', 'boolean', 'float', 'padding'),
    dtype=tuple(TOLERANCE),
  )
  def test_same(self, case, mask, dtype):
    """Output, weights, and gradients of inputs and parameters."""
    d, h = 15, 5
    options = MODULES[case]
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(
      d, h, batch_first=True, dtype=getattr(torch, dtype), **options
    )
    with torch.no_grad():
      for i, parameter in enumerate(module.parameters()):
        parameter.copy_(torch.tensor(normal(i, *parameter.shape) / 3))
    x = normal(10, B, T, d).astype(dtype)
    inputs = [x]
    if case == 'cross':
      inputs += [
        normal(i, B, S, w).astype(dtype) for i, w in ((1, 17), (2, 19))
      ]
    s = inputs[-1].shape[1]
    keep = booleans(3, T, s) | np.eye(T, s, dtype=bool)
    bias = normal(4, T, s).astype(dtype)
    lengths = np.array([s, 4])
    ours, theirs = {
      'none': ({}, {}),
      'boolean': ({'mask': keep}, {'attn_mask': torch.tensor(~keep)}),
      'float': ({'bias': bias}, {'attn_mask': torch.tensor(bias)}),
      'padding': (
        {'mask': masks.lengths(lengths)},
        {'key_padding_mask': torch.tensor(np.arange(s) >= lengths[:, None])},
      ),
    }[mask]
    config = GroupedConfig(
      d_model=d,
      num_heads=h,
      key_features=options.get('kdim'),
      value_features=options.get('vdim'),
      use_bias=options.get('bias', True),
    )
    cotangent = normal(20, B, T, d).astype(dtype)
    weights_cotangent = normal(21, B, h, T, s).astype(dtype)

    f = functools.partial(attention.apply, config, return_weights=True, **ours)
    got, back = jax.vjp(jax.jit(f), carried_over(module), *inputs)
    grads = back((jnp.asarray(cotangent), jnp.asarray(weights_cotangent)))

    given = tensors(*inputs)
    out, weights = module(
      *(given if case == 'cross' else given * 3),
      need_weights=True,
      average_attn_weights=False,
      **theirs,
    )
    loss = torch.sum(out * torch.tensor(cotangent)) + torch.sum(
      weights * torch.tensor(weights_cotangent)
    )
    loss.backward()
    assert_close(list(got), numpy(out, weights), TOLERANCE[dtype])
    input_grads = numpy(*(x.grad for x in given))
    assert_close(list(grads[1:]), input_grads, TOLERANCE[dtype])
    wanted = carried_over_grads(module)
    for tree in (grads[0], wanted):
      # It adds the same to all scores of a query: only rounding.
      tree['key'].pop('bias', None)
    assert_close(grads[0], wanted, 3 * TOLERANCE[dtype])

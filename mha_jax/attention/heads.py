"""Every vmap over heads: who shares what.

`attend` knows one head. Three nested `jax.vmap`s, all over leading axes, make
it attention of many, and `in_axes` alone tells which heads share a key and a
value; nothing is repeated in memory.

  vmap over        q  k          v          MHA    GQA        MQA
  batch rows b     0  0          0
  kv heads n       0  0 or None  0 or None  n = h  1 < n < h  n = 1
  group's heads g  0  None       None       g = 1  g = h / n  g = h

Over kv heads an axis of size 1 is shared (`None`), any other is mapped (0): so
is each part of a key that comes in parts. Latent attention, expanded, has keys
and values by head and one rotary key, (0, None) and 0; absorbed, it is MQA.
Masks, biases, positions and dropout keys ride along by the same rule.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks, implementations, masks, shapes
from mha_jax.attention.axes import Axis, Blocks
from mha_jax.attention.constants import opaque
from mha_jax.attention.dtypes import compute_dtype, wide_dtype
from mha_jax.attention.each import each
from mha_jax.attention.notation import Array, Parts, Shaped
from mha_jax.attention.one_head import block_pairs, blockwise, exact
from mha_jax.attention.one_head.dropout import check_dropout
from mha_jax.attention.sharded_rows import rows_over_devices

KeysValues = tuple[Parts, Array]
Extras = dict[str, Any]
"""What belongs to a score and not to q, k or v: leaves lead with (b, n, g)."""

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
  'exact': exact.attend,
  'blockwise': blockwise.attend,
}


def multihead_attention(
  q_BHTK: Any,
  k_BNSK: Any,
  v_BNSV: Any,
  *,
  mask: Any = None,
  bias: Any = None,
  scale: float | Array | None = None,
  logit_softcap: float | None = None,
  query_positions: Any = None,
  key_positions: Any = None,
  dropout: Any = None,
  return_weights: bool = False,
  return_residual: bool = False,
  implementation: str = 'auto',
) -> Any:
  """Attention of h query heads over n key/value heads, heads first.

  Head i attends to key/value head i // (h / n).

  Args:
    q_BHTK: queries (b, h, t, k), or a tuple of parts (b, h, t, k_i) whose
      scores add.
    k_BNSK: keys (b, n, s, k), n divides h; or a tuple of as many parts, each
      (b, n, s, k_i), or (b, 1, s, k_i) where all heads share it.
    v_BNSV: values (b, n, s, v), or (b, 1, s, v) likewise.
    mask: a `Mask`, or booleans that broadcast to (b, h, t, s); True may attend.
    bias: added to the scores, broadcasts to (b, h, t, s); -inf may not attend.
    scale: multiplies q k^T; None: 1 / sqrt(k), with k = sum k_i.
    logit_softcap: c > 0 bounds the scaled scores as c tanh(x / c), before bias
      and mask; None: no bound.
    query_positions: (b, t) or (t,) integers for masks; None: 0 .. t-1.
    key_positions: (b, s) or (s,) integers for masks; None: 0 .. s-1.
    dropout: a `Dropout`; every row and head draws its own bits from its key.
    return_weights: whether to return the weights (b, h, t, s) too, before
      dropout.
    return_residual: whether to return the log of the softmax's denominator
      (b, h, t) too, see `attend`.
    implementation: 'auto', 'exact', 'blockwise', 'cudnn' or 'splash', see
      `implementations.choose`.

  Returns:
    The output (b, h, t, v) in the inputs' common dtype; with return_weights or
    return_residual a tuple of it and what was asked for, in this order. A query
    that may attend to nothing gets zeros.

  Raises:
    ValueError: shapes do not fit, the mask is not boolean, or an option is
      unknown or cannot serve.
    TypeError: forward-mode differentiation of blocks, see `blockwise.attend`.
  """
  call = _read(
    q_BHTK,
    k_BNSK,
    v_BNSV,
    mask=mask,
    bias=bias,
    scale=scale,
    logit_softcap=logit_softcap,
    query_positions=query_positions,
    key_positions=key_positions,
    dropout=dropout,
    return_weights=return_weights,
    return_residual=return_residual,
  )
  chosen = implementations.choose(implementation, call.traits)
  if chosen in implementations.KERNELS:
    return call.by_kernel(implementations.KERNELS[chosen])
  try:
    return _by_head(call, chosen)
  except TypeError as error:
    if chosen == 'blockwise' and 'custom_vjp' in str(error):
      raise TypeError(
        'blockwise attention has no forward-mode derivative (jax.jvp); use '
        "implementation='exact'"
      ) from error
    raise


def implementation_of(*arguments: Any, **options: Any) -> str:
  """The implementation that `multihead_attention` takes for these arguments.

  >>> x = jnp.zeros((1, 8, 4096, 64))
  >>> implementation_of(x, x, x, mask=masks.causal())
  'blockwise'
  """
  signature = inspect.signature(multihead_attention)
  call = signature.bind(*arguments, **options)
  call.apply_defaults()
  implementation = call.arguments.pop('implementation')
  return implementations.choose(implementation, _read(**call.arguments).traits)


def _read(
  q_BHTK: Any,
  k_BNSK: Any,
  v_BNSV: Any,
  *,
  mask: Any,
  bias: Any,
  scale: Any,
  logit_softcap: float | None,
  query_positions: Any,
  key_positions: Any,
  dropout: Any,
  return_weights: bool,
  return_residual: bool,
) -> '_Call':
  """The arguments as arrays; a ValueError where they do not fit."""
  qs, ks, v = (
    exact.as_parts(q_BHTK),
    exact.as_parts(k_BNSK),
    jnp.asarray(v_BNSV),
  )
  b, h, t, _, s = shapes.check_shapes(qs, ks, v)
  checks.softcap(logit_softcap)
  check_dropout(dropout)
  dropout = None if dropout is None or dropout.rate == 0 else dropout
  exact.check_scale(scale)
  mask, bias = shapes.check_pairs(mask, bias, (b, h, t, s))
  dtype = compute_dtype(None, *qs, *ks, v)
  extras = {
    'mask': mask,
    'bias': None if bias is None else bias.astype(wide_dtype(dtype)),
    'query_positions': shapes.per_row('query_positions', query_positions, b, t),
    'key_positions': shapes.per_row('key_positions', key_positions, b, s),
    'dropout': None if dropout is None else dropout.per_head(b, h),
  }
  wanted = {
    'return_weights': return_weights,
    'return_residual': return_residual,
  }
  asked = tuple(name for name, value in wanted.items() if value)
  softcap = None if logit_softcap is None else float(logit_softcap)
  return _Call(qs, ks, v, scale, extras, dtype, softcap, asked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Call:
  """The arguments of `multihead_attention`, checked."""

  qs: Any  # (b, h, t, k_i) each
  ks: Any  # (b, n, s, k_i) each, or (b, 1, s, k_i)
  v: Any  # (b, n, s, v), or (b, 1, s, v)
  scale: Any  # () or None
  extras: Extras
  dtype: Any = dataclasses.field(metadata={'static': True})
  logit_softcap: float | None = dataclasses.field(metadata={'static': True})
  asked: tuple[str, ...] = dataclasses.field(metadata={'static': True})

  @property
  def sizes(self) -> tuple[int, int, int, int, int]:
    """The sizes b, h, t, n, s."""
    b, h, t = self.qs[0].shape[:3]
    n = max(x.shape[1] for x in (*self.ks, self.v))
    return b, h, t, n, self.v.shape[2]

  @property
  def traits(self) -> implementations.Call:
    """What an implementation is chosen by."""
    _, _, t, _, s = self.sizes
    given = {name: x for name, x in self.extras.items() if name != 'mask'}
    given['logit_softcap'] = self.logit_softcap
    scale = self.scale
    given['scale of an array'] = scale if isinstance(scale, jax.Array) else None
    k_heads, v_heads = self.ks[0].shape[1], self.v.shape[1]
    given['k and v of other numbers of heads'] = k_heads != v_heads or None
    return implementations.Call(
      t,
      s,
      (tuple(k.shape[-1] for k in self.ks), self.v.shape[-1]),
      self.dtype,
      self.extras['mask'],
      tuple(name for name, x in given.items() if x is not None),
      self.asked,
    )

  def by_kernel(self, kernel: Callable[..., Array]) -> Array:
    """The outputs of a fused kernel, which takes all heads at once."""
    scale = self.scale
    scale = exact.default_scale(self.qs) if scale is None else float(scale)
    q, k, v = (x.astype(self.dtype) for x in (*self.qs, *self.ks, self.v))
    return kernel(q, k, v, scale, masks.reach(self.extras['mask']))


@functools.partial(jax.jit, static_argnames='implementation')
def _by_head(call: _Call, implementation: str) -> Any:
  """The outputs of a one-head function, mapped over all heads.

  Compiled once for equal shapes and options, also where the caller does not
  jit.
  """
  extras = jax.tree.map(opaque, call.extras)
  call = dataclasses.replace(call, extras=extras)
  of_rows = functools.partial(_of_rows, implementation=implementation)
  return rows_over_devices(of_rows, call)


def _of_rows(call: _Call, implementation: str) -> Any:
  """The outputs of the batch rows that one device has."""
  b, h, t, n, s = call.sizes
  g = h // n
  options = {'scale': call.scale, 'logit_softcap': call.logit_softcap}
  extras = jax.tree.map(lambda leaf: _split_heads(leaf, n, g), call.extras)
  asked = dict.fromkeys(call.asked, True)
  one_by_one = False
  if implementation == 'blockwise':
    one_by_one = block_pairs.fits_better_alone(t, call.v)
    options['sizes'] = sizes = block_pairs.block_sizes(t, s, g, b * n)
    blocks = Blocks(t, sizes.queries), Blocks(s, sizes.keys)
    extras['pairs'] = block_pairs.of_heads(extras, *blocks, by_head=one_by_one)

  def one_head(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    attend = IMPLEMENTATIONS[implementation]
    return attend(qs, *kv, **options, **asked, **extras)

  per_group = _map_group(one_head)
  if implementation == 'exact':
    per_group = _silence_together(per_group)

  def one_row(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return each(per_group, qs, kv, extras, one_by_one=one_by_one)

  qs = tuple(jnp.reshape(q, (b, n, g, *q.shape[2:])) for q in call.qs)
  out = each(one_row, qs, (call.ks, call.v), extras, one_by_one=one_by_one)
  return jax.tree.map(lambda x: jnp.reshape(x, (b, h, *x.shape[3:])), out)


def _map_group(one_head: Callable[..., Any]) -> Callable[..., Any]:
  """Maps over the query heads of a group, which share one k and one v."""

  def mapped(qs: Parts, kv: KeysValues, extras: Extras) -> Any:
    return each(one_head, qs, jax.tree.map(lambda x: x[None], kv), extras)

  return mapped


def _silence_together(per_group: Callable[..., Any]) -> Callable[..., Any]:
  """Silences the keys that no head of a group may attend to.

  Where the heads' masks differ, each would silence others, and k and v would no
  longer be shared.
  """

  def silenced(
    qs: tuple[Shaped[Array, 'g t _'], ...],
    kv: tuple[tuple[Shaped[Array, 's _'], ...], Shaped[Array, 's v']],
    extras: Extras,
  ) -> Any:
    pairs = {name: extras[name] for name in (*block_pairs.OF_MASKS, 'bias')}
    t, s = qs[0].shape[1], kv[1].shape[0]

    def allowed(pair: Extras) -> Any:
      return exact.allowed_pairs(
        pair['mask'],
        pair['bias'],
        Axis(t, pair['query_positions']),
        Axis(s, pair['key_positions']),
      )

    used = None
    if any(x.shape[0] > 1 for x in jax.tree.leaves(pairs)):
      used = jnp.any(each(allowed, pairs), axis=(0, 1))[None]
    return per_group(qs, kv, extras | {'used': used})

  return silenced


def _split_heads(leaf: Array, n: int, g: int) -> Array:
  """(b, h, ...) -> (b, n, g, ...), or (b, 1, ...) -> (b, 1, 1, ...)."""
  heads = (n, g) if leaf.shape[1] == n * g else (1, 1)
  return jnp.reshape(leaf, (leaf.shape[0], *heads, *leaf.shape[2:]))

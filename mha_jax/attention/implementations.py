"""The implementations of `multihead_attention`, and which computes a call.

  exact      all scores at once: weights, forward-mode derivatives, short calls
  blockwise  by blocks of keys: memory grows with t, not with t s
  cudnn      cuDNN's fused attention, on NVIDIA GPUs
  splash     Pallas' splash attention, on TPUs

The fused kernels take no part where they would do anything else than the other
two: theirs are calls in which every query sees its own key, so that no query
sees nothing and no key goes unused. They have no second derivatives.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import masks
from mha_jax.attention.devices import default_device
from mha_jax.attention.dtypes import compute_dtype
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.scores import Scores

Reach = tuple[int | None, int | None]


def cudnn(
  q_BHTK: Array, k_BNSK: Array, v_BNSV: Array, scale: float, reach: Reach
) -> Array:
  """Attends by cuDNN; gives (b, h, t, v)."""
  left, right = reach
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BHTK, k_BNSK, v_BNSV))
  out = jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=scale,
    is_causal=right == 0,
    local_window_size=None if left is None else (left, 0),
    implementation='cudnn',
  )
  return jnp.swapaxes(out, 1, 2)


def splash(
  q_BHTK: Array,
  k_BNSK: Array,
  v_BNSV: Array,
  scale: float,
  reach: Reach,
  interpret: bool = False,
) -> Array:
  """Splash attention: one key/value head with its queries at a time.

  Args:
    q_BHTK: queries, k_BNSK: keys, v_BNSV: values.
    scale: of the scores.
    reach: of the mask.
    interpret: runs the kernel without a TPU, slowly.
  """
  b, h, t, k = q_BHTK.shape
  n, s = k_BNSK.shape[1:3]
  kernel = _splash_kernel(h // n, t, s, reach, interpret)
  q = jnp.reshape((q_BHTK * scale).astype(q_BHTK.dtype), (b, n, h // n, t, k))
  out = jax.vmap(jax.vmap(kernel))(q, k_BNSK, v_BNSV)
  return jnp.reshape(out, (b, h, t, out.shape[-1]))


def _splash_kernel(
  g: int, t: int, s: int, reach: Reach, interpret: bool
) -> Any:
  # Imported here: Pallas takes long, and most calls never want it.
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  mask: Any = library.FullMask((t, s))
  if reach == (None, 0):
    mask = library.CausalMask((t, s))
  elif reach != (None, None):
    mask = library.LocalMask((t, s), reach, 0)
  side = next(x for x in (512, 256, 128) if t % x == 0)
  sizes = library.BlockSizes(
    block_q=side,
    block_kv=side,
    block_q_dkv=side,
    block_kv_dkv=side,
    block_q_dq=side,
    block_kv_dq=side,
  )
  return library.make_splash_mqa_single_device(
    mask=library.MultiHeadMask([mask] * g),
    block_sizes=sizes,
    interpret=interpret,
  )


KERNELS: dict[str, Callable[..., Array]] = {'cudnn': cudnn, 'splash': splash}


def by_kernel(
  name: str, qs: Parts, ks: Parts, v: Array, scores: Scores
) -> Array:
  """Attends by a fused kernel, which takes all heads at once."""
  dtype = compute_dtype(None, *qs, *ks, v)
  q, k, v = (x.astype(dtype) for x in (*qs, *ks, v))
  scale, reach = float(scores.scale_for(qs)), masks.reach(scores.mask)
  assert reach is not None  # `choose` has seen to it
  return KERNELS[name](q, k, v, scale, reach)


OURS = ('exact', 'blockwise')
NAMES = ('auto', *OURS, *KERNELS)

# Measured on two CPU cores, see docs/decisions.md, "Blocks and thresholds".
LONG_KEYS = 1024
MANY_SCORES = 1024 * 1024
"""Keys, or scores of a head, from which on blocks are faster."""

LANES = 128
"""Splash attention takes sizes that are multiples of it."""


@dataclasses.dataclass(frozen=True)
class Traits:
  """All of a call that the choice of an implementation depends on.

  Args:
    t: queries, a number or a symbolic dimension of `jax.export`.
    s: keys, likewise.
    widths: features of each part of a key, and of a value.
    dtype: the dtype computed in.
    mask: the mask, or None.
    given: names of the other arguments that are in use, such as 'bias' and
      'return_weights'.
  """

  t: Any
  s: Any
  widths: tuple[tuple[int, ...], int]
  dtype: Any
  mask: masks.Mask | None = None
  given: tuple[str, ...] = ()


def traits_of(qs: Parts, ks: Parts, v: Array, scores: Scores) -> Traits:
  """Reads the traits off checked arguments, heads first."""
  array = isinstance(scores.scale, jax.Array)
  uneven = ks[0].shape[1] != v.shape[1]
  given = {
    'bias': scores.bias is not None,
    'query_positions': scores.query_positions is not None,
    'key_positions': scores.key_positions is not None,
    'dropout': scores.dropout is not None,
    'logit_softcap': scores.logit_softcap is not None,
    'scale of an array': array,
    'k and v with different numbers of heads': uneven,
    'return_weights': scores.return_weights,
    'return_residual': scores.return_residual,
  }
  return Traits(
    qs[0].shape[2],
    v.shape[2],
    (tuple(k.shape[-1] for k in ks), v.shape[-1]),
    compute_dtype(None, *qs, *ks, v),
    scores.mask,
    tuple(name for name, is_given in given.items() if is_given),
  )


def choose(implementation: str, traits: Traits) -> str:
  """Chooses the implementation that computes a call.

  Args:
    implementation: a choice, or 'auto': a fused kernel where the device has one
      that serves the traits, else blocks for long calls, else exact.
    traits: of the call.

  Raises:
    ValueError: the choice is unknown, or cannot serve the call.
  """
  check_name(implementation)
  known = isinstance(traits.t, int) and isinstance(traits.s, int)
  if known and 0 in (traits.t, traits.s):
    return 'exact'  # there is nothing to compute
  if implementation != 'auto':
    reason = reason_against(implementation, traits)
    if reason is not None:
      raise ValueError(
        f'implementation={implementation!r} cannot serve this call: {reason}; '
        "use 'auto'"
      )
    return implementation
  if not known:
    return 'exact'  # serves any length
  many = traits.t * traits.s >= MANY_SCORES
  # A loop over the keys of one query pays where a copy of the keys would not.
  long = traits.s >= LONG_KEYS and (
    traits.t > 1 or default_device().platform == 'cpu'
  )
  if not (many or long):
    return 'exact'
  for name in (*KERNELS, 'blockwise'):
    if reason_against(name, traits) is None:
      return name
  return 'exact'


def check_name(implementation: str) -> None:
  """Raises a ValueError unless there is such an implementation."""
  if implementation not in NAMES:
    raise ValueError(
      f'implementation={implementation!r} is unknown; use one of {list(NAMES)}'
    )


def reason_against(implementation: str, traits: Traits) -> str | None:
  """Says why an implementation does not serve a call; None: it does."""
  if implementation == 'exact':
    return None
  if not (isinstance(traits.t, int) and isinstance(traits.s, int)):
    return f'it wants lengths that are known, not t={traits.t} and s={traits.s}'
  if 'return_weights' in traits.given:
    return 'it never has the weights as a whole, and return_weights is True'
  if implementation == 'blockwise':
    return None
  if traits.given:
    return f'it takes no {traits.given[0]}'
  if traits.t != traits.s:
    return f'it takes as many queries as keys, not {traits.t} and {traits.s}'
  if len(traits.widths[0]) > 1:
    return 'it takes no keys in parts'
  if masks.reach(traits.mask) is None:
    return 'it takes no mask but causal and window'
  return (
    _against_cudnn(traits)
    if implementation == 'cudnn'
    else _against_splash(traits)
  )


def _against_cudnn(traits: Traits) -> str | None:
  (k,), v = traits.widths
  device = default_device()
  capability = str(getattr(device, 'compute_capability', ''))
  nvidia = device.platform == 'gpu' and capability[:1].isdigit()
  if not nvidia or float(capability) < 8:
    return f'it wants an NVIDIA GPU of capability 8 or more, not {device}'
  if jnp.dtype(traits.dtype) not in (jnp.bfloat16, jnp.float16):
    return f'it computes in bfloat16 or float16, not in {traits.dtype}'
  if k != v or k % 8 or k > 128:
    return f'it takes heads of 8 to 128 features by eights, not {k} and {v}'
  left, right = masks.reach(traits.mask) or (None, None)
  if right not in (None, 0) or (left is not None and right is None):
    return 'it takes windows that end at the query alone'
  return None


def _against_splash(traits: Traits) -> str | None:
  (k,), v = traits.widths
  if default_device().platform != 'tpu' or jax.device_count() > 1:
    count, device = jax.device_count(), default_device()
    return f'it wants a TPU, one alone, not {count} of {device}'
  if jnp.dtype(traits.dtype) not in (jnp.bfloat16, jnp.float32):
    return f'it computes in bfloat16 or float32, not in {traits.dtype}'
  if any(size % LANES for size in (traits.t, k, v)):
    return (
      f'it takes lengths and features by {LANES}, not t={traits.t}, k={k}, '
      f'v={v}'
    )
  return None

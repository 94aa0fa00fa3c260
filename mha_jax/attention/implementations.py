"""Which implementation computes a call of `multihead_attention`.

  exact      all scores at once: weights, forward-mode derivatives, short calls
  blockwise  by blocks of keys: memory grows with t, not with t s
  cudnn      cuDNN's fused attention, on NVIDIA GPUs
  splash     Pallas' splash attention, on TPUs

The fused kernels take no part where they would do anything else than the other
two: theirs are calls in which every query sees its own key, so that no query
sees nothing and no key goes unused. They have no second derivatives.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import masks
from mha_jax.attention.notation import Array

Reach = tuple[int | None, int | None]


def cudnn(
  q_BHTK: Array, k_BNSK: Array, v_BNSV: Array, scale: float, reach: Reach
) -> Array:
  """cuDNN's attention."""
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


KERNELS = {'cudnn': cudnn, 'splash': splash}

NAMES = ('auto', 'exact', 'blockwise', *KERNELS)

# Measured on two CPU cores, see docs/decisions.md, "Blocks and thresholds".
LONG_KEYS = 1024
MANY_SCORES = 1024 * 1024
"""Keys, or scores of a head, from which on blocks are faster."""

LANES = 128
"""What splash attention's sizes are multiples of."""


@dataclasses.dataclass(frozen=True)
class Call:
  """What a choice depends on.

  Args:
    t: queries, a number or a symbolic dimension of `jax.export`.
    s: keys, likewise.
    widths: features of each part of a key, and of a value.
    dtype: the dtype computed in.
    mask: the mask, or None.
    given: names of the other arguments that are in use, such as 'bias'.
    asked: 'return_weights' and 'return_residual', where they are asked for.
  """

  t: Any
  s: Any
  widths: tuple[tuple[int, ...], int]
  dtype: Any
  mask: masks.Mask | None = None
  given: tuple[str, ...] = ()
  asked: tuple[str, ...] = ()


def choose(implementation: str, call: Call) -> str:
  """The implementation that computes a call.

  Args:
    implementation: a choice, or 'auto': a fused kernel where the device has one
      that serves the call, else blocks for long calls, else exact.
    call: the call.

  Raises:
    ValueError: the choice is unknown, or cannot serve the call.
  """
  check_name(implementation)
  known = isinstance(call.t, int) and isinstance(call.s, int)
  if known and 0 in (call.t, call.s):
    return 'exact'  # there is nothing to compute
  if implementation != 'auto':
    reason = reason_against(implementation, call)
    if reason is not None:
      raise ValueError(
        f'implementation={implementation!r} cannot serve this call: {reason}; '
        "use 'auto'"
      )
    return implementation
  if not known:
    return 'exact'  # serves any length
  many = call.t * call.s >= MANY_SCORES
  # A loop over the keys of one query pays where a copy of the keys would not.
  long = call.s >= LONG_KEYS and (call.t > 1 or _device().platform == 'cpu')
  if not (many or long):
    return 'exact'
  for name in (*KERNELS, 'blockwise'):
    if reason_against(name, call) is None:
      return name
  return 'exact'


def check_name(implementation: str) -> None:
  """Raises a ValueError unless there is such an implementation."""
  if implementation not in NAMES:
    raise ValueError(
      f'implementation={implementation!r} is unknown; use one of {list(NAMES)}'
    )


def reason_against(implementation: str, call: Call) -> str | None:
  """Why an implementation does not serve a call; None: it does."""
  if implementation == 'exact':
    return None
  if not (isinstance(call.t, int) and isinstance(call.s, int)):
    return f'it wants lengths that are known, not t={call.t} and s={call.s}'
  if 'return_weights' in call.asked:
    return 'it never has the weights as a whole, and return_weights is True'
  if implementation == 'blockwise':
    return None
  if others := (*call.given, *call.asked):
    return f'it takes no {others[0]}'
  if call.t != call.s:
    return f'it takes as many queries as keys, not {call.t} and {call.s}'
  if len(call.widths[0]) > 1:
    return 'it takes no keys in parts'
  if masks.reach(call.mask) is None:
    return 'it takes no mask but causal and window'
  return (
    _against_cudnn(call) if implementation == 'cudnn' else _against_splash(call)
  )


def _against_cudnn(call: Call) -> str | None:
  (k,), v = call.widths
  device = _device()
  capability = str(getattr(device, 'compute_capability', ''))
  nvidia = device.platform == 'gpu' and capability[:1].isdigit()
  if not nvidia or float(capability) < 8:
    return f'it wants an NVIDIA GPU of capability 8 or more, not {device}'
  if jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float16):
    return f'it computes in bfloat16 or float16, not in {call.dtype}'
  if k != v or k % 8 or k > 128:
    return f'it takes heads of 8 to 128 features by eights, not {k} and {v}'
  left, right = masks.reach(call.mask) or (None, None)
  if right not in (None, 0) or (left is not None and right is None):
    return 'it takes windows that end at the query alone'
  return None


def _against_splash(call: Call) -> str | None:
  (k,), v = call.widths
  if _device().platform != 'tpu' or jax.device_count() > 1:
    return f'it wants a TPU, one alone, not {jax.device_count()} of {_device()}'
  if jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float32):
    return f'it computes in bfloat16 or float32, not in {call.dtype}'
  if any(size % LANES for size in (call.t, k, v)):
    return (
      f'it takes lengths and features by {LANES}, not t={call.t}, k={k}, v={v}'
    )
  return None


def _device() -> Any:
  """A device that a call runs on, unless its arrays say otherwise."""
  default = jax.config.jax_default_device  # type: ignore
  if default is None or isinstance(default, str):
    return jax.devices(default)[0]
  return default

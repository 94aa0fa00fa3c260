"""An identity that can be differentiated forward, and not in reverse.

The gradient of blockwise attention passes through it on its way out, so that a
gradient of a gradient says what to do instead of failing inside of a loop.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mha_jax.attention.notation import Array

_once = Primitive('once')


def once(x: Array) -> Array:
  """x; a ValueError where it is differentiated in reverse."""
  return _once.bind(x)


def _refuse(cotangent: Any, x: Any) -> None:
  del cotangent, x
  raise ValueError(
    'a gradient of the gradient of blockwise attention is asked for in reverse '
    "mode; use implementation='exact', or forward over reverse: "
    'jax.jvp(jax.grad(f), ...)'
  )


_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
mlir.register_lowering(_once, lambda _, x: [x])
batching.defvectorized(_once)
ad.deflinear2(_once, _refuse)

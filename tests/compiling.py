"""How tests compile: quickly, or as users do.

XLA's emitters of fused loops are two thirds of the time that tests take to
compile. jaxlib 0.10 can do without them; later versions do not know the flag.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

_CAN_DO_WITHOUT = importlib.metadata.version('jaxlib').startswith('0.10.')

QUICK = '--xla_cpu_use_fusion_emitters=false' if _CAN_DO_WITHOUT else ''
"""For the environment's XLA_FLAGS, which are read when JAX first compiles."""
AS_USERS = {'xla_cpu_use_fusion_emitters': True} if _CAN_DO_WITHOUT else {}
"""Compiler options of a `jax.jit` whose result should have users' last bits."""


@contextlib.contextmanager
def patched(target: Any, **replacements: Any) -> Iterator[None]:
  """Replaces attributes of a module, in programs that are compiled anew.

  The library's own jitted functions would otherwise run what they compiled
  before.
  """
  with mock.patch.multiple(target, **replacements):
    jax.clear_caches()
    yield
  jax.clear_caches()


@contextlib.contextmanager
def count_compilations() -> Iterator[Callable[[], int]]:
  """Gives a function that tells how many programs were compiled within."""
  seen = []

  def listen(event: str, *_: Any, **__: Any) -> None:
    if event.endswith('backend_compile_duration'):
      seen.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield lambda: len(seen)
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)

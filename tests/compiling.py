"""How tests compile: quickly, or as users do.

XLA's emitters of fused loops are two thirds of the time that tests take to
compile. jaxlib 0.10 can do without them; later versions do not know the flag.
"""

import importlib.metadata

_CAN_DO_WITHOUT = importlib.metadata.version('jaxlib').startswith('0.10.')

QUICK = '--xla_cpu_use_fusion_emitters=false' if _CAN_DO_WITHOUT else ''
"""For the environment's XLA_FLAGS, which are read when JAX first compiles."""
AS_USERS = {'xla_cpu_use_fusion_emitters': True} if _CAN_DO_WITHOUT else {}
"""Compiler options of a `jax.jit` whose result should have users' last bits."""

"""An example of every variant of attention, and the loop that it is held to.

A new variant needs a row in EXAMPLES and one in LOOPS; tests/test_variants.py
then asks of it what it owes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from flax import nnx

from mha_jax.attention import Rope
from mha_jax.attention.variants import VARIANTS, build

D = 5
KINDS = tuple(VARIANTS)
EXAMPLES: dict[str, dict[str, Any]] = {
  'mha': {'num_heads': 3, 'head_dim': 2, 'rope': Rope()},
  'gqa': {
    'num_heads': 6,
    'num_kv_heads': 3,
    'head_dim': 4,
    'v_head_dim': 7,
    'rope': Rope(),
    'normalize_qk': 'rms',
  },
  'mqa': {
    'num_heads': 3,
    'head_dim': 2,
    'rope': Rope(layout='interleaved'),
    'logit_softcap': 2.0,
  },
  'mla': {
    'num_heads': 3,
    'kv_lora_rank': 13,
    'q_lora_rank': 11,
    'qk_nope_head_dim': 7,
    'qk_rope_head_dim': 2,
    'v_head_dim': 5,
    'use_bias': True,
  },
  'gta': {'num_heads': 6, 'num_kv_heads': 3, 'head_dim': 4, 'rope': Rope()},
}


def grouped_loop(config, params, *inputs, **options):
  rope = config.rope
  return oracles.layer(
    params,
    *inputs,
    kind=config.normalize_qk or None,
    rope=None if rope is None else (rope.theta, rope.layout),
    softcap=config.logit_softcap,
    **options,
  )


def latent_loop(config, params, *inputs, **options):
  rope = config.rotary
  return oracles.latent(
    params, *inputs, theta=rope.theta, layout=rope.layout, **options
  )


def tied_loop(config, params, *inputs, **options):
  rope = config.rope
  rope = None if rope is None else (rope.theta, rope.layout)
  return oracles.tied(params, *inputs, rope=rope, **options)


LOOPS = {
  'mha': grouped_loop,
  'gqa': grouped_loop,
  'mqa': grouped_loop,
  'mla': latent_loop,
  'gta': tied_loop,
}
"""`loop(config, params, x, y, positions=, gates=, allowed=)`: output, weights.

In float64 NumPy.
"""


def kinds_of(base: type) -> set[str]:
  """The names of the library's classes of a kind, as of masks and of caches."""
  found = {
    cls.__name__
    for cls in base.__subclasses__()
    if cls.__module__.startswith('mha_jax') and cls.__name__[0] != '_'
  }
  return found.union(*map(kinds_of, base.__subclasses__()))


def config_of(kind: str, **more: Any) -> Any:
  """The example of a variant, with changes."""
  return build(kind, d_model=D, **EXAMPLES[kind] | more)


def params_of(config: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
  """Random parameters, biases and scales too, as JAX arrays."""
  return jax.tree.map(
    jnp.asarray, oracles.random_params(config, seed, np.dtype(dtype))
  )


def nnx_module(module: nnx.Module, params: Any) -> Any:
  """An NNX module that holds these parameters."""
  graph, state = nnx.split(module)
  nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
  return nnx.merge(graph, state)

"""From a module's arguments to a config: what Linen and NNX shells share."""

from typing import Any

import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.grouped import GroupedConfig


def kv_heads_of(kind: str, num_heads: int, given: int | None) -> int:
  """The key/value heads of an attention of a kind, 'mha', 'gqa' or 'mqa'.

  Args:
    kind: which of the three.
    num_heads: query heads h.
    given: the number asked for; None: what the kind implies.

  Raises:
    ValueError: the kind implies another number, or (gqa) none is given.
  """
  implied = {'mha': num_heads, 'gqa': given, 'mqa': 1}[kind]
  if implied is None:
    raise ValueError(
      f"num_kv_heads=None: grouped-query attention ('gqa') needs a divisor of "
      f"num_heads={num_heads}; MultiHeadAttention ('mha') has num_heads of them"
    )
  if given not in (None, implied):
    raise ValueError(
      f'num_kv_heads={given} must be {implied} or None in {kind!r}; use '
      "GroupedQueryAttention ('gqa')"
    )
  return implied


def config_for(
  kind: str,
  inputs_q: Any,
  inputs_k: Any = None,
  inputs_v: Any = None,
  *,
  num_heads: int,
  num_kv_heads: int | None = None,
  qkv_features: int | None = None,
  head_dim: int | None = None,
  **options: Any,
) -> GroupedConfig:
  """The config of a module, with widths read from its first inputs.

  Args:
    kind: 'mha', 'gqa' or 'mqa'.
    inputs_q: (..., t, d).
    inputs_k: (..., s, d'); None: inputs_q.
    inputs_v: (..., s, d''); None: inputs_k.
    num_heads: query heads h.
    num_kv_heads: key/value heads n; None: what the kind implies.
    qkv_features: h k in all; None: d, or h head_dim.
    head_dim: k; None: qkv_features / h.
    **options: further fields of `GroupedConfig`.

  Raises:
    ValueError: sizes contradict each other or do not divide.
  """
  inputs_k = inputs_q if inputs_k is None else inputs_k
  inputs_v = inputs_k if inputs_v is None else inputs_v
  widths = {}
  for name, x in (('q', inputs_q), ('k', inputs_k), ('v', inputs_v)):
    shape = np.shape(x)
    if len(shape) < 2:
      raise ValueError(
        f'inputs_{name} of shape {shape} must be (..., length, features)'
      )
    widths[name] = shape[-1]
  checks.positive('num_heads', num_heads)
  if qkv_features is not None and head_dim is None:
    checks.divides('num_heads', num_heads, 'qkv_features', qkv_features)
    head_dim = qkv_features // num_heads
  elif qkv_features not in (None, (head_dim or 0) * num_heads):
    raise ValueError(
      f'qkv_features={qkv_features} contradicts head_dim={head_dim} with '
      f'num_heads={num_heads}; give one of the two'
    )
  return GroupedConfig(
    d_model=widths['q'],
    num_heads=num_heads,
    num_kv_heads=kv_heads_of(kind, num_heads, num_kv_heads),
    head_dim=head_dim,
    key_features=widths['k'],
    value_features=widths['v'],
    **options,
  )

"""The variants by name: a row each; shells and decoders are built from it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mha_jax.attention import checks
from mha_jax.attention.config import AttentionConfig
from mha_jax.attention.grouped import GroupedConfig
from mha_jax.attention.latent import LatentConfig
from mha_jax.attention.tied import TiedConfig


@dataclasses.dataclass(frozen=True)
class Variant:
  """A kind of attention.

  Args:
    config: its class of configs.
    fixed: fields that the name settles, such as one key/value head for 'mqa'.
    equal: fields that the name makes equal to another, where they are given.
    required: fields that must be given, and what they should be.
  """

  config: type[AttentionConfig]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
  required: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def options(self) -> tuple[str, ...]:
    """The names of the config's fields."""
    return tuple(x.name for x in dataclasses.fields(self.config))  # type: ignore[arg-type]


DIVISOR = 'a divisor of num_heads'
RANK = 'the features of the latent'
WIDTH = 'an even number of features'

VARIANTS: dict[str, Variant] = {
  'mha': Variant(GroupedConfig, equal={'num_kv_heads': 'num_heads'}),
  'gqa': Variant(GroupedConfig, required={'num_kv_heads': DIVISOR}),
  'mqa': Variant(GroupedConfig, fixed={'num_kv_heads': 1}),
  'mla': Variant(LatentConfig, required={'kv_lora_rank': RANK}),
  'gta': Variant(
    TiedConfig, required={'num_kv_heads': DIVISOR, 'head_dim': WIDTH}
  ),
}


def build(kind: str, **options: Any) -> AttentionConfig:
  """The config of a variant.

  Args:
    kind: a name in `VARIANTS`.
    **options: fields of its config; None: the field's default.

  Raises:
    ValueError: the kind or an option is unknown, contradicts the kind, or is
      missing.
  """
  if kind not in VARIANTS:
    raise ValueError(f'attention={kind!r} must be in {tuple(VARIANTS)}')
  variant = VARIANTS[kind]
  given = {name: x for name, x in options.items() if x is not None}
  if unknown := sorted(set(given) - set(variant.options)):
    raise ValueError(
      f'{unknown[0]}={given[unknown[0]]!r} is no option of {kind!r}; its '
      f'options are {", ".join(x for x in variant.options if x in options)}'
    )
  settled = {name: given.get(x) for name, x in variant.equal.items()}
  for name, value in {**settled, **variant.fixed}.items():
    if given.get(name, value) != value:
      raise ValueError(
        f'{name}={given[name]!r} must be {value} or None in {kind!r}; use '
        "'gqa', GroupedQueryAttention"
      )
  for name, what in variant.required.items():
    if name not in given:
      raise ValueError(f'{name}=None: {kind!r} needs it: {what}')
  return variant.config(**{**given, **variant.fixed})


def kind_of(kind: str, num_heads: int, num_kv_heads: int | None) -> str:
  """The variant that a module of the grouped family is.

  `MultiHeadAttention` takes num_kv_heads as `flax.nnx.MultiHeadAttention` does,
  and is then grouped.
  """
  own = num_kv_heads in (None, num_heads)
  return 'gqa' if kind == 'mha' and not own else kind


def widths(inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[int, int, int]:
  """The features of a module's inputs, where None stands for the one before.

  Raises:
    ValueError: an input has fewer than two dimensions.
  """
  inputs_k = inputs_q if inputs_k is None else inputs_k
  inputs_v = inputs_k if inputs_v is None else inputs_v
  found = []
  for name, x in (('q', inputs_q), ('k', inputs_k), ('v', inputs_v)):
    shape = np.shape(x)
    if len(shape) < 2:
      raise ValueError(
        f'inputs_{name} of shape {shape} must be (..., length, features)'
      )
    found.append(shape[-1])
  return found[0], found[1], found[2]


def head_dim_of(
  num_heads: int, qkv_features: int | None, head_dim: int | None
) -> int | None:
  """head_dim from Flax's qkv_features = h k; None where both are None.

  Raises:
    ValueError: they contradict each other or do not divide.
  """
  checks.positive('num_heads', num_heads)
  if qkv_features is None:
    return head_dim
  if head_dim is None:
    checks.positive('qkv_features', qkv_features)
    checks.divides('num_heads', num_heads, 'qkv_features', qkv_features)
    return qkv_features // num_heads
  if qkv_features != head_dim * num_heads:
    raise ValueError(
      f'qkv_features={qkv_features} contradicts head_dim={head_dim} with '
      f'num_heads={num_heads}; give one of the two'
    )
  return head_dim

"""The variants by name: a row each; shells and decoders are built from it."""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from mha_jax.attention import checks
from mha_jax.attention.variants.config import AttentionConfig
from mha_jax.attention.variants.grouped import GroupedConfig
from mha_jax.attention.variants.latent import LatentConfig
from mha_jax.attention.variants.tied import TiedConfig


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


def option_types() -> dict[str, Any]:
  """Collects the options of all variants, by name, with their types."""
  types: dict[str, Any] = {}
  for variant in VARIANTS.values():
    hints = typing.get_type_hints(variant.config)
    types |= {name: hints[name] for name in variant.options}
  return types


def name_of(config: AttentionConfig) -> str:
  """Names the variant that a config is, the most special one that fits.

  A class that has no row is named module:Class.
  """
  fitting = [
    name
    for name, variant in VARIANTS.items()
    if variant.config is type(config) and _settles(variant, config)
  ]
  if not fitting:
    return f'{type(config).__module__}:{type(config).__qualname__}'
  rows = [(name, VARIANTS[name]) for name in fitting]
  return max(rows, key=lambda x: len(x[1].fixed) + len(x[1].equal))[0]


def _settles(variant: Variant, config: AttentionConfig) -> bool:
  """Tells whether a config has what the variant's name settles."""
  wanted = {name: getattr(config, x) for name, x in variant.equal.items()}
  none_or_same = all(
    getattr(config, name) in (None, value) for name, value in wanted.items()
  )
  return none_or_same and all(
    getattr(config, name) == value for name, value in variant.fixed.items()
  )


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
  given = {
    name: checks.plain(x) for name, x in options.items() if x is not None
  }
  if unknown := sorted(set(given) - set(variant.options)):
    raise ValueError(
      f'{unknown[0]}={given[unknown[0]]!r} is no option of {kind!r}; its '
      f'options are {", ".join(variant.options)}'
    )
  settled = {
    name: (given.get(x), given.get(x, x)) for name, x in variant.equal.items()
  }
  settled |= {name: (value, value) for name, value in variant.fixed.items()}
  for name, (value, shown) in settled.items():
    if given.get(name, value) != value:
      raise ValueError(
        f'{name}={given[name]!r} must be {shown} or None in {kind!r}'
        f'{_others_with(name, variant)}'
      )
  for name, what in variant.required.items():
    if name not in given:
      raise ValueError(f'{name}=None: {kind!r} needs it: {what}')
  made: dict[str, Any] = {**given, **variant.fixed}
  try:
    return _config(variant.config, **made)  # type: ignore[arg-type]
  except TypeError:  # something that cannot be hashed: refused by its name
    return variant.config(**made)


def _others_with(name: str, variant: Variant) -> str:
  """Names the variants of the same class that leave an option free."""
  names = [
    f'{other!r} ({x.config.__name__})'
    for other, x in VARIANTS.items()
    if x.config is variant.config and name not in {**x.fixed, **x.equal}
  ]
  return f'; use {" or ".join(names)}' if names else ''


@functools.lru_cache(maxsize=4096, typed=True)
def _config(kind: type[AttentionConfig], **options: Any) -> AttentionConfig:
  """Makes a config once, so that its table is made once too."""
  return kind(**options)

"""The variants of attention: a config each, and the registry by name."""

from mha_jax.attention.variants.registry import (
  VARIANTS,
  Variant,
  build,
  name_of,
  option_types,
)

__all__ = ['VARIANTS', 'Variant', 'build', 'name_of', 'option_types']

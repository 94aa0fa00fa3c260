"""Masks: which query may attend to which key.

Each kind is made by its function and composed with `&` and `|`:

  >>> print(masks.causal().draw(3, 4))
  ■ · · ·
  ■ ■ · ·
  ■ ■ ■ ·

`causal` and `window` compare positions, where a token stands in its sequence;
`dense`, `lengths` and `segments` go by the row and column of the call. Without
`input_positions` the two are the same. Where the inputs have several batch
dimensions, b counts the rows of all of them. `jax.vmap` over the batch rows
maps a mask that was made for all of them with in_axes=0, and over its heads
with 0 again.
"""

from mha_jax.attention.masks.algebra import (
  Mask,
  all_of,
  as_mask,
  dense,
  from_numbers,
)
from mha_jax.attention.masks.kinds import (
  causal,
  lengths,
  reach,
  segments,
  window,
)

__all__ = [
  'Mask',
  'all_of',
  'as_mask',
  'causal',
  'dense',
  'from_numbers',
  'lengths',
  'reach',
  'segments',
  'window',
]

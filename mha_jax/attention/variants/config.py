"""A variant of attention: its sizes, its table of projections, its heads.

  q = queries(x), entries = entries(y, z)      the variant's projections
  o_i = attend(q, entries)_i                   its heads

Entries are what decoding keeps of a token: for MHA its keys and values, for MLA
its latent. `layer.apply` does the rest.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import Params, Table

Heads = tuple[Array, Array | None]
"""The heads' outputs (b, h, t, v) and weights (b, h, t, s), None: not asked."""

Positions = Array | None
"""(b, length) or (1, length) integers; None: 0, 1, 2, ..."""

Core = Callable[..., Heads]
"""`core(q_BHTK, k_BNSK, v_BNSV, scale=, logit_softcap=)`: `multihead_attention`
with mask, bias, positions and dropout filled in. Two calls drop the same
weights."""


@dataclasses.dataclass(frozen=True)
class Rows:
  """The rows of a table with their parameters: `rows(name, x)` applies one."""

  table: Table
  params: Mapping[str, Params]
  dtype: Any

  def __call__(self, name: str, x: Array) -> Array:
    return self.table[name].apply(self.params[name], x, self.dtype)

  def kernel(self, name: str) -> Array:
    """A projection's kernel, in the dtype to compute in."""
    return jnp.asarray(self.params[name]['kernel']).astype(self.dtype)


class AttentionConfig:
  """The shape of an attention: a frozen dataclass, a subclass a variant."""

  d_model: int
  num_heads: int
  rope: Rope | None = None
  values_from_keys = False  # True: inputs_v has no place
  keeps_latent = False  # True: entries are a latent and a rotary key

  @property
  def table(self) -> Table:
    """The variant: its rows by name; 'out' takes the heads."""
    raise NotImplementedError

  @property
  def qk_head_dim(self) -> int:
    """The features that a score is a sum over."""
    raise NotImplementedError

  @property
  def entry_shapes(self) -> tuple[tuple[int, int], ...]:
    """(heads, features) of each array of `entries`."""
    raise NotImplementedError

  @property
  def cache_elements(self) -> int:
    """What decoding keeps of a token, in elements a layer."""
    return sum(math.prod(shape) for shape in self.entry_shapes)

  @property
  def input_widths(self) -> tuple[int, int, int]:
    """The features of inputs_q, inputs_k and inputs_v."""
    return (self.d_model,) * 3

  @property
  def rotary(self) -> Rope | None:
    """The RoPE that is in use."""
    return self.rope

  def queries(self, rows: Rows, x: Array, at: Positions) -> Parts:
    """The parts of the queries (b, h, t, ...) from x (b, t, d)."""
    raise NotImplementedError

  def entries(self, rows: Rows, y: Array, z: Array, at: Positions) -> Parts:
    """What decoding keeps (b, heads, s, ...) of y (b, s, d'), z (b, s, d'')."""
    raise NotImplementedError

  def attend(self, rows: Rows, q: Parts, entries: Parts, core: Core) -> Heads:
    """The outputs of the heads: makes keys and values, calls `core`."""
    raise NotImplementedError

  def expands(self, t: int, s: int) -> bool:
    """Whether `attend` multiplies the entries of s tokens for t queries."""
    del t, s
    return False

  def rotate(self, x_BHTK: Array, at: Positions) -> Array:
    """Turns x by the RoPE in use, where there is one."""
    rope = self.rotary
    return x_BHTK if rope is None else rope.rotate_heads(x_BHTK, at)

  def check_sizes(self, *may_be_zero: str) -> None:
    """Makes numbers plain ones; a ValueError unless sizes are positive."""
    checks.plain_fields(self)
    for name, kind in typing.get_type_hints(type(self)).items():
      value = getattr(self, name)
      optional = kind == int | None and value is None
      if kind not in (int, int | None) or optional:
        continue
      if not (name in may_be_zero and value == 0):
        checks.positive(name, value)
        object.__setattr__(self, name, int(value))  # a narrow one would wrap

  def check_rope(self, name: str, size: int) -> None:
    """Raises a ValueError unless `rope` is a Rope that can turn `size`."""
    if self.rope is None:
      return
    if not isinstance(self.rope, Rope):
      raise ValueError(f'rope={self.rope!r} must be a Rope, as Rope(), or None')
    checks.even(name, size)

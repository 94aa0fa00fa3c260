"""A variant of attention: its sizes, its table of projections, its heads.

  q = queries(x), entries = entries(y, z)      the variant's projections
  o_i = attend(q, entries)_i                   its heads

Entries are what decoding keeps of a token: for MHA its keys and values, for MLA
its latent. `layer.apply` does the rest.
"""

import dataclasses
import math
import typing
from typing import Any, Protocol

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import ParamsByRow, Table

Heads = tuple[Array, Array | None]
"""The heads' outputs (b, h, t, v) and weights (b, h, t, s), None: not asked."""

Positions = Array | None
"""(b, length) or (1, length) integers; None: 0, 1, 2, ..."""


class HeadsAttention(Protocol):
  """`multihead_attention` with mask, bias, positions and dropout filled in.

  Two calls drop the same weights.
  """

  def __call__(
    self,
    q: Array | Parts,
    k: Array | Parts,
    v: Array,
    *,
    scale: float | Array | None = None,
    logit_softcap: float | None = None,
  ) -> Heads: ...


@dataclasses.dataclass(frozen=True)
class Project:
  """Applies the rows of a table by name: `project('query', x)`."""

  table: Table
  params: ParamsByRow
  dtype: Any

  def __call__(self, name: str, x: Array) -> Array:
    return self.table[name].compute(self.params[name], x, self.dtype)

  def kernel(self, name: str) -> Array:
    """Returns a projection's kernel, in the dtype to compute in."""
    return self.params[name]['kernel'].astype(self.dtype)


class AttentionConfig:
  """The base of all configs: each variant is a frozen dataclass of its own."""

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
    """The elements that decoding keeps of a token, in one layer."""
    return sum(math.prod(shape) for shape in self.entry_shapes)

  @property
  def input_widths(self) -> tuple[int, int, int]:
    """The features of inputs_q, inputs_k and inputs_v."""
    return (self.d_model,) * 3

  @property
  def rotary(self) -> Rope | None:
    """The RoPE that is in use."""
    return self.rope

  def queries(self, project: Project, x: Array, positions: Positions) -> Parts:
    """Makes the parts of the queries (b, h, t, ...) from x (b, t, d)."""
    raise NotImplementedError

  def entries(
    self, project: Project, y: Array, z: Array, positions: Positions
  ) -> Parts:
    """Makes the arrays (b, heads, s, ...) that decoding keeps of each token.

    Args:
      project: applies the rows of the table.
      y: the keys' input (b, s, d').
      z: the values' input (b, s, d'').
      positions: of the tokens.
    """
    raise NotImplementedError

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    """Makes keys and values of the entries, and calls `attention`."""
    raise NotImplementedError

  def expands(self, t: int, s: int) -> bool:
    """Tells whether `attend` projects the entries before it attends.

    Args:
      t: queries.
      s: tokens kept.

    Returns:
      True: NaN in the entry of an empty slot would spread, so that slots which
      hold no token are set to zero.
    """
    del t, s
    return False

  def rotate(self, x_BHTK: Array, positions: Positions) -> Array:
    """Turns x by the RoPE in use, where there is one."""
    rope = self.rotary
    return x_BHTK if rope is None else rope.rotate_heads(x_BHTK, positions)

  def check_sizes(self, *may_be_zero: str) -> None:
    """Makes numbers plain ones; a ValueError unless sizes are positive."""
    checks.plain_fields(self)
    for name, kind in typing.get_type_hints(type(self)).items():
      value = getattr(self, name)
      checks.hashable(name, value)
      if kind is bool:
        checks.yes_or_no(name, value)
        object.__setattr__(self, name, bool(value))
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


def check_config(config: Any) -> None:
  """Raises a ValueError unless it is an `AttentionConfig`."""
  if not isinstance(config, AttentionConfig):
    raise ValueError(
      f'config={config!r} must be an AttentionConfig, as GroupedConfig(...)'
    )

"""The rows of a table: projections told by einsum strings.

An einsum string says all there is to say of a projection:
`'btd,dhk->bhtk'` has a kernel (d, h, k), contracts d (so the fan-in is d),
adds a bias (h, k), and splits into heads on the way out. A `Norm` is the
other kind of row. Rows own nothing: they describe parameters and apply them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention.dtypes import compute_dtype
from mha_jax.attention.notation import (
  LETTERS,
  LOGICAL_AXES,
  Array,
  ArrayLike,
  DTypeLike,
)

Params = Mapping[str, Any]
Initializer = jax.nn.initializers.Initializer
Sizes = Mapping[str, int] | tuple[tuple[str, int], ...]

INITIALIZERS: Mapping[str, Initializer] = {
  'kernel': jax.nn.initializers.lecun_normal(),  # std = 1 / sqrt(fan-in)
  'bias': jax.nn.initializers.zeros,
  'scale': jax.nn.initializers.ones,
}
"""The default initialiser of a parameter, by its name."""


class Row:
  """A row of a table: named parameters with known shapes, and what they do."""

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, by name."""
    raise NotImplementedError

  @property
  def init_shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape that the initialiser of each parameter sees."""
    return self.shapes

  @property
  def initializers(self) -> Mapping[str, Initializer]:
    """The default initialiser of each parameter, by name."""
    return INITIALIZERS

  @property
  def logical_axes(self) -> dict[str, tuple[str, ...]]:
    """The logical axis name of every dimension of every parameter."""
    raise NotImplementedError

  def compute(self, params: Params, x: Array, dtype: Any) -> Array:
    """Applies parameters that fit to x, in a floating dtype."""
    raise NotImplementedError

  def apply(
    self, params: Params, x: ArrayLike, dtype: DTypeLike | None = None
  ) -> Array:
    """Applies parameters to x, once all have been checked.

    Args:
      params: `{name: array}`, of the row's `shapes`.
      x: what the row takes.
      dtype: the dtype to compute in; None: the common dtype of all.

    Raises:
      ValueError: the parameters, or x, do not fit.
    """
    self.check(str(self), params)
    x = jnp.asarray(x)
    params = {name: jnp.asarray(a) for name, a in params.items()}
    return self.compute(params, x, compute_dtype(dtype, x, *params.values()))

  @property
  def num_params(self) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in self.shapes.values())

  def check(self, name: str, params: Any) -> None:
    """Raises a ValueError unless the parameters are those of this row."""
    got = {key: np.shape(value) for key, value in (params or {}).items()}
    if got != self.shapes:
      raise ValueError(
        f'params[{name!r}] has shapes {got}, but the config asks for '
        f'{self.shapes}; were they made for another config?'
      )

  def init(
    self,
    key: Array,
    initializers: Mapping[str, Initializer] = MappingProxyType({}),
    dtype: DTypeLike = jnp.float32,
  ) -> dict[str, Array]:
    """Draws the parameters.

    Args:
      key: a random key.
      initializers: by parameter name, in place of the row's own.
      dtype: of the parameters.
    """
    keys = jax.random.split(key, len(self.shapes))
    initializers = {**self.initializers, **initializers}
    return {
      name: jnp.reshape(
        initializers[name](key, self.init_shapes[name], dtype), shape
      )
      for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
    }


@dataclasses.dataclass(frozen=True)
class Projection(Row):
  """A linear map with a kernel and an optional bias, told by an einsum string.

    y = einsum(spec, x, kernel) + bias

  >>> query = Projection('btd,dhk->bhtk', {'d': 64, 'h': 8, 'k': 8})
  >>> query.kernel_shape, query.bias_shape, query.num_params
  ((64, 8, 8), (8, 8), 4160)

  Args:
    spec: `input,kernel->output` in the letters of `notation`. The kernel's
      contracted letters come first.
    sizes: the size of every letter of the kernel; more letters may be given.
    use_bias: whether a bias over the kernel's output letters is added.

  Raises:
    ValueError: the string or the sizes do not describe a projection.
  """

  spec: str
  sizes: Sizes
  use_bias: bool = True

  def __post_init__(self) -> None:
    sizes = dict(self.sizes)
    letters = set(self.spec) - set(',->')
    if unknown := sorted(letters - set(LETTERS)):
      raise ValueError(
        f'spec={self.spec!r} uses {unknown}; the letters are {"".join(LETTERS)}'
      )
    if self.spec.count(',') != 1 or self.spec.count('->') != 1:
      raise ValueError(
        f'spec={self.spec!r} must read input,kernel->output, '
        "for instance 'btd,dhk->bhtk'"
      )
    kernel = self.kernel_letters
    if missing := [letter for letter in kernel if letter not in sizes]:
      raise ValueError(f'sizes={sizes} lacks {missing} of spec={self.spec!r}')
    if bad := {x: sizes[x] for x in kernel if sizes[x] < 1}:
      raise ValueError(f'sizes={bad} must be at least 1 (spec={self.spec!r})')
    if not self.contracted or not kernel.startswith(self.contracted):
      raise ValueError(
        f'spec={self.spec!r}: the letters that the kernel shares with the '
        f'input alone must lead the kernel; write it {self.contracted!r} first'
      )
    x, kernel, output = self.letters
    kept_in = set(x) - set(self.contracted)
    if any(len(set(a)) != len(a) for a in self.letters) or set(
      output
    ) != kept_in | set(self.bias_letters):
      raise ValueError(
        f'spec={self.spec!r}: the output must have the letters that input and '
        'kernel do not sum over, each once'
      )
    # Only the kernel's sizes are kept, as a tuple, so that equal projections
    # are equal and hashable.
    kept = tuple((letter, int(sizes[letter])) for letter in kernel)
    object.__setattr__(self, 'sizes', kept)

  @functools.cached_property
  def letters(self) -> tuple[str, str, str]:
    """The letters of input, kernel and output."""
    inputs, output = self.spec.split('->')
    x, kernel = inputs.split(',')
    return x, kernel, output

  @functools.cached_property
  def kernel_letters(self) -> str:
    return self.letters[1]

  @functools.cached_property
  def contracted(self) -> str:
    """The letters that are summed over, in the kernel's order."""
    x, kernel, output = self.letters
    return ''.join(c for c in kernel if c in x and c not in output)

  @functools.cached_property
  def bias_letters(self) -> str:
    return self.kernel_letters[len(self.contracted) :]

  def _shape(self, letters: str) -> tuple[int, ...]:
    sizes = dict(self.sizes)
    return tuple(sizes[letter] for letter in letters)

  @functools.cached_property
  def kernel_shape(self) -> tuple[int, ...]:
    return self._shape(self.kernel_letters)

  @functools.cached_property
  def bias_shape(self) -> tuple[int, ...]:
    return self._shape(self.bias_letters)

  @functools.cached_property
  def fan_in(self) -> int:
    return math.prod(self._shape(self.contracted))

  @functools.cached_property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    shapes = {'kernel': self.kernel_shape}
    return shapes | ({'bias': self.bias_shape} if self.use_bias else {})

  @functools.cached_property
  def init_shapes(self) -> dict[str, tuple[int, ...]]:
    """The shapes that initialisers see: (fan-in, fan-out), as in Flax.

    A 2-D initialiser then finds the fan-in where it expects it, also for a
    kernel of three dimensions.
    """
    fan_out = math.prod(self.bias_shape)
    shapes = {'kernel': (self.fan_in, fan_out), 'bias': (fan_out,)}
    return {name: shapes[name] for name in self.shapes}

  @property
  def logical_axes(self) -> dict[str, tuple[str, ...]]:
    letters = {'kernel': self.kernel_letters, 'bias': self.bias_letters}
    return {
      name: tuple(LOGICAL_AXES[letter] for letter in letters[name])
      for name in self.shapes
    }

  def __str__(self) -> str:
    return self.spec

  def apply(
    self, params: Params, x: ArrayLike, dtype: DTypeLike | None = None
  ) -> Array:
    """Projects x, once all have been checked.

    Args:
      params: `{'kernel': ..., 'bias': ...}`.
      x: an array of the input's letters.
      dtype: the dtype to compute in; None: the common dtype of all.

    Returns:
      An array of the output's letters.

    Raises:
      ValueError: the parameters, or the input's shape, do not fit the sizes.
    """
    sizes = dict(self.sizes)
    letters = self.letters[0]
    wanted = tuple(sizes.get(letter) for letter in letters)
    shape = np.shape(x)
    if len(wanted) != len(shape) or any(
      a not in (None, b) for a, b in zip(wanted, shape, strict=True)
    ):
      raise ValueError(
        f'input of shape {shape} does not fit {self.spec!r} with sizes '
        f'{sizes}; pass an array {tuple(letters)}'
      )
    return super().apply(params, x, dtype)

  @functools.cached_property
  def _product(self) -> str:
    """The output's letters in the order in which the product has them.

    In any other order the kernel would be transposed, at every call.
    """
    inputs = self.letters[0]
    kept = [c for c in inputs if c not in self.contracted]
    return ''.join((*kept, *(c for c in self.bias_letters if c not in inputs)))

  @functools.cached_property
  def _bias_in_product(self) -> tuple[str, tuple[int, ...]]:
    """The einsum that orders the bias, and its shape beside the product."""
    order = ''.join(c for c in self._product if c in self.bias_letters)
    sizes = dict(self.sizes)
    shape = tuple(sizes[c] if c in order else 1 for c in self._product)
    return f'{self.bias_letters}->{order}', shape

  def compute(self, params: Params, x: Array, dtype: Any) -> Array:
    inputs, kernel, output = self.letters
    product = self._product
    y = jnp.einsum(
      f'{inputs},{kernel}->{product}',
      x.astype(dtype),
      params['kernel'].astype(dtype),
    )
    if self.use_bias:
      order, shape = self._bias_in_product
      bias = jnp.einsum(order, params['bias'].astype(dtype))
      y = y + jnp.reshape(bias, shape)
    return jnp.einsum(f'{product}->{output}', y)

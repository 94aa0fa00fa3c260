"""Optimisers by name: any of optax that takes a learning rate, or one's own."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mha_jax.importing import imported

Pairs = tuple[tuple[str, Any], ...]
Function = Callable[..., optax.GradientTransformation]


def function_of(name: str | None) -> Function:
  """The function that makes an optimiser of a learning rate.

  Args:
    name: of a function of optax, such as 'sgd' or 'lion'; module:function for
      one of your own, which may return any chain; None: 'adamw'.

  Raises:
    ValueError: there is none, or it takes no `learning_rate`.
  """
  if name is None:
    return optax.adamw
  if ':' in name:
    function = imported('name', name)
  else:
    function = getattr(optax, name, None)
  if not callable(function) or 'learning_rate' not in _takes(function):
    known = [x for x in dir(optax) if 'learning_rate' in _takes_of_optax(x)]
    near = difflib.get_close_matches(name, known) or ['sgd', 'lion', 'lamb']
    raise ValueError(
      f'name={name!r} is no function that takes learning_rate; optax has '
      f"{', '.join(near)} and others, your own is written 'module:function'"
    )
  return function


def make(
  name: str | None,
  learning_rate: optax.ScalarOrSchedule,
  usual: Mapping[str, Any],
  options: Pairs | None,
) -> optax.GradientTransformation:
  """The optimiser of a name.

  Args:
    name: see `function_of`.
    learning_rate: a number, or a schedule of the step.
    usual: arguments for those that take them.
    options: more arguments, as names and values.
  """
  function = function_of(name)
  takes = _takes(function)
  arguments = {x: value for x, value in usual.items() if x in takes}
  return function(learning_rate, **arguments | dict(options or ()))


def check(
  name: str | None,
  usual: Mapping[str, Any],
  defaults: Mapping[str, Any],
  options: Pairs | None,
) -> None:
  """Raises a ValueError unless an optimiser can be made and take a step.

  Args:
    name: see `function_of`.
    usual: arguments for those that take them.
    defaults: what they are where nobody changed them.
    options: more arguments, as names and values.
  """
  if name is None and options is None:
    return
  takes = _takes(function_of(name))
  for argument, value in usual.items():
    if argument not in takes and value != defaults[argument]:
      raise ValueError(
        f'{argument}={value!r} has no effect on name={name!r}, which takes '
        f'none; leave it at {defaults[argument]!r}'
      )
  params = {'kernel': jax.ShapeDtypeStruct((2, 3), jnp.float32)}

  def step(params: Any) -> Any:
    optimizer = make(name, 1e-3, usual, options)
    return optimizer.update(params, optimizer.init(params), params)

  if name is not None and ':' in name:
    return  # it may know the parameters of a model by name
  try:
    jax.eval_shape(step, params)
  except Exception as error:  # of optax, which checks little itself
    raise ValueError(
      f'name={name!r} with options={dict(options or ())} takes no step from '
      f'gradients alone ({error})'
    ) from error


def as_pairs(options: Any) -> Pairs | None:
  """Options as a tuple, which can be hashed; none: None.

  Raises:
    ValueError: they are no dict of names and plain values.
  """
  pairs: Iterable[Any] = () if options is None else options
  try:
    named = dict(pairs)
    hash(tuple(named.values()))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'options={options!r} must be a dict of names and plain values, such as '
      "{'momentum': 0.9}"
    ) from error
  return tuple(sorted(named.items())) or None


def _takes(function: Any) -> frozenset[str]:
  """The names of a function's parameters."""
  try:
    return frozenset(inspect.signature(function).parameters)
  except (TypeError, ValueError):
    return frozenset()


def _takes_of_optax(name: str) -> frozenset[str]:
  function = inspect.getattr_static(optax, name, None)
  return _takes(function) if inspect.isfunction(function) else frozenset()

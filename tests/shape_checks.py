"""Which functions are checked at run time while testing: those with shapes."""

import re
from collections.abc import Callable
from typing import Any

import beartype

SHAPED = re.compile(r'\b(Bool|Float|Int|Key|Shaped)\[')


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
  """Checks the arguments and results of a function with shaped annotations.

  Public entries have none: they take anything, and raise a ValueError that says
  what is wrong.
  """
  hints = map(repr, getattr(function, '__annotations__', {}).values())
  shaped = any(map(SHAPED.search, hints))
  return beartype.beartype(function) if shaped else function

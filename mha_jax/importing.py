"""Imports a user's own code by its name, module:name, as configs write it."""

import importlib
from typing import Any


def imported(field: str, text: str) -> Any:
  """The object that module:name stands for.

  Args:
    field: the field of a config that holds it, for errors.
    text: such as 'configs.my_task:MyTask'; the module is imported as Python
      finds it, from the current folder first under `python -m`.

  Raises:
    ValueError: there is no such module, or nothing of that name in it.
  """
  module, _, name = text.partition(':')
  try:
    return getattr(importlib.import_module(module), name)
  except Exception as error:  # the module may hold any code
    raise ValueError(
      f'{field}={text!r} cannot be imported ({type(error).__name__}: {error}); '
      'name module:name'
    ) from error

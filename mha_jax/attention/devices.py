"""The device that a call runs on."""

from typing import Any

import jax


def default_device() -> Any:
  """Returns a device that a call runs on, unless its arrays say otherwise."""
  default = jax.config.jax_default_device  # type: ignore
  if default is None or isinstance(default, str):
    return jax.devices(default)[0]
  return default

"""Makes a device of each CPU core, for experiments that train many models."""

import os
from typing import Any

import jax


def use_all_cores() -> None:
  """Lets JAX see each CPU core that this process may use as a device.

  XLA computes small models on hardly more than one core; `train_grid` spreads
  its models over devices. Nothing changes where the user chose a number of
  devices, by JAX_NUM_CPU_DEVICES or XLA_FLAGS. Call it before JAX is first
  used.
  """
  config: Any = jax.config
  flag = 'xla_force_host_platform_device_count'
  if config.jax_num_cpu_devices > 0 or flag in os.getenv('XLA_FLAGS', ''):
    return
  if hasattr(os, 'sched_getaffinity'):
    cores = len(os.sched_getaffinity(0))
  else:
    cores = os.cpu_count() or 1
  config.update('jax_num_cpu_devices', cores)

"""Records where a run was started: env.json, an entry for each start.

What the numbers depend on besides the config is in it, so that a run does not
go on elsewhere without a word.
"""

import json
import os
import pathlib
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from mha_jax.training.record import (
  RecordError,
  RecordWarning,
  as_json,
  flatten,
  write_json,
)

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
OPTIONS = (
  'jax_enable_x64',
  'jax_default_prng_impl',
  'jax_threefry_partitionable',
  'jax_random_seed_offset',
  'jax_default_matmul_precision',
)
"""Options of JAX that change the numbers by definition."""
MAY_DIFFER = (
  'packages',
  'devices',
  'cpus',
  'git_commit',
  'xla_flags',
  'optimized',
  'jax_disable_jit',
)
"""Facts that may change the numbers, most often in their last bits alone."""


def environment() -> dict[str, Any]:
  """Versions, options, devices, command: what is needed to run it again."""
  config: Any = jax.config
  return {
    'command': [pathlib.Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]],
    'python': platform.python_version(),
    'platform': platform.platform(),
    'packages': {name: metadata.version(name) for name in PACKAGES},
    'options': options(),
    'xla_flags': os.environ.get('XLA_FLAGS', ''),
    'optimized': not config.read('jax_disable_most_optimizations'),
    'jax_disable_jit': config.jax_disable_jit,
    'devices': [device.device_kind for device in jax.devices()],
    'cpus': os.cpu_count(),
    'git_commit': _git_commit(),
  }


def options() -> dict[str, Any]:
  """The values of `OPTIONS`, as far as this JAX has them."""
  return {x: getattr(jax.config, x) for x in OPTIONS if hasattr(jax.config, x)}


def add_start(workdir: pathlib.Path, **more: Any) -> None:
  """Adds this start to the folder's env.json.

  Args:
    workdir: the folder.
    **more: what to note besides, such as the step that it goes on from.
  """
  path = workdir / 'env.json'
  write_json(path, [*_starts(path), environment() | more])


def check_same_options(workdir: pathlib.Path) -> None:
  """Holds this start against the last one of the folder; see `OPTIONS`.

  Warns where there was one and env.json does not tell of its options.

  Raises:
    RecordError: JAX's options differ, and the numbers would.
  """
  starts = _starts(workdir / 'env.json')
  options_then = starts[-1].get('options') if starts else None
  if not options_then and (workdir / 'checkpoints').exists():
    warnings.warn(
      f'workdir={workdir} holds checkpoints but no env.json to tell under '
      'which options of JAX they were made; if those were others, numbers do '
      'not go on as they would have',
      RecordWarning,
      stacklevel=2,
    )
  if changed := _changed(workdir, ['options']):
    raise RecordError(
      f"workdir={workdir} was started with other options of JAX's "
      f'({"; ".join(changed)}), which give other numbers; set them as before, '
      'or choose another --workdir'
    )


def warn_of_changes(workdir: pathlib.Path) -> None:
  """Warns, in a line, of what else differs from the folder's last start."""
  if changed := _changed(workdir, MAY_DIFFER):
    warnings.warn(
      f'workdir={workdir} was started elsewhere ({"; ".join(changed)}); what '
      'is added to it may differ from what it would have been',
      RecordWarning,
      stacklevel=2,
    )


def _changed(workdir: pathlib.Path, names: Sequence[str]) -> list[str]:
  """Gives those of these entries that were different at the last start."""
  starts = _starts(workdir / 'env.json')
  if not starts:
    return []
  then, now = (
    flatten({name: x[name] for name in names if name in x})
    for x in (starts[-1], as_json(environment()))
  )
  return [
    f'{name.removeprefix("options.")}: {then[name]} -> {now[name]}'
    for name in then
    if name in now and then[name] != now[name]
  ]


def _starts(path: pathlib.Path) -> list[dict[str, Any]]:
  """The entries of env.json; none where there is no such file.

  Raises:
    RecordError: it holds something else.
  """
  if not path.exists():
    return []
  try:
    starts = json.loads(path.read_bytes())
  except ValueError:
    starts = None
  if isinstance(starts, dict):  # of a time when it held the last start alone
    starts = [starts]
  if not isinstance(starts, list) or not all(
    isinstance(x, dict) for x in starts
  ):
    raise RecordError(f'{path} is no list of starts; restore it, or remove it')
  return starts


def _git_commit() -> str | None:
  """The checkout's commit, where this package lies in one."""
  here = pathlib.Path(__file__).parent
  try:
    done = subprocess.run(
      ['git', 'rev-parse', 'HEAD'],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return done.stdout.strip()

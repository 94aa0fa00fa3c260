"""Runs an experiment from its command line, alike for all of them.

`run(parse, main)` reads the flags, lets `parse` turn them into settings, and
hands those to `main`. Bad input, wherever parsing meets it, is one line on
standard error and exit code 2. A reader of the output who goes, as `head`
does, ends nothing. `--help` shows the script, its own flags and the fields of
its config.
"""

import atexit
import contextlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
from absl import flags
from jax.errors import JaxRuntimeError
from ml_collections import ConfigDict

from experiments.harness import (
  config_files,
  flag_parsing,
  help_text,
  printing,
)
from mha_jax.training.record import FULL, RecordError
from mha_jax.training.signals import interrupt_at_once

Settings = TypeVar('Settings')

USER_ERRORS = (flags.Error, ImportError, OSError, TypeError, ValueError)
HELP = ('--help', '-help', '-h', '-?')


def run(
  parse: Callable[[], Settings],
  main: Callable[[Settings], int],
  default_config: str,
) -> NoReturn:
  """Runs an experiment and exits with what main returns.

  Args:
    parse: reads `flags.FLAGS` and returns the settings; an error of its is
      the user's to mend.
    main: does the work.
    default_config: the config file, where the user names none.
  """
  with printing.heard_or_not(), warnings.catch_warnings():
    warnings.showwarning = _show_warning
    try:
      with interrupt_at_once():
        sys.exit(_run(parse, main, default_config))
    except KeyboardInterrupt:
      print('SIGINT: stopped', file=sys.stderr)
      _leave_at_exit(130)
      sys.exit(130)


def _leave_at_exit(code: int) -> None:
  """Cuts the interpreter's end short: JAX waits there for what still computes,
  and orbax's threads complain of what has failed."""

  def leave() -> None:
    with contextlib.suppress(OSError):
      sys.stdout.flush()
    os._exit(code)

  atexit.register(leave)


def _run(
  parse: Callable[[], Settings],
  main: Callable[[Settings], int],
  default_config: str,
) -> int:
  """Does the work of `run`; returns the exit code, or exits with it."""
  arguments = [a for a in sys.argv if a not in HELP]
  wants_help = len(arguments) < len(sys.argv)
  try:
    source, arguments = flag_parsing.take_config(arguments, default_config)
    flag_parsing.define_flags(
      source, config_files.load_config(source), arguments
    )
    flag_parsing.parse_flags(arguments)
    if not wants_help:
      _check_platforms()
      chosen = parse()
  except USER_ERRORS as error:
    _refuse(error)
  if wants_help:
    print(
      help_text.help_of(
        source, config_files.config_module(source), flag_parsing.own_flags()
      )
    )
    return 0
  try:
    return main(chosen)
  except (JaxRuntimeError, MemoryError) as error:
    _leave_at_exit(2)
    _refuse(_out_of_memory(error) or error)
  except (OSError, RecordError) as error:
    _leave_at_exit(2)
    if isinstance(error, OSError) and error.errno in FULL:
      workdir = getattr(chosen, 'workdir', 'what it writes')
      _refuse(OSError(f'{error}; make room for {workdir}'))
    _refuse(error)
  except FloatingPointError as error:
    print(f'failed: {error}', file=sys.stderr)
    return 1


def _check_platforms() -> None:
  """Raises a ValueError if JAX cannot use what JAX_PLATFORMS names."""
  named = os.environ.get('JAX_PLATFORMS')
  if not named:
    return
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:  # JAX raises both
    reason = str(error).partition('(set JAX')[0].rstrip(' .')
    raise ValueError(
      f'JAX_PLATFORMS={named}: {reason or "no such device here"}; unset it to '
      'use the devices there are'
    ) from error


def _out_of_memory(error: Exception) -> Exception | None:
  """An error that names the largest sizes, if that is what is wrong."""
  text = str(error).partition('\n')[0].rstrip('.')
  known = isinstance(error, MemoryError) or 'out of memory' in text.lower()
  if not known and 'RESOURCE_EXHAUSTED' not in text:
    return None
  sizes = _numbers(flags.FLAGS.config)
  largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
  named = ', '.join(f'--config.{name}={sizes[name]}' for name in largest)
  return ValueError(
    f'out of memory ({text}); the largest sizes are {named}: choose less'
  )


def _numbers(config: ConfigDict, prefix: str = '') -> dict[str, int]:
  """The integer fields of a config that are sizes of something."""
  found: dict[str, int] = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      found |= _numbers(value, f'{prefix}{name}.')
    elif type(value) is int and not re.search('seed|step|every', name):
      found[prefix + name] = value
  return found


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
  """A warning in one line."""
  print(f'warning: {" ".join(str(message).split())}', file=sys.stderr)


def _refuse(error: Exception) -> NoReturn:
  """Says in one line what is wrong, and exits with code 2."""
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)


def positive_ints(name: str, values: list[str]) -> list[int]:
  """A list flag's values as positive integers.

  Raises:
    ValueError: a value is something else, or there is none.
  """
  try:
    numbers = [int(value) for value in values]
  except ValueError:
    numbers = []
  if not numbers or min(numbers) < 1:
    raise ValueError(
      f'--{name}={",".join(values)} must be positive integers with commas '
      f'between, for instance --{name}=1,2,4'
    )
  return numbers


def exit_code(stopped_by: signal.Signals) -> int:
  """0 after a clean stop on SIGTERM, 130 after Ctrl-C, as in a shell."""
  return 0 if stopped_by == signal.SIGTERM else 128 + stopped_by


def merge(config: ConfigDict, short: Mapping[str, flags.FlagHolder]) -> None:
  """Puts flags that are short for fields of the config into it.

  Raises:
    ValueError: the field is given too, with another value.
  """
  for name, holder in short.items():
    if holder.value is None:
      continue
    field = f'config.{name}'
    if field in flags.FLAGS and config[name] != holder.value:
      raise ValueError(
        f'--{name}={holder.value} and --{field}={config[name]} contradict each '
        'other; give one'
      )
    config[name] = holder.value

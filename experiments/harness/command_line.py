"""What every experiment's command line does alike.

`run(parse, main)` reads the flags, lets `parse` turn them into settings, and
hands those to `main`. Bad input, wherever parsing meets it, is one line on
standard error and exit code 2. A reader of the output who goes, as `head`
does, ends nothing. `--help` shows the script, its own flags and the fields of
its config.
"""

import atexit
import contextlib
import difflib
import importlib.util
import os
import pathlib
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import jax
from absl import flags
from jax.errors import JaxRuntimeError
from ml_collections import ConfigDict, FrozenConfigDict, config_flags

from experiments.harness import help_text, printing, settings
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
  """What `run` says; returns the exit code, or exits with it."""
  arguments = [a for a in sys.argv if a not in HELP]
  wants_help = len(arguments) < len(sys.argv)
  try:
    source, arguments = _take_config(arguments, default_config)
    _define_flags(source, load_config(source), arguments)
    _parse_flags(arguments)
    if not wants_help:
      _check_platforms()
      chosen = parse()
  except USER_ERRORS as error:
    _refuse(error)
  if wants_help:
    print(help_text.whole(source, config_module(source), own_flags()))
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
      'take what there is'
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


def load_config(source: str) -> ConfigDict:
  """The config that FILE[:variants] describes, with what it leaves out.

  Raises:
    ValueError: no such file, or it does not give a config.
  """
  name, colon, variants = source.partition(':')
  module = config_module(source)
  try:
    config = module.get_config(*([variants] if colon else []))
  except (Exception, SystemExit) as error:  # the file may hold any code
    raise _config_error(source, error) from error
  if not isinstance(config, ConfigDict):
    raise ValueError(
      f'--config={source}: get_config must return a ConfigDict, not a '
      f'{type(config).__name__}'
    )
  if isinstance(config, FrozenConfigDict):
    config = config.as_configdict()
  of_variants = variants.split(',') if variants else []
  default_name = '-'.join([pathlib.Path(name).stem, *of_variants])
  settings.complete(config, default_name)
  return config


def config_module(source: str) -> ModuleType:
  """The module of FILE[:variants].

  Raises:
    ValueError: no such file, or it is no Python.
  """
  name = source.partition(':')[0]
  path = pathlib.Path(name)
  if not path.is_file():
    there = path.parts[:1] != ('configs',) or pathlib.Path('configs').is_dir()
    raise ValueError(
      f'--config={source}: no file {name!r}; name a Python file with '
      'get_config, for instance configs/copy_task.py'
      if there
      else f'--config={source}: no folder configs here; change to the checkout '
      'of mha_jax, where README.md lies, or name a file'
    )
  spec = importlib.util.spec_from_file_location('config_file', path)
  if spec is None or spec.loader is None:
    raise ValueError(f'--config={source}: {name!r} is no Python file')
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:  # the file may hold any code
    raise _config_error(source, error) from error
  return module


def _config_error(source: str, error: BaseException) -> ValueError:
  """What a config file raised, as one that names the file."""
  kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
  return ValueError(f'--config={source}: {kind}{error}')


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


def own_flags() -> dict[str, flags.Flag]:
  """The experiment's flags by name, but for those of its config."""
  script = sys.modules['__main__']
  by_module = flags.FLAGS.flags_by_module_dict()
  own = (sys.argv[0], script.__name__)
  return {
    flag.name: flag
    for module in by_module
    if module in own or 'experiments' in module
    for flag in by_module[module]
    if flag.name.partition('.')[0] != 'config'
  }


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


def _take_config(arguments: list[str], default: str) -> tuple[str, list[str]]:
  """Takes --config FILE out of the arguments."""
  sources: list[str] = []
  rest, i = [], 0
  while i < len(arguments):
    name, equals, value = arguments[i].partition('=')
    if name in ('--config', '-config'):
      if not equals:
        i += 1
        value = ''.join(arguments[i : i + 1])
        if not value or value.startswith('-'):
          raise ValueError('--config needs a value; write --config=FILE')
      sources.append(value)
    else:
      rest.append(arguments[i])
    i += 1
  if len(sources) > 1:
    raise ValueError(f'--config is given {len(sources)} times; give it once')
  return (sources or [default])[0], rest


def _define_flags(
  source: str, config: ConfigDict, arguments: list[str]
) -> None:
  """The flags that all experiments have: --config.FIELD and --workdir."""
  known = help_text.fields(config)
  for argument in arguments:
    override = re.match(r'--?(?:no)?config\.([^=]*)', argument)
    if override and override[1] not in known:
      hint = _close(override[1], _by_last_name(config) | _by_name(config))
      raise ValueError(
        f'--config.{override[1]}: {source} has no such field; {hint}'
      )
  config_flags.DEFINE_config_dict('config', config, sys_argv=arguments)
  flags.DEFINE_string(
    'workdir', None, 'folder for records and figures (default runs/<name>)'
  )


def _parse_flags(arguments: list[str]) -> None:
  """Reads the flags.

  Raises:
    ValueError: one is unknown, lacks its value, is empty where that would
      mean its default, or is given twice.
    flags.Error: a value is of the wrong type.
  """
  for argument, after in zip(arguments, [*arguments[1:], '--'], strict=True):
    name = argument.lstrip('-')
    known = argument.startswith('-') and name in flags.FLAGS
    if known and not flags.FLAGS[name].boolean and after.startswith('--'):
      raise ValueError(f'--{name} needs a value; write --{name}=VALUE')
  try:
    rest = flags.FLAGS(arguments)
  except flags.UnrecognizedFlagError as error:
    names = _by_last_name(flags.FLAGS['config'].value)
    hint = _close(error.flagname, names | {x: f'--{x}' for x in own_flags()})
    raise ValueError(f'unknown flag --{error.flagname}; {hint}') from error
  if len(rest) > 1:
    raise ValueError(f'unknown argument {rest[1]!r}; flags start with --')
  for name in flags.FLAGS:
    flag = flags.FLAGS[name]
    if flag.present and flag.value == '' and flag.default is None:
      raise ValueError(
        f'--{name}= is empty; give it a value, or leave it out for the default'
      )
    if flag.present > 1 and not isinstance(flag.value, tuple):
      raise ValueError(f'--{name} is given {flag.present} times; give it once')


def _by_name(config: ConfigDict) -> dict[str, str]:
  """The flags of a config's fields by field, as train.steps."""
  return {x: f'--config.{x}' for x in help_text.fields(config)}


def _by_last_name(config: ConfigDict) -> dict[str, str]:
  """The same by the field's own name, as steps."""
  flag_of = _by_name(config)
  return {x.rpartition('.')[2]: flag for x, flag in flag_of.items()}


def _close(name: str, known: Mapping[str, str]) -> str:
  """What the user may have meant: the value of the nearest key."""
  close = difflib.get_close_matches(name, known, n=1)
  if close:
    return f'did you mean {known[close[0]]}?'
  return '--help lists flags and fields'

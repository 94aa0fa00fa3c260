"""The arguments of a command line, read into flags; errors say what was meant.

`take_config` finds the config file, whose fields `define_flags` makes flags of,
and `parse_flags` reads them all.
"""

import difflib
import re
import sys
from collections.abc import Mapping

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments.harness import help_text


def take_config(arguments: list[str], default: str) -> tuple[str, list[str]]:
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


def define_flags(source: str, config: ConfigDict, arguments: list[str]) -> None:
  """Defines the flags of all experiments: --config.FIELD and --workdir."""
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


def parse_flags(arguments: list[str]) -> None:
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


def _by_name(config: ConfigDict) -> dict[str, str]:
  """The flags of a config's fields by field, as train.steps."""
  return {x: f'--config.{x}' for x in help_text.fields(config)}


def _by_last_name(config: ConfigDict) -> dict[str, str]:
  """The same by the field's own name, as steps."""
  flag_of = _by_name(config)
  return {x.rpartition('.')[2]: flag for x, flag in flag_of.items()}


def _close(name: str, known: Mapping[str, str]) -> str:
  """Suggests what the user may have meant: the value of the nearest key."""
  if name == 'model.layers':
    return 'only a config file gives it, see docs/training.md'
  close = difflib.get_close_matches(name, known, n=1)
  if close:
    return f'did you mean {known[close[0]]}?'
  return '--help lists flags and fields'

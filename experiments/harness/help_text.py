"""What `--help` shows: the script, its flags, and the fields of its config.

What a field means is said where it is defined: in the docstring of its
dataclass, under `Args:`, or in that of a config file which the script reads
itself, under `Fields:`.
"""

import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.harness import settings
from mha_jax.attention.variants import VARIANTS
from mha_jax.tasks import TASKS

NAME = 'names the folder in runs/'
KIND = (
  f'{", ".join(TASKS)}; or a dataclass of your own, module:Class, see '
  'docs/training.md'
)


def help_of(
  source: str, config_file: ModuleType, own: Mapping[str, flags.Flag]
) -> str:
  """The text.

  Args:
    source: FILE[:variants] of the config.
    config_file: its module.
    own: the script's flags by name.
  """
  script, config = sys.modules['__main__'], flags.FLAGS.config
  parts = [(script.__doc__ or '').strip(), '', 'Flags:']
  parts += [f'  --config={source}', '      FILE[:variants] with get_config']
  parts += variants_of(config_file)
  for flag in own.values():
    default = '' if flag.default is None else f'={flag.default_as_str}'
    parts += [f'  --{flag.name}{default}', f'      {flag.help}']
  parts += ['', 'Fields of the config (--config.FIELD=VALUE):']
  words = {name: str(flag.help) for name, flag in own.items()}
  words |= meanings(config, config_file)
  for name, value in fields(config).items():
    parts.append(f'  {name}={value}')
    if name in words:
      parts.append(f'      {words[name]}')
  return '\n'.join(parts)


def variants_of(config_file: ModuleType) -> list[str]:
  """Lists the variants of a config file, with what they are."""
  known: Mapping[str, str] = getattr(config_file, 'VARIANTS', {})
  return [f'      :{name}: {meaning}' for name, meaning in known.items()]


def meanings(config: ConfigDict, config_file: ModuleType) -> dict[str, str]:
  """Says in a line each what the fields of a config mean."""
  words = {'name': NAME, 'task.kind': KIND} | arguments_of(config_file.__doc__)
  for variant in reversed(VARIANTS.values()):
    for name, meaning in arguments_of(variant.config.__doc__).items():
      words[f'model.{name}'] = meaning
  for section, kind in settings.kinds(config).items():
    for name, meaning in arguments_of(kind.__doc__).items():
      words[f'{section}.{name}'] = meaning
  return words


def fields(config: ConfigDict, prefix: str = '') -> dict[str, Any]:
  """The fields of a config and of its sections, as `model.d_model`."""
  found: dict[str, Any] = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      found |= fields(value, f'{prefix}{name}.')
    else:
      found[f'{prefix}{name}'] = value
  return found


def arguments_of(docstring: str | None) -> dict[str, str]:
  """Reads the line of each argument or field out of a docstring."""
  text = docstring or ''
  head = re.search(r'^( *)(?:Args|Fields):\n', text, re.M)
  if head is None:
    return {}
  indent = f'{head[1]}  '
  listed = re.split(rf'^{head[1]}\S', text[head.end() :], flags=re.M)[0]
  entry = rf'^{indent}(\w+): (.*(?:\n{indent} +\S.*)*)'
  found = re.findall(entry, listed, re.M)
  return {name: ' '.join(x.split()).removesuffix('.') for name, x in found}

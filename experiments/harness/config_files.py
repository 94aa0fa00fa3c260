"""Config files: FILE[:variants] to the config that it describes."""

import importlib.util
import pathlib
from types import ModuleType

from ml_collections import ConfigDict, FrozenConfigDict

from experiments.harness import settings


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
      else f'--config={source}: no folder configs here; start in the checkout '
      'of mha_jax, the folder of README.md, or name a file'
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
  """Turns what a config file raised into an error that names the file."""
  kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
  return ValueError(f'--config={source}: {kind}{error}')

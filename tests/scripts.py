"""Runs experiments, in this process and as processes of their own."""

import contextlib
import io
import os
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import compiling
from absl import flags
from absl.testing import flagsaver

from experiments.harness import command_line

ROOT = pathlib.Path(command_line.__file__).parents[2]
TINY = '--config=configs/copy_task.py:tiny'


class Result(NamedTuple):
  """How a call ended."""

  code: Any
  out: str
  err: str
  files: frozenset[str] = frozenset()
  """Those in the workdir when the first word was printed."""


def call(script: ModuleType, *arguments: str) -> Result:
  """Runs an experiment's command line in this process.

  Of a flag that is given several times the last counts, so that a test can
  change what others share. Flags that the call defines are forgotten
  afterwards, so that the next call starts from the script's own.
  """
  last = {x.partition('=')[0] if '=' in x else x: x for x in arguments}
  return call_as_given(script, *last.values())


def call_as_given(script: ModuleType, *arguments: str) -> Result:
  """The same with all of the arguments, in their order."""
  workdir = [x.partition('=')[2] for x in arguments if '--workdir=' in x]
  out, err, code = Watching(workdir), io.StringIO(), None
  argv, main = sys.argv, sys.modules['__main__']
  with (
    contextlib.chdir(ROOT),
    flagsaver.flagsaver(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    # Its exit is not this process's.
    mock.patch.object(command_line.atexit, 'register'),
  ):
    sys.argv, sys.modules['__main__'] = [script.__name__, *arguments], script
    try:
      command_line.run(script.parse, script.main, 'configs/copy_task.py')
    except SystemExit as end:
      code = end.code
    finally:
      sys.argv, sys.modules['__main__'] = argv, main
      flags.FLAGS.unparse_flags()
  return Result(code, out.getvalue(), err.getvalue(), out.files)


class Watching(io.StringIO):
  """Notes which files there are in folders at the first write."""

  def __init__(self, folders: list[str]):
    super().__init__()
    self._folders = folders
    self.files: frozenset[str] = frozenset()

  def write(self, text: str) -> int:
    if not self.tell():
      self.files = frozenset().union(*map(names, self._folders))
    return super().write(text)


def names(folder: str | pathlib.Path) -> frozenset[str]:
  """The files below a folder, without those of checkpoints."""
  root = pathlib.Path(folder)
  found = (x.relative_to(root) for x in root.rglob('*') if x.is_file())
  return frozenset(str(x) for x in found if 'checkpoints' not in x.parts)


def start(
  module: str,
  *arguments: str,
  compilation_cache: pathlib.Path | None = None,
  into_one: bool = False,
  quick: bool = False,
) -> subprocess.Popen[str]:
  """Starts `python -m module` in the checkout, compiled as users do.

  Args:
    module: the experiment.
    arguments: its command line.
    compilation_cache: a folder where processes that run the same programs
      share them compiled, which saves seconds; None: no sharing.
    into_one: whether standard error goes where standard output goes.
    quick: whether to compile as tests do, not as users.
  """
  xla_flags = os.environ.get('XLA_FLAGS', '').removesuffix(compiling.QUICK)
  environment = os.environ | {'XLA_FLAGS': xla_flags}
  if quick:
    environment |= {'XLA_FLAGS': compiling.QUICK}
    environment |= {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
  if compilation_cache is not None:
    environment['JAX_COMPILATION_CACHE_DIR'] = str(compilation_cache)
    environment['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  return subprocess.Popen(
    [sys.executable, '-m', module, *arguments],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT if into_one else subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen[str]) -> Result:
  """Waits for a process that `start` began."""
  out, err = process.communicate(timeout=300)
  return Result(process.returncode, out, err)


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
  """The files and folders below a folder, and what the files hold."""
  return {
    str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
    for path in sorted(folder.rglob('*'))
  }

"""What all tests share: run-time shape checks, hypothesis profiles, parity."""

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import compiling
import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

if 'mha_jax.attention' in sys.modules:
  raise RuntimeError('mha_jax.attention was imported before its import hook')
# Shaped annotations are checked at every call while testing.
install_import_hook('mha_jax.attention', 'shape_checks.checked')

jax.config.update('jax_numpy_rank_promotion', 'raise')

HAS_TORCH = importlib.util.find_spec('torch') is not None
collect_ignore_glob = [] if HAS_TORCH else ['parity/*']

_SETTINGS = {
  'deadline': None,
  'suppress_health_check': [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
  'ci', max_examples=5, derandomize=True, database=None, **_SETTINGS
)
hypothesis.settings.register_profile('deep', max_examples=300, **_SETTINGS)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    '--deep',
    action='store_true',
    help='hypothesis: many random examples a test instead of a few fixed ones',
  )


def pytest_configure(config: pytest.Config) -> None:
  deep = config.getoption('--deep')
  hypothesis.settings.load_profile('deep' if deep else 'ci')
  if not deep:
    flags = os.environ.get('XLA_FLAGS', '')
    # XLA takes a lone space for the name of a file.
    os.environ['XLA_FLAGS'] = f'{flags} {compiling.QUICK}'.strip()


@pytest.fixture(scope='session', autouse=True)
def quick_compile(request: pytest.FixtureRequest) -> None:
  """Compiles without XLA's optimisations: twice as fast a test.

  --deep compiles as users do, and so do the tests of what a program holds.
  """
  quick = not request.config.getoption('--deep')
  jax.config.update('jax_disable_most_optimizations', quick)


@pytest.fixture(scope='class')
def full_compile() -> Iterator[None]:
  """Compiles with XLA's passes; what was compiled otherwise is forgotten."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.clear_caches()
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', before)
  jax.clear_caches()


@pytest.fixture(scope='session', autouse=True)
def small_blocks() -> Iterator[None]:
  """Blocks of 3 queries and 4 keys, so that small inputs have many."""
  from mha_jax.attention.one_head import block_pairs

  whole = block_pairs.block_sizes

  @functools.wraps(whole)
  def sizes(t: int, s: int, group: int = 1, kv_heads: int = 1) -> Any:
    sizes = whole(t, s, group, kv_heads)
    return block_pairs.BlockSizes(min(3, sizes.queries), min(4, sizes.keys))

  with mock.patch.object(block_pairs, 'block_sizes', sizes):
    yield


def pytest_terminal_summary(
  terminalreporter: pytest.TerminalReporter,
) -> None:
  if not HAS_TORCH:
    terminalreporter.write_line(
      'parity tests not run: PyTorch is not installed; install with: '
      "pip install -e '.[parity]'"
    )

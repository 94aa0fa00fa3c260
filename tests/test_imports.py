"""What importing the library pulls in, and which way imports point."""

import ast
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
from unittest import mock

from absl.testing import parameterized

import experiments
import mha_jax

ROOT = pathlib.Path(mha_jax.__file__).parent
CORE = sorted(
  path.relative_to(ROOT).as_posix() for path in ROOT.glob('attention/**/*.py')
)
HEAVY = ('matplotlib', 'orbax', 'optax', 'ml_collections', 'rich', 'torch')
SHARED = (
  'mha_jax',
  'mha_jax.axis_names',
  'mha_jax.flax_arguments',
  'mha_jax.flax_serialization',
)
OUTSIDE = ('jax', 'jaxtyping', 'numpy')

REPORT = """
import json, sys
before = set(sys.modules)
{imports}
from jax._src import xla_bridge
flags = sys.modules.get('absl.flags')
ours = []
if flags is not None:
  ours = [x for x in flags.FLAGS.flags_by_module_dict() if 'mha_jax' in x]
print(json.dumps({{
  'modules': sorted(x.split('.')[0] for x in set(sys.modules) - before),
  'backends': sorted(xla_bridge._backends),
  'flags': ours,
}}))
"""


def report(imports: str) -> dict:
  """What a fresh interpreter holds after some imports."""
  done = subprocess.run(
    [sys.executable, '-W', 'error', '-c', REPORT.format(imports=imports)],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT.parent,
  )
  return json.loads(done.stdout)


def imported(path: pathlib.Path) -> set[str]:
  """The absolute names of all modules that a file imports."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {'.' * node.level + (node.module or '')}
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


class ImportsTest(parameterized.TestCase):
  @parameterized.parameters('linen', 'nnx')
  def test_a_front_end_is_light(self, name):
    """Nothing beyond what jax and Flax import themselves."""
    ours = report(f'import mha_jax, mha_jax.{name}')
    theirs = report(f'import jax, flax.{name}')
    extra = set(ours['modules']) - set(theirs['modules'])
    self.assertEmpty(extra & set(HEAVY))
    self.assertIn('mha_jax', extra)
    self.assertEmpty(ours['flags'])
    self.assertEmpty(ours['backends'])

  @parameterized.parameters('import mha_jax', 'import mha_jax.attention')
  def test_core_is_lighter(self, imports):
    """The pure functions need no Flax, and touch no device."""
    got = report(imports)
    for name in ('flax', 'absl', 'chex', *HEAVY):
      self.assertNotIn(name, got['modules'])
    self.assertEmpty(got['backends'])

  def test_the_report_sees(self):
    """A device, a heavy module and a flag would be noticed."""
    got = report(
      'import jax, matplotlib; jax.devices()\n'
      'from absl import flags\n'
      "flags.DEFINE_integer('x', 1, 'x', module_name='mha_jax.planted')"
    )
    self.assertIn('matplotlib', got['modules'])
    self.assertNotEmpty(got['backends'])
    self.assertEqual(got['flags'], ['mha_jax.planted'])


class PackageTest(parameterized.TestCase):
  """What is installed is what is needed and what is told."""

  def setUp(self):
    super().setUp()
    text = (ROOT.parent / 'pyproject.toml').read_text()
    self.project = tomllib.loads(text)['project']

  def test_the_library_needs_its_dependencies_alone(self):
    """What only experiments import is in their extra."""
    needed = {re.match(r'\w+', x)[0] for x in self.project['dependencies']}
    optional = {'tensorboardX'}  # imported where it is asked for
    for path in ROOT.rglob('*.py'):
      for module in imported(path):
        package = module.split('.')[0]
        if package != 'mha_jax' and package not in sys.stdlib_module_names:
          self.assertIn(package, needed | optional, path)
    extra = ' '.join(self.project['optional-dependencies']['experiments'])
    for name in experiments.NEEDED:
      self.assertIn(name, extra)
      self.assertNotIn(name, needed)

  def test_description(self):
    """The wheel has no experiments: its description runs without them."""
    text = (ROOT.parent / self.project['readme']).read_text()
    self.assertNotIn('python -m', text)
    (block,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    names: dict = {}
    exec(block, names)
    self.assertEqual(names['y'].shape, names['x'].shape)

  def test_experiments_without_their_extra(self):
    """One line with the remedy, which `python -m` prints as it is."""
    with (
      mock.patch.object(importlib.util, 'find_spec', return_value=None),
      self.assertRaisesRegex(ImportError, r"pip install -e '.\[experiments\]'"),
    ):
      importlib.reload(experiments)
    importlib.reload(experiments)


class DirectionTest(parameterized.TestCase):
  @parameterized.parameters(*((name,) for name in CORE))
  def test_core_imports_nothing_above(self, name):
    """attention/ imports jax, NumPy and itself."""
    for module in imported(ROOT / name):
      package = module.split('.')[0]
      if package == 'mha_jax':
        self.assertStartsWith(module, 'mha_jax.attention')
      else:
        self.assertTrue(
          package in OUTSIDE or package in sys.stdlib_module_names, module
        )

  @parameterized.parameters(
    'linen.py',
    'nnx.py',
    'axis_names.py',
    'flax_arguments.py',
    'flax_serialization.py',
  )
  def test_shells_import_the_core_only(self, name):
    """A front end knows attention and Flax, nothing above, not the other."""
    for module in imported(ROOT / name):
      package = module.split('.')[0]
      known = package in ('mha_jax', 'flax', *OUTSIDE)
      self.assertTrue(known or package in sys.stdlib_module_names, module)
      if package == 'mha_jax' and module not in SHARED:
        self.assertStartsWith(module, 'mha_jax.attention')

  def test_relative_and_planted_imports_are_seen(self):
    """The reader understands every form of import."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / 'planted.py'
    path.write_text(
      'import flax.linen as nn\nfrom mha_jax import linen\n'
      'def f():\n  from .. import decoder\n'
    )
    self.assertContainsSubset(
      {'flax.linen', 'mha_jax.linen', '..'}, imported(path)
    )

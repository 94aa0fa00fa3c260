"""README's Python runs, from top to bottom, and prints what it says."""

import doctest
import pathlib
import re

import pytest
from absl.testing import parameterized

README = pathlib.Path(__file__).parents[1] / 'README.md'


@pytest.mark.usefixtures('quick_compile')
class ReadmeTest(parameterized.TestCase):
  def test_code_blocks(self):
    """Each block in the namespace that those before it left."""
    blocks = re.findall(r'```python\n(.*?)```', README.read_text(), re.DOTALL)
    self.assertGreater(len(blocks), 4)
    names: dict = {}
    for block in blocks:
      if '>>>' not in block:
        exec(compile(block, str(README), 'exec'), names)
        continue
      test = doctest.DocTestParser().get_doctest(
        block, names, 'README.md', str(README), 0
      )
      result = doctest.DocTestRunner().run(test, clear_globs=False)
      self.assertEqual(result.failed, 0)
    # What the comments in the blocks claim.
    self.assertEqual(names['layer'].num_heads, 8)
    self.assertEqual(names['weights'].shape, (2, 8, 10, 10))
    self.assertEqual(names['num_params'](names['config'].table), 10400)

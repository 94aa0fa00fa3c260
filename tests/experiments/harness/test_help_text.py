"""What --help says of the fields of configs."""

import pathlib

import scripts
from absl.testing import parameterized

from experiments import configure_heads
from experiments.harness import config_files, help_text

CONFIGS = sorted(
  str(path.relative_to(scripts.ROOT))
  for path in pathlib.Path(scripts.ROOT, 'configs').glob('*.py')
  if path.stem not in ('__init__', 'base')
)


class MeaningsTest(parameterized.TestCase):
  @parameterized.parameters(*CONFIGS, 'configs/recall.py:induction')
  def test_every_field(self, source):
    """Each has a meaning, and no docstring tells of one that is not there."""
    config = config_files.load_config(source)
    module = config_files.config_module(source)
    words = help_text.meanings(config, module)
    if source == 'configs/configure_heads.py':  # whose fields are its flags
      words |= dict.fromkeys(configure_heads.OVERRIDES, 'a flag')
    fields = help_text.fields(config)
    self.assertEmpty([x for x in fields if not words.get(x)])
    own = help_text.arguments_of(module.__doc__)
    self.assertEmpty(set(own) - set(fields))

  @parameterized.parameters(*CONFIGS)
  def test_variants(self, source):
    """Each that a file takes is named with what it is, and no other."""
    module = config_files.config_module(source)
    config = module.get_config()
    lines = help_text.variants_of(module)
    names = [line.split(':')[1] for line in lines]
    self.assertEqual(names, [*module.VARIANTS])
    for name in names:
      self.assertNotEqual(module.get_config(name), config)
    with self.assertRaisesRegex(ValueError, 'config variant .*tiny'):
      module.get_config('other')

  def test_arguments_of(self):
    """One line each, from the list alone, whatever the indent."""
    text = """First line.

    Args:
      a: the first
        of two lines.
      b_2: short; None: none.

        Another paragraph.

    Raises:
      ValueError: never.
    """
    self.assertEqual(
      help_text.arguments_of(text),
      {'a': 'the first of two lines', 'b_2': 'short; None: none'},
    )
    self.assertEqual(
      help_text.arguments_of('Fields:\n  x: one.\n'), {'x': 'one'}
    )
    for nothing in (None, '', 'Args are many.', 'Args:\n'):
      self.assertEqual(help_text.arguments_of(nothing), {})

"""Every einsum string, shape suffix and annotation uses the letters."""

import ast
import pathlib
import re

from absl.testing import parameterized

import mha_jax.attention
from mha_jax.attention.notation import LETTERS, LOGICAL_AXES

PACKAGE = pathlib.Path(mha_jax.attention.__file__).parent
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob('*.py'))
EINSUM = re.compile(r'[\w.]+(,[\w.]+)*->[\w.]*')
ANNOTATIONS = ('Bool', 'Float', 'Int', 'Key', 'Shaped')


def einsum_strings(source: str) -> list[str]:
  """All string constants that read as an einsum."""
  return [
    node.value
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Constant)
    and isinstance(node.value, str)
    and EINSUM.fullmatch(node.value)
  ]


def einsum_calls(source: str) -> list[ast.expr]:
  """The first argument of every call of einsum."""
  return [
    node.args[0]
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr == 'einsum'
  ]


def shape_suffixes(source: str) -> list[str]:
  """The suffix of every name such as q_BHTK."""
  names = [
    node.id if isinstance(node, ast.Name) else node.arg
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Name | ast.arg)
  ]
  return [m[1] for x in names if (m := re.search(r'[a-z0-9]_([A-Z]+)$', x))]


def annotated_dims(source: str) -> list[str]:
  """The one-letter dimensions of every jaxtyping annotation."""
  dims = []
  for node in ast.walk(ast.parse(source)):
    if (
      isinstance(node, ast.Subscript)
      and isinstance(node.value, ast.Name)
      and node.value.id in ANNOTATIONS
    ):
      dims += ast.literal_eval(node.slice.elts[1]).split()
  bare = [dim.lstrip('#*') for dim in dims]
  return [dim for dim in bare if len(dim) == 1 and dim.isalpha()]


def foreign(strings: list[str]) -> set[str]:
  """The letters that are not in the table."""
  return set(''.join(strings)) - set(LETTERS) - set(',->')


class NotationTest(parameterized.TestCase):
  @parameterized.parameters(*FILES)
  def test_einsum_strings_use_the_letters(self, name: str):
    """No einsum string has a letter outside the table."""
    self.assertEmpty(foreign(einsum_strings((PACKAGE / name).read_text())))

  @parameterized.parameters(*FILES)
  def test_einsums_can_be_read(self, name: str):
    """An einsum's string is a constant, or made from a Projection's spec."""
    source = (PACKAGE / name).read_text()
    for node in einsum_calls(source):
      if isinstance(node, ast.Constant):
        self.assertIn(node.value, einsum_strings(source))
      else:
        self.assertEqual(name, 'projections/rows.py', ast.unparse(node))

  @parameterized.parameters(*FILES)
  def test_shape_suffixes_use_the_letters(self, name: str):
    """q_BHTK and its like are upper-case letters of the table."""
    suffixes = shape_suffixes((PACKAGE / name).read_text())
    self.assertEmpty(foreign([suffix.lower() for suffix in suffixes]))

  @parameterized.parameters(*FILES)
  def test_annotations_use_the_letters(self, name: str):
    """A dimension of one letter in an annotation is in the table."""
    self.assertEmpty(foreign(annotated_dims((PACKAGE / name).read_text())))

  def test_the_checks_find_what_they_look_for(self):
    """The readers see the strings of the package and a planted letter."""
    grouped = (PACKAGE / 'variants/grouped.py').read_text()
    self.assertContainsSubset(
      ['btd,dhk->bhtk', 'bsd,dnk->bnsk', 'bsd,dnv->bnsv', 'bhtv,hvd->btd'],
      einsum_strings(grouped),
    )
    planted = (
      "y = jnp.einsum('bxd,dhk->bhxk', x_BXD, w)\n"
      "def f(x: Float[Array, 'b x']): ..."
    )
    self.assertEqual(foreign(einsum_strings(planted)), {'x'})
    self.assertEqual(shape_suffixes(planted), ['BXD'])
    self.assertEqual(annotated_dims(planted), ['b', 'x'])
    heads = (PACKAGE / 'heads.py').read_text()
    self.assertContainsSubset(['BHTK', 'BNSK', 'BNSV'], shape_suffixes(heads))
    self.assertContainsSubset(['g', 't', 's', 'v'], annotated_dims(heads))

  def test_axis_names(self):
    """Every letter has one logical axis name, and no two share one."""
    self.assertEqual(LETTERS.keys(), LOGICAL_AXES.keys())
    self.assertLen(set(LOGICAL_AXES.values()), len(LETTERS))

"""A user's type checker infers arrays from our signatures."""

import ast
import pathlib
import re
import tempfile

from absl.testing import parameterized
from mypy import api

ROOT = pathlib.Path(__file__).parents[1]
HEAD = """
import jax
from flax import nnx
import mha_jax.linen as linen
import mha_jax.nnx as mha_nnx
from mha_jax import dot_product_attention
from mha_jax.attention import (
  GroupedConfig, apply, attend, init_cache, init_table, keys_values, masks,
  multihead_attention,
)

x: jax.Array
config = GroupedConfig(64, 4)
params = init_table(config.table, jax.random.key(0))
cache = init_cache(config, 2, 8)
layer = mha_nnx.MultiHeadAttention(4, 64, rngs=nnx.Rngs(0))
shell = linen.MultiHeadLatentAttention(4, 8)
"""
ARRAY = 'Array'
CASES = {
  'attend(x, x, x, mask=masks.causal())': ARRAY,
  'attend(x, x, x, return_residual=True)': 'tuple[Array, ...]',
  'multihead_attention((x, x), (x, x), x, bias=[0.0])': ARRAY,
  'multihead_attention(x, x, x, return_weights=True)[1]': ARRAY,
  'dot_product_attention(x, x, x, is_causal=True)': ARRAY,
  'dot_product_attention(x, x, x, return_residual=True)[1]': ARRAY,
  'apply(config, params, x, dtype="bfloat16")': ARRAY,
  'apply(config, params, x, return_weights=True)': 'tuple[Array, Array]',
  'apply(config, params, x, cache=cache)': 'tuple[Array, Cache]',
  'apply(config, params, x, cache=keys_values(config, params, x))[0]': ARRAY,
  'layer(x, mask=masks.causal())': ARRAY,
  'layer(x, cache=layer.init_cache(2, 8))': 'tuple[Array, Cache]',
  'shell(x, x, deterministic=True)': ARRAY,
  'shell(x, cache=shell.init_cache(2, 8))[0]': ARRAY,
}
WRONG = (
  "attend(x, x, x, mask=3 + 'a')",
  'multihead_attention(x, x, x, caausal=True)',
  'apply(config, params, x, cache=x)',
  'layer(x, maks=x)',
)
OURS = ('latent', 'apply', 'multihead_attention')


def checked(source: str) -> list[str]:
  """The lines that mypy prints of a program, types without their modules."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'program.py'
    path.write_text(source)
    out, errors, _ = api.run(
      [
        '--config-file',
        str(ROOT / 'pyproject.toml'),
        '--allow-redefinition',
        str(path),
      ]
    )
  return re.sub(r'\b(\w+\.)+(?=[A-Z])', '', out + errors).splitlines()


class TypesTest(parameterized.TestCase):
  def test_results(self):
    """Each call's type, and no complaint about the call."""
    lines = checked(HEAD + ''.join(f'reveal_type({x})\n' for x in CASES))
    got = [re.search(r'Revealed type is "(.*)"', line) for line in lines]
    self.assertEqual([x and x[1] for x in got[:-1]], [*CASES.values()], lines)

  def test_mistakes(self):
    """Each wrong call is found."""
    lines = checked(HEAD + ''.join(f'{call}\n' for call in WRONG))
    first = HEAD.count('\n') + 1
    for place, call in enumerate(WRONG, first):
      with self.subTest(call):
        self.assertRegex('\n'.join(lines), rf'(?m)^\S+:{place}: error')

  @parameterized.parameters(
    ('docs/modules.md', {ARRAY, 'tuple[Array, Array]'}),
    ('docs/long_sequences.md', {ARRAY}),
  )
  def test_pages(self, page, wanted):
    """What the pages' programs name after our calls is arrays, never Any."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    lines, calls = [], 0
    for node in ast.parse('\n'.join(x for x in blocks if '>>>' not in x)).body:
      lines.append(ast.unparse(node))
      value = getattr(node, 'value', None)
      if isinstance(value, ast.Call) and ast.unparse(value.func) in OURS:
        lines.append(f'reveal_type({ast.unparse(node.targets[0])})')
        calls += 1
    found = re.findall(
      'Revealed type is "(.*)"', '\n'.join(checked('\n'.join(lines)))
    )
    self.assertLen(found, calls)
    self.assertEqual(set(found), wanted)

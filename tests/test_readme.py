"""README's Python runs, from top to bottom, and prints what it says."""

import doctest
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
from absl.testing import parameterized
from compiling import patched

from mha_jax import attention
from mha_jax.attention import heads, init_table, num_params
from mha_jax.attention.variants import build

README = pathlib.Path(__file__).parents[1] / 'README.md'


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
    self.assertEqual(names['cache'].nbytes_per_token, 80)
    self.assertEqual(names['tokens'].shape, (2, 8))
    self.assertEqual(names['smaller'].num_heads, 6)
    self.assertEqual(names['weights'].shape, (2, 8, 10, 10))
    sown = names['state']['intermediates']['attention']['attention_weights']
    self.assertEqual(sown[0].shape, (2, 8, 10, 10))
    self.assertEqual(names['maps'][0].shape, (4, 8, 16, 16))
    self.assertEqual(names['num_params'](names['config'].table), 10400)


EXAMPLES = {
  'MHA': ('mha', {}),
  'GQA': ('gqa', {'num_kv_heads': 4}),
  'MQA': ('mqa', {}),
  'MLA expanded': ('mla', {'form': 'expanded'}),
  'MLA absorbed': ('mla', {'form': 'absorbed'}),
  'MLA (rank r, rotary p)': ('mla', {}),
  'GTA': ('gta', {'num_kv_heads': 4, 'head_dim': 64}),
  'GTA (keys tied to values)': ('gta', {'num_kv_heads': 4, 'head_dim': 64}),
}
"""README's rows at the sizes that it gives: d = 1024, h = 16."""


def config_of(row: str):
  kind, options = EXAMPLES[row]
  if kind == 'mla':
    options = options | {'kv_lora_rank': 256, 'qk_rope_head_dim': 32}
  else:
    options = options | {'use_bias': False}
  return build(kind, d_model=1024, num_heads=16, **options)


def rows_of(first_column: str) -> list[list[str]]:
  """The cells of the table that has a row which begins so."""
  tables = re.findall(r'(?:^\|.*\n)+', README.read_text(), re.MULTILINE)
  (table,) = [x for x in tables if f'| {first_column} |' in x]
  lines = table.strip().split('\n')[2:]
  return [[cell.strip() for cell in x.strip('|').split('|')] for x in lines]


class SharingTableTest(parameterized.TestCase):
  def test_in_axes(self):
    """What README shows as shared is shared where heads are mapped."""
    rows = rows_of('MLA absorbed')
    self.assertLen(rows, 6)
    for name, *shown, _ in rows:
      config, seen = config_of(name), []
      mapping = heads._over_leading_axis

      def record(function, in_turn, *args, seen=seen, mapping=mapping):
        if len(args) > 2:
          seen.append(args[:2])
        return mapping(function, in_turn, *args)

      shapes = jax.eval_shape(
        functools.partial(init_table, config.table), jax.random.key(0)
      )
      with patched(heads, _over_leading_axis=record):
        jax.eval_shape(
          functools.partial(attention.apply, config),
          shapes,
          jax.ShapeDtypeStruct((2, 3, 1024), jnp.float32),
        )
      got = [self.text(i, kv) for i, (_, kv) in enumerate(seen)]
      self.assertEqual(got, shown, name)

  def text(self, level: int, kv) -> str:
    """`0, k, v` as README writes it, the parts of k over key/value heads."""
    ks, v = jax.tree.map(lambda x: 0 if x.shape[0] > 1 else None, kv)
    by_part = level == 1 and len(ks) > 1
    return f'0, {ks if by_part else ks[0]}, {v}'

  def test_numbers(self):
    """Parameters and cached elements at the sizes given."""
    rows = rows_of('GTA (keys tied to values)')
    self.assertLen(rows, 5)
    for name, _, _, parameters, cache in rows:
      config = config_of(name)
      self.assertEqual(f'{num_params(config.table):,}', parameters, name)
      self.assertEqual(f'{config.cache_elements:,}', cache, name)

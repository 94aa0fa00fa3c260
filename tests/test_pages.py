"""The Python of README and of the pages runs, and their tables are true."""

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

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
  # page: what its comments claim, of the names that its blocks leave.
  'README.md': {'y.shape': (2, 10, 64)},
  'docs/package.md': {'y.shape': (2, 10, 64)},
  'docs/modules.md': {
    'latent.key_down.kernel.shape': (64, 16),
    'latent.config.cache_elements': 16 + 4,
    'weights.shape': (2, 8, 10, 10),
    "state['intermediates']['attention']['attention_weights'][0].shape": (
      (2, 8, 10, 10)
    ),
    'num_params(config.table)': 10400,
  },
  'docs/decoding.md': {
    'cache.nbytes_per_token': 80,
    'tokens.shape': (2, 8),
    '[layer.num_kv_heads for layer in mixed.layers]': [2, 4],
  },
  'docs/long_sequences.md': {
    'implementation_of(q, q, q, mask=masks.causal())': 'blockwise',
  },
  'docs/sharing.md': {},
  'docs/heads.md': {
    'smaller.layers[0].num_heads': 6,
    'maps[0].shape': (4, 8, 16, 16),
    "rows[3]['layer'], rows[3]['head']": (0, 3),
  },
}


class PagesTest(parameterized.TestCase):
  @parameterized.parameters(*PAGES)
  def test_code_blocks(self, page):
    """Each block in the namespace that those before it left."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    self.assertNotEmpty(blocks)
    names: dict = {}
    for block in blocks:
      if '>>>' not in block:
        exec(compile(block, page, 'exec'), names)
        continue
      test = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
      result = doctest.DocTestRunner().run(test, clear_globs=False)
      self.assertEqual(result.failed, 0)
    for expression, value in PAGES[page].items():
      self.assertEqual(eval(expression, names), value, expression)

  def test_every_page_is_run(self):
    """A page with Python is in the table, or has a test of its own."""
    pages = [*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')]
    with_python = {
      str(page.relative_to(ROOT))
      for page in pages
      if '```python' in page.read_text()
    }
    elsewhere = {'docs/training.md', 'WORKSPACE.md'}
    self.assertEqual(with_python - elsewhere, set(PAGES))

  def test_links(self):
    """What a page links to is there, and every figure is shown."""
    pages = [*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')]
    linked = set()
    for page in pages:
      for target in re.findall(r'\]\(([^)#:]+)\)', page.read_text()):
        linked.add((page.parent / target).resolve())
    self.assertEmpty([x for x in linked if not x.exists()])
    self.assertContainsSubset(set((ROOT / 'docs').glob('*.png')), linked)

  def test_readme_is_short(self):
    """The rest is for the pages."""
    self.assertLess(len((ROOT / 'README.md').read_text().splitlines()), 200)


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
"""The rows of docs/sharing.md at its sizes: d = 1024, h = 16."""


def config_of(row: str):
  kind, options = EXAMPLES[row]
  if kind == 'mla':
    options = options | {'kv_lora_rank': 256, 'qk_rope_head_dim': 32}
  else:
    options = options | {'use_bias': False}
  return build(kind, d_model=1024, num_heads=16, **options)


def rows_of(first_column: str) -> list[list[str]]:
  """The cells of the table that has a row which begins so."""
  text = (ROOT / 'docs' / 'sharing.md').read_text()
  tables = re.findall(r'(?:^\|.*\n)+', text, re.MULTILINE)
  (table,) = [x for x in tables if f'| {first_column} |' in x]
  lines = table.strip().split('\n')[2:]
  return [[cell.strip() for cell in x.strip('|').split('|')] for x in lines]


class SharingTableTest(parameterized.TestCase):
  def test_in_axes(self):
    """What the page shows as shared is shared where heads are mapped."""
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
    """`0, k, v` as the page writes it, the parts of k over key/value heads."""
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

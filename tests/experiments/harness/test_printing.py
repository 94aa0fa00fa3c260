"""Tables on any width, and output that nobody reads."""

import contextlib
import io
import os
import re
import tempfile
from unittest import mock

from absl.testing import parameterized

from experiments import (
  benchmark,
  check_costs,
  probe_heads,
  prune_heads,
)
from experiments.harness import printing
from experiments.reports import (
  head_counts,
  latent_ranks,
  model_costs,
  statistics,
)
from mha_jax.analysis.configurator.demand import Demand
from mha_jax.analysis.costs.hardware import hardware
from mha_jax.analysis.costs.published import published

SUMMARY = {'n_heads': 16, 'head_dim': 64, 'params': 12_345}
SUMMARY |= {'learning_rate': 0.003, 'speed_learning_rate': 0.03}
for name, numbers in (
  ('final_loss', (0.0015, 0.001, 0.002)),
  ('final_accuracy', (0.62, 0.5, 0.75)),
  ('steps_to_threshold', (float('inf'), 30, float('inf'))),
):
  for part, number in zip(('median', 'min', 'max'), numbers, strict=True):
    SUMMARY[f'{name}_{part}'] = number


def summary() -> head_counts.Summary:
  best = statistics.Best({'learning_rate': 0.01}, (1.0,), '')
  return head_counts.Summary(16, best, best, 3.5, SUMMARY)


def shown(width: int, *parts) -> str:
  """What `show` prints on so many columns."""
  out = io.StringIO()
  columns = mock.patch.dict(os.environ, {'COLUMNS': str(width)})
  with columns, contextlib.redirect_stdout(out):
    printing.show(*parts)
  return out.getvalue()


def tables() -> dict:
  """A table of every experiment, with long numbers."""
  names = 'previous_token duplicate_token prefix_matching copying_score '
  names += 'first_token separators entropy mean_distance ablation_zero '
  scores = dict.fromkeys([*names.split(), 'ablation_mean'], -0.49)
  head = {'layer': 11, 'head': 15, 'name': 'previous token'} | scores
  demand = Demand(params=70e9, seq_len=131_072, hardware=hardware('h100'))
  llama = published('llama3-70b')
  ratio = {'ratio': 12.34, 'ratio_low': 10.11, 'ratio_high': 14.25}
  line = {'variant': 'MHA, heads of 16', 'rotary': 4, 'params': 143_808}
  line |= {'cache_elements': 256, 'cache_share': 0.0625, 'bits_median': 3.136}
  line |= {'difference_mean': -0.0921, 'difference_low': -0.1234}
  line |= {'difference_high': 0.0621, 'perplexity': 8.79, 'learning_rate': 0.1}
  pruned = {'heads': 128, 'heads_kept': 64, 'loss': 3.136, 'error': 1.5e-6}
  pruned |= {'loss_pruned': 5.123, 'params': 45_248, 'params_pruned': 28_864}
  pruned |= {'cache_bytes': 65_536, 'cache_bytes_pruned': 32_768} | ratio
  curves = [
    {'gone': 12, 'order': name, 'loss': loss}
    for name in ('importance', 'oracle', 'random')
    for loss in (1.391, 5.301)
  ]
  times = {'model': 'MHA', 'predicted': 0.1234, 'measured': 0.2345}
  times |= {'ratio': 1.901, 'bound': 'weights'}
  speed = {'contender': 'a sum over the cache', 'seconds': 1.2345}
  return {
    'sweep': head_counts.table([summary()] * 2, 0.05),
    'mla_rank': latent_ranks.table([line]),
    'probe': probe_heads._table([head], 'induction task, mha, 2 layers'),
    'curves': prune_heads._curve_table(curves),
    'pruned': prune_heads._pruned_table([pruned]),
    'check_costs': check_costs._table([times]),
    'benchmark': benchmark.case_table([speed | ratio | {'peak_bytes': 2**40}]),
    'model': model_costs.table(
      llama, demand, model_costs.costs_of(llama, demand)
    ),
  }


class ShowTest(parameterized.TestCase):
  @parameterized.parameters(40, 60, 80, 110)
  def test_numbers_are_whole(self, width):
    """On any terminal words may fold, but no number is cut or lost."""
    for name, table in tables().items():
      cells = [str(x) for column in table.columns for x in column.cells]
      wanted = sorted(' '.join(cells).split())
      text = shown(width, table)
      with self.subTest(name):
        self.assertNotIn('…', text)
        self.assertContainsSubset(wanted, text.split())
        # As often, too: nothing stands for another.
        for word in set(wanted):
          found = text.split().count(word)
          self.assertGreaterEqual(found, wanted.count(word), word)
        self.assertLessEqual(max(map(len, text.splitlines())), width)

  def test_a_row_becomes_a_block(self):
    """Where columns do not fit: their names, and the cells in one line."""
    table = tables()['sweep']
    text = shown(40, table)
    for line in (
      r'n_heads +16',
      r'params +12,345',
      r'accuracy +0\.62 \(0\.50-0\.75\)',
      r'steps to loss < +never \(30-never\)',
    ):
      self.assertRegex(text, rf'(?m)^ *{line} *$')
    self.assertLess(len(re.findall('n_heads', shown(80, table))), 2)

  def test_order(self):
    """Texts as they are, however long, in their places."""
    long = 'x ' * 100
    text = shown(40, long, tables()['check_costs'], 'the end')
    self.assertStartsWith(text, f'{long}\n')
    self.assertEndsWith(text, 'the end\n')

  def test_columns(self):
    """COLUMNS counts in a file too; without it a file is wide."""
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()):
      os.environ.pop('COLUMNS', None)
      self.assertEqual(printing.columns(), printing.WIDE)
      os.environ['COLUMNS'] = '55'
      self.assertEqual((printing.columns(), printing.columns(50)), (55, 50))


class QuietTest(parameterized.TestCase):
  def test_nobody_reads(self):
    """Writing and flushing go on in silence, and only there."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = printing.Quiet(os.fdopen(writer, 'w'))
    for _ in range(3):
      self.assertEqual(stream.write('x' * 10_000), 10_000)
      stream.writelines(['a\n', 'b\n'])
      stream.flush()
    stream.close()
    with tempfile.TemporaryFile('w+') as file:
      stream = printing.Quiet(file)
      stream.write('heard')
      stream.flush()
      file.seek(0)
      self.assertEqual(file.read(), 'heard')

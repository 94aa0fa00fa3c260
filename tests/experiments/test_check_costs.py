"""experiments.check_costs: predicted beside measured, for three decoders."""

import csv
import pathlib
import tempfile

import scripts
from absl.testing import parameterized

from experiments import check_costs
from mha_jax.analysis import hardware

TINY = '--config=configs/check_costs.py:tiny'


class CheckCostsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def test_output(self):
    result = scripts.call(check_costs, TINY, f'--workdir={self.workdir}')
    self.assertEqual(result.code, 0, result)
    self.assertIn('32 tokens, batch 1, float32', result.out)
    text = (self.workdir / 'results.csv').read_text()
    rows = list(csv.DictReader(text.splitlines()))
    self.assertEqual([x['model'] for x in rows], ['MHA', 'GQA', 'MLA'])
    for row in rows:
      ratio = float(row['measured']) / float(row['predicted'])
      self.assertAlmostEqual(float(row['ratio']) / ratio, 1)
      self.assertIn(row['bound'], ('weights', 'compute', 'cache', 'attention'))

  def test_errors(self):
    result = scripts.call(check_costs, TINY, '--config.length=0')
    self.assertEqual(result.code, 2, result)
    self.assertIn('--config.length=0 must be a positive', result.err)

  def test_measured_hardware(self):
    """Some FLOP/s and bytes/s, more than none."""
    cpu = hardware.measure_cpu()
    self.assertGreater(cpu.flops, 1e8)
    self.assertGreater(cpu.bandwidth, 1e8)

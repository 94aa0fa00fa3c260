"""experiments.check_costs: predicted beside measured, for three decoders."""

import csv
import pathlib
import tempfile
from unittest import mock

import scripts
from absl.testing import parameterized

from experiments import check_costs
from experiments.harness import config_files
from mha_jax.analysis.costs import hardware

TINY = '--config=configs/check_costs.py:tiny'


class CheckCostsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def test_output(self):
    """MHA's prediction by hand: what a step reads, where reading binds."""
    cpu = hardware.Hardware('cpu', 1e15, 1e9, 1e10)
    with mock.patch.object(hardware, 'measure_cpu', return_value=cpu):
      result = scripts.call(check_costs, TINY, f'--workdir={self.workdir}')
    self.assertEqual(result.code, 0, result)
    self.assertIn('32 tokens, batch 1, float32', result.out)
    text = (self.workdir / 'results.csv').read_text()
    rows = list(csv.DictReader(text.splitlines()))
    self.assertEqual([x['model'] for x in rows], ['MHA', 'GQA', 'MLA'])
    self.assertEqual(result.files, scripts.names(self.workdir))
    for row in rows:
      self.assertEqual((row['num_heads'], row['length']), ('4', '32'))
      ratio = float(row['measured']) / float(row['predicted'])
      self.assertAlmostEqual(float(row['ratio']) / ratio, 1)
      self.assertEqual(row['bound'], 'weights')
    d, tokens, vocab = 16, 33, 1024
    weights = 4 * d * d + 8 * d * d + 3 * d + vocab * d
    read = 4 * (weights + 2 * tokens * d)
    self.assertAlmostEqual(float(rows[0]['predicted']) / (read / 1e9), 1)

  def test_one_head(self):
    """Has no group to share: GQA would be MHA again."""
    config = config_files.load_config('configs/check_costs.py:tiny')
    config.num_heads = 1
    self.assertEqual([*check_costs.models_of(config)], ['MHA', 'MLA'])

  def test_config_of_another(self):
    config = '--config=configs/configure_heads.py'
    result = scripts.call(check_costs, config, f'--workdir={self.workdir}')
    self.assertEqual(result.code, 2, result)
    self.assertIn("--config has no 'd_model'; give a config", result.err)

  def test_errors(self):
    result = scripts.call(check_costs, TINY, '--config.length=0')
    self.assertEqual(result.code, 2, result)
    self.assertIn('--config.length=0 must be a positive', result.err)

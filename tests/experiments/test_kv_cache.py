"""experiments.kv_cache: exercise 2, measured and by formula."""

import csv
import json
import pathlib
import tempfile

import scripts
from absl.testing import parameterized

from configs import kv_cache as configs
from experiments import kv_cache


class KvCacheTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def call(self, variant: str, *more: str) -> scripts.Result:
    config = f'--config=configs/kv_cache.py:{variant}'
    return scripts.call(kv_cache, config, f'--workdir={self.workdir}', *more)

  def rows(self) -> dict[str, dict]:
    lines = (self.workdir / 'results.jsonl').read_text().splitlines()
    return {row['variant']: row for row in map(json.loads, lines)}

  def test_measured(self):
    """Arrays as large as the formula says, a speed, a table and a figure."""
    result = self.call('tiny')
    self.assertEqual(result.code, 0, result)
    rows = self.rows()
    self.assertEqual(list(rows), ['MHA', 'GQA n=2', 'MQA', 'MLA r=8'])
    for name, elements in (('MHA', 128), ('GQA n=2', 32), ('MLA r=8', 12)):
      self.assertEqual(rows[name]['elements_per_token'], elements)
      self.assertEqual(rows[name]['cache_bytes'], 16 * 2 * elements)
      self.assertEqual(rows[name]['allocated_bytes'], 16 * 2 * elements)
      self.assertGreater(rows[name]['tokens_per_s'], 0)
      self.assertIn(name, result.out)
    self.assertEqual(rows['MQA']['params_drop'], 0.4375)
    self.assertEqual(rows['MQA']['cache_share'], 0.125)
    png = (self.workdir / 'kv_cache.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')
    self.assertEqual(result.files, scripts.names(self.workdir))
    text = (self.workdir / 'results.csv').read_text()
    lines = {x['variant']: x for x in csv.DictReader(text.splitlines())}
    self.assertEqual(lines['MQA']['cache_bytes'], str(16 * 2 * 16))
    for line in lines.values():  # of what it is the cache
      self.assertEqual((line['d_model'], line['length']), ('64', '16'))
      self.assertEqual(line['dtype'], 'bfloat16')

  @parameterized.parameters(
    ('deepseek_v2', 'MLA r=512', 34_560, None),
    ('deepseek_v3', 'MLA r=512', 35_136, None),
    ('deepseek_v2_lite', 'MLA r=512', 27 * 576, None),
    ('llama3_70b', 'GQA n=8', 80 * 2 * 8 * 128, 1 / 8),
    ('llama3_8b', 'GQA n=8', 32 * 2 * 8 * 128, 1 / 4),
    ('mistral_7b', 'GQA n=8', 32 * 2 * 8 * 128, 1 / 4),
    ('gpt2', 'MHA', 12 * 2 * 768, 1),
  )
  def test_published(self, variant, name, elements, share):
    """Formula rows of published shapes, without an array."""
    result = self.call(variant)
    self.assertEqual(result.code, 0, result)
    row = self.rows()[name]
    self.assertEqual(row['elements_per_token'], elements)
    self.assertNotIn('allocated_bytes', row)
    if share is not None:
      self.assertEqual(row['cache_share'], share)

  def test_length(self):
    """The flag --length sets the number of tokens."""
    self.call('tiny', '--length=24', '--config.decode_steps=0')
    self.assertEqual(self.rows()['MQA']['cache_bytes'], 24 * 2 * 16)

  def test_every_published_shape(self):
    """Each is tested above."""
    self.assertLen(configs.PUBLISHED, 7)

  @parameterized.parameters(
    ('--config.kv_heads=3', 'num_kv_heads=3 must divide num_heads=8'),
    ('--config.kv_heads=x', '--config.kv_heads=x must be positive integers'),
    ('--config.dtype=int8', "--config.dtype='int8' must be in"),
    ('--config.decode_steps=99', '--config.decode_steps=99 must be an integer'),
    ('--config.length=0', '--config.length=0 must be a positive integer'),
    ('--length=-1', '--length=-1 must be a positive integer'),
    ('--length=3', '--config.decode_steps=4 must be an integer and lie in'),
  )
  def test_bad_input(self, flag, message):
    """One line with the flag, the value and the remedy; nothing is written."""
    result = self.call('tiny', flag)
    self.assertEqual(result.code, 2)
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn(message, result.err)
    self.assertFalse(self.workdir.exists())

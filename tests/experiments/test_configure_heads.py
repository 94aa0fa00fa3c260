"""The configurator's script: what it prints, writes, and refuses."""

import json
import pathlib
import struct
import tempfile
from unittest import mock

import jax
import scripts
from absl.testing import parameterized

from experiments import configure_heads
from mha_jax.analysis.costs.hardware import Hardware

CONFIG = '--config=configs/configure_heads.py'


class ConfigureHeadsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    self.workdir = self.folder / 'run'

  def call(self, *arguments: str, config: str = CONFIG) -> scripts.Result:
    return scripts.call(
      configure_heads, config, f'--workdir={self.workdir}', *arguments
    )

  def test_report(self):
    """All parts, on 80 columns; a figure of 900 pixels or more."""
    result = self.call(config=f'{CONFIG}:tiny')
    self.assertEqual(result.code, 0, result)
    for part in (
      'Why:',
      'Strategies of this width and depth',
      'Closest published models:\n- gpt2 (124 M) keeps',
      'When memory is short, all else kept:',
      'When latency is short, all else kept:',
      'Rules:\n- lanes dropped',
      'What this does not know:\n- Quality is not predicted by formula',
      'To paste:\n\nimport jax',
    ):
      self.assertIn(part, result.out)
    self.assertEqual(result.files, scripts.names(self.workdir))
    lines = result.out.splitlines()
    self.assertLessEqual(max(map(len, lines[:-1])), 80)  # then the folder
    png = (self.workdir / 'configure_heads.png').read_bytes()
    width, _ = struct.unpack('>II', png[16:24])
    self.assertGreaterEqual(width, 900)

  def test_json(self):
    """Nothing but JSON, the file's; what is to be pasted has the parameters."""
    result = self.call('--json', config=f'{CONFIG}:tiny')
    self.assertEqual(result.code, 0, result)
    found = json.loads(result.out)
    written = json.loads((self.workdir / 'results.json').read_text())
    self.assertEqual(found, written)
    best = found['recommendation']
    self.assertIn(best, found['strategies'])
    self.assertEqual(
      [x['recommended'] for x in found['strategies']].count(1), 1
    )
    self.assertBetween(best['params'] / 10e6, 0.97, 1.03)
    self.assertAlmostEqual(
      best['step_seconds'] * best['tokens_per_second'],
      found['demand']['batch'],
    )
    namespace = {}
    exec(found['python'], namespace)
    leaves = jax.tree.leaves(namespace['variables'])
    d, width = best['d_model'], best['mlp_width']
    rest = 3 * d * width + 2 * d
    layers = best['num_layers'] * (sum(x.size for x in leaves) + rest)
    self.assertEqual(layers + 256 * d * (2 - best['tied']) + d, best['params'])

  def test_flags_override_the_config(self):
    result = self.call(
      '--json',
      '--params=350M',
      '--seq_len=2k',
      '--hardware=TPU v5e',
      '--devices=2',
      '--batch=3',
      '--kv_dtype=fp8',
      '--latency_ms=50',
      '--objective=latency',
    )
    found = json.loads(result.out)['demand']
    self.assertEqual(
      {name: x for name, x in found.items() if name != 'hardware'},
      {
        'params': 350e6,
        'seq_len': 2048,
        'devices': 2,
        'batch': 3,
        'latency_ms': 50.0,
        'param_dtype': 'bf16',
        'kv_dtype': 'fp8',
        'split': 'heads',
        'objective': 'latency',
        'vocab_size': 128_256,
        'head_dim': None,
      },
    )
    self.assertEqual(found['hardware']['name'], 'v5e')

  def test_own_hardware(self):
    path = self.folder / 'my.json'
    values = {'name': 'mine', 'flops': 1e14, 'bandwidth': 1e12, 'memory': 5e10}
    path.write_text(json.dumps(values))
    result = self.call(f'--hardware={path}', config=f'{CONFIG}:tiny')
    self.assertEqual(result.code, 0, result)
    self.assertIn('1 x mine', result.out)

  def test_cpu(self):
    """Measured, as the table of hardware does it."""
    machine = Hardware('cpu', 1e11, 2e10, 1e10)
    with mock.patch(
      'mha_jax.analysis.costs.hardware.measure_cpu', return_value=machine
    ):
      result = self.call('--hardware=cpu', config=f'{CONFIG}:tiny')
    self.assertEqual(result.code, 0, result)
    self.assertIn('1 x cpu', result.out)

  def test_model(self):
    """Llama-3 70B in bf16: 160 KiB a token in int8, so 320."""
    result = self.call('--model=Llama-3 70B', '--devices=8', '--seq_len=8k')
    self.assertEqual(result.code, 0, result)
    for part in ('70,553,706,496', '320 KiB', 'num_kv_heads 8', '17.6 GB'):
      self.assertIn(part, result.out)
    self.assertRegex(result.out, r'fits +yes')
    alone = f'--workdir={self.folder}/alone'
    result = self.call('--model=llama3-70b', '--json', alone)
    found = json.loads(result.out)
    self.assertEqual(found['params']['total'], 70_553_706_496)
    self.assertEqual(found['max_batch'], 0)
    self.assertEmpty([*self.folder.rglob('*.png')])
    result = self.call('--model=llama3-70b', alone)
    self.assertRegex(result.out, r'fits +no: 240\.\d GB too many')

  def test_model_of_layers_that_differ(self):
    """Local and global layers of Gemma 3 by themselves."""
    result = self.call('--model=gemma3-12b', '--json')
    found = json.loads(result.out)
    local, whole = found['layers']
    self.assertEqual((local['count'], whole['count']), (40, 8))
    self.assertEqual(
      whole['cache_bytes_per_sequence'], 2 * 2 * 8 * 256 * 32_768
    )
    self.assertEqual(
      whole['cache_bytes_per_sequence'] / local['cache_bytes_per_sequence'], 32
    )
    each = sum(
      x['count'] * x['cache_bytes_per_sequence'] for x in (local, whole)
    )
    self.assertEqual(each, found['cache_bytes_per_sequence'])
    head = 262_208 * 3840
    for name, outside in (
      ('step_seconds', 2 * head / 3.35e12),
      ('train_flops_per_token', 6 * head),
      ('decode_flops_per_token', 2 * head),
    ):
      each = sum(x['count'] * x[name] for x in (local, whole)) + outside
      self.assertAlmostEqual(each / found[name], 1, places=3)

  def test_encoder(self):
    """No cache and no decoding; longer than it was made for is said."""
    result = self.call('--model=bert-base')
    self.assertEqual(result.code, 0, result)
    self.assertIn('32,768 tokens are beyond its 512', result.out)
    self.assertIn('no cache, no decoding', result.out)
    self.assertNotIn('decode step', result.out)

  @parameterized.parameters(
    ('1.3B', 1000, 1.3e9),
    ('350M', 1000, 350e6),
    ('1e9', 1000, 1e9),
    ('32k', 1024, 32_768),
    ('32768', 1024, 32_768),
    ('128K', 1024, 131_072),
  )
  def test_sizes(self, text, thousand, size):
    self.assertEqual(configure_heads.parse_size('x', text, thousand), size)

  @parameterized.parameters(
    (['--params=-3'], '--params=-3 must be a positive number, such as 1.3B'),
    (['--params=0'], '--params=0 must be a positive number'),
    (['--params='], '--params= is empty; give it a value'),
    (['--params=1e99'], 'params=1e+99 must lie in'),
    (['--seq_len=abc'], '--seq_len=abc must be a positive number, such as 32k'),
    (['--seq_len=' + '9' * 400], 'must be a positive number, such as 32k'),
    (['--seq_len=9G'], 'seq_len=9663676416 must be a positive integer'),
    (['--hardware=h1000'], "hardware='h1000' is unknown; nearest: h100"),
    (['--hardware=no.json'], 'no.json cannot be read'),
    (['--batch=0'], 'batch=0 must be a positive integer'),
    (['--devices=x'], 'flag --devices=x: invalid literal for int() with'),
    (['--latency_ms=-1'], 'latency_ms=-1.0 must lie in'),
    (['--objective=fun'], '<quality|throughput|latency>'),
    (['--kv_dtype=fp7'], '<fp32|bf16|fp16|fp8|int8|int4>'),
    (['--head_dim=100'], 'head_dim=100 must be in (64,'),
    (['--model=llama3-7b'], "model='llama3-7b' is unknown; nearest"),
    (
      ['--params=13B', '--hardware=rtx4090'],
      '4.4 GB too many; take devices=2',
    ),
    (['--params=1B', '--model=gpt2'], 'give one of the two'),
    (['--config.params=1B', '--model=gpt2'], 'give one of the two'),
    (['--head_dim=64', '--config.model=gpt2'], 'give one of the two'),
    (['--model='], '--model= is empty'),
    (['--workdir='], '--workdir= is empty'),
    (['--workdir=/dev/null'], '--workdir=/dev/null: /dev/null is a file'),
    (['--split=rows'], '<heads|batch>'),
    (['--latency_ms=0.1'], 'against latency_ms=0.1, 1.24 ms too many'),
  )
  def test_nonsense(self, arguments, message):
    """One clear line and exit code 2; nothing is written."""
    result = self.call(*arguments)
    self.assertEqual(result.code, 2, result)
    self.assertEqual(result.out, '')
    self.assertIn(message, result.err)
    self.assertEqual(result.err.count('\n'), 1)
    self.assertStartsWith(result.err, 'error: ')
    self.assertFalse(self.workdir.exists())

  def test_config_of_another(self):
    result = self.call(config='--config=configs/check_costs.py')
    self.assertEqual(result.code, 2, result)
    self.assertIn("--config has no 'params'; give a config", result.err)
    self.assertFalse(self.workdir.exists())

  def test_unknown_variant(self):
    result = self.call(config=f'{CONFIG}:huge')
    self.assertEqual(result.code, 2, result)
    self.assertIn("config variant ['huge'] is unknown", result.err)

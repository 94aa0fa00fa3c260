"""The table against its sources, files of users, and this machine measured."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized

from mha_jax.analysis.costs import hardware as module
from mha_jax.analysis.costs.hardware import (
  HARDWARE,
  Hardware,
  from_json,
  hardware,
  measure_cpu,
)

OWN = {'name': 'own', 'flops': 835e12, 'bandwidth': 3.9e12, 'memory': 94e9}


class TableTest(parameterized.TestCase):
  @parameterized.parameters(
    # TFLOP/s in dense bf16, TB/s, GB; the makers' datasheets, and for TPUs
    # jax-ml.github.io/scaling-book/tpus.
    ('h100', 989, 3.35, 80),
    ('h200', 989, 4.8, 141),
    ('a100', 312, 2.039, 80),
    ('rtx4090', 165.2, 1.008, 24),
    ('v5e', 197, 0.81, 16),
    ('v5p', 459, 2.8, 96),
    ('v6e', 920, 1.6, 32),
  )
  def test_table(self, name, flops, bandwidth, memory):
    row = HARDWARE[name]
    self.assertEqual(row.name, name)
    self.assertAlmostEqual(row.flops / 1e12, flops)
    self.assertAlmostEqual(row.bandwidth / 1e12, bandwidth)
    self.assertAlmostEqual(row.memory / 1e9, memory)
    self.assertNotEmpty(row.source)

  def test_ridge(self):
    """The scaling book, chapter 1: about 240 FLOPs a byte for TPU v5e."""
    self.assertAlmostEqual(HARDWARE['v5e'].ridge, 243, delta=1)

  @parameterized.parameters(
    ('h100', 'h100'),
    ('NVIDIA H100', 'h100'),
    ('TPU-v5e', 'v5e'),
    ('tpu_v6e', 'v6e'),
    ('RTX 4090', 'rtx4090'),
  )
  def test_spellings(self, text, name):
    self.assertIs(hardware(text), HARDWARE[name])

  @parameterized.parameters(
    ('h1000', "hardware='h1000' is unknown; nearest: h100"),
    ('tpu v4', 'nearest: .*v5'),
    ('abacus', 'nearest: h100, .*, v6e, cpu; or give a file'),
    ('', 'nearest: h100, .*, cpu'),
  )
  def test_unknown(self, text, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      hardware(text)
    self.assertNotIn('\n', str(caught.exception))

  @parameterized.parameters(
    ('flops', 989, 'flops=989 .* FLOP/s, at least 1e'),
    ('bandwidth', 3.35, 'bytes/s'),
    ('memory', 80, 'memory=80'),
    ('memory', -1, 'memory=-1'),
    ('flops', True, 'flops=True'),
    ('flops', '1e12', "flops='1e12'"),
    ('flops', float('nan'), 'flops=nan'),
    ('flops', float('inf'), 'flops=inf'),
  )
  def test_numbers(self, name, value, message):
    """In base units: 989 is no machine's FLOP/s but TFLOP/s."""
    with self.assertRaisesRegex(ValueError, message):
      Hardware(**OWN | {name: value})


class FileTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / 'my.json'

  def test_file(self):
    self.path.write_text(json.dumps(OWN))
    got = from_json(self.path)
    self.assertEqual(got, Hardware(**OWN))
    self.assertEqual(hardware(str(self.path)), got)
    self.path.write_text(json.dumps(OWN | {'source': 'a datasheet'}))
    self.assertEqual(
      from_json(self.path), dataclasses.replace(got, source='a datasheet')
    )

  @parameterized.parameters(
    ('{"name": ', 'my.json is not JSON: .*line 1'),
    (b'\xff\xfe\x00', 'my.json is not JSON'),
    ('[1, 2]', 'my.json holds a list; it must hold an object with name, flops'),
    (
      json.dumps(OWN | {'tflops': 3}),
      "has 'tflops'; the names are name, flops",
    ),
    (
      json.dumps({x: OWN[x] for x in OWN if x != 'bandwidth'}),
      "lacks 'bandwidth', in bytes/s",
    ),
    (json.dumps({}), "lacks 'name'$"),
    (json.dumps(OWN | {'name': 3}), 'name=3 must be a string'),
    (json.dumps(OWN | {'source': None}), 'source=None must be a string'),
    (json.dumps(OWN | {'flops': '1T'}), "my.json: flops='1T' of .*FLOP/s"),
    (json.dumps(OWN | {'memory': 94}), 'my.json: memory=94 of .*bytes'),
    (json.dumps(OWN | {'flops': float('nan')}), 'flops=nan'),
    (json.dumps(OWN | {'memory': 10**400}), 'memory=1000.* at most 1e'),
    (
      json.dumps(OWN | {'name': '$x_{$'}),
      'of hardware must be 1 to 60 letters',
    ),
    (json.dumps(OWN | {'name': '[/x]'}), 'of hardware must be 1 to 60 letters'),
    (json.dumps(OWN | {'name': ''}), "name='' of hardware must be"),
    (json.dumps(OWN | {'name': chr(0xD800)}), 'of hardware must be 1 to 60'),
    (
      json.dumps(OWN | {'source': 'a' + chr(10)}),
      'source=.* must be printable',
    ),
    ('[' * 100_000, 'my.json is not JSON'),
  )
  def test_bad_files(self, text, message):
    """One line each, with the file's name."""
    text = text if isinstance(text, bytes) else text.encode()
    self.path.write_bytes(text)
    with self.assertRaisesRegex(ValueError, message) as caught:
      from_json(self.path)
    self.assertNotIn('\n', str(caught.exception))

  def test_no_file(self):
    with self.assertRaisesRegex(ValueError, 'my.json cannot be read: No such'):
      hardware(str(self.path))


class CpuTest(parameterized.TestCase):
  def test_measured(self):
    """Numbers that a machine of this decade can have."""
    cpu = hardware('cpu')
    self.assertBetween(cpu.flops, 1e9, 1e13)
    self.assertBetween(cpu.bandwidth, 3e8, 2e12)
    total = pathlib.Path('/proc/meminfo')
    if total.exists():
      kib = int(total.read_text().split()[1])
      self.assertAlmostEqual(cpu.memory / (1024 * kib), 1, delta=0.01)

  def test_from_times(self):
    """FLOP/s of a product of 2 n^3 FLOPs, bytes/s of the matrix alone."""
    sizes = []

    def seconds(function, *args):
      del function
      sizes.append([x.shape for x in args])
      return 0.5 ** len(sizes)

    with mock.patch.object(module, '_best_seconds', seconds):
      cpu = measure_cpu()
    (left, right), (row, matrix) = sizes
    self.assertEqual(left, right)
    self.assertEqual(row, (1, matrix[0]))
    self.assertEqual(cpu.flops, 2 * left[0] ** 3 / 0.5)
    self.assertEqual(cpu.bandwidth, 4 * matrix[0] * matrix[1] / 0.25)

  def test_best_seconds(self):
    """The least of three calls or more, the compilation not among them."""
    clock, calls = [0.0, 3.0, 10.0, 12.0, 20.0, 25.0], []
    with (
      mock.patch.object(module.time, 'perf_counter', side_effect=clock),
      mock.patch.object(module.jax, 'jit', lambda function: function),
    ):
      self.assertEqual(module._best_seconds(calls.append, 1.0), 2.0)
    self.assertLen(calls, 4)

"""experiments.benchmark: every suite runs, resumes, and refuses nonsense."""

import csv
import json
import pathlib
import tempfile
import time
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import scripts
from absl.testing import parameterized
from flax import nnx

from configs import benchmark as configs
from experiments import benchmark
from experiments.figures import speed
from experiments.harness import timing
from experiments.suites import case, decoder
from mha_jax.decoder import DecoderLM, decoder_config


class BenchmarkTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'run'

  def call(self, *more: str) -> scripts.Result:
    config = '--config=configs/benchmark.py:tiny'
    return scripts.call(benchmark, config, f'--workdir={self.workdir}', *more)

  def rows(self) -> list[dict]:
    lines = (self.workdir / 'results.jsonl').read_text().splitlines()
    return list(map(json.loads, lines))

  def test_finished_cases_are_kept(self):
    """Ours come first, then peers; a second call measures nothing."""
    result = self.call('--config.suites=decode', '--config.memory=true')
    self.assertEqual(result.code, 0, result)
    first = self.rows()
    self.assertLen(first, 2)
    names = [[x['contender'] for x in row['rows']] for row in first]
    self.assertEqual(names[0], ['mha_jax', 'flax', 'a sum over the cache'])
    self.assertNotIn('peak_bytes', first[0]['rows'][0])
    self.assertEqual(names[1][:2], ['absorbed', 'expanded'])
    for row in first:
      self.assertEqual(row['rows'][0]['ratio'], 1)
      self.assertGreater(row['rows'][1]['seconds'], 0)
    self.assertIn('absorbed', result.out)
    self.assertEqual(result.files, scripts.names(self.workdir))
    table = (self.workdir / 'results.csv').read_text()
    self.assertEqual(table.count('\n'), 1 + 3 + 3)
    header, first_line, *_ = csv.reader(table.splitlines())
    line = dict(zip(header, first_line, strict=True))
    self.assertEqual((line['batch_size'], line['head_dim']), ('1', '4'))
    again = self.call('--config.suites=decode', '--config.memory=true')
    self.assertEqual(again.code, 0, again)
    self.assertEqual(self.rows(), first)

  @parameterized.parameters(
    ({'key': 3}, False),
    ({'setting': None}, False),
    ({'rows': []}, False),
    ({'rows': {}}, False),
    ({'rows': [None]}, False),
    ({'rows': [{'contender': 'x', 'seconds': 0.5}]}, False),
    ({}, True),
  )
  def test_wrong_values(self, changes, whole):
    """Such a case is measured again."""
    numbers = dict.fromkeys(benchmark.NUMBERS, 0.5)
    row = {'key': 'a', 'suite': 's', 'task': 't', 'setting': {'t': 3}}
    row['rows'] = [numbers | {'contender': 'x', 'peak_bytes': None}]
    self.assertEqual(benchmark._is_whole(row | changes), whole)

  def test_decoders_are_the_same(self):
    """The peers' decoders have the parameters of ours, with and without MLP."""
    tokens = jnp.zeros((1, 7), jnp.int32)
    for f in (0, 11):
      model = decoder_config(13, 7, 6, num_layers=2, num_heads=3, mlp_dim=f)
      peer = nnx.eval_shape(
        lambda model=model: decoder.NnxDecoder(model, nnx.Rngs(0))
      )
      ours, linen = (
        jax.eval_shape(x.init, jax.random.key(0), tokens)
        for x in (
          DecoderLM(model),
          decoder.LinenDecoder(model, nn.dot_product_attention),
        )
      )
      self.assertEqual(self.sizes(linen), self.sizes(ours))
      self.assertEqual(self.sizes(nnx.state(peer, nnx.Param)), self.sizes(ours))

  def sizes(self, params: Any) -> list[int]:
    return sorted(x.size for x in jax.tree.leaves(params))

  def test_attention(self):
    """Every task, and its memory; no figure over one length."""
    prepared = []

    def peak_bytes(prepare, arguments):
      if not prepared:  # once as the other process would
        prepare(*arguments)()
      prepared.append(arguments)
      return 2**20

    with mock.patch.object(timing, 'peak_bytes', peak_bytes):
      result = self.call(
        '--config.suites=attention',
        '--config.lengths=16',
        '--config.window=16',
        '--config.memory=true',
      )
    self.assertEqual(result.code, 0, result)
    tasks = [(row['task'], row['setting']['t']) for row in self.rows()]
    self.assertContainsSubset(
      [
        ('causal forward', 16),
        ('causal forward and backward', 16),
      ],
      tasks,
    )
    peaks = [x['peak_bytes'] for row in self.rows() for x in row['rows']]
    self.assertEqual(peaks, [2**20] * len(prepared))
    self.assertFalse((self.workdir / 'benchmark.png').exists())

  @parameterized.parameters('module', 'train')
  def test_contenders(self, suite):
    """Flax always, PyTorch where it is installed; CI runs them all."""
    config = configs.get_config('tiny')
    for each in benchmark.suite_cases(suite, config):
      self.assertIn('flax', ' '.join(each.contenders))
      self.assertEqual(
        case.HAS_TORCH, any('torch' in name for name in each.contenders)
      )

  @parameterized.parameters(
    ('--config.suites=speed', "--config.suites has ['speed']; the suites are"),
    ('--config.rounds=0', '--config.rounds=0 must be a positive integer'),
    ('--config.lengths=a', '--config.lengths=a must be positive integers'),
    ('--config.num_heads=0', '--config.num_heads=0 must be a positive'),
    ('--config.num_heads=6', '--config.num_heads=6 must be a multiple of 4'),
  )
  def test_bad_input(self, flag, message):
    """One line with the flag, the value and the remedy; nothing is written."""
    result = self.call(flag)
    self.assertEqual(result.code, 2)
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn(message, result.err)
    self.assertFalse(self.workdir.exists())


def prepare_a_large_array() -> case.Run:
  """A run that needs 64 MiB, for a process of its own."""
  return lambda: bytearray(64 * 2**20)


class TimingTest(parameterized.TestCase):
  def test_interleaved(self):
    """Round after round in random orders, the warm-up not counted."""
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in 'abc'}
    seconds = timing.interleaved(runs, rounds=7)
    rounds = [''.join(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    self.assertLen(rounds, 2 + 7)
    self.assertEqual({''.join(sorted(x)) for x in rounds}, {'abc'})
    self.assertGreater(len(set(rounds)), 3)
    self.assertEqual([len(x) for x in seconds.values()], [7, 7, 7])

  def test_seconds(self):
    """What is measured is the run."""
    runs = {'slow': lambda: time.sleep(0.05), 'fast': lambda: None}
    seconds = timing.interleaved(runs, rounds=1)
    self.assertGreaterEqual(seconds['slow'][0], 0.05)
    self.assertLess(seconds['fast'][0], seconds['slow'][0])

  def test_stop(self):
    """A stop between runs leaves no half-measured case."""
    self.assertIsNone(
      timing.interleaved({'a': lambda: None}, 3, stop=lambda: True)
    )

  def test_ratio(self):
    """Of medians; the quartiles are over rounds."""
    got = timing.ratio([1, 2, 1, 1], [2, 2, 4, 3])
    self.assertEqual(got, {'ratio': 2.5, 'ratio_low': 2, 'ratio_high': 3})

  def test_peak(self):
    """How far a run raises the memory of a process of its own."""
    peak = timing.peak_bytes(prepare_a_large_array, ())
    self.assertBetween(peak, 60 * 2**20, 90 * 2**20)

  def test_figure_without_memory(self):
    """Cases whose memory was not measured are drawn without it."""
    row = {'contender': 'mha_jax', 'seconds': 0.1}
    cases = [
      {
        'task': 'causal forward',
        'setting': {'t': t, 'heads': 2, 'kv_heads': 2, 'head_dim': 3},
        'rows': [row],
      }
      for t in (8, 16)
    ]
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'figure.png'
      speed.benchmark(cases, path)
      self.assertStartsWith(path.read_bytes(), b'\x89PNG\r\n')


def fail_to_prepare():
  raise KeyError('no such array')


class FailureTest(parameterized.TestCase):
  def test_it_is_raised_here(self):
    """It does not pass for a process that ran out of memory."""
    with self.assertRaisesRegex(KeyError, 'no such array'):
      timing.peak_bytes(fail_to_prepare, ())

"""What a run leaves on disk, and how it survives a crash."""

import json
import pathlib
import struct
import sys
import tempfile
from unittest import mock

import jax
from absl.testing import parameterized

from mha_jax.decoder import DecoderConfig
from mha_jax.training import record

CONFIG = {'model': {'d_model': 8, 'head_dim': None}, 'rate': 0.003}


class RecordTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'runs' / 'x'
    self.metrics = self.workdir / 'metrics.jsonl'

  def record(self, step: int = 0, **options) -> record.Recorder:
    if not self.metrics.exists():
      record.claim(self.workdir, CONFIG)
    recorder = record.Recorder(self.workdir, step, **options)
    self.addCleanup(recorder.close)
    return recorder


class FilesTest(RecordTestCase):
  def test_config(self):
    """config.json holds the config, a dataclass as nested dicts."""
    self.record()
    self.assertEqual(
      json.loads((self.workdir / 'config.json').read_text()), CONFIG
    )
    config = record.as_json({'model': {'a': (1, 2)}})
    self.assertEqual(config, {'model': {'a': [1, 2]}})
    decoder = record.as_json(DecoderConfig(vocab_size=3, max_len=5))
    self.assertEqual(decoder['max_len'], 5)
    self.assertIsNone(decoder['head_dim'])

  def test_environment(self):
    """env.json says what is needed to run it again."""
    with mock.patch.object(sys, 'orig_argv', ['/a/b/python', '-m', 'x', '--y']):
      self.record()
    env = json.loads((self.workdir / 'env.json').read_text())
    self.assertEqual(env['command'], ['python', '-m', 'x', '--y'])
    self.assertEqual(env['packages']['jax'], jax.__version__)
    self.assertContainsSubset(
      {'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy'}, env['packages']
    )
    self.assertLen(env['devices'], jax.device_count())
    self.assertEqual(
      tuple(map(int, env['python'].split('.')[:2])), sys.version_info[:2]
    )
    self.assertGreaterEqual(env['cpus'], 1)
    commit = env['git_commit']
    self.assertTrue(commit is None or len(commit) == 40)

  def test_without_git(self):
    """Where git is absent the commit is null."""
    with mock.patch.object(record.subprocess, 'run', side_effect=OSError):
      self.assertIsNone(record.environment()['git_commit'])

  def test_metrics(self):
    """One JSON line a write, on disk at once, with no times."""
    recorder = self.record()
    self.assertEqual(recorder.last, {})
    recorder.write(10, {'loss': jax.numpy.float32(0.1), 'accuracy': 1})
    text = self.metrics.read_text()
    self.assertEqual(
      text, '{"step": 10, "loss": 0.10000000149011612, "accuracy": 1.0}\n'
    )
    self.assertEqual(recorder.last, json.loads(text))
    recorder.write(20, {'loss': float('nan')})
    rows = record.read_jsonl(self.metrics)
    self.assertLen(rows, 2)
    self.assertNotEqual(rows[1]['loss'], rows[1]['loss'])


class ResumeTest(RecordTestCase):
  def lines(self, *steps: int) -> str:
    return ''.join(f'{{"step": {i}, "loss": {i / 8}}}\n' for i in steps)

  def resume(self, text: str, step: int) -> record.Recorder:
    self.workdir.mkdir(parents=True)
    self.metrics.write_text(text)
    return self.record(step)

  @parameterized.parameters(
    (0, ()), (15, (10,)), (20, (10, 20)), (30, (10, 20, 30)), (99, (10, 20, 30))
  )
  def test_lines_beyond_the_checkpoint_are_cut(self, step, kept):
    """What stays is byte for byte what was there, and writing goes on."""
    recorder = self.resume(self.lines(10, 20, 30), step)
    self.assertEqual(self.metrics.read_text(), self.lines(*kept))
    self.assertEqual(recorder.last.get('step'), kept[-1] if kept else None)
    recorder.write(100, {'loss': 12.5})
    self.assertEqual(self.metrics.read_text(), self.lines(*kept, 100))

  @parameterized.parameters(
    '{"step": 30, "lo', '{', '{"step": 30, "loss": 3.75}'
  )
  def test_a_torn_last_line_is_dropped(self, torn):
    """Also one that lacks its newline only."""
    self.resume(self.lines(10, 20) + torn, 99)
    self.assertEqual(self.metrics.read_text(), self.lines(10, 20))

  @parameterized.parameters('', '{"step": 1')
  def test_nothing_but_a_torn_line(self, text):
    """An empty file is a beginning."""
    self.resume(text, 0)
    self.assertEqual(self.metrics.read_text(), '')

  def test_another_config_is_refused(self):
    """The error names folder, fields and both values; nothing changes."""
    self.record().write(10, {'loss': 1.0})
    before = {p: p.read_bytes() for p in self.workdir.iterdir()}
    other = {'model': {'d_model': 16, 'head_dim': 4}, 'rate': 0.003, 'new': 1}
    with self.assertRaisesRegex(
      ValueError,
      r'x holds a run with another config \(model.d_model: 8 -> 16; '
      r'model.head_dim: None -> 4; new: None -> 1\); choose another --workdir',
    ):
      record.check_same_config(self.workdir, other)
    self.assertEqual(
      before, {p: p.read_bytes() for p in self.workdir.iterdir()}
    )
    record.check_same_config(self.workdir, CONFIG)

  def test_files_are_replaced_as_a_whole(self):
    """A crash in the middle of a write leaves what was there."""
    self.workdir.mkdir(parents=True)
    path = self.workdir / 'results.csv'
    record.write_text(path, 'old\n')
    with (
      mock.patch.object(pathlib.Path, 'replace', side_effect=KeyboardInterrupt),
      self.assertRaises(KeyboardInterrupt),
    ):
      record.write_text(path, 'new\n')
    self.assertEqual(path.read_text(), 'old\n')
    record.write_text(path, 'newer\n')
    self.assertEqual(path.read_text(), 'newer\n')
    self.assertLen(list(self.workdir.iterdir()), 1)


class TensorBoardTest(RecordTestCase):
  def events(self):
    """All events, file by file, read from the TFRecord framing."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted((self.workdir / 'tensorboard').iterdir()):
      data, at = path.read_bytes(), 0
      while at < len(data):
        (size,) = struct.unpack_from('<Q', data, at)
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        found.append(event)
        at += size + 16
    return found

  def test_events(self):
    """Every metric of every write is a scalar at its step."""
    recorder = self.record(tensorboard=True)
    recorder.write(10, {'loss': 0.5, 'accuracy': 0.25})
    recorder.write(20, {'loss': 0.125, 'accuracy': 1})
    recorder.close()
    scalars = [
      (event.step, value.tag, value.simple_value)
      for event in self.events()
      for value in event.summary.value
    ]
    wanted = [
      (10, 'loss', 0.5),
      (10, 'accuracy', 0.25),
      (20, 'loss', 0.125),
      (20, 'accuracy', 1.0),
    ]
    self.assertEqual(scalars, wanted)

  def test_resuming_purges_later_events(self):
    """TensorBoard is told to forget what lies beyond the checkpoint."""
    self.record(20, tensorboard=True).close()
    starts = [e.step for e in self.events() if e.session_log.status == 1]
    self.assertEqual(starts, [21])

  def test_not_asked_for(self):
    """No writer is imported and no folder made."""
    with mock.patch.dict(sys.modules, {'tensorboardX': None}):
      self.record().write(10, {'loss': 1.0})
    self.assertFalse((self.workdir / 'tensorboard').exists())

  def test_missing_writer(self):
    """The error says how to install it."""
    with (
      mock.patch.dict(sys.modules, {'tensorboardX': None}),
      self.assertRaisesRegex(ImportError, r"pip install -e '.\[tensorboard"),
    ):
      record.Recorder(self.workdir, CONFIG, tensorboard=True)


class FolderTest(RecordTestCase):
  @parameterized.parameters('junk', '{}', '[1]', '"step"', '\xff')
  def test_a_line_that_is_no_record(self, line):
    """Is named with file and number, and stays."""
    self.workdir.mkdir(parents=True)
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    self.metrics.write_text(text, encoding='latin-1')
    with self.assertRaisesRegex(record.RecordError, r'metrics.jsonl:2 is no'):
      record.read_jsonl(self.metrics, 'step')
    self.assertEqual(self.metrics.read_text(encoding='latin-1'), text)

  @parameterized.parameters('checkpoints', 'metrics.jsonl')
  def test_a_run_without_its_config(self, name):
    """Nobody knows which run it was: it is not gone on with."""
    (self.workdir / name).mkdir(parents=True)
    with self.assertRaisesRegex(record.RecordError, f'{name}.*no config.json'):
      record.claim(self.workdir, CONFIG)

  def test_a_broken_config(self):
    """Names the file."""
    self.workdir.mkdir(parents=True)
    (self.workdir / 'config.json').write_text('{"model"')
    with self.assertRaisesRegex(record.RecordError, r'config.json is no JSON'):
      record.claim(self.workdir, CONFIG)

  def test_one_process_at_a_time(self):
    """A second lock is refused; a released one can be had again."""
    with (
      record.exclusive(self.workdir),
      self.assertRaisesRegex(record.RecordError, 'in use by another'),
      record.exclusive(self.workdir),
    ):
      pass
    with record.exclusive(self.workdir):
      pass

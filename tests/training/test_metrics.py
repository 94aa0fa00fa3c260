"""metrics.jsonl: what is written, and what a run may go on from."""

import json
import pathlib
import struct
import sys
import tempfile
from unittest import mock

import jax
from absl.testing import parameterized

from mha_jax.training import metrics, record


def lines(*steps: int) -> str:
  return ''.join(f'{{"step": {i}, "loss": {i / 8}}}\n' for i in steps)


class MetricsTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder)
    self.path = self.workdir / 'metrics.jsonl'

  def record(self, *steps: int, **options) -> metrics.Recorder:
    recorder = metrics.Recorder(self.workdir, steps, **options)
    self.addCleanup(recorder.close)
    return recorder


class WriteTest(MetricsTestCase):
  def test_lines(self):
    """One JSON line a write, on disk at once, with no times."""
    recorder = self.record()
    self.assertEqual(recorder.last, {})
    recorder.write(10, {'loss': jax.numpy.float32(0.1), 'accuracy': 1})
    text = self.path.read_text()
    self.assertEqual(
      text, '{"step": 10, "loss": 0.10000000149011612, "accuracy": 1.0}\n'
    )
    self.assertEqual(recorder.last, json.loads(text))
    recorder.write(20, {'loss': float('nan')})
    rows = record.read_jsonl(self.path)
    self.assertLen(rows, 2)
    self.assertNotEqual(rows[1]['loss'], rows[1]['loss'])

  def test_no_room(self):
    """Names the file; what did not fit is not written later."""
    recorder = self.record()
    with (
      mock.patch.object(
        pathlib.Path, 'open', side_effect=OSError(28, 'No space left on device')
      ),
      self.assertRaisesRegex(
        record.RecordError, r'metrics.jsonl cannot be written \(No space left'
      ),
    ):
      recorder.write(10, {'loss': 1.0})
    recorder.write(20, {'loss': 2.5})
    self.assertEqual(self.path.read_text(), lines(20))


class ResumeTest(MetricsTestCase):
  def resume(self, text: str | None, *steps: int) -> metrics.Recorder:
    if text is not None:
      self.path.write_text(text)
    return self.record(*steps)

  @parameterized.parameters((), (10,), (10, 20), (10, 20, 30))
  def test_lines_beyond_the_checkpoint_are_cut(self, *steps):
    """What stays is byte for byte what was there, and writing goes on."""
    recorder = self.resume(lines(10, 20, 30), *steps)
    self.assertEqual(self.path.read_text(), lines(*steps))
    self.assertEqual(recorder.last.get('step'), steps[-1] if steps else None)
    recorder.write(100, {'loss': 12.5})
    self.assertEqual(self.path.read_text(), lines(*steps, 100))

  @parameterized.parameters(
    '{"step": 30, "lo', '{', lines(30)[:-1], 'x\n', '{"step": null}\n'
  )
  def test_torn_lines_beyond_it_are_cut(self, torn):
    """Also one that lacks its newline only; they are made again."""
    self.resume(lines(10, 20) + torn, 10, 20)
    self.assertEqual(self.path.read_text(), lines(10, 20))

  @parameterized.parameters(None, '', '{"step": 1')
  def test_a_beginning(self, text):
    """No file, an empty one, one torn line: nothing is missing."""
    self.resume(text)
    self.assertEqual(self.path.read_text(), '')

  @parameterized.parameters(
    (None, 'no line of step 10, 20, 30;', 0),
    ('', 'no line of step 10, 20, 30;', 0),
    (lines(10, 20), 'no line of step 30;', 20),
    (lines(10, 20) + lines(30)[:-4], 'no line of step 30;', 20),
    (lines(10, 20) + lines(30)[:-1], 'no line of step 30;', 20),
    (lines(10, 30, 40), 'no line of step 20;', 10),
    (lines(10, 20, 20, 30), 'more than one line of step 20;', 10),
    (lines(10, 20, 30, 30), 'more than one line of step 30;', 20),
    (
      lines(10, 20, 30, 40, 20),
      'more than one line of step 20; lines of other steps: 40;',
      10,
    ),
    (lines(20, 10, 30), 'lines out of order;', 0),
    (lines(10, 20, 25, 30), 'lines of other steps: 25;', 20),
    (
      lines(10) + '{"step": null, "loss": 2.5}\n' + lines(30),
      'no line of step 20; no metrics in line 2;',
      10,
    ),
    (
      lines(10) + '{"step": 20, "loss": []}\n' + lines(30),
      'no line of step 20; no metrics in line 2;',
      10,
    ),
    (
      lines(10) + '{"step": 20, "accuracy": 0.5}\n' + lines(30),
      'no line of step 20; no metrics in line 2;',
      10,
    ),
    (
      lines(10) + '{"step": 20, "loss": NaN}\n' + lines(30),
      'no line of step 20; no metrics in line 2;',
      10,
    ),
    (
      lines(10, 20) + '{"step": 30, "loss": -Infinity}\n',
      'no line of step 30;',
      20,
    ),
    (lines(10) + 'junk\n' + lines(20, 30), 'no metrics in line 2;', 10),
  )
  def test_lines_up_to_it(self, text, told, sound):
    """Missing, torn, double, unreadable: named, and the remedy is one."""
    with self.assertRaises(record.RecordError) as caught:
      self.resume(text, 10, 20, 30)
    message = str(caught.exception)
    self.assertIn(
      f'up to its checkpoint of step 30: {told} restore the file', message
    )
    self.assertIn(f'remove the checkpoints after step {sound} to', message)
    left = self.path.read_text() if self.path.exists() else None
    self.assertEqual(left, text)
    steps = [x for x in (10, 20, 30) if x <= sound]
    self.resume(None, *steps)
    self.assertEqual(self.path.read_text(), lines(*steps))

  def test_many_are_counted(self):
    with self.assertRaisesRegex(
      record.RecordError, '10, 20, 30, 40, 50 and 4 '
    ):
      self.resume('', *range(10, 100, 10))


class TensorBoardTest(MetricsTestCase):
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
    self.path.write_text(lines(10, 20))
    self.record(10, 20, tensorboard=True).close()
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
      self.record(tensorboard=True)

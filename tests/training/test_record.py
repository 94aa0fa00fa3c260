"""What a run leaves on disk, and how it survives a crash."""

import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized

from mha_jax.decoder import decoder_config
from mha_jax.training import record

CONFIG = {'model': {'d_model': 8, 'head_dim': None}, 'rate': 0.003}


class RecordTestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'runs' / 'x'


class FilesTest(RecordTestCase):
  def test_config(self):
    """config.json holds the config, a dataclass as nested dicts."""
    record.claim(self.workdir, CONFIG)
    self.assertEqual(
      json.loads((self.workdir / 'config.json').read_text()), CONFIG
    )
    config = record.as_json({'model': {'a': (1, 2)}})
    self.assertEqual(config, {'model': {'a': [1, 2]}})
    decoder = record.as_json(decoder_config(vocab_size=3, max_len=5))
    self.assertEqual(decoder['max_len'], 5)
    self.assertEqual(decoder['attention']['kind'], 'mha')
    self.assertIsNone(decoder['attention']['head_dim'])

  def test_another_config_is_refused(self):
    """The error names folder, fields and both values; nothing changes."""
    record.claim(self.workdir, CONFIG)
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

  def test_rows_of_other_names(self):
    """A CSV has all of them, in order; what a row lacks is empty."""
    self.workdir.mkdir(parents=True)
    path = self.workdir / 'results.csv'
    record.write_csv(path, [{'a': 1, 'b': 2}, {'c': 3, 'a': 4}])
    self.assertEqual(path.read_text(), 'a,b,c\n1,2,\n4,,3\n')

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

  def test_no_room(self):
    """Names the file; what was there stays, and nothing is left beside it."""
    self.workdir.mkdir(parents=True)
    path = self.workdir / 'results.csv'
    record.write_text(path, 'old\n')
    full = OSError(28, 'No space left on device')
    with (
      mock.patch.object(pathlib.Path, 'replace', side_effect=full),
      self.assertRaisesRegex(
        record.RecordError, r'results.csv cannot be written \(No space left'
      ),
    ):
      record.write_text(path, 'new\n')
    self.assertEqual(path.read_text(), 'old\n')
    self.assertLen(list(self.workdir.iterdir()), 1)


class FolderTest(RecordTestCase):
  @parameterized.parameters('junk', '{}', '[1]', '"step"', '\xff')
  def test_a_line_that_is_no_record(self, line):
    """Is named with file and number, and stays."""
    self.workdir.mkdir(parents=True)
    path = self.workdir / 'results.jsonl'
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_text(text, encoding='latin-1')
    with self.assertRaisesRegex(record.RecordError, r'results.jsonl:2 is no'):
      record.read_jsonl(path, 'step')
    self.assertEqual(path.read_text(encoding='latin-1'), text)

  @parameterized.parameters('checkpoints', 'metrics.jsonl')
  def test_a_run_without_its_config(self, name):
    """Nobody knows which run it was: it is not gone on with."""
    (self.workdir / name).mkdir(parents=True)
    with self.assertRaisesRegex(record.RecordError, f'{name}.*no config.json'):
      record.claim(self.workdir, CONFIG)

  @parameterized.parameters(
    ('{"model"', 'is no JSON'), ('[]', 'holds no config'), ('3', 'no config')
  )
  def test_a_broken_config(self, text, message):
    """Names the file."""
    self.workdir.mkdir(parents=True)
    (self.workdir / 'config.json').write_text(text)
    with self.assertRaisesRegex(record.RecordError, f'config.json .*{message}'):
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

  def test_a_folder_that_cannot_be_written(self):
    """One line with the folder and the remedy; its own errors stay."""
    message = r'workdir=.*x cannot be written \(Read-only.* --workdir'
    for name in ('open', 'mkdir'):
      error = OSError(30, 'Read-only file system')
      with (
        mock.patch.object(pathlib.Path, name, side_effect=error),
        self.assertRaisesRegex(record.RecordError, message),
        record.exclusive(self.workdir),
      ):
        self.fail('it was entered')
    with self.assertRaises(FileNotFoundError), record.exclusive(self.workdir):
      (self.workdir / 'absent').read_text()

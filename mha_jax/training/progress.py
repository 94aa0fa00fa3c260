"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

import time
from typing import Any

from rich import progress
from rich.console import Console
from rich.table import Column

SECONDS_BETWEEN_LINES = 10.0
WIDE, NARROW = 100, 60
"""Columns from which there is room for a bar, and for the time that is left."""


class ProgressBar:
  """Shows step, metrics, speed and time left; a context manager.

  Args:
    description: what is being done.
    total: the number of steps.
    start: steps already done.
    console: where to write; None: standard error.
  """

  def __init__(
    self,
    description: str,
    total: int,
    start: int = 0,
    console: Console | None = None,
  ):
    self._console = console or Console(stderr=True)
    self._description, self._total = description, total
    self._step, self._steps_timed, self._seconds = start, 0, 0.0
    self._since: float | None = None
    self._last_line = time.monotonic()
    width = self._console.width
    # Words fold where it is narrow; numbers are never cut.
    folds, whole = Column(), Column(no_wrap=True)
    bar = [progress.BarColumn(20, table_column=whole)] * (width >= WIDE)
    left = [progress.TimeRemainingColumn(table_column=whole)]
    self._bar = progress.Progress(
      progress.TextColumn('{task.description}', table_column=folds),
      *bar,
      progress.MofNCompleteColumn(table_column=whole),
      progress.TextColumn('{task.fields[status]}', table_column=folds),
      *left * (width >= NARROW),
      console=self._console,
      disable=not self._console.is_terminal,
    )
    self._task = self._bar.add_task(
      description, total=total, completed=start, status=''
    )

  def __enter__(self) -> 'ProgressBar':
    self._bar.start()
    return self

  def __exit__(self, *_: Any) -> None:
    self._bar.stop()

  @property
  def steps_per_second(self) -> float | None:
    """Mean speed since the first update, which includes compilation."""
    return self._steps_timed / self._seconds if self._seconds else None

  def update(self, step: int, metrics: dict[str, float]) -> None:
    """Reports that `step` steps are done."""
    now = time.monotonic()
    if self._since is not None:
      self._steps_timed += step - self._step
      self._seconds += now - self._since
    self._since, self._step = now, step
    parts = [f'{name} {value:.4g}' for name, value in metrics.items()]
    if self.steps_per_second is not None:
      parts.append(f'{self.steps_per_second:.3g} steps/s')
    status = '  '.join(parts)
    self._bar.update(self._task, completed=step, status=status)
    if self._console.is_terminal:
      return
    if step >= self._total or now - self._last_line > SECONDS_BETWEEN_LINES:
      self._last_line = now
      self._console.print(
        f'{self._description}  {step}/{self._total}  {status}',
        highlight=False,
        soft_wrap=True,
      )

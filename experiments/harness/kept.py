"""Rows of results.jsonl: trained once, and kept as soon as they are there.

A finished row is not trained again. A failed one is recorded, does not end the
experiment, and is tried again next time. What a signal stopped leaves nothing.
"""

import hashlib
import json
import math
import pathlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from experiments.harness import folders
from mha_jax.training import environment, record, train
from mha_jax.training.record import Row
from mha_jax.training.signals import StopRequest, stop_on_signal

Group = TypeVar('Group')
"""What trains at once and becomes one row or more."""


def key_of(
  experiment: train.Experiment, seeds: Sequence[int], **more: Any
) -> str:
  """A hash of all that the numbers of a row depend on by definition."""
  parts = {
    'experiment': without_path(record.as_json(experiment)),
    'seeds': list(seeds),
    'options': environment.options(),
    **more,
  }
  text = json.dumps(parts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_path(config: Any) -> Any:
  """A config whose text is told by its digest alone, wherever it lies."""
  task = config.get('task') if isinstance(config, dict) else None
  if not isinstance(task, dict) or 'digest' not in task:
    return config
  return config | {'task': task | {'path': None}}


def train_missing(
  workdir: pathlib.Path,
  asked: Mapping[str, Any],
  fields: Sequence[str],
  missing: Callable[[Mapping[str, Row]], Iterable[Group]],
  measure: Callable[[Group, StopRequest], Sequence[Row]],
) -> tuple[dict[str, Row], signal.Signals | None]:
  """Trains what results.jsonl lacks, and keeps it there.

  Args:
    workdir: the folder.
    asked: what else the folder is kept for, see `folders.asked`.
    fields: those of every row, 'key' among them.
    missing: the groups to train, given the rows that are there by their keys.
    measure: trains a group; no rows where a stop was requested before the end.

  Returns:
    The rows by their keys, and the signal that stopped it early.
  """
  path = workdir / 'results.jsonl'
  with folders.kept(workdir, asked), stop_on_signal() as request:
    done = {str(row['key']): row for row in record.read_jsonl(path, *fields)}
    for group in missing(done):
      rows = measure(group, request)
      if rows:
        done |= {str(row['key']): row for row in rows}
        record.write_text(path, ''.join(map(record.line_of, done.values())))
      if request.signal is not None:
        print(
          f'{request.signal.name}: stopped; what is finished is kept in '
          f'{path}, and the same command goes on'
        )
        break
  return done, request.signal


def with_status(
  heads: Sequence[Row], numbers_of: Callable[[], Sequence[Row]]
) -> list[Row]:
  """Rows that say whether they are finished, and if not, why.

  Args:
    heads: what is known of each row beforehand.
    numbers_of: trains, and gives the rest of each row; nothing where a stop was
      requested before the end.
  """
  try:
    numbers = numbers_of()
  except Exception as error:  # whatever it is, the others go on
    first = str(error).strip().splitlines()[:1]
    text = f'{type(error).__name__}: {"".join(first)}'
    return [head | {'status': 'failed', 'error': text} for head in heads]
  status = {'status': 'finished'}
  return [x | status | y for x, y in zip(heads, numbers, strict=False)]


def plain(array: Any, digits: int = 17) -> Any:
  """Nested lists of numbers, None for what is not finite.

  Args:
    array: the numbers.
    digits: how many significant ones are kept; 17 are all.
  """
  found = np.vectorize(
    lambda x: float(f'{x:.{digits}g}') if math.isfinite(x) else None,
    otypes=[object],
  )
  return found(np.asarray(array)).tolist()

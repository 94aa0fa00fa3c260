"""Points: one model with several seeds each, trained once and recorded.

All seeds of a point train at once, mapped by `jax.vmap` in one compiled
program. A finished point is a line of results.jsonl and is not trained again; a
failed one is recorded, does not end the experiment, and is tried again next
time. A point that a signal stopped leaves nothing.
"""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.harness import folders, settings
from mha_jax.training import environment, record, train
from mha_jax.training.record import Row
from mha_jax.training.seeds import train_seeds
from mha_jax.training.signals import StopRequest, stop_on_signal

SEEDS = flags.DEFINE_integer(
  'seeds',
  3,
  'seeds of each model, from train.seed on',
  lower_bound=1,
  upper_bound=1000,
)
EQUAL_PARAMS = flags.DEFINE_bool(
  'equal_params', False, 'widen MLPs until all have as many parameters'
)

ROW = ('key', 'seeds', 'status')
"""The fields of every line of results.jsonl."""


@dataclasses.dataclass(frozen=True)
class Point:
  """One model with all its seeds.

  Args:
    experiment: the seed in it is not used.
    seeds: of parameters, batches and dropout.
    name: shown while it trains.
    labels: what tells it apart in tables, kept in its row; it may not name
      what the row holds.

  Raises:
    ValueError: the seeds, trained at once, need more memory than there is.
  """

  experiment: train.Experiment
  seeds: tuple[int, ...]
  name: str
  labels: dict[str, Any] = dataclasses.field(hash=False)

  def __post_init__(self) -> None:
    settings.check_memory(self.experiment, len(self.seeds))

  @property
  def key(self) -> str:
    """A hash of all that the numbers depend on by definition."""
    parts = {
      'experiment': _without_path(record.as_json(self.experiment)),
      'seeds': list(self.seeds),
      'options': environment.options(),
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def train_points(
  points: Sequence[Point], workdir: pathlib.Path, asked: Mapping[str, Any]
) -> tuple[list[Row], signal.Signals | None]:
  """Gives the rows of all points, from results.jsonl or by training.

  Args:
    points: those asked for.
    workdir: their folder.
    asked: what else the folder is kept for, see `folders.asked`.

  Returns:
    The rows in order of the points; and the signal that stopped it early, in
    which case the rows are those finished so far. A row has the point's labels,
    its key, seeds, config and status; 'finished' ones what `train_point`
    returns, 'failed' ones the error.
  """
  path = workdir / 'results.jsonl'
  settings.announce(point.experiment for point in points)
  with folders.kept(workdir, asked), stop_on_signal() as request:
    done = {str(row['key']): row for row in record.read_jsonl(path, *ROW)}
    for point in points:
      if not _is_finished(done.get(point.key), point):
        row = measure(point, request)
        if row is not None:
          done[point.key] = row
          record.write_text(path, ''.join(map(record.line_of, done.values())))
      if request.signal is not None:
        print(
          f'{request.signal.name}: stopped; finished points are kept in '
          f'{path}, and the same command goes on'
        )
        break
  rows = [done[x.key] | x.labels for x in points if x.key in done]
  return rows, request.signal


def _is_finished(row: Row | None, point: Point) -> bool:
  """Tells whether a row has all numbers of a point; if not, it trains again."""
  if row is None or row['status'] != 'finished':
    return False
  seeds, steps = len(point.seeds), point.experiment.train.steps
  shapes: dict[str, tuple[int, ...]] = {
    'loss': (seeds, steps),
    'accuracy': (seeds, steps),
    'final_loss': (seeds,),
    'final_accuracy': (seeds,),
  }
  params, speed = row.get('params'), row.get('steps_per_s')
  config = record.as_json(point.experiment)
  return (
    row['seeds'] == [*point.seeds]
    and _without_path(row.get('config')) == _without_path(config)
    and type(params) is int
    and params >= 1
    and (speed is None or (type(speed) is float and 0 < speed < math.inf))
    and all(_has_shape(row.get(x), shape) for x, shape in shapes.items())
  )


def _without_path(config: Any) -> Any:
  """A config whose text is told by its digest alone, wherever it lies."""
  task = config.get('task') if isinstance(config, dict) else None
  if not isinstance(task, dict) or 'digest' not in task:
    return config
  return config | {'task': task | {'path': None}}


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
  """Tells whether nested lists are finite numbers throughout, in this shape."""
  try:
    array = np.asarray(value)
  except ValueError:  # ragged
    return False
  numbers = array.shape == shape and array.dtype.kind in 'if'
  return numbers and bool(np.all(np.isfinite(array)))


def measure(point: Point, request: StopRequest) -> Row | None:
  """Trains a point; a failure comes back as a row that says so.

  None where a stop was requested before the end.
  """
  head = {'key': point.key, **point.labels, 'seeds': list(point.seeds)}
  head['config'] = record.as_json(point.experiment)
  head['options'] = environment.options()
  try:
    numbers = train_point(point, request)
  except Exception as error:  # whatever it is, the other points go on
    first = str(error).strip().splitlines()[:1]
    text = f'{type(error).__name__}: {"".join(first)}'
    return head | {'status': 'failed', 'error': text}
  if numbers is None:
    return None
  return head | {'status': 'finished'} | numbers


def train_point(point: Point, request: StopRequest) -> Row | None:
  """Trains all seeds of a point; numbers lead with the seed.

  Returns:
    params (count), steps_per_s (all seeds together take such a step),
    final_loss and final_accuracy (seeds,) on the validation batches, loss and
    accuracy (seeds, steps) of the training batches. None where a stop was
    requested before the last step.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  outcome = train_seeds(point.experiment, point.seeds, request, point.name)
  if outcome is None:
    return None
  sizes = [leaf.size for leaf in jax.tree.leaves(outcome.params)]
  return {
    'params': sum(sizes) // len(point.seeds),
    'steps_per_s': outcome.steps_per_second,
    'final_loss': _plain(outcome.final['eval_loss']),
    'final_accuracy': _plain(outcome.final['eval_accuracy']),
    'loss': _plain(outcome.history['loss']),
    'accuracy': _plain(outcome.history['accuracy']),
  }


def _plain(array: Any) -> Any:
  """Nested lists with 6 significant digits."""
  return np.vectorize(lambda x: float(f'{x:.6g}'))(np.asarray(array)).tolist()


def num_params(experiment: train.Experiment) -> int:
  """Parameters of the model, without making them."""
  init = functools.partial(train.init, experiment)
  state = jax.eval_shape(init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def with_mlp(experiment: train.Experiment, mlp_dim: int) -> train.Experiment:
  """The experiment with an MLP of this hidden width."""
  model = dataclasses.replace(experiment.model, mlp_dim=mlp_dim)
  return dataclasses.replace(experiment, model=model)


def equal_params(
  experiments: Sequence[train.Experiment],
) -> list[train.Experiment]:
  """The same with MLPs widened, so that all have as many parameters.

  The greatest model keeps its MLP, or gets one of a single unit; the others
  come as near to its size as whole hidden units allow (Shazeer 2019, table 3,
  widens the feed-forward layers likewise).
  """
  least = [with_mlp(x, max(x.model.mlp_dim, 1)) for x in experiments]
  sizes = [num_params(x) for x in least]
  result = []
  for experiment, size in zip(least, sizes, strict=True):
    width = experiment.model.mlp_dim
    unit = num_params(with_mlp(experiment, width + 1)) - size
    more = round((max(sizes) - size) / unit)
    result.append(with_mlp(experiment, width + more))
  return result

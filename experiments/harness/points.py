"""Points: a model at a learning rate with several seeds, trained and recorded.

All seeds of a point train at once, and so do points that differ in the learning
rate alone, mapped by `jax.vmap` in one compiled program. A finished point is a
line of results.jsonl and is not trained again; a failed one is recorded, does
not end the experiment, and is tried again next time. A training that diverged
is a result like any other: numbers that are not finite are null in its row. A
point that a signal stopped leaves nothing.
"""

import dataclasses
import functools
import math
import pathlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.harness import kept, settings
from mha_jax.attention import checks
from mha_jax.training import environment, record, train
from mha_jax.training.grid import train_grid
from mha_jax.training.record import Row
from mha_jax.training.signals import StopRequest

SEEDS = flags.DEFINE_integer(
  'seeds',
  3,
  'seeds of each model, from train.seed on',
  lower_bound=1,
  upper_bound=1000,
)
LEARNING_RATES = flags.DEFINE_list(
  'learning_rates',
  ['0.003', '0.01', '0.03', '0.1'],
  'peaks tried for each model, which is judged at its best',
)
EQUAL_PARAMS = flags.DEFINE_bool(
  'equal_params', False, 'widen MLPs until all have as many parameters'
)

ROW = ('key', 'seeds', 'status')
"""The fields of every line of results.jsonl."""
DIGITS = 6
"""Significant digits of the numbers in it."""


@dataclasses.dataclass(frozen=True)
class Point:
  """One model at one learning rate with all its seeds.

  Args:
    experiment: the seed in it is not used.
    seeds: of parameters, batches and dropout.
    name: shown while it trains; the same for all learning rates.
    labels: what tells it apart in tables, kept in its row; it may not name
      what the row holds.
  """

  experiment: train.Experiment
  seeds: tuple[int, ...]
  name: str
  labels: dict[str, Any] = dataclasses.field(hash=False)

  @property
  def key(self) -> str:
    """A hash of all that the numbers depend on by definition."""
    return kept.key_of(self.experiment, self.seeds)


def learning_rates() -> tuple[float, ...]:
  """The rates of --learning_rates, in order.

  Raises:
    ValueError: they are not positive numbers, or a flag sets the config's too.
  """
  if 'config.optimizer.learning_rate' in flags.FLAGS:
    raise ValueError(
      '--config.optimizer.learning_rate is what the experiment varies; use '
      '--learning_rates'
    )
  rates = set()
  for text in LEARNING_RATES.value:
    try:
      rates.add(float(text))
      checks.real('learning_rate', float(text), 1e-12, 1e3)
    except ValueError:
      given = ','.join(LEARNING_RATES.value)
      raise ValueError(
        f'--learning_rates={given} must be numbers from 1e-12 to 1000, with '
        'commas between'
      ) from None
  if not rates:
    raise ValueError('--learning_rates= is empty; give one, such as 0.003')
  return tuple(sorted(rates))


def points_of(
  experiment: train.Experiment,
  seeds: tuple[int, ...],
  name: str,
  labels: Mapping[str, Any],
) -> tuple[Point, ...]:
  """The points of a model, one for each of --learning_rates.

  Raises:
    ValueError: all of them, trained at once, need more memory than there is.
  """
  rates = learning_rates()
  settings.check_memory(experiment, len(seeds) * len(rates))
  return tuple(
    Point(
      _at_rate(experiment, rate),
      seeds,
      name,
      {**labels, 'learning_rate': rate},
    )
    for rate in rates
  )


def _at_rate(experiment: train.Experiment, rate: float) -> train.Experiment:
  optimizer = dataclasses.replace(experiment.optimizer, learning_rate=rate)
  return dataclasses.replace(experiment, optimizer=optimizer)


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
    its key, seeds, config and status; 'finished' ones what `train_group`
    returns, 'failed' ones the error.
  """
  settings.announce(point.experiment for point in points)

  def missing(done: Mapping[str, Row]) -> list[list[Point]]:
    lacking = {x.key: x for x in points if not _is_finished(done.get(x.key), x)}
    return _groups(lacking.values())

  done, stopped_by = kept.train_missing(workdir, asked, ROW, missing, measure)
  rows = [done[x.key] | x.labels for x in points if x.key in done]
  return rows, stopped_by


def _groups(points: Iterable[Point]) -> list[list[Point]]:
  """The points that train at once: those that differ in the rate alone."""
  groups: dict[Any, list[Point]] = {}
  for point in points:
    alike = (_at_rate(point.experiment, 1.0), point.seeds)
    groups.setdefault(alike, []).append(point)
  return list(groups.values())


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
    and kept.without_path(row.get('config')) == kept.without_path(config)
    and type(params) is int
    and params >= 1
    and (speed is None or (type(speed) is float and 0 < speed < math.inf))
    and all(_has_shape(row.get(x), shape) for x, shape in shapes.items())
  )


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
  """Tells whether nested lists are finite numbers or None, in this shape."""
  try:
    array = np.asarray(value, float)  # None, which is no finite number, is nan
  except (TypeError, ValueError):  # words, or ragged
    return False
  return array.shape == shape and not np.any(np.isinf(array))


def measure(group: Sequence[Point], request: StopRequest) -> list[Row]:
  """Trains a group; a failure comes back as rows that say so.

  Returns:
    A row for each point; an empty list where a stop was requested before the
    end.
  """
  heads = [
    {
      'key': point.key,
      **point.labels,
      'seeds': list(point.seeds),
      'config': record.as_json(point.experiment),
      'options': environment.options(),
    }
    for point in group
  ]
  return kept.with_status(heads, lambda: train_group(group, request))


def train_group(group: Sequence[Point], request: StopRequest) -> list[Row]:
  """Trains all learning rates and seeds of a model; numbers lead with the seed.

  Args:
    group: points that differ in the learning rate alone.
    request: where it comes before the last step, training ends.

  Returns:
    For each point params (count), steps_per_s (all rates and seeds together
    take such a step), final_loss and final_accuracy (seeds,) on the validation
    batches, loss and accuracy (seeds, steps) of the training batches. None at
    all where a stop was requested before the last step.
  """
  first = group[0]
  rates = [x.experiment.optimizer.learning_rate for x in group]
  found = train_grid(first.experiment, rates, first.seeds, request, first.name)
  if found is None:
    return []
  return [
    {
      'params': num_params(first.experiment),
      'steps_per_s': found.steps_per_second,
      'final_loss': kept.plain(found.final['eval_loss'][i], DIGITS),
      'final_accuracy': kept.plain(found.final['eval_accuracy'][i], DIGITS),
      'loss': kept.plain(found.history['loss'][i], DIGITS),
      'accuracy': kept.plain(found.history['accuracy'][i], DIGITS),
    }
    for i in range(len(group))
  ]


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

"""Exercise 1: do more heads help, plateau or hurt?

  python -m experiments.sweep_heads
  python -m experiments.sweep_heads --n_heads=1,2,4,8,16 --seeds=3
  python -m experiments.sweep_heads --config=configs/copy_task.py:tiny

The width d_model stays fixed, so h heads have d_model / h features each and
the parameters stay the same. All seeds of a head count train at once, mapped
by `jax.vmap` in one compiled program. Prints a table and writes results.jsonl,
results.csv and sweep_heads.png into the workdir.

A head count with its seeds is a point. A finished point is not trained again;
a failed one is recorded, does not end the sweep, and is tried again next time.
Ctrl-C and SIGTERM stop; the same command goes on with what is missing.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console

from experiments import command_line, figures, reports, settings
from mha_jax.attention import checks
from mha_jax.training import record, train
from mha_jax.training.progress import ProgressBar
from mha_jax.training.run import StopRequest, stop_on_signal

N_HEADS = flags.DEFINE_list(
  'n_heads', ['1', '2', '4', '8', '16'], 'head counts, divisors of d_model'
)
SEEDS = flags.DEFINE_integer(
  'seeds',
  3,
  'seeds a head count, from train.seed on',
  lower_bound=1,
  upper_bound=1000,
)
THRESHOLD = flags.DEFINE_float(
  'threshold', 0.05, 'the loss (nats) that speed is measured to'
)


ROW = ('key', 'n_heads', 'head_dim', 'seeds', 'status')
"""What every line of results.jsonl has."""


@dataclasses.dataclass(frozen=True)
class Point:
  """One head count with all its seeds."""

  experiment: train.Experiment
  seeds: tuple[int, ...]

  @property
  def key(self) -> str:
    """A hash of the point's config and seeds."""
    text = json.dumps(record.as_json(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Settings:
  points: tuple[Point, ...]
  threshold: float
  title: str
  workdir: pathlib.Path


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_sections(config)
  if 'config.model.num_heads' in flags.FLAGS:
    raise ValueError(
      '--config.model.num_heads is what the sweep varies; use --n_heads'
    )
  heads = command_line.positive_ints('n_heads', N_HEADS.value)
  checks.real('--threshold', THRESHOLD.value, 1e-6, 1e3)
  heads = sorted(set(heads))
  first_seed = _experiment(config, heads[0]).train.seed
  if first_seed + SEEDS.value > 2**32:
    raise ValueError(
      f'--seeds={SEEDS.value} from --config.train.seed={first_seed} on '
      'must stay below 2^32'
    )
  seeds = tuple(range(first_seed, first_seed + SEEDS.value))
  points = tuple(Point(_experiment(config, h), seeds) for h in heads)
  name = f'sweep_heads-{config.name}'
  workdir = settings.workdir_from(flags.FLAGS.workdir, name)
  model = config.model
  title = f'{config.name}, {model.attention}, d_model = {model.d_model}'
  return Settings(points, THRESHOLD.value, title, workdir)


def _experiment(config: ConfigDict, num_heads: int) -> train.Experiment:
  """The experiment with a number of heads; an error names the flag."""
  config = config.copy_and_resolve_references()
  config.model.num_heads = num_heads
  try:
    return settings.experiment_from(config)
  except ValueError as error:
    raise ValueError(f'--n_heads={num_heads}: {error}') from error


def main(chosen: Settings) -> int:
  path = chosen.workdir / 'results.jsonl'
  with record.exclusive(chosen.workdir), stop_on_signal() as request:
    record.write_json(chosen.workdir / 'env.json', record.environment())
    done = {row['key']: row for row in record.read_jsonl(path, *ROW)}
    for point in chosen.points:
      if done.get(point.key, {}).get('status') == 'finished':
        continue
      row = measure(point, request)
      if row is not None:
        done[point.key] = row
        text = ''.join(json.dumps(x) + '\n' for x in done.values())
        record.write_text(path, text)
      if request.signal is not None:
        print(
          f'{request.signal.name}: stopped; finished head counts are kept in '
          f'{path}, and the same command goes on'
        )
        return command_line.exit_code(request.signal)
  rows = [done[point.key] for point in chosen.points]
  report(rows, chosen)
  return 0 if all(row['status'] == 'finished' for row in rows) else 1


def measure(point: Point, request: StopRequest) -> dict[str, Any] | None:
  """Trains a point; a failure comes back as a row that says so.

  None where a stop was requested before the end.
  """
  head = {
    'key': point.key,
    'n_heads': point.experiment.model.num_heads,
    'head_dim': point.experiment.model.attention_config.qk_head_dim,
    'seeds': list(point.seeds),
    'config': record.as_json(point.experiment),
  }
  try:
    numbers = train_seeds(point, request)
  except Exception as error:  # whatever it is, the other points go on
    first = str(error).strip().splitlines()[:1]
    text = f'{type(error).__name__}: {"".join(first)}'
    return head | {'status': 'failed', 'error': text}
  if numbers is None:
    return None
  return head | {'status': 'finished'} | numbers


def train_seeds(point: Point, request: StopRequest) -> dict[str, Any] | None:
  """Trains all seeds in one program; numbers lead with the seed.

  Returns:
    params (count), steps_per_s (all seeds together take such a step),
    final_loss and final_accuracy (seeds,) on the evaluation batches, loss and
    accuracy (seeds, steps) of the training batches. None where a stop was
    requested before the last step.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  experiment, config = point.experiment, point.experiment.train
  keys = jax.vmap(jax.random.key)(jnp.asarray(point.seeds))
  init = functools.partial(train.init, experiment)
  state = jax.jit(jax.vmap(init))(keys)
  history: list[Any] = []
  step = 0
  with ProgressBar(
    f'{experiment.model.num_heads:>2} heads', config.steps
  ) as bar:
    while step < config.steps:
      num_steps = min(config.steps_per_dispatch, config.steps - step)
      state, metrics = _advance(experiment, num_steps, keys, state)
      history.append(jax.device_get(metrics))
      step += num_steps
      latest = {name: history[-1][name] for name in ('loss', 'accuracy')}
      if not np.all(np.isfinite(latest['loss'])):
        raise FloatingPointError(f'the loss is not finite before step {step}')
      bar.update(step, {k: float(np.median(x)) for k, x in latest.items()})
      if request.signal is not None and step < config.steps:
        return None
  evaluate = functools.partial(train.evaluate, experiment)
  final = jax.jit(jax.vmap(evaluate))(keys, state.params)
  if not np.all(np.isfinite(final['eval_loss'])):
    raise FloatingPointError('the loss is not finite at the end')
  curves = {
    name: np.concatenate([chunk[name] for chunk in history], axis=1)
    for name in ('loss', 'accuracy')
  }
  sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
  return {
    'params': sum(sizes) // len(point.seeds),
    'steps_per_s': bar.steps_per_second,
    'final_loss': _plain(final['eval_loss']),
    'final_accuracy': _plain(final['eval_accuracy']),
    'loss': _plain(curves['loss']),
    'accuracy': _plain(curves['accuracy']),
  }


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _advance(
  experiment: train.Experiment,
  num_steps: int,
  keys: jax.Array,
  state: train.TrainState,
) -> tuple[train.TrainState, train.Metrics]:
  """`train.advance` of every seed."""
  advance = functools.partial(train.advance, experiment, num_steps)
  return jax.vmap(advance)(keys, state)


def _plain(array: Any) -> Any:
  """Nested lists with 6 significant digits."""
  return np.vectorize(lambda x: float(f'{x:.6g}'))(np.asarray(array)).tolist()


def report(rows: list[dict[str, Any]], chosen: Settings) -> None:
  """Prints the table and the sentence; writes CSV and figure."""
  finished = [row for row in rows if row['status'] == 'finished']
  summaries = [reports.summarise(row, chosen.threshold) for row in finished]
  console = Console()
  failed = [row for row in rows if row['status'] == 'failed']
  console.print(reports.table(summaries, failed, chosen.threshold))
  for row in failed:
    print(f'n_heads={row["n_heads"]} failed: {row["error"]}')
  if not finished:
    return
  record.write_csv(chosen.workdir / 'results.csv', summaries)
  figure = chosen.workdir / 'sweep_heads.png'
  figures.sweep_heads(
    finished, summaries, chosen.threshold, chosen.title, figure
  )
  print(reports.verdict(summaries, chosen.threshold))
  print(f'recorded in {chosen.workdir}, figure {figure}')


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/copy_task.py')

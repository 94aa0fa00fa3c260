"""Trains decoders on the copy task and looks into their heads.

A model is a head count at a scale. All its learning rates and seeds train at
once, and it becomes a row of numbers; those of the scores of positions are kept
all through training.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import kept
from experiments.reports import head_counts, statistics
from mha_jax.analysis import copying, probing
from mha_jax.decoder import DecoderConfig
from mha_jax.tasks import Batch
from mha_jax.training import grid, record, train
from mha_jax.training.record import Row
from mha_jax.training.signals import StopRequest

EXAMPLES = 128  # validation examples that numbers are means over
ANALYSIS = 100  # a stream of keys apart from those of training
SNAPSHOT = ('rank', 'margin', 'margin_std')
"""The numbers of every head that are kept all through training."""

ROW = ('key', 'n_heads', 'head_dim', 'scale', 'score_scale', 'seeds', 'config')
"""The fields of every line of results.jsonl."""
FINISHED = (
  *('learning_rate', 'rates', 'attention', 'accuracy', 'accuracy_without'),
  *('snapshots', *SNAPSHOT),
)
"""Those that a finished one has besides."""


@dataclasses.dataclass(frozen=True)
class Model:
  """A head count at a scale, with its learning rates and seeds."""

  experiment: train.Experiment
  n_heads: int
  scale: str
  rates: tuple[float, ...]
  seeds: tuple[int, ...]

  @property
  def key(self) -> str:
    """A hash of all that the numbers depend on, all of the rates too.

    The row has the numbers of the best rate alone, so that another list of
    rates is another model.
    """
    rates = list(self.rates)
    return kept.key_of(self.experiment, self.seeds, rates=rates)

  @property
  def batch(self) -> Batch:
    """Validation examples, the same for all seeds and rates."""
    key = jax.random.fold_in(jax.random.key(self.seeds[0]), ANALYSIS)
    return self.experiment.task.validation.sample(key, EXAMPLES)


def is_finished(row: Row | None) -> bool:
  """Tells whether a row has all numbers; one without a status is finished."""
  return (
    row is not None
    and row.get('status', 'finished') == 'finished'
    and all(name in row for name in FINISHED)
  )


def measure(model: Model, request: StopRequest) -> list[Row]:
  """Trains a model and looks into it; a failure is a row that says so.

  Returns:
    A row as in results.jsonl; none at all where a stop was requested before the
    end.
  """
  attention = copying.check_decoder(model.experiment.model)
  head = {
    'key': model.key,
    'n_heads': model.n_heads,
    'head_dim': attention.qk_head_dim,
    'scale': model.scale,
    'score_scale': copying.scale_of(attention),
    'seeds': list(model.seeds),
    'config': record.as_json(model.experiment),
  }
  return kept.with_status([head], lambda: numbers_of(model, request))


def numbers_of(model: Model, request: StopRequest) -> list[Row]:
  """Trains a model and looks into it; numbers lead with the seed.

  Returns:
    The fields of `FINISHED`: 'rates' has the losses at every learning rate; all
    else is of the best one. Snapshots lead with the step, and None stands for
    what is not finite. Nothing where a stop was requested before the end.
  """
  config, inputs = model.experiment.model, model.batch.inputs
  steps: list[int] = []
  found: list[dict[str, np.ndarray]] = []

  def observe(step: int, state: train.TrainState) -> None:
    # On one device: sums over models that lie on several can wait forever for
    # each other where threads are few.
    params = jax.device_put(state.params, jax.local_devices()[0])
    numbers = position_numbers(config, inputs, params)
    steps.append(step)
    found.append(jax.device_get(jax.block_until_ready(numbers)))

  s = 's' * (model.n_heads > 1)
  name = f'{model.n_heads:>2} head{s}, scale {model.scale}'
  outcome = grid.train_grid(
    model.experiment, model.rates, model.seeds, request, name, observe
  )
  if outcome is None:
    return []
  rates = _by_rate(model, outcome)
  best = statistics.best_rate(rates, head_counts.final_losses).learning_rate
  i = model.rates.index(best)
  params = jax.tree.map(lambda x: x[i], outcome.params)
  return [
    {
      'learning_rate': best,
      'rates': rates,
      **head_numbers(model, params),
      'snapshots': steps,
      **{x: kept.plain(np.stack([y[x][i] for y in found])) for x in SNAPSHOT},
    }
  ]


def _by_rate(model: Model, outcome: grid.Outcome) -> list[Row]:
  """The losses of each learning rate, as `statistics.best_rate` takes them."""
  return [
    {
      'learning_rate': rate,
      'final_loss': kept.plain(outcome.final['eval_loss'][i]),
      'loss': kept.plain(outcome.history['loss'][i]),
    }
    for i, rate in enumerate(model.rates)
  ]


@functools.partial(jax.jit, static_argnums=0)
def position_numbers(
  config: DecoderConfig, inputs: jax.Array, params: Any
) -> dict[str, jax.Array]:
  """The numbers of `SNAPSHOT` of many models.

  Args:
    config: the decoder.
    inputs: (b, 2 L) tokens.
    params: each leads with (rates, seeds).

  Returns:
    (rates, seeds, h) each; a margin is the mean over answers, beside it is
    their standard deviation.
  """

  def one(params: Any) -> dict[str, jax.Array]:
    scores = copying.position_scores(config, params, inputs)
    margins = copying.margins(scores)
    numbers = (
      copying.effective_rank(scores),
      jnp.mean(margins, axis=-1),
      jnp.std(margins, axis=-1),
    )
    return dict(zip(SNAPSHOT, numbers, strict=True))

  return jax.vmap(jax.vmap(one))(params)


def head_numbers(model: Model, params: Any) -> Row:
  """Attention to the source and accuracies, each with and without a head.

  Args:
    model: at one learning rate.
    params: each leads with the seed.

  Returns:
    attention (seeds, h), accuracy (seeds,), accuracy_without (seeds, h).
  """
  config, batch = model.experiment.model, model.batch
  found: dict[str, list[Any]] = {
    'attention': [],
    'accuracy': [],
    'accuracy_without': [],
  }
  for i in range(len(model.seeds)):
    own = jax.tree.map(lambda x, i=i: x[i], params)
    (maps,) = probing.attention_maps(config, own, batch.inputs)
    without, whole = copying.accuracies_without(config, own, batch)
    found['attention'].append(copying.attention_to_source(maps, batch))
    found['accuracy'].append(whole)
    found['accuracy_without'].append(without)
  found = jax.device_get(jax.block_until_ready(found))
  return {name: kept.plain(np.stack(x)) for name, x in found.items()}

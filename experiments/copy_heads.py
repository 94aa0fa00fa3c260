"""What each head does in the copy task, and why small heads are slow.

  python -m experiments.copy_heads --seeds=5
  python -m experiments.copy_heads --seeds=5 --scales=sqrt,0.06,0.2,0.7,2
  python -m experiments.copy_heads --config=configs/copy_task.py:tiny

Trains decoders of one layer with several head counts at a fixed d_model, and
with several scales of the scores q k^T: 'sqrt', which is 1 / sqrt(head_dim),
and numbers in its place, before training and all through it. Every model is
trained at each of --learning_rates and judged at the one with the least median
validation loss; speed at the one with the fewest steps.

Of each head it tells the attention that answers pay to the symbol they have to
say, and the accuracy without the head. Of the scores that positions alone make
it tells, all through training, the effective rank and how far the right source
stands out (mha_jax/analysis/copying.py has the formulas).

Prints a table and what follows from it; writes results.jsonl, results.csv,
heads.csv and copy_heads.png into the workdir. A head count at a scale, with all
its rates and seeds, trains at once and is kept when it is finished; one that
fails is recorded, does not end the experiment, and is tried again next time.
Ctrl-C and SIGTERM stop, and the same command goes on with what is missing.
Heads and scales can be added later and train alone; with other --learning_rates
or --seeds every model trains again, at all of the rates.
"""

import dataclasses
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.figures import copying as figures
from experiments.harness import (
  command_line,
  cores,
  folders,
  kept,
  points,
  printing,
  settings,
)
from experiments.harness.copying import ROW, Model, is_finished, measure
from experiments.reports import copying as reports
from experiments.reports import copying_words, head_counts
from mha_jax.analysis import copying
from mha_jax.attention import checks
from mha_jax.tasks import CopyTask
from mha_jax.training import record
from mha_jax.training.record import Row

HEADS = flags.DEFINE_list(
  'heads', ['1', '4', '16'], 'head counts, divisors of d_model'
)
SCALES = flags.DEFINE_list(
  'scales',
  ['sqrt', '1'],
  'factors of the scores: sqrt for 1 / sqrt(head_dim), or numbers',
)

FREE = ('heads', 'scales', 'learning_rates')
"""Flags that may differ from call to call in a folder. Models are kept; those
of other rates, even of one more, are others and train from the start."""


@dataclasses.dataclass(frozen=True)
class Settings:
  models: tuple[Model, ...]
  title: str
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_sections(config)
  if points.EQUAL_PARAMS.value:
    raise ValueError('--equal_params has no effect here; leave it out')
  if 'config.model.num_heads' in flags.FLAGS:
    raise ValueError(
      '--config.model.num_heads is what the experiment varies; use --heads'
    )
  heads = sorted(set(command_line.positive_ints('heads', HEADS.value)))
  scales = list(dict.fromkeys(map(_scale, SCALES.value or [''])))
  models = tuple(_model(config, h, scale) for h in heads for scale in scales)
  workdir = folders.named(f'copy_heads-{config.name}')
  asked = folders.asked(config, free=FREE)
  record.check_same_config(workdir, asked)
  title = f'{config.name}, one layer, d_model = {config.model.d_model}'
  return Settings(models, title, workdir, asked)


def _scale(text: str) -> str:
  """One of --scales, written in one way."""
  if text == reports.SQRT:
    return text
  try:
    checks.real('scale', float(text), 1e-6, 1e6)
  except ValueError:
    raise ValueError(
      f'--scales={",".join(SCALES.value)} must be {reports.SQRT} or numbers '
      'from 1e-6 to 1e6, with commas between'
    ) from None
  return f'{float(text):g}'


def _model(config: ConfigDict, n_heads: int, scale: str) -> Model:
  """A head count at a scale; an error names the flag."""
  config = config.copy_and_resolve_references()
  config.model.num_heads = n_heads
  try:
    experiment = settings.experiment_from(config)
  except ValueError as error:
    raise ValueError(f'--heads={n_heads}: {error}') from error
  task = experiment.task
  if not isinstance(task, CopyTask) or task.pairs or task.min_length:
    raise ValueError('--config wants a plain copy task: configs/copy_task.py')
  if task.length < 2:
    raise ValueError('--config.task.length=1 leaves no choice; give 2 or more')
  try:
    attention = copying.check_decoder(experiment.model)
  except ValueError as error:
    raise ValueError(f'--config.model: {error}') from error
  if attention.num_heads != n_heads:
    raise ValueError(
      f'--heads={n_heads}: config.model.layers sets num_heads, which the '
      'experiment varies; leave it out there'
    )
  if scale != reports.SQRT:
    scaled = copying.with_scale(attention, float(scale))
    model = dataclasses.replace(experiment.model, attention=scaled)
    experiment = dataclasses.replace(experiment, model=model)
  rates, first = points.learning_rates(), experiment.train.seed
  seeds = settings.seeds_from('--seeds', first, points.SEEDS.value)
  settings.check_memory(experiment, len(rates) * len(seeds))
  return Model(experiment, n_heads, scale, rates, seeds)


def main(chosen: Settings) -> int:
  rows, stopped_by = train_models(chosen)
  if stopped_by is not None:
    return command_line.exit_code(stopped_by)
  report(rows, chosen)
  return 0 if all(map(is_finished, rows)) else 1


def train_models(
  chosen: Settings,
) -> tuple[list[Row], signal.Signals | None]:
  """Gives the rows of all models, from results.jsonl or by training.

  Returns:
    The rows in order, and the signal that stopped it early, in which case they
    are those there are so far.
  """

  def missing(done: Mapping[str, Row]) -> list[Model]:
    return [x for x in chosen.models if not is_finished(done.get(x.key))]

  done, stopped_by = kept.train_missing(
    chosen.workdir, chosen.asked, ROW, missing, measure
  )
  return [done[x.key] for x in chosen.models if x.key in done], stopped_by


def report(rows: Sequence[Row], chosen: Settings) -> None:
  """Writes CSVs and the figure; prints the table and what follows from it."""
  summaries = [reports.summarise(row) for row in rows if is_finished(row)]
  if summaries:
    _report_finished(summaries, chosen)
  printing.show(
    *(
      f'{reports.name_of(row)} failed: {row["error"]}'
      for row in rows
      if not is_finished(row)
    )
  )


def _report_finished(
  summaries: Sequence[reports.Summary], chosen: Settings
) -> None:
  """The same of the models that did not fail."""
  workdir = chosen.workdir
  lines = [x.line | head_counts.fields(x.row['config']) for x in summaries]
  record.write_csv(workdir / 'results.csv', lines)
  record.write_csv(
    workdir / 'heads.csv', [line for x in summaries for line in x.heads]
  )
  figure = workdir / 'copy_heads.png'
  figures.copy_heads(summaries, chosen.title, figure)
  printing.show(
    reports.table(summaries),
    *copying_words.verdicts(summaries),
    *copying_words.advice(summaries),
    f'recorded in {workdir}, figure {figure}',
  )


if __name__ == '__main__':
  cores.use_all_cores()
  command_line.run(parse, main, default_config='configs/copy_task.py')

"""Trains one model and records it.

  python -m experiments.train --config=configs/copy_task.py
  python -m experiments.train --config=configs/copy_task.py:tiny
  python -m experiments.train --config.model.num_heads=8 --workdir=runs/eight

Writes config.json, env.json, metrics.jsonl and checkpoints into the workdir.
Ctrl-C and SIGTERM save and stop; the same command goes on from there.
docs/training.md: what the files hold, the model loaded and generating, a task,
a config and an optimiser of one's own.
"""

import dataclasses
import pathlib

from absl import flags

from experiments.harness import command_line, folders, settings
from mha_jax.training import metrics, record
from mha_jax.training.run import run
from mha_jax.training.train import Experiment

TENSORBOARD = flags.DEFINE_bool(
  'tensorboard', False, 'write TensorBoard events too (extra: tensorboard)'
)


@dataclasses.dataclass(frozen=True)
class Settings:
  experiment: Experiment
  workdir: pathlib.Path
  tensorboard: bool


def parse() -> Settings:
  config = flags.FLAGS.config
  experiment = settings.experiment_from(config)
  settings.check_memory(experiment)
  workdir = folders.named(config.name)
  record.check_same_config(workdir, record.as_json(experiment))
  if TENSORBOARD.value:
    metrics.event_writer()
  return Settings(experiment, workdir, TENSORBOARD.value)


def main(chosen: Settings) -> int:
  settings.announce([chosen.experiment])
  outcome = run(chosen.experiment, chosen.workdir, chosen.tensorboard)
  steps = chosen.experiment.train.steps
  if outcome.stopped_by is not None:
    print(
      f'{outcome.stopped_by.name}: saved at step {outcome.step} of {steps} in '
      f'{chosen.workdir}; the same command goes on from there'
    )
    return command_line.exit_code(outcome.stopped_by)
  numbers = '  '.join(
    f'{name} {outcome.metrics[name]:.4g}'
    for name in ('loss', 'accuracy', 'eval_loss', 'eval_accuracy')
    if name in outcome.metrics
  )
  print(f'step {outcome.step}  {numbers}\nrecorded in {chosen.workdir}')
  return 0


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/copy_task.py')

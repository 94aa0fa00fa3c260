"""Which heads should a new decoder have, and which projections?

  python -m experiments.configure_heads --params=1.3B --seq_len=32k --batch=16
  python -m experiments.configure_heads --hardware=v5e --devices=8 --json
  python -m experiments.configure_heads --latency_ms=20 --objective=throughput
  python -m experiments.configure_heads --model=llama3-70b --devices=8

From a budget of parameters, a length and the hardware: a recommendation with
its reasons, what else there is (cache against step time against a proxy of
quality), the closest published models, what to change when memory or latency
is short, and the attention as Python to paste. --model prints what a published
model costs instead. --hardware takes a name, `cpu` (measured here) or a file,
my.json; --json prints JSON alone. Writes results.json and configure_heads.png
into the workdir. Quality is not predicted by formula.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.figures import configurator
from experiments.harness import command_line, folders, printing, settings
from experiments.reports import model_costs, recommendation
from mha_jax.analysis import costs
from mha_jax.analysis.configurator import advice
from mha_jax.analysis.configurator.choice import Choice, choose
from mha_jax.analysis.configurator.comparison import closest
from mha_jax.analysis.configurator.demand import OBJECTIVES, Demand
from mha_jax.analysis.costs.hardware import HARDWARE, hardware
from mha_jax.analysis.costs.published import PUBLISHED, Published, published
from mha_jax.analysis.costs.roofline import SPLITS
from mha_jax.training import record

OVERRIDES: dict[str, Any] = {
  x.name: x
  for x in (
    flags.DEFINE_string('params', None, 'parameters, such as 1.3B or 350M'),
    flags.DEFINE_string('seq_len', None, 'tokens, such as 32k or 32768'),
    flags.DEFINE_string(
      'hardware',
      None,
      f'{", ".join(HARDWARE)}, cpu (measured), or my.json: an object with '
      'name, flops (FLOP/s), bandwidth (bytes/s), memory (bytes) of a device',
    ),
    flags.DEFINE_integer('devices', None, 'ways of tensor parallelism'),
    flags.DEFINE_integer('batch', None, 'sequences decoded at once'),
    flags.DEFINE_float('latency_ms', None, 'bound on a decode step'),
    flags.DEFINE_enum(
      'param_dtype', None, [*costs.BYTES], 'of the weights; bf16, on cpu fp32'
    ),
    flags.DEFINE_enum(
      'kv_dtype', None, [*costs.BYTES], 'of the cache; bf16, on cpu fp32'
    ),
    flags.DEFINE_enum('split', None, SPLITS, 'of the cache over devices'),
    flags.DEFINE_enum(
      'objective',
      None,
      OBJECTIVES,
      'what to optimise, among decoders of usual proportions',
    ),
    flags.DEFINE_integer(
      'vocab_size', None, 'of the tokeniser; its table counts as parameters'
    ),
    flags.DEFINE_integer(
      'head_dim', None, 'fix the size of heads, such as 256'
    ),
    flags.DEFINE_string(
      'model',
      None,
      f'print the costs of a published model: {", ".join(PUBLISHED)}',
    ),
  )
}
JSON = flags.DEFINE_bool('json', False, 'print JSON alone')

UNITS = {'': 0, 'k': 1, 'm': 2, 'b': 3, 'g': 3, 't': 4}
FIGURE = 'configure_heads.png'


@dataclasses.dataclass(frozen=True)
class Settings:
  demand: Demand
  answer: Choice | Published
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  settings.check_fields(config, ('name', *OVERRIDES))
  command_line.merge(config, OVERRIDES)
  workdir, asked = folders.named(config.name), folders.asked(config)
  record.check_same_config(workdir, asked)
  if config.model is not None:
    _check_given(config.model)
  demand = _demand(config)
  answer = choose(demand) if config.model is None else published(config.model)
  return Settings(demand, answer, workdir, asked)


def _check_given(model: str) -> None:
  """Raises a ValueError for flags that a model's costs do not depend on."""
  for name in model_costs.OWN:
    for flag in (name, f'config.{name}'):
      if flag in flags.FLAGS and flags.FLAGS[flag].present:
        raise ValueError(
          f'--{flag} and --model={model}: give one of the two, since a model '
          'has its own shape'
        )


def _demand(config: ConfigDict) -> Demand:
  """The demand that a config describes."""
  machine = hardware(config.hardware)
  usual = 'fp32' if machine.name == 'cpu' else 'bf16'  # as it was measured
  return Demand(
    params=parse_size('params', config.params, 1000),
    seq_len=round(parse_size('seq_len', config.seq_len, 1024)),
    hardware=machine,
    devices=config.devices,
    batch=config.batch,
    latency_ms=config.latency_ms,
    param_dtype=config.param_dtype or usual,
    kv_dtype=config.kv_dtype or usual,
    split=config.split,
    objective=config.objective,
    vocab_size=config.vocab_size,
    head_dim=config.head_dim,
  )


def parse_size(name: str, text: str, thousand: int) -> float:
  """A number such as 1.3B, 350M, 32k or 32768.

  Args:
    name: the flag.
    text: what it holds.
    thousand: what k stands for: 1000, of tokens 1024.

  Raises:
    ValueError: it is no positive number of that kind.
  """
  match = re.fullmatch(
    r'(\d+(?:\.\d+)?(?:e\d\d?)?)([kmbgt]?)', str(text).strip().lower()
  )
  number = float(match[1]) * thousand ** UNITS[match[2]] if match else 0
  if not 0 < number < math.inf:
    example = '32k or 32768' if thousand == 1024 else '1.3B or 350M'
    raise ValueError(
      f'--{name}={text} must be a positive number, such as {example}'
    )
  return number


def main(chosen: Settings) -> int:
  with folders.kept(chosen.workdir, chosen.asked):
    report(chosen)
  return 0


def report(chosen: Settings) -> None:
  """Writes JSON and the figure; prints the answer."""
  demand, answer = chosen.demand, chosen.answer
  if isinstance(answer, Choice):
    result = recommendation.as_dict(answer)
    configurator.configure_heads(
      answer, closest(answer.best.candidate.shape, 3), chosen.workdir / FIGURE
    )
  else:
    result = model_costs.costs_of(answer, demand)
  record.write_json(chosen.workdir / 'results.json', result)
  if JSON.value:
    print(json.dumps(result, indent=2))
  elif isinstance(answer, Choice):
    recommendation.report(answer)
    print(f'recorded in {chosen.workdir}, figure {chosen.workdir / FIGURE}')
  else:
    printing.show(model_costs.table(answer, demand, result), most=80)
    recommendation.bullets('What this does not know', [advice.TIMES])
    print(f'recorded in {chosen.workdir}')


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/configure_heads.py')

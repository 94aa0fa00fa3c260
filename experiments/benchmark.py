"""Speed and memory against the peers, in turn on one machine.

  python -m experiments.benchmark
  python -m experiments.benchmark --config.suites=attention,decode
  python -m experiments.benchmark --config=configs/benchmark.py:full

Suites: attention (jax.nn, Flax, PyTorch), module (Flax Linen and NNX, PyTorch),
unjitted (calls outside of jit, and tracing: jax.nn, Flax Linen and NNX),
decoder (a training step; the same decoder with Flax's attention), train (a step
of the copy task; the same model in NNX and PyTorch) and decode.
Contenders take turns, round after round; a table shows medians as multiples of
the first one's, with the quartiles over rounds, and how far one run raises a
fresh process's memory. Finished cases are kept in results.jsonl and skipped
when the command is given again.
"""

import dataclasses
import importlib
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.figures import speed
from experiments.harness import (
  command_line,
  folders,
  printing,
  settings,
  timing,
)
from experiments.reports import head_counts
from experiments.suites.case import HAS_TORCH, Case, Run
from mha_jax.attention import checks
from mha_jax.training import record
from mha_jax.training.signals import StopRequest, stop_on_signal

SUITES = ('attention', 'module', 'unjitted', 'decoder', 'train', 'decode')
WITH_MEMORY = ('attention', 'decoder')
SIZES = (
  'rounds',
  'batch_size',
  'num_heads',
  'head_dim',
  'window',
  'module_batch_size',
  'module_d_model',
  'decoder_layers',
  'train_steps',
  'decode_tokens',
  'decode_batch_size',
  'traced_layers',
)
OPEN = ('suites', 'lengths', 'module_lengths', 'decoder_lengths', 'train_heads')
"""The fields of the config that may differ between calls in one folder."""
ROW = ('key', 'suite', 'task', 'setting', 'rows')
"""The fields of every line of results.jsonl."""
NUMBERS = ('seconds', 'ratio', 'ratio_low', 'ratio_high')
"""The fields of each contender in a line."""


@dataclasses.dataclass(frozen=True)
class Settings:
  cases: tuple[Case, ...]
  config: ConfigDict
  workdir: pathlib.Path
  asked: Mapping[str, Any]


def parse() -> Settings:
  config = flags.FLAGS.config
  others = ('name', 'memory', 'max_scores_gib', 'tiny')
  settings.check_fields(config, (*SIZES, *OPEN, *others))
  for name in SIZES:
    checks.positive(f'--config.{name}', config[name])
  checks.real('--config.max_scores_gib', config.max_scores_gib, 1e-9, 1e6)
  chosen = config.suites.split(',')
  if config.num_heads % 4:
    raise ValueError(
      f'--config.num_heads={config.num_heads} must be a multiple of 4: GQA is '
      'measured in groups of 4'
    )
  checks.divides(
    '--config.num_heads',
    config.num_heads,
    '--config.module_d_model',
    config.module_d_model,
  )
  if unknown := sorted(set(chosen) - set(SUITES)):
    raise ValueError(f'--config.suites has {unknown}; the suites are {SUITES}')
  cases = tuple(case for suite in chosen for case in suite_cases(suite, config))
  workdir = folders.named(config.name)
  asked = folders.asked(config, free=OPEN)
  record.check_same_config(workdir, asked)
  return Settings(cases, config, workdir, asked)


def suite_cases(suite: str, config: ConfigDict) -> list[Case]:
  """The cases of a suite, each suite a file."""
  cases: list[Case] = importlib.import_module(
    f'experiments.suites.{suite}'
  ).cases(config)
  return cases


def main(chosen: Settings) -> int:
  path = chosen.workdir / 'results.jsonl'
  if not HAS_TORCH:
    note = "PyTorch is not installed and takes no part: pip install '.[parity]'"
    print(note, file=sys.stderr)
  with folders.kept(chosen.workdir, chosen.asked), stop_on_signal() as request:
    rows = [row for row in record.read_jsonl(path, *ROW) if _is_whole(row)]
    done = {row['key']: row for row in rows}
    console = Console(stderr=True)
    for number, case in enumerate(chosen.cases, 1):
      if case.key not in done:
        console.print(f'{number}/{len(chosen.cases)} {case.key}', style='dim')
        row = measure(case, chosen.config, request)
        if row is not None:
          done[case.key] = row
          text = ''.join(json.dumps(x) + '\n' for x in done.values())
          record.write_text(path, text)
      if request.signal is not None:
        print(
          f'{request.signal.name}: stopped; finished cases are kept in {path}, '
          'and the same command goes on'
        )
        return command_line.exit_code(request.signal)
  measured = [done[case.key] for case in chosen.cases if case.key in done]
  if measured:
    report(measured, chosen)
  return 0 if len(measured) == len(chosen.cases) else 1


def _is_whole(row: dict[str, Any]) -> bool:
  """Tells whether a line has what a table needs; else it is measured again."""
  rows = row['rows']
  return (
    isinstance(row['key'], str)
    and isinstance(row['setting'], dict)
    and isinstance(rows, list)
    and bool(rows)
    and all(
      isinstance(x, dict)
      and isinstance(x.get('contender'), str)
      and all(type(x.get(name)) is float for name in NUMBERS)
      for x in rows
    )
  )


def measure(
  case: Case, config: ConfigDict, request: StopRequest
) -> dict[str, Any] | None:
  """Times the contenders of a case in turn; None where a stop was requested.

  One that fails, for want of memory or of a compiler, is left out with a line.
  """
  runs = {}
  for name, prepare in case.contenders.items():
    try:
      runs[name] = prepare()
      runs[name]()
    except Exception as error:  # whatever it is, the others go on
      first = str(error).strip().splitlines()[:1]
      why = f'{type(error).__name__}: {"".join(first)}'
      print(f'{name} takes no part: {why}', file=sys.stderr)
      runs.pop(name, None)
  if not runs:
    return None
  seconds = timing.interleaved(
    runs, config.rounds, stop=lambda: request.signal is not None
  )
  if seconds is None:
    return None
  ours = seconds[next(iter(seconds))]
  rows = []
  for name, values in seconds.items():
    row = {'contender': name, 'seconds': statistics.median(values)}
    row |= timing.ratio(ours, values)
    if config.memory and case.suite in WITH_MEMORY:
      arguments = (case.suite, config.to_json(), case.key, name)
      row['peak_bytes'] = timing.peak_bytes(contender_run, arguments)
    rows.append(row)
  head = {'key': case.key, 'suite': case.suite, 'task': case.task}
  return head | {'setting': case.setting, 'rows': rows}


def contender_run(suite: str, config: str, key: str, name: str) -> Run:
  """One contender's run, from what can be sent to another process."""
  cases = suite_cases(suite, ConfigDict(json.loads(config)))
  return next(x for x in cases if x.key == key).contenders[name]()


def report(rows: list[dict[str, Any]], chosen: Settings) -> None:
  """Writes CSV and figure; prints a table for each case."""
  texts: list[str | Table] = []
  flat: list[dict[str, Any]] = []
  for case in rows:
    sizes = ', '.join(f'{k}={x}' for k, x in case['setting'].items())
    texts.append(f'{case["suite"]}: {case["task"]} ({sizes})')
    texts.append(case_table(case['rows']))
    head = {'suite': case['suite'], 'task': case['task'], 'setting': sizes}
    flat += [head | row for row in case['rows']]
  names = list(dict.fromkeys(name for row in flat for name in row))
  csv_path = chosen.workdir / 'results.csv'
  same = {k: x for k, x in chosen.config.to_dict().items() if k not in OPEN}
  table = [
    {n: row.get(n) for n in names} | head_counts.fields(same) for row in flat
  ]
  record.write_csv(csv_path, table)
  texts.append(f'recorded in {chosen.workdir}')
  by_length = [case for case in rows if case['task'].startswith('causal')]
  if len({case['setting']['t'] for case in by_length}) > 1:
    figure = chosen.workdir / 'benchmark.png'
    speed.benchmark(by_length, figure)
    texts.append(f'figure {figure}')
  printing.show(*texts)


def case_table(rows: list[dict[str, Any]]) -> Table:
  """Medians, also as multiples of the first contender's, and memory."""
  table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
  names = ('contender', 'ms', 'times the first', 'quartiles', 'memory')
  for name in names:
    table.add_column(name, justify='left' if name == names[0] else 'right')
  for row in rows:
    peak = row.get('peak_bytes')
    table.add_row(
      row['contender'],
      f'{1e3 * row["seconds"]:.3g}',
      f'{row["ratio"]:.2f}',
      f'{row["ratio_low"]:.2f}-{row["ratio_high"]:.2f}',
      '' if peak is None else f'{peak / 2**20:,.0f} MiB',
    )
  return table


if __name__ == '__main__':
  command_line.run(parse, main, default_config='configs/benchmark.py')

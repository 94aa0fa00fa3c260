"""A recommendation as JSON and as text: `configure_heads` without --model."""

import dataclasses
import math
import textwrap
from typing import Any

from rich import box
from rich.table import Table

from experiments.harness import printing
from mha_jax.analysis import costs
from mha_jax.analysis.configurator import advice
from mha_jax.analysis.configurator.candidates import as_python
from mha_jax.analysis.configurator.choice import Choice, axes
from mha_jax.analysis.configurator.comparison import differences, explain
from mha_jax.analysis.configurator.quality import QUALITY_SOURCE, quality
from mha_jax.analysis.configurator.rules import Costed

SHOWN = 5
"""Remedies that are printed."""


def as_dict(choice: Choice) -> dict[str, Any]:
  """A choice as JSON has it."""
  best = choice.best
  demand = dataclasses.asdict(best.demand)
  models = []
  for model in choice.closest:
    factors = differences(best, model)
    models.append(
      {
        'name': model.name,
        'cache_ratio': math.prod(factors.values()),
        'factors': factors,
        'words': explain(best, model),
      }
    )
  return {
    'demand': demand,
    'recommendation': _row(choice, best),
    'strategies': [_row(choice, x) for x in choice.strategies],
    'closest': models,
    'reasons': advice.reasons(choice),
    'rules': advice.rules_in_words(choice),
    'remedies': advice.remedies(choice),
    'quality_proxy': QUALITY_SOURCE,
    'unknown': list(advice.UNKNOWN),
    'python': as_python(best.candidate),
  }


def _row(choice: Choice, costed: Costed) -> dict[str, Any]:
  x = costed.candidate
  return {
    'kind': x.kind,
    'd_model': x.d_model,
    'num_layers': x.num_layers,
    'mlp_width': x.mlp_width,
    'vocab_size': x.vocab_size,
    'tied': x.tied,
    'attention': dataclasses.asdict(x.attention),
    'params': costed.params,
    'cache_bytes_per_token': costed.token_bytes,
    'weight_bytes_per_device': costed.weight_bytes,
    'cache_bytes_per_device': costed.cache_bytes,
    'step_seconds': costed.step.seconds,
    'step_parts': costed.step.parts,
    'bound': costed.step.bound,
    'tokens_per_second': costed.step.tokens_per_second,
    'max_batch': costed.fitting_batch,
    'quality_points_lost': -quality(x.attention),
    'on_front': axes(costed) in [axes(y) for y in choice.front],
    'recommended': costed == choice.best,
  }


def report(choice: Choice) -> None:
  """Prints the recommendation, why, what else, and what to paste."""
  demand = choice.best.demand
  print(
    f'{costs.counted(demand.params)} parameters, {demand.seq_len:,} tokens, '
    f'batch {demand.batch}, {demand.devices} x {demand.hardware.name}, '
    f'{demand.objective}:'
  )
  printing.show(_recommendation(choice.best), most=80)
  bullets('Why', advice.reasons(choice))
  printing.show(_strategies(choice), most=80)
  bullets(
    'Closest published models',
    [explain(choice.best, model) for model in choice.closest],
  )
  for name, lines in advice.remedies(choice).items():
    if lines:
      bullets(f'When {name} is short, all else kept', lines[:SHOWN])
  bullets('Rules', advice.rules_in_words(choice))
  bullets('What this does not know', list(advice.UNKNOWN))
  print('\nTo paste:\n')
  print(as_python(choice.best.candidate))


def bullets(title: str, lines: list[str]) -> None:
  """Prints a list; its words fold."""
  print(f'\n{title}:')
  fold = textwrap.TextWrapper(
    printing.columns(80) - 1,
    initial_indent='- ',
    subsequent_indent='  ',
    break_long_words=False,
  )
  for line in lines:
    print(fold.fill(line))


def _recommendation(best: Costed) -> Table:
  x = best.candidate
  table = Table(box=box.SIMPLE, show_header=False)
  sizes = dict(x.attention.sizes)
  rank = f'r = {sizes.get("r")}, p = {sizes.get("p")}'
  if 'q' in sizes:
    rank += f', queries from {sizes["q"]}'
  keeps = rank if x.num_kv_heads is None else f'{x.num_kv_heads}'
  label = 'latent' if x.num_kv_heads is None else 'key/value heads'
  for name, value in (
    ('projections', x.kind),
    ('query heads', f'{x.num_heads} of {x.head_dim}'),
    (label, keeps),
    ('d_model', f'{x.d_model:,}'),
    ('layers', f'{x.num_layers}'),
    ('MLP, gated', f'{x.mlp_width:,}'),
    ('vocabulary', f'{x.vocab_size:,}{", tied" * x.tied}'),
    ('parameters', f'{best.params:,}'),
    ('cache a token', f'{best.token_bytes / 1024:,.4g} KiB'),
    ('decode step', f'{best.step.seconds * 1e3:.3g} ms'),
  ):
    table.add_row(name, value)
  return table


def _strategies(choice: Choice) -> Table:
  table = Table(
    title='\nStrategies of this width and depth',
    box=box.SIMPLE_HEAD,
    caption=(
      "<: recommended; *: on the Pareto front of a device's cache, step and "
      'points. '
      f'Points lost: {QUALITY_SOURCE}.'
    ),
    caption_justify='left',
    padding=(0, 1, 0, 0),
  )
  names = ('strategy', 'MLP', 'cache/token', 'step', 'max batch', 'points lost')
  for name in (*names, ''):
    side = 'left' if name in ('strategy', '') else 'right'
    table.add_column(name, justify=side)  # type: ignore[arg-type]
  for costed in choice.strategies:
    x = costed.candidate
    row = _row(choice, costed)
    table.add_row(
      x.strategy,
      f'{x.mlp_width:,}',
      f'{costed.token_bytes / 1024:,.4g} KiB',
      f'{costed.step.seconds * 1e3:.3g} ms',
      f'{row["max_batch"]:,}',
      f'{abs(row["quality_points_lost"]):.2f}',
      '*' * row['on_front'] + ' <' * row['recommended'],
    )
  return table

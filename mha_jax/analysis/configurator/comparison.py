"""A decoder beside published ones: the closest, what differs, and why."""

import math

from mha_jax.analysis.configurator.candidates import kv_heads
from mha_jax.analysis.configurator.quality import quality
from mha_jax.analysis.configurator.rules import Costed
from mha_jax.analysis.costs.counts import (
  cache_elements,
  counted,
  gigabytes,
  num_params,
)
from mha_jax.analysis.costs.published import PUBLISHED, Published
from mha_jax.analysis.costs.roofline import (
  decode_step,
  device_cache_bytes,
  weight_bytes,
)
from mha_jax.analysis.costs.shape import ModelShape

ALIKE = 1.25
"""Factors of the cache below this need no reason."""
SAME_SIZE = 1.5
"""Up to this factor of parameters another depth is a choice of proportions."""


def closest(shape: ModelShape, count: int = 2) -> tuple[Published, ...]:
  """The published decoders whose sizes are least far, the nearest first.

  sum of (log a - log b)^2 over parameters, depth, width, heads, and elements
  of a token's cache a layer
  """
  own = _sizes(shape)
  decoders = [x for x in PUBLISHED.values() if x.shape.causal]
  distance = {x.name: math.dist(own, _sizes(x.shape)) for x in decoders}
  return tuple(sorted(decoders, key=lambda x: distance[x.name])[:count])


def differences(costed: Costed, model: Published) -> dict[str, float]:
  """Factors whose product is a model's cache a token over the candidate's.

  At the demand's length, of which layers with a window keep a part.

  Returns:
    By name: 'layers', 'key/value heads', 'head_dim', 'windows'; where one of
    both has a latent, 'elements a layer' for the two in the middle.
  """
  candidate, shape = costed.candidate, model.shape
  length = costed.demand.seq_len
  ours, theirs = candidate.attention, shape.layers[0].attention
  each = theirs.cache_elements / ours.cache_elements
  factors = {'layers': len(shape.layers) / candidate.num_layers}
  n, m = kv_heads(theirs), kv_heads(ours)
  if n is None or m is None:
    factors['elements a layer'] = each
  else:
    factors['key/value heads'] = n / m
    factors['head_dim'] = each * m / n
  whole = len(shape.layers) * theirs.cache_elements * length
  factors['windows'] = cache_elements(shape, length) / whole
  return factors


def explain(costed: Costed, model: Published) -> str:
  """Explains how a published model's cache differs from the candidate's."""
  candidate, demand = costed.candidate, costed.demand
  factors = differences(costed, model)
  ratio = math.prod(factors.values())
  attention = model.shape.layers[0].attention
  theirs = {
    'layers': f'{len(model.shape.layers)} layers for {candidate.num_layers}',
    'key/value heads': (
      f'{attention.entry_shapes[0][0]} key/value heads for '
      f'{candidate.num_kv_heads}'
    ),
    'head_dim': f'head_dim {attention.qk_head_dim} for {candidate.head_dim}',
    'elements a layer': (
      f'{attention.cache_elements} elements a layer for '
      f'{candidate.attention.cache_elements}'
    ),
    'windows': 'windows, beyond which layers keep nothing',
  }
  parts = [
    f'{theirs[name]} (x {x:.3g})'
    for name, x in factors.items()
    if abs(math.log(x)) > 0.01
  ]
  params = num_params(model.shape).total
  other_size = not 1 / SAME_SIZE <= params / costed.params <= SAME_SIZE
  why = [
    'Another size.'
    if name == 'layers' and other_size
    else _why(name, x, costed, model)
    for name, x in factors.items()
    if not 1 / ALIKE <= x <= ALIKE
  ]
  place, length, batch = demand.place, demand.seq_len, demand.batch
  step = decode_step(model.shape, place, length, batch)
  cache = device_cache_bytes(model.shape, place, length, batch)
  room = demand.usable_memory - weight_bytes(model.shape, place)
  left = f'{gigabytes(room)} are left' if room > 0 else 'nothing is left'
  fits = '' if cache <= room else f' (does not fit: {left})'
  head = (
    f'{model.name} ({counted(params)}) keeps {ratio:.3g} times as much a token'
  )
  return ' '.join(
    [
      f'{head}: {", ".join(parts)}.' if parts else f'{head}.',
      *why,
      f'Under this demand its cache takes {gigabytes(cache)} a device{fits}, '
      f'its step {step.seconds * 1e3:.3g} ms.',
    ]
  )


def _why(name: str, factor: float, costed: Costed, model: Published) -> str:
  """Names the reasons that makers may have had for another choice."""
  if name == 'key/value heads':
    theirs = quality(model.shape.layers[0].attention)
    points = theirs - quality(costed.candidate.attention)
    more = 'More' if factor > 1 else 'Fewer'
    if points * (factor - 1) <= 0:
      return f'{more} key/value heads, of another number of heads.'
    return (
      f'More key/value heads: {points:.2g} points of the proxy, which the '
      'recommendation gives for the cache.'
      if factor > 1
      else f'Fewer key/value heads: {-points:.2g} points of the proxy for less '
      'cache; this demand has room for more.'
    )
  return {
    'layers': 'Another depth, which at equal parameters hardly matters.',
    'head_dim': (
      'Another head_dim: 64 up to d_model 2048 and 128 beyond are usual; fewer '
      'features save cache, which the proxy does not see.'
    ),
    'elements a layer': (
      'A latent differs: the objective quality prefers grouped attention while '
      'one within 0.1 points of the best fits; others weigh cache and step.'
    ),
    'windows': 'Windows, which are not among the candidates, save cache.',
  }[name]


def _sizes(shape: ModelShape) -> tuple[float, ...]:
  attention = shape.layers[0].attention
  return tuple(
    math.log(x)
    for x in (
      num_params(shape).total,
      len(shape.layers),
      shape.d_model,
      attention.num_heads,
      attention.cache_elements,
    )
  )

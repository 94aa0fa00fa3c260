"""Hardware: FLOP/s, bytes/s of memory, and bytes of it.

  hardware('h100')      a row of the table
  hardware('my.json')   the user's own, see `from_json`
  hardware('cpu')       this machine, measured in about a second

Peaks are the makers': dense (no sparsity), of one device. What programs reach
is less; for the CPU the numbers are what JAX reached.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_jax.attention import checks

LEAST = {'flops': 1e9, 'bandwidth': 1e8, 'memory': 1e6}
"""No machine has less: such a number is in another unit."""
MOST = {'flops': 1e20, 'bandwidth': 1e18, 'memory': 1e18}
"""No machine has more."""
UNITS = {'flops': 'FLOP/s', 'bandwidth': 'bytes/s', 'memory': 'bytes'}


@dataclasses.dataclass(frozen=True)
class Hardware:
  """One device.

  Args:
    name: what to call it.
    flops: FLOP/s of dense products in bfloat16 (measured CPUs: float32).
    bandwidth: bytes/s read from its main memory.
    memory: bytes of main memory.
    source: where the numbers are from.
    lanes: features that a head should have a multiple of, or is padded to.

  Raises:
    ValueError: a number is so small or large that its unit is another, or a
      text cannot be shown.
  """

  name: str
  flops: float
  bandwidth: float
  memory: float
  source: str = 'given by the user'
  lanes: int = 64

  def __post_init__(self) -> None:
    if not re.fullmatch(r'[\w .+()/-]{1,60}', self.name):
      raise ValueError(
        f'name={self.name!a} of hardware must be 1 to 60 letters, digits, '
        'spaces or . + - / ( )'
      )
    if not self.source.isprintable():
      raise ValueError(f'source={self.source!a} must be printable')
    for name, least in LEAST.items():
      value = getattr(self, name)
      number = isinstance(value, int | float)
      if not (number and least <= value <= MOST[name]):
        raise ValueError(
          f'{name}={value!r} of hardware {self.name!r} must be a number of '
          f'{UNITS[name]}, at least {least:g} and at most {MOST[name]:g}'
        )
    checks.positive('lanes', self.lanes)

  @property
  def ridge(self) -> float:
    """FLOPs a byte at which computing takes as long as reading."""
    return self.flops / self.bandwidth


_SCALING_BOOK = 'jax-ml.github.io/scaling-book/tpus, table of chips'

HARDWARE: dict[str, Hardware] = {
  row.name: row
  for row in (
    Hardware('h100', 989e12, 3.35e12, 80e9, 'NVIDIA H100 datasheet, SXM'),
    Hardware('h200', 989e12, 4.8e12, 141e9, 'NVIDIA H200 datasheet, SXM'),
    Hardware('a100', 312e12, 2.039e12, 80e9, 'NVIDIA A100 datasheet, 80GB SXM'),
    Hardware(
      'rtx4090',
      165.2e12,
      1.008e12,
      24e9,
      'NVIDIA Ada GPU architecture whitepaper, appendix A, FP32 accumulation',
    ),
    Hardware('v5e', 197e12, 0.81e12, 16e9, _SCALING_BOOK, 128),
    Hardware('v5p', 459e12, 2.8e12, 96e9, _SCALING_BOOK, 128),
    Hardware('v6e', 920e12, 1.6e12, 32e9, _SCALING_BOOK, 128),
  )
}
"""The makers' numbers by name."""


def hardware(name: str) -> Hardware:
  """A device by name.

  Args:
    name: a key of `HARDWARE` in any spelling ('TPU v5e', 'NVIDIA-H100'), 'cpu'
      to measure this machine, or the path of a .json file.

  Raises:
    ValueError: the name is unknown or the file is not as `from_json` wants it.
  """
  text = str(name)
  if text.endswith('.json'):
    return from_json(text)
  plain = ''.join(x for x in text.lower() if x.isalnum())
  plain = plain.removeprefix('nvidia').removeprefix('tpu')
  if plain == 'cpu':
    return measure_cpu()
  if plain in HARDWARE:
    return HARDWARE[plain]
  known = (*HARDWARE, 'cpu')
  near = difflib.get_close_matches(plain, known) or known
  raise ValueError(
    f'hardware={name!r} is unknown; nearest: {", ".join(near)}; or give a '
    'file of your own, as my.json'
  )


def from_json(path: str | os.PathLike[str]) -> Hardware:
  """A device from a file.

    {"name": "h100-nvl", "flops": 835e12, "bandwidth": 3.9e12, "memory": 94e9}

  Args:
    path: a JSON object with these names in FLOP/s, bytes/s and bytes, and with
      a "source" and "lanes" or without.

  Raises:
    ValueError: the file cannot be read, a name is missing or unknown, or a
      value is no such number.
  """
  try:
    values = json.loads(pathlib.Path(path).read_text())
  except OSError as error:
    raise ValueError(
      f'{path} cannot be read: {error.strerror}; give the path of a JSON file'
    ) from error
  except (ValueError, RecursionError) as error:  # neither JSON nor text
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(values, dict):
    raise ValueError(
      f'{path} holds a {type(values).__name__}; it must hold an object with '
      f'name, {", ".join(LEAST)}'
    )
  fields = {x.name: x for x in dataclasses.fields(Hardware)}
  if unknown := sorted(set(values) - set(fields)):
    raise ValueError(
      f'{path} has {unknown[0]!r}; the names are {", ".join(fields)}'
    )
  if missing := [x for x in ('name', *LEAST) if x not in values]:
    unit = f', in {UNITS[missing[0]]}' if missing[0] in UNITS else ''
    raise ValueError(f'{path} lacks {missing[0]!r}{unit}')
  for name in ('name', 'source'):
    if not isinstance(values.get(name, ''), str):
      raise ValueError(f'{path}: {name}={values[name]!r} must be a string')
  try:
    return Hardware(**values)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def measure_cpu() -> Hardware:
  """Measures what JAX reaches on this machine's CPU, in about a second.

  FLOP/s are those of a float32 product of two square matrices, bytes/s those of
  a row times a matrix of 256 MiB, as a decoding step reads its weights; the
  best of several runs. Other products read at other rates: on 2 cores of an
  EPYC 22 GB/s this way, 12 for 4 rows, 8 to 17 for batched ones as of
  attention, 59 the matrix times a column. Memory is the machine's, whoever
  uses it.
  """
  with jax.default_device(jax.devices('cpu')[0]):
    square = jnp.ones((1024, 1024), jnp.float32)
    product = _best_seconds(jnp.matmul, square, square)
    large = jnp.ones((8192, 8192), jnp.float32)
    sweep = _best_seconds(jnp.matmul, large[:1], large)
  return Hardware(
    name='cpu',
    flops=2 * square.size * square.shape[0] / product,
    bandwidth=large.nbytes / sweep,
    memory=float(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')),
    source=f'measured on this machine, {os.cpu_count()} cores, float32',
  )


def _best_seconds(
  function: Callable[..., Any], *args: Any, budget: float = 0.3
) -> float:
  """The least time of a call, compiled, of all that the budget allows."""
  call = jax.jit(function)
  jax.block_until_ready(call(*args))
  times: list[float] = []
  while len(times) < 3 or sum(times) < budget:
    begin = time.perf_counter()
    jax.block_until_ready(call(*args))
    times.append(time.perf_counter() - begin)
  return min(times)

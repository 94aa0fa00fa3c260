"""A demand: the size of a new decoder, its work and its hardware."""

import dataclasses

from mha_jax.analysis.costs.counts import itemsize
from mha_jax.analysis.costs.hardware import Hardware
from mha_jax.analysis.costs.roofline import SPLITS, Placement
from mha_jax.attention import checks

OBJECTIVES = ('quality', 'throughput', 'latency')
HEAD_DIMS = (64, 80, 96, 128, 256)
USABLE = 0.9
"""The part of a memory that weights and cache may take."""


@dataclasses.dataclass(frozen=True)
class Demand:
  """The size of a model, the work that it must do, and where.

  Args:
    params: how many parameters, within 3 %.
    seq_len: tokens of a sequence when it decodes.
    hardware: each device.
    devices: ways of tensor parallelism.
    batch: sequences at once.
    latency_ms: milliseconds that a decode step may take; None: any.
    param_dtype: of the weights, a name in `costs.BYTES`.
    kv_dtype: of the cache.
    split: how devices split the cache, 'heads' or 'batch', see `Placement`.
    objective: 'quality', 'throughput' (tokens a second, at the batch that
      fits) or 'latency' (of a step, at `batch`).
    vocab_size: m.
    head_dim: features of a head; None: 64 or 128. To ask for another is the
      reason that it needs.

  Raises:
    ValueError: a value is none of these.
  """

  params: float
  seq_len: int
  hardware: Hardware
  devices: int = 1
  batch: int = 1
  latency_ms: float | None = None
  param_dtype: str = 'bf16'
  kv_dtype: str = 'bf16'
  split: str = 'heads'
  objective: str = 'quality'
  vocab_size: int = 128_256
  head_dim: int | None = None

  def __post_init__(self) -> None:
    checks.real('params', self.params, 1e5, 1e13)
    for name in ('seq_len', 'devices', 'batch', 'vocab_size'):
      checks.positive(name, getattr(self, name))
    if self.latency_ms is not None:
      checks.real('latency_ms', self.latency_ms, 1e-6, 1e6)
    itemsize('param_dtype', self.param_dtype)
    itemsize('kv_dtype', self.kv_dtype)
    if self.objective not in OBJECTIVES:
      raise ValueError(f'objective={self.objective!r} must be in {OBJECTIVES}')
    if self.head_dim not in (None, *HEAD_DIMS):
      raise ValueError(f'head_dim={self.head_dim!r} must be in {HEAD_DIMS}')
    if self.split not in SPLITS:
      raise ValueError(f'split={self.split!r} must be in {SPLITS}')

  @property
  def place(self) -> Placement:
    """The placement on the devices."""
    return Placement(
      self.hardware, self.devices, self.param_dtype, self.kv_dtype, self.split
    )

  @property
  def usable_memory(self) -> float:
    """Bytes of each device for weights and cache; the rest for activations."""
    return USABLE * self.hardware.memory

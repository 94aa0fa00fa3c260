"""The shape of a model: its attention configs, and the parts around them.

  shape = stack(attention, 32, mlp=Mlp(14336), vocab_size=128256)
  shape = decoder_shape(config)               that of a `DecoderLM`, exactly

`costs` counts what a shape takes, `roofline` what devices make of it.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

from mha_jax.attention import AttentionConfig, checks
from mha_jax.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Mlp:
  """Two matrices, d by f and back; gated ones (SwiGLU, GeGLU) have a third.

  Args:
    width: f, the hidden features.
    gated: whether there is a gate.
    use_bias: whether each matrix adds a bias.
  """

  width: int
  gated: bool = True
  use_bias: bool = False

  def __post_init__(self) -> None:
    checks.positive('width', self.width)

  def num_params(self, d: int, tokens: float, devices: int = 1) -> float:
    """Parameters that so many tokens use, on each of the devices."""
    del tokens  # one uses all
    width = math.ceil(self.width / devices)
    into = 2 if self.gated else 1
    bias = into * width + d if self.use_bias else 0
    return (into + 1) * d * width + bias


@dataclasses.dataclass(frozen=True)
class Experts:
  """A mixture of experts: a router, experts it chooses from, and shared ones.

  Args:
    expert: one of them.
    routed: experts to choose from.
    active: of those, how many a token uses.
    shared: experts that every token uses.
  """

  expert: Mlp
  routed: int
  active: int
  shared: int = 0

  def __post_init__(self) -> None:
    checks.positive('routed', self.routed)
    checks.whole('active', self.active, 1, self.routed)
    checks.whole('shared', self.shared, 0, 2**31 - 1)

  def num_params(self, d: int, tokens: float, devices: int = 1) -> float:
    """Parameters that so many tokens use, on each of the devices.

      d E + (shared + E (1 - (1 - active / E)^tokens)) expert

    the expected number of distinct experts when the router chooses evenly:
    `active` for one token, all for many. Each expert is split over the devices.
    """
    missed = (1 - self.active / self.routed) ** tokens
    experts = self.shared + self.routed * (1 - missed)
    return d * self.routed + experts * self.expert.num_params(d, 1, devices)


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer.

  Args:
    attention: its config.
    mlp: what follows; None: nothing.
    window: how many tokens a query sees, itself included; None: all before it.
    norms: vectors (d,) of the norms beside the attention's own: 2 for pre-norm
      RMSNorm, 4 with biases or with norms after too.
  """

  attention: AttentionConfig
  mlp: Mlp | Experts | None = None
  window: int | None = None
  norms: int = 2

  def __post_init__(self) -> None:
    if self.window is not None:
      checks.positive('window', self.window)

  def keys(self, length: int) -> int:
    """Counts the keys that the last of so many tokens attends to."""
    return length if self.window is None else min(length, self.window)

  def pairs(self, length: int, causal: bool = True) -> int:
    """Pairs of a query and a key that it attends to, in a whole sequence.

    causal: w (w + 1) / 2 + (t - w) w,  w the window or t;  else t w
    """
    w = self.keys(length)
    return w * (w + 1) // 2 + (length - w) * w if causal else length * w


@dataclasses.dataclass(frozen=True)
class ModelShape:
  """A model.

  Args:
    layers: from the first to the last.
    vocab_size: m.
    tied: whether the output projection is the table of embeddings.
    positions: learned positions; 0: none.
    norms: vectors (d,) of norms outside of the layers.
    causal: False for an encoder.

  Raises:
    ValueError: there are no layers, or they differ in d_model.
  """

  layers: tuple[Layer, ...]
  vocab_size: int
  tied: bool = False
  positions: int = 0
  norms: int = 1
  causal: bool = True

  def __post_init__(self) -> None:
    checks.positive('vocab_size', self.vocab_size)
    widths = {layer.attention.d_model for layer in self.layers}
    if len(widths) != 1:
      raise ValueError(
        f'layers have d_model {sorted(widths)}; give one layer or more, all of '
        'the same width'
      )

  @property
  def d_model(self) -> int:
    return self.layers[0].attention.d_model

  @functools.cached_property
  def groups(self) -> tuple[tuple[Layer, int], ...]:
    """The layers that differ, and how many there are of each."""
    return tuple(collections.Counter(self.layers).items())


def stack(
  attention: AttentionConfig | Sequence[AttentionConfig],
  num_layers: int,
  *,
  vocab_size: int,
  mlp: Mlp | Experts | None = None,
  first: Sequence[Mlp | Experts | None] = (),
  windows: Sequence[int | None] = (None,),
  layer_norms: int = 2,
  tied: bool = False,
  positions: int = 0,
  norms: int = 1,
  causal: bool = True,
) -> ModelShape:
  """A model of layers that are alike, or take turns.

  Args:
    attention: their config, or configs of the layers in turn, like windows.
    num_layers: how many.
    vocab_size: m.
    mlp: of each layer.
    first: in place of it in the first layers, such as (Mlp(18432),) * 3.
    windows: of the layers in turn, over and over: (4096, None) alternates local
      and global ones.
    layer_norms: see `Layer`.
    tied: see `ModelShape`, like those that follow.
    positions: learned ones.
    norms: outside of the layers.
    causal: False for an encoder.

  Raises:
    ValueError: a number is not positive, or first has too many.
  """
  checks.positive('num_layers', num_layers)
  attentions = (
    [attention] if isinstance(attention, AttentionConfig) else attention
  )
  if len(first) > num_layers or not windows:
    raise ValueError(
      f'first has {len(first)} and windows {len(windows)} for num_layers='
      f'{num_layers}; give no more MLPs than layers, and a window or None'
    )
  mlps = [*first, *[mlp] * (num_layers - len(first))]
  layers = tuple(
    Layer(
      attentions[i % len(attentions)],
      mlp,
      windows[i % len(windows)],
      layer_norms,
    )
    for i, mlp in enumerate(mlps)
  )
  return ModelShape(layers, vocab_size, tied, positions, norms, causal)


def decoder_shape(
  config: DecoderConfig, windows: Sequence[int | None] = (None,)
) -> ModelShape:
  """The shape of a `DecoderLM`: its parameters are exactly as many.

  Args:
    config: the decoder.
    windows: of its layers' caches in turn, see `stack`.
  """
  mlp = None
  if config.mlp_dim:
    mlp = Mlp(config.mlp_dim, gated=False, use_bias=config.use_bias)
  layers = tuple(
    Layer(attention, mlp, windows[i % len(windows)], norms=2 if mlp else 1)
    for i, attention in enumerate(config.layers)
  )
  positions = config.max_len if config.learned_positions else 0
  return ModelShape(layers, config.vocab_size, positions=positions)

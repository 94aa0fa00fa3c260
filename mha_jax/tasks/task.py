"""Defines a task as training sees it: a vocabulary, a length and batches."""

import abc
from typing import Protocol

import jax
import jax.numpy as jnp

from mha_jax.attention.pytrees import pytree


@pytree
class Batch:
  """Sequences to predict: targets are the inputs' next tokens."""

  inputs: jax.Array  # (b, t) int32
  targets: jax.Array  # (b, t) int32
  weights: jax.Array  # (b, t) float32, 1 where the target counts, else 0

  def mean(self, values: jax.Array) -> jax.Array:
    """The mean () of values (b, t) over the targets that count."""
    return jnp.sum(values * self.weights) / jnp.sum(self.weights)


class Task(Protocol):
  """A source of batches.

  A task of one's own is a frozen dataclass that inherits from it and gives what
  is abstract here; the rest is for showing what was learnt.
  """

  @property
  @abc.abstractmethod
  def vocab_size(self) -> int:
    """The number of tokens m."""

  @property
  @abc.abstractmethod
  def max_len(self) -> int:
    """The length t of a batch's inputs."""

  @property
  @abc.abstractmethod
  def kind(self) -> str:
    """Its name in `TASKS`, or where to import it from, module:Class.

    A field that is not given, so that records have it:
    `kind: str = dataclasses.field(default='module:Class', init=False)`.
    """

  @abc.abstractmethod
  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws a batch; the same key gives the same batch."""

  @property
  def validation(self) -> 'Task':
    """The task to evaluate on; itself, where batches never end."""
    return self

  @property
  def separators(self) -> tuple[int, ...]:
    """Tokens that part others and stand for nothing themselves."""
    return ()

  @property
  def symbols(self) -> tuple[int, ...]:
    """The tokens that inputs hold, without separators and padding."""
    separators = self.separators
    return tuple(x for x in range(self.vocab_size) if x not in separators)

  def token_text(self, token: int) -> str:
    """Writes a token as a reader is shown it."""
    return str(token)

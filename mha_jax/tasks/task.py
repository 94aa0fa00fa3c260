"""What a task is to training: a vocabulary, a length and batches."""

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
  """A source of batches."""

  @property
  def vocab_size(self) -> int:
    """The number of tokens m."""

  @property
  def max_len(self) -> int:
    """The length t of a batch's inputs."""

  @property
  def kind(self) -> str:
    """Its name in `TASKS`."""

  @property
  def validation(self) -> 'Task':
    """The task to evaluate on; itself, where batches never end."""

  @property
  def separators(self) -> tuple[int, ...]:
    """Tokens that part others and stand for nothing themselves."""

  @property
  def symbols(self) -> tuple[int, ...]:
    """The tokens that inputs hold, without separators and padding."""

  def token_text(self, token: int) -> str:
    """How a token is shown to a reader."""

  def sample(self, key: jax.Array, batch_size: int) -> Batch:
    """Draws a batch; the same key gives the same batch."""

"""The letters of every einsum string, shape comment and annotation.

One letter, one meaning, everywhere: `q_BHTK` is a query of shape
(batch, query heads, query length, head dimension), `'btd,dhk->bhtk'` the
projection that makes it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Bool, Float, Int, Key, Shaped

Array = jax.Array

ArrayLike = jax.typing.ArrayLike | Sequence[Any]
"""An array, a NumPy array, a number or a nested list of numbers."""

DTypeLike = jax.typing.DTypeLike

__all__ = [
  'LETTERS',
  'LOGICAL_AXES',
  'Array',
  'ArrayLike',
  'Bool',
  'DTypeLike',
  'Float',
  'Int',
  'Key',
  'Shaped',
]

LETTERS: dict[str, str] = {
  'b': 'batch',
  't': 'query length',
  's': 'key length',
  'd': 'model dimension',
  'h': 'query heads',
  'n': 'key/value heads',
  'g': 'query heads per key/value head, h = n g',
  'k': 'head dimension of queries and keys',
  'v': 'head dimension of values',
  'r': 'latent rank (MLA kv_lora_rank)',
  'p': 'rotary part of a key (MLA qk_rope_head_dim)',
  'q': 'query latent rank (MLA q_lora_rank)',
  'f': 'hidden dimension of the MLP',
  'm': 'vocabulary',
}

LOGICAL_AXES: dict[str, str] = {
  'b': 'batch',
  't': 'query_length',
  's': 'key_length',
  'd': 'embed',
  'h': 'heads',
  'n': 'kv_heads',
  'g': 'group',
  'k': 'head_dim',
  'v': 'v_head_dim',
  'r': 'kv_lora_rank',
  'p': 'qk_rope_head_dim',
  'q': 'q_lora_rank',
  'f': 'mlp',
  'm': 'vocab',
}
"""Names of kernel axes for sharding rules, by letter."""

Parts = tuple[Array, ...]
"""Arrays (b, heads, length, features), or of one head (length, features): the
parts of a query or key, whose scores add, or the entries of a cache."""

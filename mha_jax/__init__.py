"""Multi-head attention and what followed it, for JAX research.

import mha_jax.linen as mha          # Flax Linen modules
import mha_jax.nnx as mha            # the same as Flax NNX modules
from mha_jax import attention        # the pure functions below them
from mha_jax import dot_product_attention    # jax.nn's signature
"""

from mha_jax import attention
from mha_jax.attention.dot_product import dot_product_attention

__version__ = '0.1.0'

__all__ = ['__version__', 'attention', 'dot_product_attention']

"""Multi-head attention and what followed it, for JAX research.

import mha_jax.linen as mha          # Flax Linen modules
from mha_jax import attention        # the pure functions below them
"""

from mha_jax import attention

__version__ = '0.1.0'

__all__ = ['__version__', 'attention']

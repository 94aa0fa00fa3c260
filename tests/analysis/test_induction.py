"""A model that is trained to have induction heads has them, and needs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from mha_jax.analysis import probing, pruning
from mha_jax.decoder import decoder_config
from mha_jax.tasks import Batch, InductionTask
from mha_jax.training import train

HEADS = (4, 1)
"""With more heads in the second layer each would stand in for the others."""


@pytest.mark.usefixtures('full_compile')
class InductionTest(parameterized.TestCase):
  def test_heads(self):
    """Prefix matching above 0.8, a positive copying score; without the head
    the loss on repeats rises by more than without any other."""
    task = InductionTask(64, 64, min_period=16, max_period=32)
    model = decoder_config(
      64,
      64,
      d_model=64,
      num_layers=2,
      head_dim=16,
      layers=[{'num_heads': h} for h in HEADS],
    )
    experiment = train.Experiment(
      model, task, train.OptimizerConfig(), train.TrainConfig(steps=1000)
    )
    key = jax.random.key(0)
    state = jax.jit(functools.partial(train.init, experiment))(key)
    advance = jax.jit(functools.partial(train.advance, experiment, 1000))
    params = advance(key, state)[0].params

    repeats = probing.repeated_tokens(jax.random.key(1), 64, 32, range(64))
    again = jnp.broadcast_to(jnp.arange(64) >= 32, repeats.shape)
    rows = probing.head_scores(model, params, repeats, queries=again)
    self.assertLen(rows, sum(HEADS))
    matching = [row['prefix_matching'] for row in rows]
    self.assertGreater(matching[-1], 0.8)
    self.assertLess(max(matching[:-1]), 0.1)
    self.assertEqual(probing.name_heads(rows)[-1], 'induction')
    self.assertGreater(rows[-1]['copying_score'], 0.8)

    counts = again[:, :-1].astype(jnp.float32)
    batch = Batch(repeats[:, :-1], repeats[:, 1:], counts)
    loss = jax.jit(
      functools.partial(pruning.loss_with_gates, model, params, batch)
    )
    whole = [np.ones(h) for h in HEADS]
    gains = []
    for layer, h in enumerate(HEADS):
      for head in range(h):
        gates = [x.copy() for x in whole]
        gates[layer][head] = 0
        gains.append(float(loss(gates) - loss(whole)))
    self.assertEqual(np.argmax(gains), 4)

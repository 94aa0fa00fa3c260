"""What a training step keeps in memory, against shapes and XLA's count."""

import dataclasses
import functools
import pathlib
import tempfile
from unittest import mock

import jax
from absl.testing import parameterized

from mha_jax.decoder import decoder_config
from mha_jax.tasks import CopyTask
from mha_jax.training import memory, train
from mha_jax.training.train import Experiment, OptimizerConfig, TrainConfig


def make(
  length: int = 7, batch_size: int = 5, num_symbols: int = 11, **model
) -> Experiment:
  task = CopyTask(length=length, num_symbols=num_symbols)
  sizes = {'vocab_size': task.vocab_size, 'max_len': task.max_len}
  return Experiment(
    decoder_config(**sizes, **({'d_model': 24, 'num_heads': 3} | model)),
    task,
    OptimizerConfig(warmup_steps=1),
    TrainConfig(steps=3, batch_size=batch_size),
  )


def state_of(experiment: Experiment) -> train.TrainState:
  """The shapes of the state before the first step."""
  init = functools.partial(train.init, experiment)
  return jax.eval_shape(init, jax.random.key(0))


class SizesTest(parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'num_layers': 3, 'mlp_dim': 13},
    {'num_layers': 2, 'mlp_dim': 13, 'use_bias': True, 'positions': 'none'},
    {'attention': 'gqa', 'num_heads': 4, 'num_kv_heads': 2},
    {'attention': 'mla', 'kv_lora_rank': 5},
    {
      'num_layers': 2,
      'head_dim': 7,
      'layers': ({'num_heads': 3}, {'num_heads': 2}),
    },
  )
  def test_params_and_state(self, **model):
    """Exactly those of the model; with gradients and AdamW's two moments."""
    experiment = make(**model)
    state = state_of(experiment)
    count = sum(x.size for x in jax.tree.leaves(state.params))
    self.assertEqual(sum(memory.num_params(experiment.model)), count)
    sizes = memory.step_bytes(experiment)
    kept = sum(4 * x.size for x in jax.tree.leaves(state) if x.ndim)
    self.assertEqual(sizes['embeddings'] + sizes['layers'], kept + 4 * count)

  @parameterized.parameters(
    {'length': 16, 'batch_size': 31, 'num_layers': 2},
    {'batch_size': 2, 'd_model': 384, 'mlp_dim': 512},
  )
  def test_xla_counts_more(self, **sizes):
    """Never more than XLA takes, and not below a quarter of it."""
    experiment = make(**sizes)
    advance = functools.partial(train.advance, experiment, 2)
    lowered = jax.jit(advance, donate_argnums=1).lower(
      jax.random.key(0), state_of(experiment)
    )
    found = lowered.compile().memory_analysis()
    taken = found.temp_size_in_bytes + found.argument_size_in_bytes
    share = sum(memory.step_bytes(experiment).values()) / taken
    self.assertBetween(share, 0.25, 1)

  def test_by_hand(self):
    """Each part in numbers, 3 seeds at once."""
    sizes = memory.step_bytes(make(num_layers=2, mlp_dim=13), copies=3)
    tokens = 3 * 5 * 14
    self.assertEqual(sizes['logits'], 4 * tokens * 13)
    self.assertEqual(sizes['attention weights'], 4 * tokens * 2 * 2 * 3 * 14)
    layer = 2 * 24 + 2 * 24 + 2 * 24 + 24 + 2 * 13
    self.assertEqual(sizes['activations'], 4 * tokens * 2 * layer)


class CheckTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'d_model': 24 * 2**17}, 'layers, by model.d_model=3145728, model.num_h'),
    ({'batch_size': 10**9}, 'are activations, by train.batch_size=1000000000'),
    ({'length': 500, 'batch_size': 10**6}, 'are attention weights, by train.b'),
    (
      {'length': 10**8},
      'are activations, by train.batch_size=5, task.length=100000000',
    ),
    ({'head_dim': 10**9}, 'are .*, model.head_dim=1000000000: choose'),
    (
      {'attention': 'mla', 'kv_lora_rank': 10**9},
      'are .*, model.kv_lora_rank=1000000000: choose',
    ),
    ({'num_symbols': 10**9}, 'embeddings, by .*, task.num_symbols=1000000000'),
    ({'mlp_dim': 2**31 - 1}, 'layers, by .* model.mlp_dim=2147483647'),
  )
  def test_refused(self, sizes, message):
    """Nothing is allocated; what needs most is named with its value."""
    with (
      mock.patch.object(memory, 'available_bytes', return_value=2**36),
      self.assertRaisesRegex(ValueError, rf' 64.0 GiB of memory; .*{message}'),
    ):
      memory.check(make(**sizes))

  def test_the_bound(self):
    """What there is, to the byte."""
    experiment = make()
    needed = sum(memory.step_bytes(experiment).values())
    with mock.patch.object(memory, 'available_bytes', return_value=needed):
      memory.check(experiment)
      with self.assertRaisesRegex(ValueError, 'step of 2 trainings at once'):
        memory.check(experiment, copies=2)
    with (
      mock.patch.object(memory, 'available_bytes', return_value=needed - 1),
      self.assertRaisesRegex(ValueError, 'choose less'),
    ):
      memory.check(experiment)

  def test_available(self):
    """The device's own, else the least of the machine's and its container's."""
    machine = memory.available_bytes()
    self.assertBetween(machine, 2**28, 2**50)
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'memory.max'
      with mock.patch.object(memory, 'CONTAINER_LIMITS', (path,)):
        for text, wanted in (('max\n', None), ('4097\n', 4097)):
          path.write_text(text)
          found = memory.available_bytes()
          self.assertEqual(found, wanted or found)
    device = mock.Mock()
    device.memory_stats.return_value = {'bytes_limit': 513}
    with mock.patch.object(jax, 'local_devices', return_value=[device]):
      self.assertEqual(memory.available_bytes(), 513)

  def test_blocks_keep_no_weights(self):
    """From 1,024 keys on attention goes by blocks."""
    for length, some in ((511, True), (512, False)):
      sizes = memory.step_bytes(make(length=length))
      self.assertEqual(sizes['attention weights'] > 0, some)
    other = dataclasses.replace(make(), train=TrainConfig(batch_size=7))
    self.assertEqual(memory.step_bytes(other)['logits'], 4 * 7 * 14 * 13)

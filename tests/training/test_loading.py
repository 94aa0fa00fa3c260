"""A trained model from its folder alone."""

import dataclasses
import json
import pathlib
import sys
import tempfile
import types
from unittest import mock

import examples
import jax.numpy as jnp
from absl.testing import parameterized
from oracles import assert_same_bits

from mha_jax.attention import GroupedConfig, Rope
from mha_jax.attention.positions.scaling import SCALINGS
from mha_jax.decoder import (
  DecoderConfig,
  DecoderLM,
  decoder_config,
  generate,
)
from mha_jax.tasks import TextTask
from mha_jax.training import record, run, train
from mha_jax.training.loading import load_model, model_from_json
from mha_jax.training.record import RecordError


class ModelTest(parameterized.TestCase):
  """A decoder's config through JSON and back."""

  @parameterized.parameters(*examples.EXAMPLES)
  def test_every_variant(self, kind):
    """With its kind by the registry's name, alone and beside another."""
    config = examples.config_of(kind)
    other = examples.config_of('gqa', rope=None)
    for attention in (config, (config, other)):
      model = DecoderConfig(5, 7, attention, mlp_dim=3)
      saved = json.loads(json.dumps(record.as_json(model)))
      first = saved['attention']
      first = first[0] if isinstance(first, list) else first
      self.assertEqual(first['kind'], kind)
      self.assertEqual(model_from_json(saved), model)

  @parameterized.parameters(*SCALINGS)
  def test_every_scaling(self, name):
    """Of RoPE, with sizes that are not its own by default."""
    sizes = {
      'LinearScaling': {'factor': 3.0},
      'Llama3Scaling': {'factor': 3.0, 'original_max_position_embeddings': 9},
      'YarnScaling': {'factor': 3.0, 'original_max_position_embeddings': 9},
    }
    rope = Rope(99.0, 'interleaved', SCALINGS[name](**sizes[name]))
    model = DecoderConfig(5, 7, GroupedConfig(12, 3, rope=rope))
    self.assertEqual(model_from_json(record.as_json(model)), model)

  def test_a_config_of_ones_own(self):
    """Is found by module and class."""
    model = DecoderConfig(5, 7, Own(12, 3))
    saved = record.as_json(model)
    self.assertEqual(saved['attention']['kind'], f'{__name__}:Own')
    module = types.ModuleType(__name__)
    module.Own = Own
    with mock.patch.dict(sys.modules, {__name__: module}):
      self.assertEqual(model_from_json(saved), model)


@dataclasses.dataclass(frozen=True)
class Own(GroupedConfig):
  """A subclass is another variant."""


class LoadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(folder)
    self.workdir = self.folder / 'run'

  def test_load(self):
    """Config, parameters; heads that differ by layer; the text is gone."""
    text = self.folder / 'text'
    text.write_text('to be or not to be\n' * 50)
    task = TextTask(7, str(text))
    model = decoder_config(
      task.vocab_size,
      task.max_len,
      d_model=6,
      num_layers=2,
      head_dim=3,
      layers=({'num_heads': 2}, {'num_heads': 1}),
    )
    experiment = train.Experiment(
      model,
      task,
      train.OptimizerConfig(warmup_steps=0, name='sgd'),
      train.TrainConfig(steps=3, batch_size=2, eval_batches=1),
    )
    outcome = run.run(experiment, self.workdir)
    text.unlink()
    module, variables = load_model(str(self.workdir))
    self.assertEqual(module, DecoderLM(model))
    assert_same_bits(variables, {'params': outcome.params})
    tokens, count = generate(
      module, variables, jnp.array([list(b'to')]), max_new_tokens=3
    )
    self.assertEqual((tokens.shape, int(count[0])), ((1, 3), 3))

  @parameterized.parameters(
    (None, 'records no run .*FileNotFoundError'),
    ('{', 'records no run .*JSONDecodeError'),
    ('[]', 'records no run'),
    ('null', 'records no run'),
    ('{"model": {}}', 'records no run'),
    ('{"model": {"vocab_size": null}}', 'records no run'),
  )
  def test_no_run(self, text, message):
    """One line that names the file, whatever it holds."""
    self.workdir.mkdir()
    if text is not None:
      (self.workdir / 'config.json').write_text(text)
    with self.assertRaisesRegex(RecordError, message) as caught:
      load_model(self.workdir)
    self.assertIn(f'{self.workdir}/config.json', str(caught.exception))

  def test_no_checkpoint(self):
    self.workdir.mkdir()
    model = record.as_json(decoder_config(5, 3))
    config = {'model': model, 'optimizer': {}, 'train': {}}
    (self.workdir / 'config.json').write_text(json.dumps(config))
    with self.assertRaisesRegex(RecordError, 'holds no checkpoint'):
      load_model(self.workdir)

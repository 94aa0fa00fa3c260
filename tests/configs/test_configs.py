"""The configs of recall, text and exercise 3: every variant describes one."""

import pathlib
import tempfile

from absl.testing import parameterized

from configs import mla_rank, recall, text
from experiments.harness.settings import experiment_from
from mha_jax.tasks import CopyTask, InductionTask, RecallTask, TextTask


class ConfigsTest(parameterized.TestCase):
  @parameterized.parameters(
    (recall, '', RecallTask),
    (recall, 'tiny', RecallTask),
    (recall, 'induction', InductionTask),
    (recall, 'tiny,induction', InductionTask),
    (text, '', TextTask),
    (text, 'tiny', TextTask),
    (mla_rank, '', TextTask),
    (mla_rank, 'full', TextTask),
    (mla_rank, 'copy', CopyTask),
    (mla_rank, 'copy,full', CopyTask),
    (mla_rank, 'tiny', CopyTask),
  )
  def test_variants(self, module, variants, kind):
    """The task is what they say; two layers; tiny is short."""
    config = module.get_config(variants)
    if kind is TextTask:
      folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
      (folder / 'text').write_text('x' * 5000)
      config.task.path = str(folder / 'text')
    experiment = experiment_from(config)
    self.assertIsInstance(experiment.task, kind)
    tiny = 'tiny' in variants
    self.assertEqual(experiment.train.steps <= 60, tiny)
    layers = 1 if module is text and tiny else 2
    self.assertGreaterEqual(experiment.model.num_layers, layers)
    hash(experiment)

  @parameterized.parameters(recall, text, mla_rank)
  def test_unknown_variant(self, module):
    with self.assertRaisesRegex(ValueError, "'huge'.* unknown"):
      module.get_config('huge')

  def test_full_or_tiny(self):
    with self.assertRaisesRegex(ValueError, 'not both'):
      mla_rank.get_config('full,tiny')

"""The copy task's configs: every variant describes an experiment."""

import itertools

from absl.testing import parameterized

from configs import copy_task
from experiments.harness.settings import experiment_from
from mha_jax.tasks import CopyTask

VARIANTS = [
  ','.join(chosen)
  for count in range(len(copy_task.VARIANTS) + 1)
  for chosen in itertools.combinations(copy_task.VARIANTS, count)
]


class CopyTaskConfigTest(parameterized.TestCase):
  @parameterized.parameters(VARIANTS)
  def test_every_variant_builds(self, variants):
    """All combinations build an experiment whose task is what they say."""
    config = copy_task.get_config(variants)
    experiment = experiment_from(config)
    task = experiment.task
    self.assertIsInstance(task, CopyTask)
    self.assertEqual(task.pairs, 'pairs' in variants)
    self.assertEqual(task.min_length is not None, 'variable' in variants)
    self.assertEqual(experiment.model.vocab_size, task.vocab_size)
    self.assertEqual(experiment.model.max_len, task.max_len)
    self.assertEqual(experiment.train.steps <= 60, 'tiny' in variants)
    hash(experiment)

  def test_names_tell_the_variants_apart(self):
    """Each combination has a folder of its own, in whatever order."""
    names = {copy_task.get_config(variants).name for variants in VARIANTS}
    self.assertLen(names, len(VARIANTS))
    self.assertEqual(
      copy_task.get_config('tiny,pairs'), copy_task.get_config('pairs,tiny')
    )

  def test_the_issue_s_default(self):
    """Exercise 1: d_model=64, one layer, no MLP."""
    model = experiment_from(copy_task.get_config()).model
    self.assertEqual((model.d_model, model.num_layers), (64, 1))
    self.assertEqual(model.mlp_dim, 0)

  def test_unknown_variant(self):
    """The error names it and those that there are."""
    with self.assertRaisesRegex(ValueError, "'huge'.* unknown.*'tiny'"):
      copy_task.get_config('tiny,huge')

"""Points: equal parameters, seeds, keys. The rest is tested by the sweep."""

import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import jax
from absl.testing import parameterized

from configs import copy_task, text
from experiments.harness import points, settings
from experiments.harness.settings import experiment_from
from mha_jax.training import record


def experiment(**model):
  config = copy_task.get_config('tiny')
  config.model.update(model)
  return experiment_from(config)


class EqualParamsTest(parameterized.TestCase):
  @parameterized.parameters(0, 3)
  def test_widths(self, mlp_dim):
    """As many parameters as the greatest, whose MLP stays."""
    heads = (1, 2, 5)
    before = [
      experiment(num_heads=h, head_dim=4, mlp_dim=mlp_dim) for h in heads
    ]
    after = points.equal_params(before)
    sizes = [points.num_params(x) for x in after]
    self.assertLen(set(sizes), 1)
    self.assertEqual(after[-1].model.mlp_dim, max(mlp_dim, 1))
    for old, new in zip(before, after, strict=True):
      self.assertEqual(points.with_mlp(new, mlp_dim), old)

  def test_nearest(self):
    """Half a hidden unit off at most, where units do not divide the gap."""
    before = [
      experiment(attention='mla', kv_lora_rank=3, mlp_dim=2),
      experiment(mlp_dim=2),
    ]
    sizes = [points.num_params(x) for x in points.equal_params(before)]
    self.assertLessEqual(abs(sizes[0] - sizes[1]), 16)

  def test_count(self):
    """Embeddings, positions, four kernels, two norms and the output."""
    d, tokens, length = 16, 6, 8
    expected = 2 * tokens * d + length * d + 4 * d * d + 2 * d
    self.assertEqual(points.num_params(experiment()), expected)


class PointTest(parameterized.TestCase):
  def test_key(self):
    """All that numbers depend on, and no label."""
    point = points.Point(experiment(), (3, 4), 'a', {'n_heads': 4})
    same = dataclasses.replace(point, name='b', labels={})
    self.assertEqual(point.key, same.key)
    for other in (
      dataclasses.replace(point, seeds=(3, 5)),
      dataclasses.replace(point, experiment=experiment(num_heads=2)),
    ):
      self.assertNotEqual(point.key, other.key)

  def test_key_of_a_text(self):
    """Tells its bytes, and not where they lie."""
    with tempfile.TemporaryDirectory() as folder:
      keys = []
      for name, letter in (('a', 'x'), ('b', 'x'), ('c', 'y')):
        path = pathlib.Path(folder) / name
        path.write_text(letter * 3000)
        config = text.get_config('tiny')
        config.task.path = str(path)
        keys.append(points.Point(experiment_from(config), (0,), 'a', {}).key)
    self.assertEqual(keys[0], keys[1])
    self.assertNotEqual(keys[0], keys[2])

  def test_key_of_an_optimiser(self):
    """Its name is something that numbers depend on."""
    config = copy_task.get_config('tiny')
    config.optimizer.name = 'lion'
    other = points.Point(experiment_from(config), (0,), 'a', {})
    self.assertNotEqual(
      points.Point(experiment(), (0,), 'a', {}).key, other.key
    )

  @parameterized.parameters(
    lambda: jax.enable_x64(True),
    lambda: jax.default_prng_impl('rbg'),
    lambda: jax.threefry_partitionable(False),
    lambda: jax.default_matmul_precision('highest'),
  )
  def test_options(self, changed):
    """A row is not that of a point under other options of JAX's."""
    point = points.Point(experiment(), (3, 4), 'a', {})
    before = point.key
    with changed():
      self.assertNotEqual(point.key, before)
    self.assertEqual(point.key, before)

  def test_memory(self):
    """All seeds and rates train at once."""
    large, rates = experiment(d_model=4096), (0.1, 0.01)
    with mock.patch.object(points, 'learning_rates', return_value=rates):
      points.points_of(large, (0,), 'a', {})
      with self.assertRaisesRegex(
        ValueError, r'--config: .* of 2000 trainings at once keeps'
      ):
        points.points_of(large, tuple(range(1000)), 'a', {})

  def test_seeds(self):
    self.assertEqual(settings.seeds_from('--seeds', 3, 2), (3, 4))
    with self.assertRaisesRegex(ValueError, '--seeds=2 .*4294967295'):
      settings.seeds_from('--seeds', 2**32 - 1, 2)


class RowsTest(parameterized.TestCase):
  """What of results.jsonl is taken, and what is trained again."""

  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder)
    self.point = points.Point(experiment(), (3, 4), 'a', {'n_heads': 4})
    curve = [[0.5] * self.point.experiment.train.steps] * 2
    self.numbers = {
      'params': 7,
      'steps_per_s': 2.5,
      'final_loss': [0.1, 0.3],
      'final_accuracy': [1, 0.9],
      'loss': curve,
      'accuracy': curve,
    }

  def train(self, *trained: points.Row) -> list[points.Row]:
    """Trains the point, each time with the next of these numbers."""
    groups = [[numbers] for numbers in trained]
    with mock.patch.object(points, 'train_group', side_effect=groups):
      rows, stopped_by = points.train_points([self.point], self.workdir, {})
    self.assertIsNone(stopped_by)
    return rows

  def test_taken(self):
    """Options and config stand beside the numbers; env.json has each start."""
    (row,) = self.train(self.numbers)
    self.assertFalse(row['options']['jax_enable_x64'])
    self.assertEqual(row['config']['model']['attention']['d_model'], 16)
    self.assertEqual(str(self.train()), str([row]))
    starts = json.loads((self.workdir / 'env.json').read_text())
    self.assertLen(starts, 2)

  @parameterized.parameters(
    {'params': None},
    {'params': 7.5},
    {'params': 0},
    {'steps_per_s': 'fast'},
    {'steps_per_s': 0.0},
    {'steps_per_s': float('inf')},
    {'config': None},
    {'config': {}},
    {'config': {'task': None}},
    {'final_accuracy': [float('inf'), 1]},
    {'final_loss': []},
    {'final_loss': [0.1]},
    {'final_loss': [0.1, 'none']},
    {'final_accuracy': [[1, 0.9]]},
    {'loss': [[0.5], [0.5, 0.5]]},
    {'accuracy': 3},
    {'seeds': [3, 5]},
    {'seeds': None},
  )
  def test_wrong_values(self, **changes):
    """Such a row is trained again."""
    (row,) = self.train(self.numbers)
    path = self.workdir / 'results.jsonl'
    path.write_text(json.dumps(row | changes) + '\n')
    self.assertEqual(str(self.train(self.numbers)), str([row]))
    self.assertEqual(path.read_text(), json.dumps(row) + '\n')

  def test_without_a_config(self):
    (row,) = self.train(self.numbers)
    del row['config']
    (self.workdir / 'results.jsonl').write_text(json.dumps(row) + '\n')
    self.assertIn('config', self.train(self.numbers)[0])

  def test_a_text_elsewhere(self):
    """Its row is that of the same text."""
    config = text.get_config('tiny')
    for name in ('a', 'b'):
      path = self.workdir / name
      path.write_text('x' * 3000)
      config.task.path = str(path)
      self.point = points.Point(experiment_from(config), (3, 4), 'a', {})
      curve = [[0.5] * self.point.experiment.train.steps] * 2
      numbers = self.numbers | {'loss': curve, 'accuracy': curve}
      (row,) = self.train(*[numbers] * (name == 'a'))
      self.assertEqual(row['config']['task']['path'], str(self.workdir / 'a'))

  def test_another_version(self):
    """Its rows are taken, with a warning."""
    self.train(self.numbers)
    path = self.workdir / 'env.json'
    starts = json.loads(path.read_text())
    starts[0]['packages']['jax'] = '0.0.1'
    path.write_text(json.dumps(starts))
    with self.assertWarnsRegex(
      record.RecordWarning, r'packages.jax: 0.0.1 -> '
    ):
      self.train()

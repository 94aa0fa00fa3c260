"""Points: equal parameters, seeds, keys. The rest is tested by the sweep."""

import dataclasses
import pathlib
import tempfile

from absl.testing import parameterized

from configs import copy_task, text
from experiments import points, settings
from experiments.settings import experiment_from


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

  def test_seeds(self):
    self.assertEqual(settings.seeds_from('--seeds', 3, 2), (3, 4))
    with self.assertRaisesRegex(ValueError, '--seeds=2 .*4294967295'):
      settings.seeds_from('--seeds', 2**32 - 1, 2)

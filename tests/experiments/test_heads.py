"""experiments.probe_heads and prune_heads, on one tiny run."""

import csv
import json
import pathlib
import re
import shutil
import tempfile

import numpy as np
import pytest
import scripts
from absl.testing import parameterized

from experiments import probe_heads, prune_heads, train
from experiments.harness import trained
from mha_jax.analysis import probing, pruning
from mha_jax.training.record import RecordWarning

INDUCTION = '--config=configs/recall.py:induction,tiny'


@pytest.fixture(scope='module', autouse=True)
def run(tmp_path_factory):
  """A model of two layers, which the tests below look into."""
  folder = tmp_path_factory.mktemp('heads') / 'run'
  result = scripts.call(train, INDUCTION, f'--workdir={folder}')
  assert result.code == 0, result
  RunTestCase.run_folder = folder


class RunTestCase(parameterized.TestCase):
  run_folder: pathlib.Path

  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.workdir = pathlib.Path(folder) / 'out'

  def call(self, script, *more: str) -> scripts.Result:
    return scripts.call(
      script, f'--run={self.run_folder}', f'--workdir={self.workdir}', *more
    )

  def table(self, name: str) -> list[dict[str, str]]:
    text = (self.workdir / name).read_text()
    return list(csv.DictReader(text.splitlines()))


class ProbeTest(RunTestCase):
  def test_output(self):
    """Every head has scores and ablations; figure and page are there."""
    before = scripts.contents(self.run_folder)
    result = self.call(probe_heads, '--batch_size=16', '--examples=2')
    self.assertEqual(result.code, 0, result)
    self.assertIn('induction task, mha, 2 layers, d_model = 16', result.out)
    self.assertIn('proves nothing about cause', result.out)
    rows = self.table('heads.csv')
    self.assertEqual(
      [(x['layer'], x['head']) for x in rows],
      [(str(i), str(j)) for i in range(2) for j in range(4)],
    )
    names = {*probing.SCORES, 'ablation_zero', 'ablation_mean', 'name'}
    self.assertContainsSubset(names, rows[0])
    png = (self.workdir / 'probe_heads.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')
    page = (self.workdir / 'probe_heads.html').read_text()
    self.assertIn('ablation_zero', page)
    self.assertEqual(scripts.contents(self.run_folder), before)
    self.assertEqual(result.files, scripts.names(self.workdir))
    for row in (rows[0], self.table('divergence.csv')[0]):
      self.assertEqual(row['model.attention.kind'], 'mha')
      self.assertEqual(row['task.kind'], 'induction')
      self.assertEqual(row['step'], '40')

    model = trained.load(self.run_folder)
    batch = trained.batch(model, 0, 16)
    for kind in ('zero', 'mean'):
      losses, loss = pruning.ablation_losses(
        model.experiment.model, model.params, batch, kind
      )
      found = [float(row[f'ablation_{kind}']) for row in rows]
      np.testing.assert_allclose(found, np.ravel(losses - loss), atol=1e-5)

  def test_effect(self):
    """All heads of a name together, against each of them."""
    model = trained.load(self.run_folder)
    rows = probe_heads.score(model, 8)
    for row in rows:
      row['name'] = 'second' if row['layer'] == 1 else ''
    text = probe_heads.effect('second', rows, model, 8)
    config, batch = model.experiment.model, trained.batch(model, 0, 8)
    loss, whole = (
      pruning.loss_with_gates(config, model.params, batch, gates)
      for gates in (np.ones((2, 4)), np.stack([np.ones(4), np.zeros(4)]))
    )
    self.assertStartsWith(text, 'second: 1.0, 1.1, 1.2, 1.3. ')
    gain = float(re.search(r'gains (\S+) nats', text)[1])
    self.assertAlmostEqual(gain, float(whole - loss), delta=1e-3)

  @parameterized.parameters(
    ('no/such/run', 'no/such/run holds no config.json'),
    ('configs', 'configs holds no config.json'),
  )
  def test_no_run(self, folder, message):
    for script in (probe_heads, prune_heads):
      result = scripts.call(script, f'--run={folder}')
      self.assertEqual(result.code, 2, result)
      self.assertIn(message, result.err)
      self.assertEqual(result.err.count('\n'), 1)

  @parameterized.parameters(
    ('--models=2', '--models has no effect beside --run='),
    ('--config.train.steps=9', '--config.train.steps=9 has no effect beside'),
    ('--batch_size=99999999', '--batch_size=99999999'),
    ('--run=', '--run= is empty'),
  )
  def test_flags(self, flag, message):
    """A flag without effect is refused, and so is a batch past all memory."""
    result = self.call(prune_heads, flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn(message, result.err)

  def test_too_short(self):
    result = scripts.call(probe_heads, scripts.TINY, '--config.task.length=1')
    self.assertEqual(result.code, 2, result)
    self.assertIn('a repetition needs 4', result.err)

  def test_no_checkpoint(self):
    """A run that was stopped before its first checkpoint."""
    folder = self.workdir.parent / 'empty'
    folder.mkdir()
    shutil.copy(self.run_folder / 'config.json', folder)
    result = scripts.call(
      probe_heads, f'--run={folder}', f'--workdir={self.workdir}'
    )
    self.assertEqual(result.code, 2, result)
    self.assertIn('holds no checkpoint', result.err)

  def test_edited_heads(self):
    """Shapes differ, and are named; the sound checkpoint is none to remove."""
    folder = self.workdir.parent / 'edited'
    shutil.copytree(self.run_folder, folder)
    path = folder / 'config.json'
    text = path.read_text().replace('"num_heads": 4', '"num_heads": 2')
    path.write_text(text)
    before = scripts.contents(folder)
    result = scripts.call(
      probe_heads, f'--run={folder}', f'--workdir={self.workdir}'
    )
    self.assertEqual(result.code, 2, result)
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn('40 is sound, but config.json tells of another', result.err)
    self.assertIn(
      'params/block_0/attention/query/kernel float32 (16, 4, 4), not float32 '
      '(16, 2, 8)',
      ' '.join(result.err.split()),
    )
    self.assertNotIn('remove', result.err)
    self.assertEqual(scripts.contents(folder), before)

  def test_a_damaged_checkpoint(self):
    """The one before serves, and nothing in the run's folder changes."""
    folder = self.workdir.parent / 'damaged'
    shutil.copytree(self.run_folder, folder)
    (folder / 'checkpoints' / '40' / 'default' / '_METADATA').write_text('')
    before = scripts.contents(folder)
    with self.assertWarnsRegex(RecordWarning, '40 is damaged.* from step 20'):
      model = trained.load(folder)
    self.assertEqual(model.step, 20)
    self.assertEqual(scripts.contents(folder), before)

  def test_another_run_s_record(self):
    """A field that the library does not know is named."""
    folder = self.workdir.parent / 'other'
    folder.mkdir()
    config = json.loads((self.run_folder / 'config.json').read_text())
    config['model']['num_wings'] = 2
    (folder / 'config.json').write_text(json.dumps(config))
    result = scripts.call(probe_heads, f'--run={folder}')
    self.assertEqual(result.code, 2, result)
    self.assertIn('num_wings', result.err)
    self.assertIn(f'{folder}/config.json: ', result.err)
    (folder / 'config.json').write_text('[]')
    result = scripts.call(probe_heads, f'--run={folder}')
    self.assertIn('config.json is no config', result.err)


class PruneTest(RunTestCase):
  @parameterized.parameters(
    (0.01, 8, ['--share=0.01 of 8 heads prunes nothing: one head is 0.125']),
    (0.0, 8, []),
    (0.5, 4, []),
    (0.9, 2, ['--share=0.9 of 8 heads is not reached']),
  )
  def test_share(self, share, kept, words):
    """What is pruned beside what was asked for."""
    lines = prune_heads.share_missed(share, 8, kept)
    self.assertLen(lines, len(words))
    for line, start in zip(lines, words, strict=True):
      self.assertStartsWith(line, start)

  def test_output(self):
    """Curves of every order, the pruned model, and that it is the gated one."""
    result = self.call(prune_heads, '--batch_size=16', '--random_orders=3')
    self.assertEqual(result.code, 0, result)
    curves = self.table('curves.csv')
    self.assertLen(curves, (1 + 1 + 3) * 9)
    for gone in ('0', '8'):  # the same in every order
      losses = {x['loss'][:6] for x in curves if x['gone'] == gone}
      self.assertLen(losses, 1)
    (pruned,) = self.table('pruned.csv')
    self.assertEqual(result.files, scripts.names(self.workdir))
    for row in (pruned, curves[0]):
      self.assertEqual(row['model.attention.kind'], 'mha')
      self.assertEqual(row['task.kind'], 'induction')
    self.assertNotIn('prunes nothing', result.out)
    self.assertEqual((pruned['heads'], pruned['heads_kept']), ('8', '4'))
    self.assertEqual(float(pruned['loss']), float(curves[0]['loss']))
    self.assertLess(float(pruned['error']), 1e-5)
    removed = int(pruned['params']) - int(pruned['params_pruned'])
    self.assertEqual(removed, 4 * 4 * 16 * 4)
    # Two layers of 16 + 16 numbers of 4 bytes, and half of them.
    self.assertEqual(pruned['cache_bytes'], '256')
    self.assertEqual(pruned['cache_bytes_pruned'], '128')
    png = (self.workdir / 'prune_heads.png').read_bytes()
    self.assertStartsWith(png, b'\x89PNG\r\n')

  @parameterized.parameters(
    ('--share=1.5', '--share=1.5'), ('--kind=median', '--kind')
  )
  def test_errors(self, flag, message):
    result = self.call(prune_heads, flag)
    self.assertEqual(result.code, 2, result)
    self.assertIn(message, result.err)

"""experiments.train in this process."""

import dataclasses
import json
import pathlib
import sys
import tempfile
from unittest import mock

import scripts
from absl.testing import parameterized

from experiments import train
from mha_jax.attention import GroupedConfig, num_params
from mha_jax.attention.variants import VARIANTS, Variant
from mha_jax.training import train as train_lib
from mha_jax.training.loading import load_model

OVERRIDES = (
  '--config.model.num_heads=2',
  '--config.model.attention=mqa',
  '--config.optimizer.learning_rate=0.01',
  '--config.train.steps=10',
  '--config.train.seed',
  '7',
)


TRAINED = (
  # A variant with its flags, and the parameters of its attention.
  (('gqa', 'num_kv_heads=2'), 16 * (2 * 16 + 2 * 8)),
  (
    ('mla', 'kv_lora_rank=8', 'positions=rope', 'qk_rope_head_dim=2'),
    16 * (16 + 8 + 8 + 2 + 16) + 8 + 8 * 2 * 16,
  ),
  (('gta', 'num_kv_heads=2', 'head_dim=4'), 16 * (16 + 8 + 2 + 16)),
)
ELSEWHERE = {
  'mha',  # the default, which every other test trains
  'mqa',  # of OVERRIDES
}


class VariantsTest(parameterized.TestCase):
  def test_every_variant_is_trained(self):
    """A new one needs a row above."""
    here = {options[0] for options, _ in TRAINED}
    self.assertEqual(here | ELSEWHERE, VARIANTS.keys())

  @parameterized.parameters(*TRAINED)
  def test_trains(self, options, attention_params):
    """Every variant by flags alone; its parameters are those of its sizes."""
    workdir = self.enter_context(tempfile.TemporaryDirectory())
    kind, *more = options
    with mock.patch.object(
      train_lib, 'init', side_effect=train_lib.init
    ) as init:
      result = scripts.call(
        train,
        scripts.TINY,
        f'--workdir={workdir}',
        '--config.train.steps=2',
        '--config.optimizer.warmup_steps=1',
        f'--config.model.attention={kind}',
        *(f'--config.model.{option}' for option in more),
      )
    self.assertEqual(result.code, 0, result)
    self.assertIn('step 2 ', result.out)
    model = init.call_args.args[0].model
    self.assertEqual(num_params(model.layers[0].table), attention_params)


@dataclasses.dataclass(frozen=True)
class Planted(GroupedConfig):
  """A variant of tomorrow, with an option that none has today."""

  temper: int | None = None


class PlantedTest(parameterized.TestCase):
  def test_flags_and_record(self):
    """Its option is a flag, typed and explained, without a line elsewhere."""
    workdir = self.enter_context(tempfile.TemporaryDirectory())
    row = {'planted': Variant(Planted, required={'temper': 'a number'})}
    self.enter_context(mock.patch.dict(VARIANTS, row))
    tiny = (train, scripts.TINY, f'--workdir={workdir}/run')
    wanted = '--config.model.attention=planted'
    refused = scripts.call(*tiny, wanted)
    self.assertEqual(refused.code, 2)
    self.assertIn("temper=None: 'planted' needs it: a number", refused.err)
    refused = scripts.call(*tiny, wanted, '--config.model.temper=x')
    self.assertEqual(refused.code, 2)
    steps = ('--config.train.steps=2', '--config.optimizer.warmup_steps=1')
    done = scripts.call(*tiny, wanted, '--config.model.temper=3', *steps)
    self.assertEqual(done.code, 0, done)
    model, _ = load_model(f'{workdir}/run')
    self.assertEqual(model.config.attention.temper, 3)
    self.assertIsInstance(model.config.attention, Planted)


class TrainTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.workdir = pathlib.Path(folder) / 'deep' / 'run'
    cls.first = cls.call('--tensorboard')

  @classmethod
  def call(cls, *more: str) -> scripts.Result:
    return scripts.call(
      train, scripts.TINY, f'--workdir={cls.workdir}', *OVERRIDES, *more
    )

  def test_what_it_leaves(self):
    """Records, checkpoints and TensorBoard events; the last line printed."""
    self.assertEqual(self.first.code, 0)
    self.assertEqual(
      {path.name for path in self.workdir.iterdir()},
      {
        'checkpoints',
        'config.json',
        '.lock',
        'env.json',
        'metrics.jsonl',
        'tensorboard',
      },
    )
    lines = (self.workdir / 'metrics.jsonl').read_text().splitlines()
    last = json.loads(lines[-1])
    self.assertEqual(last['step'], 10)
    self.assertIn(f'eval_loss {last["eval_loss"]:.4g}', self.first.out)
    self.assertIn(f'recorded in {self.workdir}', self.first.out)
    self.assertIn('10/10', self.first.err)

  def test_overrides(self):
    """They reach config.json, beside what the file says."""
    config = json.loads((self.workdir / 'config.json').read_text())
    self.assertEqual(config['model']['attention']['num_heads'], 2)
    self.assertEqual(config['model']['attention']['kind'], 'mqa')
    self.assertEqual(config['optimizer']['learning_rate'], 0.01)
    self.assertEqual(config['train']['steps'], 10)
    self.assertEqual(config['train']['seed'], 7)
    self.assertEqual(config['model']['attention']['d_model'], 16)
    self.assertEqual(config['task']['length'], 4)

  def test_again(self):
    """A finished run trains nothing and says the same."""
    before = (self.workdir / 'metrics.jsonl').read_bytes()
    with mock.patch.object(train_lib, 'advance', side_effect=AssertionError):
      again = self.call()
    self.assertEqual((again.code, again.out), (0, self.first.out))
    self.assertEqual((self.workdir / 'metrics.jsonl').read_bytes(), before)

  def test_another_config(self):
    """Code 2, one line with field and both values, and nothing changes."""
    before = scripts.contents(self.workdir)
    result = self.call('--config.train.steps=20', '--config.model.d_model=8')
    self.assertEqual((result.code, result.out), (2, ''))
    self.assertEqual(result.err.count('\n'), 1)
    for part in (
      f'workdir={self.workdir}',
      'train.steps: 10 -> 20',
      'model.attention.d_model: 16 -> 8',
      'choose another --workdir',
    ):
      self.assertIn(part, result.err)
    self.assertEqual(scripts.contents(self.workdir), before)

  def test_no_writer(self):
    """--tensorboard without the extra: code 2 and how to install it."""
    before = scripts.contents(self.workdir)
    with mock.patch.dict(sys.modules, {'tensorboardX': None}):
      result = self.call('--tensorboard')
    self.assertEqual(result.code, 2)
    self.assertEqual(result.err.count('\n'), 1)
    self.assertIn("pip install -e '.[tensorboard]'", result.err)
    self.assertEqual(scripts.contents(self.workdir), before)

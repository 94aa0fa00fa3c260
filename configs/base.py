"""What the configs of a trained decoder share: model, optimizer, train."""

from collections.abc import Mapping

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """One layer of attention without an MLP, trained for 300 steps."""
  config = ConfigDict()
  config.model = ConfigDict(
    {
      'd_model': 64,
      'num_layers': 1,
      'attention': 'mha',
      'num_heads': 4,
      'mlp_dim': 0,
      'positions': 'learned',
    }
  )
  config.optimizer = ConfigDict(
    {
      'learning_rate': 3e-3,
      'warmup_steps': 20,
      'final_fraction': 0.1,
      'b1': 0.9,
      'b2': 0.98,
      'weight_decay': 0.01,
      'clip_norm': 1.0,
    }
  )
  config.train = ConfigDict(
    {
      'seed': 0,
      'steps': 300,
      'batch_size': 32,
      'steps_per_dispatch': 20,
      'eval_batches': 4,
      'checkpoint_every': 100,
    }
  )
  return config


def one_variant(text: str, known: Mapping[str, str]) -> None:
  """Raises a ValueError unless a text names one variant, or none."""
  if text and text not in known:
    raise ValueError(f'config variant {text!r} must be one of {[*known]}')


def variants(text: str, known: Mapping[str, str]) -> list[str]:
  """Lists the variants that a text names, in order of the alphabet.

  Raises:
    ValueError: one is unknown.
  """
  chosen = [name for name in text.split(',') if name]
  if unknown := [name for name in chosen if name not in known]:
    raise ValueError(f'config variant {unknown} is unknown; use {[*known]}')
  return sorted(chosen)


def make_tiny(config: ConfigDict) -> None:
  """A smaller model and seconds of training, to see that all works."""
  config.model.d_model = 16
  config.optimizer.warmup_steps = 4
  config.train.update(
    {
      'steps': 40,
      'batch_size': 8,
      'steps_per_dispatch': 10,
      'eval_batches': 1,
      'checkpoint_every': 20,
    }
  )

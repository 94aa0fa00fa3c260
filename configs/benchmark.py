"""Settings of the benchmark against the peers.

  python -m experiments.benchmark                                    (minutes)
  python -m experiments.benchmark --config=configs/benchmark.py:full

The default takes three lengths and every suite; `full` takes all lengths from
64 to 16,384 tokens and more rounds. PyTorch is a contender where it is
installed (extra `parity`).

Fields:
  suites: those to run, with commas between: attention, module, unjitted,
    decoder, train, decode.
  rounds: times that each contender is run, in turn.
  memory: whether to measure memory, in processes of their own.
  lengths: tokens of suite attention, with commas between.
  batch_size: sequences of suite attention.
  num_heads: heads of suites attention, module and decoder, a multiple of 4.
  head_dim: features of a head of suite attention.
  window: keys of its sliding window.
  max_scores_gib: GiB of scores beyond which who makes them all is left out.
  module_lengths: tokens of suite module, with commas between.
  module_batch_size: sequences of suite module.
  module_d_model: width of suites module and decoder.
  decoder_lengths: tokens of suite decoder, with commas between.
  decoder_layers: layers of suite decoder.
  train_heads: heads of suite train, with commas between.
  train_steps: optimiser steps of suite train.
  decode_tokens: tokens in the cache of suite decode.
  decode_batch_size: sequences of suite decode.
  traced_layers: layers of suite unjitted whose tracing is measured.
  tiny: whether suite decode takes small sizes.
"""

from ml_collections import ConfigDict

from configs import base

VARIANTS = {
  'tiny': 'seconds long, to see that all works',
  'full': 'all lengths from 64 to 16,384 tokens, and more rounds',
}


def get_config(variants: str = '') -> ConfigDict:
  """The config of the benchmark.

  Args:
    variants: 'tiny', 'full' or empty.
  """
  base.one_variant(variants, VARIANTS)
  config = ConfigDict(
    {
      'name': f'benchmark-{variants}' if variants else 'benchmark',
      'suites': 'attention,module,unjitted,decoder,train,decode',
      'rounds': 7,
      'memory': True,
      'lengths': '256,1024,4096',
      'batch_size': 1,
      'num_heads': 8,
      'head_dim': 64,
      'window': 256,
      'max_scores_gib': 1.0,
      'module_lengths': '256,1024',
      'module_batch_size': 4,
      'module_d_model': 512,
      'decoder_lengths': '4096',
      'decoder_layers': 2,
      'train_heads': '1,4,16',
      'train_steps': 20,
      'decode_tokens': 4096,
      'decode_batch_size': 4,
      'traced_layers': 12,
      'tiny': False,
    }
  )
  if variants == 'full':
    config.lengths = '64,128,256,512,1024,2048,4096,8192,16384'
    config.rounds = 11
    config.train_heads = '1,2,4,8,16'
  if variants == 'tiny':
    config.update({'rounds': 1, 'memory': False, 'lengths': '16'})
    config.update({'head_dim': 4, 'window': 8, 'module_lengths': '16'})
    config.update({'module_d_model': 16, 'train_heads': '2'})
    config.update({'decoder_lengths': '16', 'decoder_layers': 1})
    config.update({'train_steps': 2, 'decode_tokens': 64, 'tiny': True})
    config.traced_layers = 2
  return config

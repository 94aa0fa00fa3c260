"""Published models as shapes of `costs`: what their makers chose.

  model = published('llama3-70b')
  model.shape, model.context, model.source

Sizes, rotations and windows are those of the released config.json, which each
source names; biases and norms are counted where the library's attention has
them, the biases of DeepSeek's and Kimi's routers are not.
"""

import dataclasses
import difflib

from mha_jax.analysis.costs.shape import Experts, Mlp, ModelShape, stack
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  LinearScaling,
  Rope,
  YarnScaling,
)


@dataclasses.dataclass(frozen=True)
class Published:
  """A model and what its makers say of it.

  Args:
    name: what to call it.
    shape: its layers.
    params: parameters of the released checkpoint, of its language model alone.
    active: parameters that a token uses, as its makers state them; None: all.
    context: tokens that it was made for.
    source: paper or released config.
  """

  name: str
  shape: ModelShape
  params: float
  context: int
  source: str
  active: float | None = None


def published(name: str) -> Published:
  """A model by name.

  Args:
    name: a key of `PUBLISHED` in any spelling ('Llama-3 70B').

  Raises:
    ValueError: the name is unknown.
  """
  keys = {_plain(x): x for x in PUBLISHED}
  plain = _plain(str(name))
  if plain in keys:
    return PUBLISHED[keys[plain]]
  near = difflib.get_close_matches(plain, keys, n=5, cutoff=0.5) or keys
  raise ValueError(
    f'model={name!r} is unknown; nearest: {", ".join(keys[x] for x in near)}'
  )


_ROPE = Rope()


def _plain(name: str) -> str:
  """Letters and digits alone, in lower case."""
  return ''.join(x for x in name.lower() if x.isalnum())


def _grouped(
  d_model: int,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int = 128,
  rope: Rope | None = _ROPE,
  use_bias: bool = False,
  normalize_qk: bool | str = False,
  logit_softcap: float | None = None,
) -> GroupedConfig:
  """An attention without a bias."""
  return GroupedConfig(
    d_model,
    num_heads,
    num_kv_heads,
    head_dim,
    use_bias=use_bias,
    normalize_qk=normalize_qk,
    rope=rope,
    logit_softcap=logit_softcap,
  )


def _latent(
  d_model: int,
  num_heads: int,
  scaling: YarnScaling,
  q_lora_rank: int | None = 1536,
  theta: float = 10_000.0,
) -> LatentConfig:
  """DeepSeek's latent attention: r = 512, k = v = 128, p = 64."""
  return LatentConfig(
    d_model,
    num_heads,
    kv_lora_rank=512,
    q_lora_rank=q_lora_rank,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope=Rope(theta, 'interleaved', scaling),
  )


def _gemma3(rope: Rope) -> GroupedConfig:
  return _grouped(3840, 16, 8, 256, rope, normalize_qk='rms')


_V2_YARN = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
_V3_YARN = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
_K2_YARN = YarnScaling(
  32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
)

PUBLISHED: dict[str, Published] = {
  row.name: row
  for row in (
    Published(
      'gpt2',
      stack(
        _grouped(768, 12, 12, 64, rope=None, use_bias=True),
        12,
        vocab_size=50_257,
        mlp=Mlp(3072, gated=False, use_bias=True),
        layer_norms=4,
        tied=True,
        positions=1024,
        norms=2,
      ),
      params=124_439_808,
      context=1024,
      source='Radford et al. 2019; openai-community/gpt2 config.json',
    ),
    Published(
      'bert-base',
      stack(
        _grouped(768, 12, 12, 64, rope=None, use_bias=True),
        12,
        vocab_size=30_522,
        mlp=Mlp(3072, gated=False, use_bias=True),
        layer_norms=4,
        tied=True,
        positions=512,
        norms=2,
        causal=False,
      ),
      params=109_482_240,
      context=512,
      source=(
        'Devlin et al. 2018; google-bert/bert-base-uncased config.json; pooler '
        'and segments not in the shape'
      ),
    ),
    Published(
      'llama2-7b',
      stack(_grouped(4096, 32, 32), 32, vocab_size=32_000, mlp=Mlp(11_008)),
      params=6_738_415_616,
      context=4096,
      source='Touvron et al. 2023b; meta-llama/Llama-2-7b-hf config.json',
    ),
    Published(
      'llama2-13b',
      stack(_grouped(5120, 40, 40), 40, vocab_size=32_000, mlp=Mlp(13_824)),
      params=13_015_864_320,
      context=4096,
      source='Touvron et al. 2023b; meta-llama/Llama-2-13b-hf config.json',
    ),
    Published(
      'llama2-70b',
      stack(_grouped(8192, 64, 8), 80, vocab_size=32_000, mlp=Mlp(28_672)),
      params=68_976_648_192,
      context=4096,
      source='Touvron et al. 2023b; meta-llama/Llama-2-70b-hf config.json',
    ),
    Published(
      'llama3-8b',
      stack(
        _grouped(4096, 32, 8, rope=Rope(5e5)),
        32,
        vocab_size=128_256,
        mlp=Mlp(14_336),
      ),
      params=8_030_261_248,
      context=8192,
      source='Grattafiori et al. 2024, table 3; Meta-Llama-3-8B config.json',
    ),
    Published(
      'llama3-70b',
      stack(
        _grouped(8192, 64, 8, rope=Rope(5e5)),
        80,
        vocab_size=128_256,
        mlp=Mlp(28_672),
      ),
      params=70_553_706_496,
      context=8192,
      source='Grattafiori et al. 2024, table 3; Meta-Llama-3-70B config.json',
    ),
    Published(
      'mistral-7b',
      stack(
        _grouped(4096, 32, 8),
        32,
        vocab_size=32_000,
        mlp=Mlp(14_336),
        windows=(4096,),
      ),
      params=7_241_732_096,
      context=8192,
      source='Jiang et al. 2023, table 1; Mistral-7B-v0.1 config.json',
    ),
    Published(
      'gemma2-9b',
      stack(
        _grouped(3584, 16, 8, 256, logit_softcap=50.0),
        42,
        vocab_size=256_000,
        mlp=Mlp(14_336),
        windows=(4096, None),
        layer_norms=4,
        tied=True,
      ),
      params=9_241_705_984,
      context=8192,
      source='Gemma Team 2024, Gemma 2, table 1; google/gemma-2-9b config.json',
    ),
    Published(
      'gemma3-12b',
      stack(
        [_gemma3(_ROPE)] * 5 + [_gemma3(Rope(1e6, scaling=LinearScaling(8.0)))],
        48,
        vocab_size=262_208,
        mlp=Mlp(15_360),
        windows=(1024,) * 5 + (None,),
        layer_norms=4,
        tied=True,
      ),
      params=11_766_034_176,
      context=131_072,
      source=(
        'Gemma Team 2025, Gemma 3, section 2; google/gemma-3-12b-pt '
        'config.json, without its image encoder'
      ),
    ),
    Published(
      'qwen2.5-7b',
      stack(
        _grouped(3584, 28, 4, rope=Rope(1e6), use_bias=True),
        28,
        vocab_size=152_064,
        mlp=Mlp(18_944),
      ),
      params=7_615_616_512,
      context=131_072,
      source=(
        'Qwen Team 2024, Qwen2.5; Qwen/Qwen2.5-7B config.json; the shape has a '
        'bias at the output too, 0.1 M'
      ),
    ),
    Published(
      'qwen3-8b',
      stack(
        _grouped(4096, 32, 8, rope=Rope(1e6), normalize_qk='rms'),
        36,
        vocab_size=151_936,
        mlp=Mlp(12_288),
      ),
      params=8_190_735_360,
      context=32_768,
      source='Qwen Team 2025, Qwen3; Qwen/Qwen3-8B config.json',
    ),
    Published(
      'deepseek-v2-lite',
      stack(
        _latent(2048, 16, _V2_YARN, q_lora_rank=None),
        27,
        vocab_size=102_400,
        mlp=Experts(Mlp(1408), routed=64, active=6, shared=2),
        first=(Mlp(10_944),),
      ),
      params=15_706_484_224,
      active=2.4e9,
      context=32_768,
      source='DeepSeek-V2 (2024), appendix B; DeepSeek-V2-Lite config.json',
    ),
    Published(
      'deepseek-v2',
      stack(
        _latent(5120, 128, _V2_YARN),
        60,
        vocab_size=102_400,
        mlp=Experts(Mlp(1536), routed=160, active=6, shared=2),
        first=(Mlp(12_288),),
      ),
      params=235_741_434_880,
      active=21e9,
      context=131_072,
      source='DeepSeek-V2 (2024), section 3.1.2; DeepSeek-V2 config.json',
    ),
    Published(
      'deepseek-v3',
      stack(
        _latent(7168, 128, _V3_YARN),
        61,
        vocab_size=129_280,
        mlp=Experts(Mlp(2048), routed=256, active=8, shared=1),
        first=(Mlp(18_432),) * 3,
      ),
      params=671_026_419_200,
      active=37e9,
      context=131_072,
      source=(
        'DeepSeek-V3 (2024), section 4.2; DeepSeek-V3 config.json, without its '
        'module for multi-token prediction'
      ),
    ),
    Published(
      'kimi-k2',
      stack(
        _latent(7168, 64, _K2_YARN, theta=50_000.0),
        61,
        vocab_size=163_840,
        mlp=Experts(Mlp(2048), routed=384, active=8, shared=1),
        first=(Mlp(18_432),),
      ),
      params=1_026_408_232_448,
      active=32.6e9,
      context=131_072,
      source='Kimi Team 2025, Kimi K2, table 2; Kimi-K2-Base config.json',
    ),
  )
}
"""The models by name."""

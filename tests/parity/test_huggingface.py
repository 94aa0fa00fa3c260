"""Against Hugging Face's transformers: scaled RoPE, MLA and GQA.

Their modules are built from configs and get random weights; nothing is
downloaded.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import torch
from absl.testing import parameterized
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import assert_close, normal

from mha_jax import attention
from mha_jax.attention import (
  GroupedConfig,
  LatentConfig,
  LinearScaling,
  Llama3Scaling,
  Rope,
  YarnScaling,
  masks,
)

try:
  import transformers
except ModuleNotFoundError as error:
  raise ModuleNotFoundError(
    f'parity is tested against transformers, but: {error}; install with: '
    "pip install -e '.[parity]'"
  ) from error
from transformers import masking_utils, modeling_rope_utils
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen3 import modeling_qwen3 as qwen3

B, T = 2, 7
TOLERANCE = {'float64': oracles.ROUNDING, 'float32': 1e-6}
"""To rounding, and of their code as it is released."""


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
  """Where their code asks for float32 it gets `dtype`.

  It takes frequencies, angles, norms and softmax in float32 whatever dtype goes
  in, so that agreement would end at 1e-6, where an epsilon can hide.
  """
  if dtype == 'float32':
    yield
    return
  with (
    mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
    mock.patch.object(torch.Tensor, 'float', torch.Tensor.double),
  ):
    yield


# A scaling is its name in their configs and the options given, whose names are
# the same in both libraries; None: no scaling.
Scaling = tuple[str, dict[str, Any]] | None
SCALINGS = {
  'linear': LinearScaling,
  'llama3': Llama3Scaling,
  'yarn': YarnScaling,
}


def their_rope(theta: float, scaling: Scaling) -> dict[str, Any]:
  """The `rope_parameters` of a config."""
  kind, options = scaling or ('default', {})
  return {'rope_type': kind, 'rope_theta': theta, **options}


def our_rope(theta: float, layout: str, scaling: Scaling) -> Rope:
  if scaling is None:
    return Rope(theta, layout)
  kind, options = scaling
  return Rope(theta, layout, SCALINGS[kind](**options))


def yarn(factor: float, length: int, **options: Any) -> Scaling:
  length_option = {'original_max_position_embeddings': length}
  return 'yarn', {'factor': factor, **length_option, **options}


def llama3(factor: float, length: int, low: float, high: float) -> Scaling:
  _, options = yarn(factor, length, low_freq_factor=low, high_freq_factor=high)
  return 'llama3', options


RELEASED = {
  'deepseek_v2': (
    10_000.0,
    64,
    yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
  ),
  'deepseek_v3': (
    10_000.0,
    64,
    yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
  ),
  'gpt_oss': (150_000.0, 64, yarn(32.0, 4096, truncate=False)),
  'llama_3_1': (500_000.0, 128, llama3(8.0, 8192, 1.0, 4.0)),
  'llama_3_2': (500_000.0, 64, llama3(32.0, 8192, 1.0, 4.0)),
  'longchat': (10_000.0, 128, ('linear', {'factor': 8.0})),
  'qwen3': (1_000_000.0, 128, yarn(4.0, 32_768)),
}
"""theta, head size and scaling of models in use."""
CORNERS = {
  'two_mscales': (100.0, 10, yarn(8.0, 4096, mscale=0.707, mscale_all_dim=1.3)),
  'mscale_alone': (100.0, 10, yarn(8.0, 4096, mscale=0.707)),
  'mscale_all_dim_alone': (100.0, 10, yarn(8.0, 4096, mscale_all_dim=0.707)),
  'attention_factor': (
    100.0,
    10,
    yarn(8.0, 4096, mscale=0.707, mscale_all_dim=1.3, attention_factor=0.6),
  ),
  'no_longer': (100.0, 10, yarn(1.0, 4096)),
  'betas': (10_000.0, 64, yarn(8.0, 4096, beta_fast=17.0, beta_slow=2.5)),
  'kimi': (50_000.0, 64, yarn(32.0, 4096, beta_fast=1.0, beta_slow=1.0)),
  'starts_before_the_first_pair': (10_000.0, 64, yarn(8.0, 100)),
  'step_at_the_first_pair': (10_000.0, 64, yarn(8.0, 6)),
  'ends_after_the_last_pair': (100.0, 10, yarn(8.0, 4096)),
  'ends_after_the_last_feature': (10.0, 10, yarn(8.0, 512)),
}
"""Where the options matter, and the bounds of what YaRN interpolates."""


@st.composite
def scalings(draw: st.DrawFn) -> Scaling:
  """Any scaling, with all of its options or some left to the default."""
  kind = draw(st.sampled_from(tuple(SCALINGS)))
  factor = draw(st.floats(1.0, 64.0))
  if kind == 'linear':
    return kind, {'factor': factor}
  length = draw(st.integers(5, 100_000))
  low = draw(st.floats(0.5, 8.0))
  high = low * draw(st.floats(1.5, 20.0))
  if kind == 'llama3':
    return llama3(factor, length, low, high)
  weights = st.sampled_from((None, 0.0, 0.707, 1.3))
  bounds = {'beta_slow': low, 'beta_fast': high}
  options = draw(st.sampled_from(({}, bounds))) | {
    'mscale': draw(weights),
    'mscale_all_dim': draw(weights),
    'attention_factor': draw(st.sampled_from((None, None, 0.6))),
    'truncate': draw(st.sampled_from((None, False, True))),
  }
  chosen = {k: v for k, v in options.items() if v is not None}
  return yarn(factor, length, **chosen)


class ScalingTest(oracles.X64TestCase):
  """Scaled frequencies, and turning by them."""

  def assert_same_frequencies(self, theta, size, scaling, dtype, tolerance):
    config = transformers.LlamaConfig(
      head_dim=size, rope_parameters=their_rope(theta, scaling)
    )
    with precision(dtype):
      frequencies, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling[0]](
        config
      )
    self.assertEqual(frequencies.dtype, getattr(torch, dtype))
    rope = our_rope(theta, 'half', scaling)
    # Each by itself: the small ones are lost in an error of the largest.
    np.testing.assert_allclose(
      rope.frequencies(size), frequencies.numpy(), tolerance
    )
    np.testing.assert_allclose(rope.scaling.rotary_factor, factor, 1e-15)

  @parameterized.product(case=(*RELEASED, *CORNERS), dtype=tuple(TOLERANCE))
  def test_frequencies(self, case, dtype):
    """The frequencies of models in use, and corners of YaRN."""
    self.assert_same_frequencies(
      *(RELEASED | CORNERS)[case], dtype, TOLERANCE[dtype]
    )

  @given(
    theta=st.floats(3.0, 1e7),
    size=st.sampled_from((2, 6, 10, 64, 128)),
    scaling=scalings(),
  )
  def test_any_scaling(self, theta, size, scaling):
    """Every option of every scaling, and what a missing one means."""
    self.assert_same_frequencies(
      theta, size, scaling, 'float64', oracles.ROUNDING
    )

  @parameterized.product(
    model=(None, *RELEASED), layout=('half', 'interleaved')
  )
  def test_turning(self, model, layout):
    """Queries and keys turned by Llama's code and by DeepSeek-V2's."""
    theta, _, scaling = RELEASED.get(model, (10_000.0, 0, None))
    size = 14
    q, k = normal(0, B, 5, T, size), normal(1, B, 3, T, size)
    positions = np.random.default_rng(0).integers(0, 10_000, (B, T))
    at = torch.tensor(positions)
    theirs = [torch.tensor(x) for x in (q, k)]
    rope_parameters = their_rope(theta, scaling)
    with precision('float64'):
      if layout == 'half':
        config = transformers.LlamaConfig(
          head_dim=size, rope_parameters=rope_parameters
        )
        turns = llama.LlamaRotaryEmbedding(config)(theirs[0], at)
        wanted = llama.apply_rotary_pos_emb(*theirs, *turns)
      else:
        config = transformers.DeepseekV2Config(
          qk_rope_head_dim=size, rope_parameters=rope_parameters
        )
        turns = deepseek_v2.DeepseekV2RotaryEmbedding(config)(theirs[0], at)
        wanted = deepseek_v2.apply_rotary_emb(*theirs, turns)
    rope = our_rope(theta, layout, scaling)
    got = [
      rope.rotate_heads(jnp.asarray(x), jnp.asarray(positions)) for x in (q, k)
    ]
    # An angle of 10,000 radians loses 4 digits of 16.
    assert_close(got, [x.numpy() for x in wanted], 1e-11)


Arrays = dict[str, np.ndarray]
Tree = dict[str, Arrays]


def linear(theirs: Arrays, name: str, *heads: int) -> Arrays:
  """Their (out, in) layer as kernel (in, *heads, features), and its bias."""
  row = {'kernel': theirs[f'{name}.weight'].T}
  if f'{name}.bias' in theirs:
    row['bias'] = theirs[f'{name}.bias']
  return {k: x.reshape(*x.shape[:-1], *heads, -1) for k, x in row.items()}


def output(theirs: Arrays, heads: int) -> Arrays:
  """Their layer after the heads as kernel (h, v, d), and its bias."""
  row = linear(theirs, 'o_proj')
  kernel = row['kernel']
  return row | {'kernel': kernel.reshape(heads, -1, kernel.shape[-1])}


def latent_tree(config: Any, theirs: Arrays) -> Tree:
  """DeepSeek's parameters, or their gradients, as our tree.

  Three layers of theirs are two rows of ours each, side by side.
  """
  h, nope = config.num_attention_heads, config.qk_nope_head_dim
  tree, query = {}, 'q_proj'
  if config.q_lora_rank is not None:
    query = 'q_b_proj'
    tree['query_down'] = linear(theirs, 'q_a_proj')
    tree['query_norm'] = {'scale': theirs['q_a_layernorm.weight']}
  down = linear(theirs, 'kv_a_proj_with_mqa')
  for first, second, row, size in (
    ('query', 'query_rope', linear(theirs, query, h), nope),
    ('key_down', 'key_rope', down, config.kv_lora_rank),
    ('key', 'value', linear(theirs, 'kv_b_proj', h), nope),
  ):
    tree[first] = {k: x[..., :size] for k, x in row.items()}
    tree[second] = {k: x[..., size:] for k, x in row.items()}
  tree['key_norm'] = {'scale': theirs['kv_a_layernorm.weight']}
  return tree | {'out': output(theirs, h)}


def grouped_tree(config: Any, theirs: Arrays) -> Tree:
  """Llama's, Mistral's or Qwen's parameters, or gradients, as our tree."""
  h, n = config.num_attention_heads, config.num_key_value_heads
  tree = {
    'query': linear(theirs, 'q_proj', h),
    'key': linear(theirs, 'k_proj', n),
    'value': linear(theirs, 'v_proj', n),
    'out': output(theirs, h),
  }
  if 'q_norm.weight' in theirs:
    tree['query_ln'] = {'scale': theirs['q_norm.weight']}
    tree['key_ln'] = {'scale': theirs['k_norm.weight']}
  return tree


class LayerTestCase(oracles.X64TestCase):
  """Holds layers of ours against one of theirs."""

  def assert_same(
    self,
    ours: list[attention.AttentionConfig],
    config: transformers.PreTrainedConfig,
    module: type[torch.nn.Module],
    rotary: type[torch.nn.Module],
    to_tree: Callable[[Any, Arrays], Tree],
    *,
    dtype: str = 'float64',
    seed: int = 0,
    window: int | None = None,
  ) -> None:
    """Output, weights, and the gradients of input and parameters."""
    x, cotangent = (
      normal(seed + i, B, T, config.hidden_size).astype(dtype) for i in range(2)
    )
    # Rows start at different positions and leave some out.
    steps = np.random.default_rng(seed).integers(1, 4, (B, T))
    positions = np.cumsum(steps, axis=1)
    at = torch.tensor(positions)
    may_attend = (
      masking_utils.causal_mask_function
      if window is None
      else masking_utils.sliding_window_causal_mask_function(window)
    )
    allowed = may_attend(0, 0, at[:, None, :, None], at[:, None, None, :])
    with precision(dtype):
      layer = module(config, layer_idx=0).to(getattr(torch, dtype))
      with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
          # Unit variance in, unit variance out.
          values = normal(seed + i, *parameter.shape)
          parameter.copy_(torch.tensor(values / values.shape[-1] ** 0.5))
      their_x = torch.tensor(x, requires_grad=True)
      wanted = layer(
        their_x,
        position_embeddings=rotary(config)(their_x, at),
        attention_mask=torch.where(allowed, 0.0, -np.inf).to(their_x.dtype),
      )
      wanted[0].backward(torch.tensor(cotangent))
    params, param_grads = (
      to_tree(config, {k: read(v) for k, v in layer.named_parameters()})
      for read in (lambda p: p.detach().numpy(), lambda p: p.grad.numpy())
    )
    mask = masks.causal() if window is None else masks.window(window - 1, 0)

    @functools.partial(jax.jit, static_argnums=0)
    def run(ours, params, x):
      layer = functools.partial(
        attention.apply,
        ours,
        mask=mask,
        input_positions=positions,
        return_weights=True,
      )
      out, back, weights = jax.vjp(layer, params, x, has_aux=True)
      return [out, weights], back(jnp.asarray(cotangent))

    for config in ours:
      got, grads = run(config, params, x)
      assert_close(got, [x.detach().numpy() for x in wanted], TOLERANCE[dtype])
      wanted_grads = param_grads, their_x.grad.numpy()
      assert_close(grads, wanted_grads, 3 * TOLERANCE[dtype])


V3 = deepseek_v3.DeepseekV3Attention, deepseek_v3.DeepseekV3RotaryEmbedding
LATENT = {
  'v2': (
    transformers.DeepseekV2Config,
    deepseek_v2.DeepseekV2Attention,
    deepseek_v2.DeepseekV2RotaryEmbedding,
  ),
  'v3': (transformers.DeepseekV3Config, *V3),
  'v3_half': (
    functools.partial(transformers.DeepseekV3Config, rope_interleave=False),
    *V3,
  ),
}
FORMS = ('expanded', 'absorbed')
# DeepSeek-V2's code wants even sizes beside what it views as complex numbers.
LATENT_SIZES = (
  {
    'kv_lora_rank': 14,
    'q_lora_rank': 17,
    'qk_nope_head_dim': 10,
    'qk_rope_head_dim': 6,
    'v_head_dim': 19,
  },
  {
    'kv_lora_rank': 26,
    'q_lora_rank': 11,
    'qk_nope_head_dim': 4,
    'qk_rope_head_dim': 10,
    'v_head_dim': 3,
  },
)


class LatentTest(LayerTestCase):
  """Both forms of latent attention against DeepSeek-V2's and -V3's."""

  def assert_same_latent(
    self, model, sizes, theta, scaling, use_bias, forms=FORMS, **options
  ):
    make_config, *modules = LATENT[model]
    config = make_config(
      hidden_size=39,
      num_attention_heads=3,
      num_key_value_heads=3,
      attention_bias=use_bias,
      rope_parameters=their_rope(theta, scaling),
      attn_implementation='eager',
      **sizes,
    )
    layout = 'half' if model == 'v3_half' else 'interleaved'
    ours = [
      LatentConfig(
        d_model=39,
        num_heads=3,
        use_bias=use_bias,
        rope=our_rope(theta, layout, scaling),
        form=form,
        **sizes,
      )
      for form in forms
    ]
    self.assert_same(ours, config, *modules, latent_tree, **options)

  @parameterized.product(model=tuple(LATENT), dtype=tuple(TOLERANCE))
  def test_as_released(self, model, dtype):
    """With all they have: query latent, biases, YaRN in rotation and scores."""
    scaling = yarn(8.0, 512, mscale=0.707, mscale_all_dim=1.3)
    self.assert_same_latent(
      model, LATENT_SIZES[0], 100.0, scaling, True, dtype=dtype
    )

  # Without shrinking: each example compiles for a second.
  @settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
  @given(
    model=st.sampled_from(tuple(LATENT)),
    form=st.sampled_from(FORMS),
    sizes=st.sampled_from(LATENT_SIZES),
    query_latent=st.booleans(),
    use_bias=st.booleans(),
    theta=st.sampled_from((100.0, 10_000.0)),
    scaling=st.sampled_from(
      (None, *(scaling for *_, scaling in (RELEASED | CORNERS).values()))
    ),
    seed=st.integers(0, 99),
  )
  def test_any_options(self, form, sizes, query_latent, **options):
    """All models, with and without query latent and biases, any scaling."""
    if not query_latent:
      sizes = sizes | {'q_lora_rank': None}
    self.assert_same_latent(sizes=sizes, forms=(form,), **options)


GROUPED = {
  'llama': (
    transformers.LlamaConfig,
    llama.LlamaAttention,
    llama.LlamaRotaryEmbedding,
  ),
  'mistral': (
    transformers.MistralConfig,
    mistral.MistralAttention,
    mistral.MistralRotaryEmbedding,
  ),
  'qwen3': (
    transformers.Qwen3Config,
    qwen3.Qwen3Attention,
    qwen3.Qwen3RotaryEmbedding,
  ),
}
GROUPED_CASES = {
  'mha': {'model': 'llama', 'n': 6},
  'llama3': {
    'model': 'llama',
    'use_bias': True,
    'scaling': llama3(8.0, 512, 1.0, 4.0),
  },
  'yarn': {'model': 'llama', 'scaling': yarn(8.0, 512)},
  'window': {'model': 'mistral', 'n': 1, 'window': 5},
  'qk_norm': {'model': 'qwen3'},
  'qk_norm_bias': {'model': 'qwen3', 'n': 2, 'use_bias': True},
}


class GroupedTest(LayerTestCase):
  """Grouped queries against Llama's, Mistral's and Qwen3's attention."""

  @parameterized.product(case=tuple(GROUPED_CASES), dtype=tuple(TOLERANCE))
  def test_same(self, case, dtype):
    """Sharing, biases, QK norm and window, with plain and scaled RoPE."""
    self.assert_same_grouped(**GROUPED_CASES[case], dtype=dtype)

  def assert_same_grouped(
    self, model, dtype, n=3, use_bias=False, scaling=None, window=None
  ):
    make_config, *modules = GROUPED[model]
    theirs = {'attention_bias': True} if use_bias else {}
    theirs |= {'sliding_window': window} if window else {}
    config = make_config(
      hidden_size=66,
      num_attention_heads=6,
      num_key_value_heads=n,
      head_dim=10,
      rope_parameters=their_rope(100.0, scaling),
      attn_implementation='eager',
      **theirs,
    )
    ours = GroupedConfig(
      d_model=66,
      num_heads=6,
      num_kv_heads=n,
      head_dim=10,
      use_bias=use_bias,
      normalize_qk='rms' if model == 'qwen3' else False,
      rope=our_rope(100.0, 'half', scaling),
    )
    self.assert_same(
      [ours], config, *modules, grouped_tree, dtype=dtype, window=window
    )

"""Multi-head latent attention: keys and values from one small latent.

  c = RMSNorm(y W_c)                     the latent of a token, r features
  k_i = c W_k,i    v_i = c W_v,i         its keys and values, head by head
  u = rope(y W_u)                        a rotary key, p features, for all heads
  q_i = x W_q,i    w_i = rope(x W_w,i)   with a query latent x is
                                         RMSNorm(x W_down)
With latent_norm=False the latents are x W_down and y W_c as they are.
  scores_i = scale (q_i k_i^T + w_i u^T),    scale = score_factor / sqrt(k + p)

Decoding keeps c and u, r + p elements a token. Two forms of one parameter tree:

  expanded  makes k_i and v_i and attends as MHA does (training, prefill)
  absorbed  attends over c itself, the key and value of one shared head:
            q_i k_i^T = (q_i W_k,i^T) c^T,  o_i = (weights_i c) W_v,i (decoding)

Source: DeepSeek-V2 (2024), section 2.1 and appendix C; the latents' norms:
section 3.1.2; score_factor, YaRN's mscale^2: the released code.
"""

import dataclasses
import functools

import jax.numpy as jnp

from mha_jax.attention import checks
from mha_jax.attention.notation import Array, Parts
from mha_jax.attention.positions.rope import Rope
from mha_jax.attention.projections import Norm, Projection, Row, Table
from mha_jax.attention.variants.config import (
  AttentionConfig,
  Heads,
  HeadsAttention,
  Positions,
  Project,
)

FORMS = ('auto', 'expanded', 'absorbed')


@dataclasses.dataclass(frozen=True)
class LatentConfig(AttentionConfig):
  """The shape of a multi-head latent attention.

  Args:
    d_model: width of the queries' input.
    num_heads: heads h.
    kv_lora_rank: features r of the latent.
    q_lora_rank: features q of the query latent; None: queries straight from the
      input.
    qk_nope_head_dim: features k of a head that do not rotate; None:
      d_model / h.
    qk_rope_head_dim: rotary features p, even; 0: none. None: half of
      qk_nope_head_dim, rounded down to even but at least 2, where `rope` is
      given, else 0.
    v_head_dim: features v of a value head; None: qk_nope_head_dim.
    kv_features: width of the keys' and values' input; None: d_model.
    out_features: width of the output; None: d_model.
    use_bias: whether the projections to latents and rotary key, and the output
      projection, add a bias; those from latents to heads never do.
    rope: turns the rotary features; None: `Rope()` where there are any.
    logit_softcap: bound on the scores, see `attend`.
    latent_norm: whether the latents are normalised.
    form: 'expanded', 'absorbed', or 'auto': whichever takes fewer
      multiplications at the call's lengths. They agree up to rounding.

  Raises:
    ValueError: sizes do not divide or are not positive, or an option is
      unknown.
  """

  d_model: int
  num_heads: int
  kv_lora_rank: int
  q_lora_rank: int | None = None
  qk_nope_head_dim: int | None = None
  qk_rope_head_dim: int | None = None
  v_head_dim: int | None = None
  kv_features: int | None = None
  out_features: int | None = None
  use_bias: bool = False
  rope: Rope | None = None
  logit_softcap: float | None = None
  latent_norm: bool = True
  form: str = 'auto'

  values_from_keys = True
  keeps_latent = True

  def __post_init__(self) -> None:
    self.check_sizes('qk_rope_head_dim')
    if self.qk_nope_head_dim is None:
      checks.divides('num_heads', self.num_heads, 'd_model', self.d_model)
    if self.rope is not None and self.qk_rope_head_dim == 0:
      raise ValueError(
        f'qk_rope_head_dim=0 leaves rope={self.rope} nothing to turn; give it '
        'features, or rope=None'
      )
    if self.sizes['p']:
      checks.even('qk_rope_head_dim', self.sizes['p'])
    self.check_rope('qk_rope_head_dim', self.sizes['p'])
    checks.softcap(self.logit_softcap)
    checks.yes_or_no('latent_norm', self.latent_norm)
    if self.form not in FORMS:
      raise ValueError(f'form={self.form!r} must be one of {FORMS}')

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """The sizes of the letters h, k, p, r and v, and q where there is one."""
    k = self.qk_nope_head_dim or self.d_model // self.num_heads
    p = self.qk_rope_head_dim
    if p is None:
      p = 0 if self.rope is None else max(2, k // 4 * 2)
    sizes = {'h': self.num_heads, 'k': k, 'p': p, 'r': self.kv_lora_rank}
    sizes['v'] = self.v_head_dim or k
    return sizes | ({'q': self.q_lora_rank} if self.q_lora_rank else {})

  @functools.cached_property
  def input_widths(self) -> tuple[int, int, int]:
    kv_features = self.kv_features or self.d_model
    return self.d_model, kv_features, kv_features

  @property
  def qk_head_dim(self) -> int:
    """k + p."""
    return self.sizes['k'] + self.sizes['p']

  @property
  def scale(self) -> float:
    """score_factor / sqrt(k + p)."""
    sharper = 1.0 if self.rotary is None else self.rotary.score_factor
    return sharper * self.qk_head_dim**-0.5

  @property
  def entry_shapes(self) -> tuple[tuple[int, int], ...]:
    """The latent (1, r) and, where there is one, the rotary key (1, p)."""
    rotary = ((1, self.sizes['p']),) if self.sizes['p'] else ()
    return (1, self.sizes['r']), *rotary

  @property
  def rotary(self) -> Rope | None:
    """`rope`, or `Rope()` where there are rotary features without one."""
    return Rope() if self.rope is None and self.sizes['p'] else self.rope

  @functools.cached_property
  def table(self) -> Table:
    """Down to the latents, their norms, up to the heads, and out."""
    x, y, _ = self.input_widths
    source = 'btq,qh' if self.q_lora_rank else 'btd,dh'

    def projection(
      spec: str, features: int = x, use_bias: bool = False
    ) -> Projection:
      return Projection(spec, self.sizes | {'d': features}, use_bias)

    rows: dict[str, Row] = {}
    if self.q_lora_rank:
      rows['query_down'] = projection('btd,dq->btq', x, self.use_bias)
      if self.latent_norm:
        rows['query_norm'] = Norm('rms', self.q_lora_rank)
    rows['query'] = projection(f'{source}k->bhtk')
    rows['key_down'] = projection('bsd,dr->bsr', y, self.use_bias)
    if self.latent_norm:
      rows['key_norm'] = Norm('rms', self.kv_lora_rank)
    rows['key'] = projection('bsr,rhk->bhsk')
    rows['value'] = projection('bsr,rhv->bhsv')
    if self.sizes['p']:
      rows['query_rope'] = projection(f'{source}p->bhtp')
      rows['key_rope'] = projection('bsd,dp->bsp', y, self.use_bias)
    out = self.out_features or self.d_model
    return rows | {'out': projection('bhtv,hvd->btd', out, self.use_bias)}

  def queries(self, project: Project, x: Array, positions: Positions) -> Parts:
    """The parts that do not and that do rotate."""
    if self.q_lora_rank:
      x = self._latent(project, 'query', x)
    if not self.sizes['p']:
      return (project('query', x),)
    return project('query', x), self.rotate(project('query_rope', x), positions)

  def entries(
    self, project: Project, y: Array, z: Array, positions: Positions
  ) -> Parts:
    """The latent and the rotary key, each of one head."""
    del z
    c = self._latent(project, 'key', y)[:, None]
    if not self.sizes['p']:
      return (c,)
    return c, self.rotate(project('key_rope', y)[:, None], positions)

  def _latent(self, project: Project, of: str, x: Array) -> Array:
    """The latent of the queries, or that of the keys."""
    c = project(f'{of}_down', x)
    return project(f'{of}_norm', c) if self.latent_norm else c

  def attend(
    self, project: Project, q: Parts, entries: Parts, attention: HeadsAttention
  ) -> Heads:
    """The two parts of a score, expanded or absorbed."""
    (q_nope, *w), (c, *u) = q, entries
    options = {'scale': self.scale, 'logit_softcap': self.logit_softcap}
    if self.expands(q_nope.shape[2], c.shape[2]):
      k, v = project('key', c[:, 0]), project('value', c[:, 0])
      return attention((q_nope, *w), (k, *u), v, **options)
    q_latent = jnp.einsum('bhtk,rhk->bhtr', q_nope, project.kernel('key'))
    o, weights = attention((q_latent, *w), (c, *u), c, **options)
    return jnp.einsum('bhtr,rhv->bhtv', o, project.kernel('value')), weights

  def expands(self, t: int, s: int) -> bool:
    """Tells whether t queries attend to s latents in the expanded form.

    'auto' takes the form with fewer multiplications a head: expanded
    s r (k + v) + t s (k + v + p), absorbed t r (k + v) + t s (2 r + p). Of
    symbolic lengths, one query is absorbed and more are expanded.
    """
    if self.form != 'auto':
      return self.form == 'expanded'
    if not (isinstance(t, int) and isinstance(s, int)):
      return not (isinstance(t, int) and t == 1)
    r, width = self.sizes['r'], self.sizes['k'] + self.sizes['v']
    return t * r * width + t * s * 2 * r >= s * r * width + t * s * width

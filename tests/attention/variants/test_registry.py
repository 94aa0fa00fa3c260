"""The registry: what a name settles, and which options it takes."""

from absl.testing import parameterized
from examples import EXAMPLES, D, config_of

from mha_jax.attention.variants import build


class RegistryTest(parameterized.TestCase):
  @parameterized.parameters(('mha', 3), ('gqa', 3), ('mqa', 1))
  def test_a_name_settles_the_sharing(self, kind, num_kv_heads):
    """MHA has a key/value head for each head, MQA one."""
    self.assertEqual(config_of(kind).sizes['n'], num_kv_heads)

  @parameterized.parameters(
    ('x', {}, r"attention='x' must be in \('mha', 'gqa', 'mqa', 'mla'"),
    ('mha', {'kv_lora_rank': 3}, "kv_lora_rank=3 is no option of 'mha'; its"),
    ('gqa', {'head_dimm': 3}, "no option of 'gqa'; .* head_dim, v_head_dim"),
    ('mla', {'num_kv_heads': 3}, "num_kv_heads=3 is no option of 'mla'"),
    ('mla', {'head_dim': 3}, "head_dim=3 is no option of 'mla'.*qk_nope_h"),
    ('mha', {'num_kv_heads': 1}, "num_kv_heads=1 must be 3 or None in 'mha'"),
    ('mqa', {'num_kv_heads': 3}, "num_kv_heads=3 must be 1 or None in 'mqa'"),
    ('gqa', {'num_kv_heads': None}, "num_kv_heads=None: 'gqa' needs it"),
    ('mla', {'kv_lora_rank': None}, "kv_lora_rank=None: 'mla' needs it"),
    ('gta', {'head_dim': None}, "head_dim=None: 'gta' needs it: an even"),
  )
  def test_bad_options(self, kind, changes, message):
    """An option that is unknown, contradicts, or is missing."""
    options = {'d_model': D, **EXAMPLES.get(kind, {}), **changes}
    with self.assertRaisesRegex(ValueError, message):
      build(kind, **options)

  def test_what_settles_it_is_named(self):
    """Also where its value is not given; and the variant that is free."""
    with self.assertRaisesRegex(
      ValueError, "num_kv_heads=4 must be num_heads or None in 'mha'; use 'gqa'"
    ):
      build('mha', num_kv_heads=4)

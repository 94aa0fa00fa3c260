"""Scores of heads against loops and planted heads; the page that shows them."""

import json
import math
import pathlib
import re
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
from absl.testing import parameterized

from mha_jax.analysis import page, probing
from mha_jax.decoder import DecoderConfig, DecoderLM, decoder_config

B, H, T, M = 2, 3, 7, 11
CONFIG = decoder_config(
  vocab_size=M, max_len=T, d_model=12, num_layers=2, num_heads=H
)
TOKENS = np.array([[3, 5, 3, 3, 9, 5, 3], [2, 4, 6, 2, 4, 4, 10]])
OTHERS = np.array([[3, 5, 3, 3, 9, 5, 3], [2, 4, 6, 8, 7, 5, 10]])
"""The second example repeats nothing."""
QUERIES = oracles.booleans(3, B, T, share=0.7)
WHERE = np.array([[1, 0, 1, 0, 0, 0, 1], [0] * 7], bool)


def draw_maps(seed: int = 0, causal: bool = True) -> np.ndarray:
  """Random maps (b, h, t, t); one query may attend to nothing."""
  scores = 2 * oracles.normal(seed, B, H, T, T)
  maps = np.exp(scores) * (np.tri(T) if causal else 1)
  maps /= maps.sum(-1, keepdims=True)
  maps[1, 2, 4] = 0
  return maps


def one_hot(key_of_query) -> np.ndarray:
  """A map (b, 1, t, t) that attends to one key each."""
  return np.broadcast_to(np.eye(T)[key_of_query][None, None], (B, 1, T, T))


UNIFORM = np.broadcast_to(
  (np.tri(T) / np.arange(1, T + 1)[:, None])[None, None], (B, 1, T, T)
)
IDENTITY = one_hot(np.arange(T))
PREVIOUS = one_hot(np.maximum(np.arange(T) - 1, 0))


def looped(value, maps, queries=None) -> np.ndarray:
  """The mean of value(b, i, row), where it is a number, for each head."""
  scores = []
  for head in range(maps.shape[1]):
    found = [
      value(b, i, maps[b, head, i])
      for b in range(maps.shape[0])
      for i in range(maps.shape[2])
      if maps[b, head, i].any() and (queries is None or queries[b, i])
    ]
    scores.append(np.mean([x for x in found if x is not None]))
  return np.array(scores)


def mass_on(keys):
  """The value of a score that adds the weights of keys(b, i)."""

  def value(b, i, row):
    found = keys(b, i)
    return sum(row[j] for j in found) if found else None

  return value


def duplicates(tokens):
  return lambda b, i: [j for j in range(i) if tokens[b][j] == tokens[b][i]]


def followers(tokens):
  return lambda b, i: [
    j for j in range(1, i) if tokens[b][j - 1] == tokens[b][i]
  ]


def bits(row) -> float:
  return -sum(p * math.log2(p) for p in row if p > 0)


def divergence(p, q) -> float:
  """Jensen-Shannon divergence by its two Kullback-Leibler divergences."""
  middle = (p + q) / 2
  return sum(
    0.5 * x[j] * math.log2(x[j] / middle[j])
    for x in (p, q)
    for j in range(len(p))
    if x[j] > 0
  )


SCORES = {
  'previous_token': (
    probing.previous_token,
    mass_on(lambda b, i: [i - 1] if i else []),
  ),
  'duplicate_token': (
    lambda maps, queries: probing.duplicate_token(maps, TOKENS, queries),
    mass_on(duplicates(TOKENS)),
  ),
  'prefix_matching': (
    lambda maps, queries: probing.prefix_matching(maps, TOKENS, queries),
    mass_on(followers(TOKENS)),
  ),
  'one_example': (
    lambda maps, queries: probing.prefix_matching(maps, OTHERS, queries),
    mass_on(followers(OTHERS)),
  ),
  'attention_to': (
    lambda maps, queries: probing.attention_to(maps, WHERE, queries),
    mass_on(lambda b, i: list(np.flatnonzero(WHERE[b]))),
  ),
  'entropy': (probing.entropy, lambda b, i, row: bits(row)),
  'mean_distance': (
    probing.mean_distance,
    lambda b, i, row: sum(row[j] * (i - j) for j in range(T)),
  ),
}


class DebugNansTest(parameterized.TestCase):
  """jax_debug_nans finds nothing: no logarithm of 0, NaN where it is meant."""

  def setUp(self):
    super().setUp()
    self.enter_context(jax.debug_nans(True))

  def test_scores(self):
    """On maps with zeros; the gradient of the entropy too."""
    maps = draw_maps()
    for score in (probing.entropy, probing.js_divergence):
      self.assertTrue(np.all(np.isfinite(score(maps))))
    slope = jax.grad(lambda x: jnp.sum(probing.entropy(x)))(jnp.asarray(maps))
    self.assertTrue(np.all(np.isfinite(slope)))

  def test_no_query_counts(self):
    """NaN is the answer."""
    maps, none = draw_maps(), np.zeros((B, T), bool)
    self.assertTrue(np.all(np.isnan(probing.entropy(maps, none))))
    self.assertTrue(np.all(np.isnan(probing.js_divergence(maps, none))))
    self.assertTrue(np.all(np.isnan(probing.attention_to(maps, none))))

  def test_table(self):
    """Without separators that score is None."""
    params = DecoderLM(CONFIG).init(jax.random.key(0), TOKENS)['params']
    rows = probing.head_scores(CONFIG, params, TOKENS)
    self.assertLen(rows, 2 * H)
    self.assertEqual({row['separators'] for row in rows}, {None})
    self.assertTrue(all(row['entropy'] >= 0 for row in rows))


class ScoresTest(parameterized.TestCase):
  @parameterized.product(name=tuple(SCORES), masked=(False, True))
  def test_loop(self, name, masked):
    """Each is the mean that a loop finds, jitted and mapped too."""
    score, value = SCORES[name]
    maps, queries = draw_maps(), QUERIES if masked else None
    wanted = looped(value, maps, queries)
    found = score(maps, queries)
    chex.assert_shape(found, (H,))
    oracles.assert_close(found, wanted, 2e-6)
    if masked:
      mapped = jax.jit(jax.vmap(score, (0, None)))
      both = mapped(np.stack([maps, draw_maps(1)]), queries)
      oracles.assert_close(both[0], found, 1e-6)
      oracles.assert_close(both[1], looped(value, draw_maps(1), queries), 2e-6)

  def test_keys_of_another_length(self):
    """Entropy, marked keys and divergence need no square map."""
    maps, where = draw_maps()[..., :5], WHERE[:, :5]
    wanted = looped(mass_on(lambda b, i: list(np.flatnonzero(where[b]))), maps)
    oracles.assert_close(probing.attention_to(maps, where), wanted, 2e-6)
    wanted = looped(lambda b, i, row: bits(row), maps)
    oracles.assert_close(probing.entropy(maps), wanted, 2e-6)
    chex.assert_shape(probing.js_divergence(maps), (H, H))

  def test_planted_heads(self):
    """A head that does one thing only has exactly that score."""
    self.assertEqual(probing.previous_token(PREVIOUS), 1)
    self.assertEqual(probing.previous_token(IDENTITY), 0)
    self.assertEqual(probing.mean_distance(PREVIOUS), (T - 1) / T)
    self.assertEqual(probing.entropy(PREVIOUS), 0)
    first = one_hot(np.zeros(T, int))
    is_first = np.tile(np.arange(T) == 0, (B, 1))
    self.assertEqual(probing.attention_to(first, is_first), 1)
    self.assertEqual(probing.mean_distance(first), (T - 1) / 2)
    tokens = np.array([[5, 7, 8, 5, 7, 8, 5]] * B)
    self.assertEqual(
      probing.duplicate_token(one_hot([0, 1, 2, 0, 1, 2, 3]), tokens), 1
    )
    induction = one_hot([0, 0, 0, 1, 2, 3, 4])
    self.assertEqual(probing.prefix_matching(induction, tokens), 1)
    self.assertEqual(probing.duplicate_token(induction, tokens), 0)
    self.assertEqual(probing.prefix_matching(PREVIOUS, tokens), 0)

  def test_uniform_head(self):
    """A causal head without preference has the values that counting gives."""
    places = np.arange(T)
    for score, wanted in (
      (probing.previous_token, np.mean(1 / (places[1:] + 1))),
      (probing.entropy, np.mean(np.log2(places + 1))),
      (probing.mean_distance, np.mean(places / 2)),
    ):
      oracles.assert_close(score(UNIFORM), np.array([wanted]), 1e-6)

  def test_no_query_counts(self):
    """Then a score is NaN: no repeated token, no mark, only empty queries."""
    maps, different = draw_maps(), np.arange(B * T).reshape(B, T)
    nothing = np.zeros((B, T), bool)
    for found in (
      probing.duplicate_token(maps, different),
      probing.prefix_matching(maps, different),
      probing.attention_to(maps, nothing),
      probing.entropy(maps, nothing),
      probing.mean_distance(np.zeros((B, H, T, T))),
      probing.previous_token(np.ones((B, H, 1, 1))),
    ):
      self.assertTrue(np.all(np.isnan(found)))
      chex.assert_shape(found, (H,))

  def test_dtypes(self):
    """Sums are in float32 at least; lists and bfloat16 are welcome."""
    maps = jnp.asarray(UNIFORM, jnp.bfloat16)
    self.assertEqual(probing.entropy(maps).dtype, jnp.float32)
    self.assertEqual(probing.previous_token(PREVIOUS.tolist()), 1)
    with jax.enable_x64(True):
      self.assertEqual(probing.entropy(UNIFORM).dtype, jnp.float64)

  @parameterized.parameters(
    ('entropy', (np.ones((2, 3)),), r'maps of shape \(2, 3\).*\(b, h, t, s\)'),
    ('previous_token', (np.ones((B, H, T, 5)),), r'maps .*\(b, h, t, t\)'),
    (
      'duplicate_token',
      (draw_maps(), TOKENS[:, :3]),
      r'tokens, int.*\(2, 3\).*\(b, t\) = \(2, 7\)',
    ),
    ('prefix_matching', (draw_maps(), TOKENS + 0.5), 'tokens, float'),
    ('attention_to', (draw_maps(), [0, 1]), r'where, int.*\(b, s\) = \(2, 7\)'),
    ('attention_to', (draw_maps(), np.ones((B, T))), 'where, float.*booleans'),
    ('mean_distance', (draw_maps(), np.ones(T, bool)), 'queries, bool.*7'),
    ('rollout', ((),), r'maps_by_layer has \(b, t\) = \[\]; give one'),
    ('rollout', ((UNIFORM, UNIFORM[:1]),), r'\[\(1, 7\), \(2, 7\)\].*same'),
    ('name_heads', ([], 1.5), r'threshold=1.5 must lie in \[0, 1\]'),
  )
  def test_errors(self, name, args, message):
    """They name the argument, what it is and what it must be."""
    with self.assertRaisesRegex(ValueError, message):
      getattr(probing, name)(*args)


class DivergenceTest(parameterized.TestCase):
  def test_loop(self):
    """Every pair, over the queries at which both may attend to something."""
    maps = draw_maps()
    wanted = np.zeros((H, H))
    for x in range(H):
      for y in range(H):
        pairs = zip(
          maps[:, x].reshape(-1, T), maps[:, y].reshape(-1, T), strict=True
        )
        found = [divergence(p, q) for p, q in pairs if p.any() and q.any()]
        wanted[x, y] = np.mean(found)
    found = jax.jit(probing.js_divergence)(maps)
    oracles.assert_close(found, wanted, 5e-6)
    np.testing.assert_allclose(found, found.T, rtol=1e-6)
    few = probing.js_divergence(maps, np.eye(B, T, 1, dtype=bool))
    wanted = np.mean([divergence(*maps[b, :2, b + 1]) for b in range(B)])
    oracles.assert_close(few[0, 1], wanted, 5e-6)

  def test_extremes(self):
    """Equal heads are 0 apart, heads without a common key 1 bit."""
    later = one_hot(np.minimum(np.arange(T) + 1, T - 1))
    maps = np.concatenate([IDENTITY, later, IDENTITY], axis=1)[:, :, :-1]
    wanted = [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    np.testing.assert_allclose(probing.js_divergence(maps), wanted, atol=1e-6)


class RolloutTest(parameterized.TestCase):
  def test_loop(self):
    """The first layer stands right; half of each layer is the identity."""
    layers = [draw_maps(1), draw_maps(2)[:, :2]]
    wanted = np.stack([np.eye(T)] * B)
    for maps in layers:
      for b in range(B):
        weights = 0.5 * sum(maps[b]) / len(maps[b]) + 0.5 * np.eye(T)
        weights /= weights.sum(1, keepdims=True)
        wanted[b] = weights @ wanted[b]
    found = jax.jit(probing.rollout)(layers)
    oracles.assert_close(found, wanted, 1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)

  def test_identity(self):
    """Maps that stay where they are, or attend to nothing, move nothing."""
    for maps in (IDENTITY, np.zeros((B, H, T, T))):
      found = probing.rollout([maps, maps, maps])
      np.testing.assert_array_equal(found, [np.eye(T)] * B)


UNEVEN = ({'num_heads': 3}, {'num_heads': 2})


def draw_params(config: DecoderConfig, seed: int = 0):
  """Random parameters, scales and biases too."""
  init = DecoderLM(config).init
  shapes = jax.eval_shape(init, jax.random.key(0), TOKENS)['params']
  leaves, tree = jax.tree.flatten(shapes)
  values = [
    jnp.asarray(0.7 * oracles.normal(seed + i, *leaf.shape), leaf.dtype)
    for i, leaf in enumerate(leaves)
  ]
  return jax.tree.unflatten(tree, values)


def full_circuits(params, layer: int) -> list[np.ndarray]:
  """The (m, m) circuit of every head, one token after the other."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  block = p[f'block_{layer}']
  value = block['attention']['value']['kernel']
  out = block['attention']['out']['kernel']
  h, m = out.shape[0], p['embed']['embedding'].shape[0]
  circuits = []
  for head in range(h):
    rows = []
    for token in range(m):
      x = p['embed']['embedding'][token] * block['attention_norm']['scale']
      x = x @ value[:, head * value.shape[1] // h] @ out[head]
      rows.append((x * p['norm']['scale']) @ p['output']['kernel'])
    circuits.append(np.stack(rows))
  return circuits


class CopyingScoreTest(parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'attention': 'gqa', 'num_heads': 4, 'num_kv_heads': 2, 'use_bias': True},
    {'attention': 'mqa', 'v_head_dim': 5},
    {'head_dim': 4, 'layers': ({'num_heads': 3}, {'num_heads': 2})},
    {'attention': 'gta', 'num_heads': 4, 'num_kv_heads': 2, 'head_dim': 6},
    {'vocab_size': 3},
  )
  def test_full_eigenvalues(self, **options):
    """They are those of the (m, m) matrix, for every layer and head."""
    config = decoder_config(
      **{'vocab_size': M, 'max_len': T, 'd_model': 12, 'num_layers': 2}
      | {'num_heads': H}
      | options
    )
    params = draw_params(config)
    found = probing.copying_score(config, params)
    self.assertLen(found, 2)
    for layer, scores in enumerate(found):
      wanted = []
      for circuit in full_circuits(params, layer):
        values = np.linalg.eigvals(circuit)
        wanted.append(np.sum(values).real / np.sum(np.abs(values)))
      np.testing.assert_allclose(scores, wanted, atol=1e-6)
      self.assertTrue(np.all(np.abs(scores) <= 1))

  def test_planted_circuits(self):
    """The identity copies, 1; its negative suppresses, -1; none is NaN."""
    params = draw_params(CONFIG)
    params['embed']['embedding'] = params['output']['kernel'].T
    params['norm']['scale'] = params['block_0']['attention_norm']['scale']
    value = params['block_0']['attention']['value']['kernel']
    transposed = jnp.moveaxis(value, 0, 2)
    signs = jnp.array([1.0, -1.0, 0.0])[:, None, None]
    params['block_0']['attention']['out']['kernel'] = signs * transposed
    first, _ = probing.copying_score(CONFIG, params)
    np.testing.assert_allclose(first[:2], [1, -1], rtol=1e-9)
    self.assertTrue(np.isnan(first[2]))

  def test_errors(self):
    """A variant without the kernel is named."""
    config = decoder_config(M, T, 12, attention='mla', kv_lora_rank=5)
    with self.assertRaisesRegex(ValueError, "attention='mla' .*use 'mha'"):
      probing.copying_score(config, {})


class TableTest(parameterized.TestCase):
  def test_attention_maps(self):
    """Those that each layer, called by hand, takes of its input."""
    config = decoder_config(
      M, T, 12, num_layers=2, head_dim=5, positions='none', layers=UNEVEN
    )
    params = draw_params(config)
    maps = probing.attention_maps(config, params, TOKENS)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p['embed']['embedding'][TOKENS]
    for layer, found in enumerate(maps):
      block = p[f'block_{layer}']
      normed = oracles.norm(x, block['attention_norm']['scale'], 'rms')
      y, weights = oracles.layer(
        block['attention'], normed, allowed=np.tri(T, dtype=bool)
      )[:2]
      x = x + y
      chex.assert_shape(found, (B, (3, 2)[layer], T, T))
      oracles.assert_close(found, weights, 2e-5)
    for tokens, message in (
      (TOKENS + 1, r'tokens from 3 to 11 must lie in \[0, 10\]'),
      (TOKENS[0], r'tokens must be integers of shape \(b, t\)'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        probing.attention_maps(config, params, tokens)

  def test_rows(self):
    """A row for each head, each score that of its function, as a number."""
    config = decoder_config(M, T, 12, num_layers=2, head_dim=5, layers=UNEVEN)
    params = draw_params(config)
    rows = probing.head_scores(config, params, TOKENS, [5, 10], QUERIES)
    heads = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    self.assertEqual([(x['layer'], x['head']) for x in rows], heads)
    self.assertEqual(list(rows[0]), ['layer', 'head', *probing.SCORES])
    maps = [
      np.asarray(x, np.float64)
      for x in probing.attention_maps(config, params, TOKENS)
    ]
    copying = probing.copying_score(config, params)
    marked = np.isin(TOKENS, [5, 10])
    values = {name: SCORES[name][1] for name in probing.SCORES[:3]}
    values |= {name: SCORES[name][1] for name in ('entropy', 'mean_distance')}
    values['first_token'] = lambda b, i, row: row[0] if i else None
    values['separators'] = lambda b, i, row: (
      row[marked[b]].sum() if marked[b, : i + 1].any() else None
    )
    for name, value in values.items():
      wanted = np.concatenate([looped(value, x, QUERIES) for x in maps])
      found = [row[name] for row in rows]
      np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
    found = [row['copying_score'] for row in rows]
    np.testing.assert_array_equal(found, np.concatenate(copying))
    json.dumps(rows, allow_nan=False)

  def test_undefined(self):
    """None where no query counts or the variant has no such score."""
    config = decoder_config(
      M, T, 12, num_heads=H, kv_lora_rank=5, attention='mla'
    )
    tokens = np.arange(T)[None]
    rows = probing.head_scores(config, draw_params(config), tokens)
    for row in rows:
      none = {name for name, x in row.items() if x is None}
      self.assertEqual(
        none,
        {'duplicate_token', 'prefix_matching', 'separators', 'copying_score'},
      )

  def test_names(self):
    """The largest score at the threshold or above; entropy makes no name."""
    rows = [
      {'previous_token': 0.5, 'duplicate_token': 0.4, 'entropy': 3.0},
      {'previous_token': 0.6, 'prefix_matching': 0.7, 'separators': None},
      {'first_token': 0.49, 'copying_score': 1.0},
      {'previous_token': None, 'duplicate_token': 0.9},
      {'first_token': 0.8, 'separators': 0.1},
      {},
    ]
    wanted = ['previous token', 'induction', '', 'duplicate token']
    wanted += ['first token', '']
    self.assertEqual(probing.name_heads(rows), wanted)
    self.assertEqual(probing.name_heads(rows, 0.45)[2], 'first token')

  def test_repeated_tokens(self):
    """Both halves agree; all symbols occur and no other; a half has none twice,
    unless there are too few."""
    symbols = [3, 5, *range(7, M)]
    length = len(symbols)
    tokens = probing.repeated_tokens(jax.random.key(0), 13, length, symbols)
    chex.assert_shape(tokens, (13, 2 * length))
    np.testing.assert_array_equal(tokens[:, :length], tokens[:, length:])
    for row in tokens[:, :length].tolist():
      self.assertEqual(sorted(row), symbols)
    self.assertTrue(np.any(tokens[0] != tokens[1]))
    few = probing.repeated_tokens(jax.random.key(0), 13, 17, [2, 4])
    self.assertEqual({*few.ravel().tolist()}, {2, 4})

  @parameterized.parameters(
    ((0, 5, [1]), 'batch_size=0'),
    ((2, 0, [1]), 'length=0'),
    ((2, 5, []), r'symbols of shape \(0,\)'),
    ((2, 5, 3), r'symbols of shape \(\)'),
  )
  def test_repeated_tokens_errors(self, args, message):
    with self.assertRaisesRegex(ValueError, message):
      probing.repeated_tokens(jax.random.key(0), *args)


HOSTILE = '</script><script>alert("x")</script><!--'


def write(path: pathlib.Path, **changes) -> str:
  """The page of two small layers, as text."""
  maps = [draw_maps(0), draw_maps(1)[:, :2]]
  text = [[HOSTILE, '\n', '&amp;', '\u2028', "'", 'é', '']] * B
  heads = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
  scores = [
    {'layer': i, 'head': np.int64(j), 'entropy': np.float32(i + j / 4)}
    | {'ablation_zero': math.nan, 'copying_score': None, 'name': HOSTILE}
    for i, j in heads
  ]
  args = {'maps': maps, 'tokens_text': text, 'scores': scores} | changes
  page.write_page(path, **args, title=HOSTILE, setting='two layers')
  return path.read_text(encoding='utf-8')


def read_data(html: str):
  """The page's data, found as a browser finds it."""
  start = '<script id="data" type="application/json">'
  return json.loads(html.split(start)[1].split('</script>')[0])


class PageTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / 'page.html'

  def test_data(self):
    """Texts, scores and rounded weights come back from the page."""
    data = read_data(write(self.path))
    self.assertEqual(data['title'], HOSTILE)
    self.assertEqual(data['setting'], 'two layers')
    self.assertEqual(data['tokens'][1][:4], [HOSTILE, '\n', '&amp;', '\u2028'])
    wanted = {'entropy': 1.25, 'ablation_zero': None, 'copying_score': None}
    self.assertEqual(data['scores'][1][1], wanted | {'name': HOSTILE})
    self.assertEqual([len(x) for x in data['scores']], [3, 2])
    for layer, maps in enumerate([draw_maps(0), draw_maps(1)[:, :2]]):
      found = np.zeros(maps.shape)
      for b, h, i in np.ndindex(maps.shape[:3]):
        row = data['maps'][layer][b][h][i]
        self.assertLessEqual(len(row), i + 1)
        found[b, h, i, : len(row)] = row
      np.testing.assert_allclose(found / data['unit'], maps, atol=5.1e-5)

  def test_nothing_escapes_and_nothing_is_loaded(self):
    """Two scripts, ours; no address, no import, no source."""
    html = write(self.path)
    self.assertNotIn(page.MARK, html)
    self.assertNotIn('alert("x")', html.replace('alert(\\"x\\")', ''))
    self.assertLen(re.findall('<script', html), 2)
    self.assertLen(re.findall('</script', html), 2)
    self.assertNotIn('<!--', html)
    for word in ('://', 'src=', 'href=', 'url(', '@import', 'fetch('):
      self.assertNotIn(word, html)
    self.assertIn("default-src 'none'", html)

  def test_every_element_that_the_script_names_exists(self):
    """Also those that are named after the state's fields."""
    html = write(self.path)
    named = {*re.findall(r"byId\('(\w+)'\)", html), 'layer', 'head', 'query'}
    self.assertGreater(len(named), 10)
    self.assertEmpty(named - {*re.findall(r'\bid="(\w+)"', html)})

  def test_caution(self):
    """It says that a map proves nothing."""
    self.assertIn(
      'proves nothing about cause', ' '.join(write(self.path).split())
    )

  @parameterized.parameters(
    ({'maps': []}, 'maps of 0 layers'),
    ({'tokens_text': [['a'], ['a', 'b']]}, r'lengths \[1, 2\]: .*one length'),
    ({'maps': [np.ones((B, H, T, 5))]}, r'maps\[0\] of shape .* b=2 and t=7'),
    ({'maps': [3 * draw_maps()]}, r'maps\[0\] has weights outside of \[0, 1\]'),
    ({'maps': [np.nan * draw_maps()]}, r'maps\[0\] has weights outside'),
    ({'maps': [draw_maps()]}, r'scores has 5 rows .*one for each of'),
  )
  def test_errors(self, changes, message):
    """What does not fit is refused, and nothing is written."""
    with self.assertRaisesRegex(ValueError, message):
      write(self.path, **changes)
    self.assertFalse(self.path.exists())

"""A page to look at attention maps with: one HTML file, nothing to install.

The template is page.html; it holds style and script and loads nothing.
"""

import json
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

UNIT = 10_000  # weights are written as integers, in 1 / UNIT
TEMPLATE = pathlib.Path(__file__).with_name('page.html')
MARK = '{"data": null}'  # where the data goes


def write_page(
  path: str | pathlib.Path,
  maps: Sequence[Any],
  tokens_text: Sequence[Sequence[str]],
  scores: Sequence[Mapping[str, Any]],
  *,
  title: str = 'Attention maps',
  setting: str = '',
) -> None:
  """Writes attention maps and the heads' scores as one HTML page.

  The page links the tokens of an example by lines as strong as the weights of
  the layer and head that are chosen; an address that ends in
  `#layer=1&head=2&example=0&query=5` opens it there.

  Args:
    path: the file to write.
    maps: (b, h, t, t) of each layer, from `attention_maps`.
    tokens_text: t texts for each of the b examples.
    scores: a row for each head with 'layer' and 'head', from `head_scores`.
      Whatever else is in a row is shown, names that start with 'ablation' (in
      nats) first; None and NaN are shown as not defined.
    title: of the page.
    setting: what the model is and how it was trained.

  Raises:
    ValueError: maps, tokens_text and scores do not fit each other, or a weight
      is not in [0, 1].
  """
  layers = [np.asarray(layer, np.float64) for layer in maps]
  _check_maps(layers, tokens_text)
  data = {
    'title': title,
    'setting': setting,
    'unit': UNIT,
    'tokens': [[str(token) for token in row] for row in tokens_text],
    'scores': _by_head(scores, [layer.shape[1] for layer in layers]),
    'maps': [[[_rows(x) for x in b] for b in layer] for layer in layers],
  }
  text = json.dumps(data, separators=(',', ':'), allow_nan=False)
  # '<' would end the script or open a comment in it.
  text = text.replace('<', '\\u003c')
  template = TEMPLATE.read_text(encoding='utf-8')
  pathlib.Path(path).write_text(template.replace(MARK, text), encoding='utf-8')


def _check_maps(
  layers: Sequence[np.ndarray], tokens_text: Sequence[Sequence[str]]
) -> None:
  """Raises a ValueError unless every layer has these examples."""
  lengths = sorted({len(row) for row in tokens_text})
  if not layers or len(lengths) != 1:
    raise ValueError(
      f'maps of {len(layers)} layers and tokens_text of lengths {lengths}: '
      'give one layer and one example at least, all examples of one length'
    )
  b, t = len(tokens_text), lengths[0]
  for i, layer in enumerate(layers):
    if layer.ndim != 4 or (layer.shape[0], *layer.shape[2:]) != (b, t, t):
      raise ValueError(
        f'maps[{i}] of shape {layer.shape} must be (b, h, t, t) with b={b} and '
        f't={t}, as in tokens_text'
      )
    if not np.all((layer >= 0) & (layer <= 1 + 1e-2)):
      raise ValueError(
        f'maps[{i}] has weights outside of [0, 1]; pass those of attention_maps'
      )


def _rows(weights: np.ndarray) -> list[list[int]]:
  """Rows (t, s) in 1 / UNIT, without the zeros at their ends."""
  rows = np.rint(weights * UNIT).astype(int)
  return [np.trim_zeros(row, 'b').tolist() for row in rows]


def _by_head(
  scores: Sequence[Mapping[str, Any]], num_heads: Sequence[int]
) -> list[list[dict[str, Any]]]:
  """The rows by layer and head, without these two."""
  found = {(row['layer'], row['head']): row for row in scores}
  wanted = {(i, j) for i, h in enumerate(num_heads) for j in range(h)}
  if len(scores) != len(wanted) or set(found) != wanted:
    raise ValueError(
      f'scores has {len(scores)} rows for (layer, head) in {sorted(found)}; '
      f'give one for each of {sorted(wanted)}'
    )

  def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
      name: _as_json(value)
      for name, value in row.items()
      if name not in ('layer', 'head')
    }

  return [
    [shown(found[i, j]) for j in range(h)] for i, h in enumerate(num_heads)
  ]


def _as_json(value: Any) -> float | str | None:
  """A finite number, a text, or None."""
  if isinstance(value, numbers.Real):
    return float(value) if math.isfinite(value) else None
  return None if value is None else str(value)

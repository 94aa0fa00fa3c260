"""Draws figures without a display, and gives them one look."""

import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mha_jax.training import record

STYLE: Any = {
  'font.size': 11,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'grid.alpha': 0.3,
  'legend.frameon': False,
}


def legend_above(axes: Axes, **kwargs: Any) -> None:
  """A legend that no curve can run through."""
  axes.legend(loc='lower center', bbox_to_anchor=(0.5, 1.0), **kwargs)


def save(figure: Figure, path: pathlib.Path) -> None:
  """Writes a PNG.

  Raises:
    RecordError: it cannot be written; the message names it.
  """
  with record.writing(path):
    figure.savefig(path, dpi=150)

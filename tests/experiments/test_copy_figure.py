"""What is drawn of heads in the copy task, from numbers made by hand."""

import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import parameterized
from copy_rows import distinct, diverge, row
from matplotlib.figure import Figure

from experiments.figures import copying as figures
from experiments.reports import copying as reports


class FigureTest(parameterized.TestCase):
  def draw(self, *rows: dict):
    """The figure's four axes."""
    drawn = []
    save = Figure.savefig

    def savefig(figure, *args, **kwargs):
      drawn.append(figure)
      return save(figure, *args, **kwargs)

    folder = self.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / 'figure.png'
    with mock.patch.object(Figure, 'savefig', savefig):
      summaries = [reports.summarise(x) for x in rows]
      figures.copy_heads(summaries, 'a task', path)
    return drawn[0].axes

  def assert_curve(self, axes, values, label):
    """The first curve is the median of (snapshots, seeds), in their range."""
    line, band = axes.get_lines()[0], axes.collections[0]
    np.testing.assert_array_equal(line.get_xdata(), [0, 50])
    np.testing.assert_allclose(line.get_ydata(), np.median(values, axis=1))
    (path,) = band.get_paths()
    for x, own in zip((0, 50), values, strict=True):
      drawn = path.vertices[path.vertices[:, 0] == x, 1]
      self.assertEqual((drawn.min(), drawn.max()), (min(own), max(own)))
    self.assertEqual(axes.get_legend().get_texts()[0].get_text(), label)

  def test_drawn(self):
    """The numbers of the row: every head, the mean over heads, the best one."""
    attention, rank, margin, speed = self.draw(distinct())
    dots = [x for x in attention.get_lines() if x.get_marker() == 'o']
    self.assertEqual(
      [(x.get_xdata()[0], x.get_ydata()[0]) for x in dots],
      [(0, 0.05), (0, 0.9), (1, 0.8), (1, 0.3), (2, 0.7), (2, 0.6)],
    )
    filled = [x.get_markerfacecolor() != 'none' for x in dots]
    self.assertEqual(filled, [False, True, True, False, True, False])
    means = [[11.5, 13.75, 16], [1.5, 3.75, 6]]
    self.assert_curve(rank, np.asarray(means), '2 x 32')
    best = [[-1.5, -2, -3.5], [2, 7, 5]]
    self.assert_curve(margin, np.asarray(best), '2 x 32')
    star = speed.get_lines()[-1]
    self.assertEqual(star.get_marker(), '*')
    self.assertEqual(star.get_ydata()[0], 12)
    (bar,) = speed.collections
    (ends,) = bar.get_segments()
    np.testing.assert_allclose(ends[:, 1], [11, 14])

  def test_diverged(self):
    """One seed of three leaves the median and the range of the others."""
    _, rank, margin, speed = self.draw(diverge(distinct(), 1))
    label = '2 x 32, 1 of 3 diverged'
    means = [[11.5, 16], [1.5, 6]]
    self.assert_curve(rank, np.asarray(means), label)
    self.assert_curve(margin, np.asarray([[-1.5, -3.5], [2, 5]]), label)
    self.assertEqual(speed.get_lines()[-1].get_ydata()[0], 14)

  def test_all_diverged(self):
    """Named in the legend, and not drawn; the others are."""
    none = distinct()
    for seed in range(3):
      none = diverge(none, seed)
    _, rank, _, speed = self.draw(none, row(4, 'sqrt', (10, 11, 12)))
    texts = [x.get_text() for x in rank.get_legend().get_texts()]
    self.assertEqual(texts, ['2 x 32, 3 of 3 diverged', '4 x 16'])
    self.assertIn('^', [x.get_marker() for x in speed.get_lines()])

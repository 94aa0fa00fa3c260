"""The figure of the sweep: written without warnings, and what it holds."""

import pathlib
import struct
import sys
import tempfile
from unittest import mock

import numpy as np
from absl.testing import parameterized
from matplotlib.figure import Figure

from experiments.figures import style, sweeps
from experiments.reports import head_counts
from mha_jax.training import record

STEPS = 30


def row(n_heads: int, ends) -> dict:
  """A point whose losses fall from 3 to each of ends."""
  losses = [np.geomspace(3, end, STEPS).tolist() for end in ends]
  return {
    'n_heads': n_heads,
    'head_dim': 64 // n_heads,
    'learning_rate': 0.01,
    'params': 1,
    'seeds': list(range(len(ends))),
    'final_loss': [loss[-1] for loss in losses],
    'final_accuracy': [0.5] * len(ends),
    'steps_per_s': 1.0,
    'loss': losses,
  }


FAST, SLOW, SOME, NEVER = (0.01, 0.02), (0.04, 0.049), (0.04, 0.3), (0.3, 0.4)


class SweepHeadsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.path = pathlib.Path(folder) / 'figure.png'

  def draw(self, *points):
    """Draws 1, 2, 4, ... heads; the figure's two axes."""
    rows = [row(2**i, ends) for i, ends in enumerate(points)]
    summaries = [head_counts.summarise([x], 0.05) for x in rows]
    curve = sweeps.Curve('', '', summaries)
    drawn = []

    def savefig(figure, *args, **kwargs):
      drawn.append(figure)
      return save(figure, *args, **kwargs)

    save = Figure.savefig
    with mock.patch.object(Figure, 'savefig', savefig):
      sweeps.sweep_heads(curve, 0.05, 'a task', self.path)
    self.figure = drawn[0]
    return rows, summaries, *self.figure.axes

  @parameterized.named_parameters(
    ('reached', FAST, SLOW, SLOW),
    ('some_never', FAST, SOME, NEVER),
    ('never', NEVER, NEVER),
    ('one_point', FAST),
    ('one_point_never', NEVER),
    ('one_seed', FAST[:1], SLOW[:1]),
    ('five_points', FAST, FAST, SLOW, SOME, NEVER),
  )
  def test_png(self, *points):
    """A PNG of the right size; labels, scales and a tick a head count."""
    _, _, curves, speed = self.draw(*points)
    data = self.path.read_bytes()
    self.assertStartsWith(data, b'\x89PNG\r\n\x1a\n')
    width, height = struct.unpack('>II', data[16:24])
    self.assertGreater(width, 1000)
    self.assertGreater(height, 500)
    self.assertEqual(curves.get_yscale(), 'log')
    self.assertIn('nats', curves.get_ylabel())
    self.assertEqual(curves.get_xlabel(), 'step')
    self.assertEqual(speed.get_xlabel(), 'n_heads')
    self.assertIn('0.05', speed.get_ylabel())
    ticks = [label.get_text() for label in speed.get_xticklabels()]
    self.assertEqual(ticks, [str(2**i) for i in range(len(points))])
    title = self.figure.get_suptitle()
    seeds = len(points[0])
    self.assertStartsWith(title, f'a task, {seeds} seed{"s" * (seeds > 1)}:')

  def test_curves(self):
    """A curve a head count: the median, in a band from least to greatest."""
    rows, _, curves, _ = self.draw(FAST, SLOW, NEVER)
    legend = [text.get_text() for text in curves.get_legend().get_texts()]
    self.assertEqual(legend, [f'{h} (rate 0.01)' for h in (1, 2, 4)])
    lines = [x for x in curves.get_lines() if len(x.get_xdata()) == STEPS]
    for x, line, band in zip(rows, lines, curves.collections, strict=True):
      np.testing.assert_array_equal(line.get_xdata(), np.arange(1, STEPS + 1))
      np.testing.assert_allclose(line.get_ydata(), np.median(x['loss'], axis=0))
      (path,) = band.get_paths()
      self.assertAlmostEqual(path.vertices[:, 1].min(), np.min(x['loss']))

  def test_diverged(self):
    """The median of the others' losses and infinity, counted in the legend."""
    rows = [row(1, (0.01, 0.02, 0.04)), row(2, (0.01, 0.02, 0.04))]
    rows[1]['loss'][1][9:] = [None] * (STEPS - 9)
    rows[1]['final_loss'][1] = None
    with mock.patch.object(sys.modules[__name__], 'row', side_effect=rows):
      _, _, curves, _ = self.draw(FAST, FAST)
    legend = [text.get_text() for text in curves.get_legend().get_texts()]
    wanted = ['1 (rate 0.01)', '2 (rate 0.01, 1 of 3 diverged)']
    self.assertEqual(legend, wanted)
    one, two = [x for x in curves.get_lines() if len(x.get_xdata()) == STEPS]
    np.testing.assert_allclose(two.get_ydata()[:9], one.get_ydata()[:9])
    np.testing.assert_allclose(two.get_ydata()[9:], rows[1]['loss'][2][9:])
    (path,) = curves.collections[1].get_paths()
    self.assertLen(path.vertices, 2 * STEPS + 3)  # at every step
    self.assertAlmostEqual(path.vertices[:, 1].max(), 3)
    self.assertLess(curves.get_ylim()[1], 10)

  def test_steps_to_threshold(self):
    """Medians where they are known, a triangle where a seed never got there."""
    _, summaries, _, speed = self.draw(FAST, SLOW, SOME, NEVER)
    lines = {line.get_marker(): line for line in speed.get_lines()}
    np.testing.assert_array_equal(lines['o'].get_xdata(), [1, 2])
    np.testing.assert_array_equal(
      lines['o'].get_ydata(),
      [x.line['steps_to_threshold_median'] for x in summaries[:2]],
    )
    np.testing.assert_array_equal(lines['^'].get_xdata(), [4, 8])
    np.testing.assert_array_equal(lines['^'].get_ydata(), [STEPS, STEPS])
    legend = [text.get_text() for text in speed.get_legend().get_texts()]
    self.assertEqual(legend, ['rate 0.01', 'a seed never gets there'])

  def test_no_triangle_unless_needed(self):
    """All reached: no triangle, also in the legend."""
    _, _, _, speed = self.draw(FAST, SLOW)
    self.assertNotIn('^', [line.get_marker() for line in speed.get_lines()])
    legend = [text.get_text() for text in speed.get_legend().get_texts()]
    self.assertEqual(legend, ['rate 0.01'])

  def test_a_marker_for_each_rate(self):
    """The final loss and the speed each at its own best rate."""
    slow, fast = row(1, SLOW), row(1, FAST) | {'learning_rate': 0.1}
    slow['final_loss'] = [0.001, 0.001]  # better in the end, and slower
    summary = head_counts.summarise([slow, fast], 0.05)
    curve = sweeps.Curve('', '', [summary])
    axes = Figure().subplots(1, 2)
    for one, name, marker in zip(
      axes, ('final_loss', 'steps_to_threshold'), 'os', strict=True
    ):
      sweeps._median_and_range(one, curve, name, 'C0', [0.01, 0.1])
      drawn = {x.get_marker() for x in one.get_lines() if len(x.get_xdata())}
      self.assertEqual(drawn & {'o', 's'}, {marker})

  def test_a_seed_that_diverged(self):
    """Its triangle stands at the loss before training, not at a step."""
    diverged = row(1, FAST) | {'final_loss': [0.01, None]}
    summaries = [
      head_counts.summarise([x], 0.05) for x in (diverged, row(2, FAST))
    ]
    axes = Figure().subplots()
    curve = sweeps.Curve('', '', summaries)
    sweeps._median_and_range(axes, curve, 'final_loss', 'C0', [0.01])
    lines = {line.get_marker(): line for line in axes.get_lines()}
    np.testing.assert_array_equal(lines['^'].get_xdata(), [1])
    np.testing.assert_allclose(lines['^'].get_ydata(), [3])
    legend = sweeps._rate_legend([curve])
    self.assertEqual(legend[-1].get_label(), 'a seed never gets there')

  def test_no_room(self):
    """The file is named."""
    error = OSError(28, 'No space left on device')
    with (
      mock.patch.object(Figure, 'savefig', side_effect=error),
      self.assertRaisesRegex(
        record.RecordError, r'figure.png cannot be written \(No space left'
      ),
    ):
      style.save(Figure(), self.path)

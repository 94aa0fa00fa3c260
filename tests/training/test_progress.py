"""The progress bar: speed, lines where there is no terminal."""

import io
import re
from unittest import mock

from absl.testing import parameterized
from rich.console import Console

from mha_jax.training import progress

METRICS = {'loss': 1.23456, 'accuracy': 0.5}


class ProgressTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.out = io.StringIO()
    clock = self.enter_context(mock.patch.object(progress, 'time'))
    self.monotonic = clock.monotonic
    self.monotonic.return_value = 100.0

  def bar(
    self, total: int, start: int = 0, terminal: bool = False, width: int = 120
  ):
    console = Console(file=self.out, force_terminal=terminal, width=width)
    bar = progress.ProgressBar('train', total, start, console)
    return self.enter_context(bar)

  def update(self, bar, now: float, step: int) -> None:
    self.monotonic.return_value = now
    bar.update(step, METRICS)

  def lines(self) -> list[str]:
    return self.out.getvalue().splitlines()

  def test_speed_leaves_out_compilation(self):
    """Steps per second count from the first update on."""
    bar = self.bar(1000, start=20)
    self.assertIsNone(bar.steps_per_second)
    self.update(bar, 130.0, 40)
    self.assertIsNone(bar.steps_per_second)
    self.update(bar, 132.0, 60)
    self.assertEqual(bar.steps_per_second, 10.0)
    self.update(bar, 137.0, 110)
    self.assertEqual(bar.steps_per_second, 10.0)
    self.update(bar, 138.0, 120)
    self.assertEqual(bar.steps_per_second, 10.0)
    self.update(bar, 140.0, 160)
    self.assertEqual(bar.steps_per_second, 12.0)

  def test_lines_without_a_terminal(self):
    """One every 10 s and one at the end, with step, metrics and speed."""
    bar = self.bar(100)
    self.update(bar, 105.0, 20)
    self.update(bar, 109.0, 40)
    self.assertEmpty(self.lines())
    self.update(bar, 111.0, 60)
    self.assertLen(self.lines(), 1)
    self.update(bar, 113.0, 80)
    self.assertLen(self.lines(), 1)
    self.update(bar, 114.0, 100)
    self.assertLen(self.lines(), 2)
    self.assertStartsWith(self.lines()[0], 'train  60/100  ')
    for part in ('100/100', 'loss 1.235', 'accuracy 0.5', '8.89 steps/s'):
      self.assertIn(part, self.lines()[1])

  def test_bar_on_a_terminal(self):
    """The bar shows the same, in place."""
    bar = self.bar(100, start=20, terminal=True)
    self.update(bar, 101.0, 60)
    self.update(bar, 102.0, 100)
    bar.__exit__(None, None, None)
    text = self.out.getvalue()
    for part in ('train', '100/100', 'loss 1.235', '40 steps/s'):
      self.assertIn(part, text)
    self.assertIn('\x1b[', text)

  @parameterized.parameters(40, 60, 80, 100, 120)
  def test_numbers_are_whole_on_a_narrow_terminal(self, width):
    """Words fold; the bar and the time give way to numbers."""
    console = Console(file=self.out, force_terminal=True, width=width)
    bar = progress.ProgressBar(' MHA, heads of 4 p=0', 1_000_000, 0, console)
    with bar:
      self.monotonic.return_value = 101.0
      bar.update(1000, METRICS)
      self.monotonic.return_value = 102.0
      bar.update(999_980, {'loss': 1.2345e-05, 'accuracy': 0.99974})
    text = re.sub('\x1b\\[[^a-zA-Z]*[a-zA-Z]', '', self.out.getvalue())
    last = text.rpartition('999980')[0].rpartition('\r')[2] + '999980'
    last += text.rpartition('999980')[2]
    words = ('999980/1000000', '1.234e-05', '0.9997', '9.99e+05', 'heads')
    for word in words:
      self.assertIn(word, last)
    self.assertNotIn('…', last)
    self.assertEqual('━' in last, width >= progress.WIDE)
    self.assertEqual('0:00:' in last, width >= progress.NARROW)

"""Signals: heard at once, and the second ends the process."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from absl.testing import parameterized

from mha_jax.training import signals

# A call of C that lasts minutes and lets other threads run, as compiled
# programs do.
BUSY = """
import hashlib, sys
from mha_jax.training import signals
with getattr(signals, sys.argv[1])():
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)
"""


class InProcessTest(parameterized.TestCase):
  @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
  def test_the_first_is_remembered(self, number):
    """Handlers hold within the block only."""
    before = signal.getsignal(number)
    with signals.stop_on_signal() as request:
      self.assertIsNone(request.signal)
      os.kill(os.getpid(), number)
      self.assertEqual(request.signal, number)
    self.assertEqual(signal.getsignal(number), before)
    self.assertEqual(signal.set_wakeup_fd(-1), -1)

  def test_ctrl_c_interrupts(self):
    """Outside of what saves it raises as ever."""
    before = signal.getsignal(signal.SIGINT)
    with self.assertRaises(KeyboardInterrupt), signals.interrupt_at_once():
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(30)
    self.assertEqual(signal.getsignal(signal.SIGINT), before)


class BusyTest(parameterized.TestCase):
  """The main thread is in C: this starts processes."""

  def test_two_signals(self):
    """A line at the first, the end at the second, though C goes on."""
    kinds = {
      'stop_on_signal': (signal.SIGTERM, 'stopping after this dispatch'),
      'interrupt_at_once': (signal.SIGINT, 'stopping'),
    }
    processes = {name: self.start(name) for name in kinds}
    for name, (number, answer) in kinds.items():
      process = processes[name]
      self.assertEqual(process.stdout.readline(), 'ready\n')
      process.send_signal(number)
      self.assertEqual(
        process.stderr.readline(), f'{number.name}: {answer}; again: at once\n'
      )
      self.assertIsNone(process.poll())
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=60)
      self.assertEqual(err, 'SIGINT: ended at once; what was saved is kept\n')
      self.assertEqual(process.returncode, 130)

  def start(self, name: str) -> subprocess.Popen[str]:
    process = self.enter_context(
      subprocess.Popen(
        [sys.executable, '-c', BUSY, name],
        cwd=pathlib.Path(signals.__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
    self.addCleanup(process.kill)
    timer = threading.Timer(60, process.kill)
    timer.start()
    self.addCleanup(timer.cancel)
    return process

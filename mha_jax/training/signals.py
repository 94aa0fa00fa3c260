"""Ctrl-C and SIGTERM, answered at once whatever the main thread does.

Python calls its signal handlers in the main thread, between two of its own
instructions. While that thread waits for a compiled program there are none, for
minutes perhaps; so a second thread hears of signals by `signal.set_wakeup_fd`.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

STDERR = 2  # the file descriptor
SHOW_CURSOR = '\x1b[?25h'  # a progress bar hides it


class StopRequest:
  """Remembers the first signal; the second ends the process at once.

  Args:
    answer: what to say to the first.

  Attributes:
    signal: the first one; None: none so far.
  """

  def __init__(self, answer: str) -> None:
    self.signal: signal.Signals | None = None
    self._answer = answer

  def receive(self, number: signal.Signals) -> None:
    """Answers one signal, in a thread beside the main one."""
    if self.signal is not None:
      cursor = SHOW_CURSOR if os.isatty(STDERR) else ''
      _say(f'{cursor}{number.name}: ended at once; what was saved is kept')
      os._exit(128 + number)  # as a shell counts
    self.signal = number
    _say(f'{number.name}: {self._answer}; again: at once')


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
  """Turns SIGINT and SIGTERM into a request, within the block.

  Only the main thread can enter it.
  """
  request = StopRequest('stopping after this dispatch')
  with _heard(request, (signal.SIGINT, signal.SIGTERM), lambda *_: None):
    yield request


@contextlib.contextmanager
def interrupt_at_once() -> Iterator[None]:
  """Answers Ctrl-C within the block, and ends the process on a second one.

  The first raises KeyboardInterrupt as ever: once the main thread is back.
  """
  request = StopRequest('stopping')
  with _heard(request, (signal.SIGINT,), signal.default_int_handler):
    yield


@contextlib.contextmanager
def _heard(
  request: StopRequest,
  numbers: Sequence[signal.Signals],
  handler: Callable[[int, FrameType | None], Any],
) -> Iterator[None]:
  """Hands signals to the request as they come, and then to the handler."""
  ear, mouth = socket.socketpair()
  mouth.setblocking(False)
  answered = threading.Semaphore(0)

  def listen() -> None:
    while heard := ear.recv(1):
      if heard[0] in numbers:
        request.receive(signal.Signals(heard[0]))
        answered.release()

  def in_main_thread(number: int, frame: FrameType | None) -> None:
    answered.acquire(timeout=1)
    handler(number, frame)

  listener = threading.Thread(target=listen, daemon=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(ear)
    listener.start()
    stack.callback(listener.join)
    stack.enter_context(mouth)  # its end is the listener's
    wakeup = signal.set_wakeup_fd(mouth.fileno())
    stack.callback(signal.set_wakeup_fd, wakeup)
    for number in numbers:
      before = signal.signal(number, in_main_thread)
      stack.callback(signal.signal, number, before)
    yield


def _say(text: str) -> None:
  """Writes a line to standard error, past what other threads buffer."""
  with contextlib.suppress(OSError):
    os.write(STDERR, f'{text}\n'.encode())

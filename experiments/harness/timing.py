"""Time and memory of contenders: in turn, medians, ratios with their spread."""

import multiprocessing
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments.suites.case import Run

STATUS = pathlib.Path('/proc/self/status')
FORGET_PEAK = pathlib.Path('/proc/self/clear_refs')


def interleaved(
  runs: Mapping[str, Run],
  rounds: int,
  stop: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]] | None:
  """Seconds of each run, round after round, each round in a random order.

  What else the machine does then hits all of them alike. Two runs before the
  first round compile and warm up.

  Args:
    runs: by name.
    rounds: times that each is measured.
    stop: asked between runs whether to give up, for None.
  """
  order = random.Random(0)
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for i in range(-2, rounds):
    for name in order.sample(list(runs), len(runs)):
      if stop():
        return None
      begin = time.perf_counter()
      runs[name]()
      if i >= 0:
        seconds[name].append(time.perf_counter() - begin)
  return seconds


def ratio(ours: list[float], peer: list[float]) -> dict[str, float]:
  """Divides a peer's seconds by ours: of medians, and round by round."""
  each = sorted(b / a for a, b in zip(ours, peer, strict=True))
  quarter = len(each) // 4
  return {
    'ratio': statistics.median(peer) / statistics.median(ours),
    'ratio_low': each[quarter],
    'ratio_high': each[len(each) - 1 - quarter],
  }


def peak_bytes(
  prepare: Callable[..., Run], arguments: tuple[Any, ...]
) -> int | None:
  """Measures how far one run raises a fresh process's memory, in bytes.

  The run compiles too. Memory is the resident set, Linux's VmHWM. None where
  the process dies of it, or the system does not tell; an exception in it is
  raised here.

  Args:
    prepare: a function of a module, called in the process; returns the run.
    arguments: its arguments.
  """
  if not STATUS.exists():
    return None
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  child = context.Process(target=_measure, args=(sender, prepare, arguments))
  child.start()
  sender.close()
  try:
    found = receiver.recv()
  except EOFError:
    return None
  finally:
    child.join()
  if isinstance(found, Exception):
    raise found
  return int(found)


def _measure(
  sender: Any, prepare: Callable[..., Run], arguments: tuple[Any, ...]
) -> None:
  try:
    run = prepare(*arguments)
    FORGET_PEAK.write_text('5')  # what preparing took does not count
    before = _status('VmRSS')
    run()
    sender.send(_status('VmHWM') - before)
  except Exception as error:  # for the process that asked
    sender.send(error)


def _status(name: str) -> int:
  """A number of bytes from the process's status."""
  lines = STATUS.read_text().splitlines()
  line = next(x for x in lines if x.startswith(f'{name}:'))
  return int(line.split()[1]) * 1024

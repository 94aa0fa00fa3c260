"""Rows over several devices, in a process that simulates four."""

import os
import pathlib
import subprocess
import sys

from mha_jax.attention.sharded_rows import rows_alike

HERE = pathlib.Path(__file__).parent


def test_on_four_devices():
  flags = os.environ.get('XLA_FLAGS', '')
  devices = '--xla_force_host_platform_device_count=4'
  run = subprocess.run(
    [sys.executable, '-m', 'pytest', '-x', HERE / 'four_devices.py'],
    env={**os.environ, 'XLA_FLAGS': f'{flags} {devices}'.strip()},
    capture_output=True,
    text=True,
    check=False,
  )
  assert run.returncode == 0, run.stdout + run.stderr


def test_one_device_is_left_alone():
  tree = {'x': [1.0, 2.0]}
  assert rows_alike(tree) is tree

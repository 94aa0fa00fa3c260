"""Experiments: one question per script, run as `python -m experiments.NAME`."""

import importlib.util

NEEDED = ('ml_collections', 'matplotlib')

if _missing := [x for x in NEEDED if importlib.util.find_spec(x) is None]:
  raise ImportError(
    f'experiments need {" and ".join(_missing)}: pip install '
    "-e '.[experiments]'",
    name=__name__,  # for one line under `python -m`
  )

"""Which implementation computes a call."""

NAMES = ('auto', 'exact', 'blockwise')

# Measured on two CPU cores, see WORKSPACE.md.
LONG = 1024
"""Keys from which on blocks are faster."""


def check_name(implementation: str) -> None:
  """Raises a ValueError unless there is such an implementation."""
  if implementation not in NAMES:
    raise ValueError(
      f'implementation={implementation!r} is unknown; use one of {list(NAMES)}'
    )


def choose(implementation: str, t: int, s: int, return_weights: bool) -> str:
  """The implementation that serves a call: 'exact' or 'blockwise'.

  Args:
    implementation: a choice, or 'auto'.
    t: queries.
    s: keys.
    return_weights: whether the weights are asked for.

  Raises:
    ValueError: the choice is unknown, or cannot serve the call.
  """
  check_name(implementation)
  if implementation == 'blockwise' and return_weights:
    raise ValueError(
      "implementation='blockwise' never has the weights as a whole; use "
      "'auto' or 'exact' with return_weights=True"
    )
  if implementation == 'auto':
    short = s < LONG or t == 0
    return 'exact' if return_weights or short else 'blockwise'
  return implementation

"""Numbers in print, rounded to the safe side: guarantees up, what is left of a budget down."""

from __future__ import annotations

import math
from collections.abc import Callable

_LEAST = 1e-300  # smaller numbers lose digits


def rounded_up(value: float, digits: int = 4) -> str:
    """A number of 0 or above, rounded up to this many significant digits."""
    return f"{_LEAST:g}" if 0 < value < _LEAST else _rounded(value, digits, math.ceil, 1 - 1e-9)


def rounded_down(value: float, digits: int = 4) -> str:
    """A number of 0 or above, rounded down to this many significant digits."""
    return "0" if value < _LEAST else _rounded(value, digits, math.floor, 1 + 1e-9)


def _rounded(value: float, digits: int, toward: Callable[[float], int], tolerance: float) -> str:
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{toward(value / unit * tolerance) * unit:.{digits}g}"

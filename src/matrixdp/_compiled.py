"""Loops as machine code, compiled by numba at their first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from matrixdp.errors import MatrixDPError


@cache
def compiled(loop: Callable[..., Any], *, fastmath: bool = False) -> Callable[..., Any]:
    """The loop as machine code that runs without the interpreter's lock; `fastmath` lets it reorder sums."""
    try:
        numba = importlib.import_module("numba")
    except ImportError as reason:
        raise MatrixDPError(
            f"numba cannot be imported ({reason}), and without it no noise is drawn; install a version that fits this "
            "Python and numpy"
        ) from None
    try:
        fast: Callable[..., Any] = numba.njit(nogil=True, cache=True, fastmath=fastmath)(loop)
    except RuntimeError:  # no folder to cache the machine code: a read-only installation without a home
        fast = numba.njit(nogil=True, fastmath=fastmath)(loop)
    return fast

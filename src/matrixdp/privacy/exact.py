"""Exact sums and products of floats (Knuth, Dekker): the rounded result and what rounding left out."""

from __future__ import annotations

from typing import Any


def two_sum(x: Any, y: Any) -> tuple[Any, Any]:
    """x + y, rounded, and the rounding error."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def _split(x: Any) -> tuple[Any, Any]:
    """x as a sum of two floats of at most 26 bits."""
    shifted = 134217729.0 * x  # 2^27 + 1
    high = shifted - (shifted - x)
    return high, x - high


def two_product(x: Any, y: Any) -> tuple[Any, Any]:
    """x * y, rounded, and the rounding error."""
    product = x * y
    (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
    return product, ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low

"""Reading of single cells by total functions: none raises, warns or stores a cell, whatever the cell holds.

A cell may be anything that a source returns: text, numbers, dates, None, or an object of some class. Each function
returns a plain value, MISSING for an empty cell, or UNEXPECTED for one that cannot be read as asked for.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Gap(Enum):
    """Why a cell has no value."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"


MISSING, UNEXPECTED = Gap
EPOCH = date(1970, 1, 1).toordinal()
# Whole decimals of at most this many digits are written out; longer ones keep their exponent.
DIGITS = 40
# Databases write "BC" or "(BC)" after days before the year 1, which no column of dates can hold.
_ISO_DAY = re.compile(r"(\d{4}-\d{2}-\d{2})(?:[T ](?!.*\bBC\b).*)?", re.ASCII | re.DOTALL)


def total(function: Callable[[Any], T]) -> Callable[[Any], T | Gap]:
    """Makes a function of a plain value total: any other cell, and any for which it raises, is UNEXPECTED."""

    def read(cell: Any) -> T | Gap:
        try:
            plain = _plain(cell)
            return plain if isinstance(plain, Gap) else function(plain)
        except Exception:
            return UNEXPECTED

    return read


def _plain(cell: Any) -> Any:
    """The cell as a bool, int, float, Decimal, str, date or datetime64; text without surrounding space."""
    if type(cell) is str:
        return unicodedata.normalize("NFC", cell).strip() or MISSING
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return MISSING
    if isinstance(cell, np.datetime64):
        return MISSING if np.isnat(cell) else cell
    if isinstance(cell, np.generic):
        kind = cell.dtype.kind  # a timedelta64 may have an int as its item
        cell = float(cell) if kind == "f" else cell.item() if kind in "biuSU" else UNEXPECTED
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", errors="surrogateescape")
    if isinstance(cell, str):
        return unicodedata.normalize("NFC", str(cell)).strip() or MISSING
    if isinstance(cell, (float, Decimal)) and (cell.is_nan() if isinstance(cell, Decimal) else math.isnan(cell)):
        return MISSING
    return cell if isinstance(cell, (bool, int, float, Decimal, date)) else UNEXPECTED


def _text(cell: Any) -> str | Gap:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return str(int(cell)) if math.isfinite(cell) and cell.is_integer() else repr(float(cell))
    if isinstance(cell, Decimal):
        whole = cell.is_finite() and cell.adjusted() < DIGITS and cell == cell.to_integral_value()
        return str(int(cell)) if whole else str(cell)
    if isinstance(cell, date):  # a datetime at midnight is a date
        midnight = not isinstance(cell, datetime) or cell.time().isoformat() == "00:00:00"
        return cell.isoformat()[:10] if midnight else cell.isoformat()
    return str(cell)


def _number(cell: Any) -> float | Gap:
    if isinstance(cell, str) and "_" in cell:  # float() accepts 1_000, other programs do not
        return UNEXPECTED
    if isinstance(cell, (date, np.datetime64)):
        return UNEXPECTED
    try:
        number = float(cell)
    except OverflowError:
        number = math.inf if cell > 0 else -math.inf
    return MISSING if math.isnan(number) else number


def _day(cell: Any) -> int | Gap:
    if isinstance(cell, date):
        return cell.toordinal() - EPOCH
    if isinstance(cell, np.datetime64):
        return int(cell.astype("datetime64[D]").astype(np.int64))
    found = _ISO_DAY.fullmatch(cell) if isinstance(cell, str) else None
    return UNEXPECTED if found is None else date.fromisoformat(found[1]).toordinal() - EPOCH


text_of = total(_text)
"""A cell as text: whole numbers without a point, true and false, ISO dates."""

number_of = total(_number)
"""A cell as a number, perhaps infinite; text in the usual decimal or exponential form."""

day_of = total(_day)
"""A cell as days since 1970-01-01: a date, a timestamp (its day), or text that begins with an ISO date."""


def day_in(form: str) -> Callable[[Any], int | Gap]:
    """`day_of`, with text in a form of `strptime`, such as "%d/%m/%Y"."""

    def read(cell: Any) -> int | Gap:
        return datetime.strptime(cell, form).toordinal() - EPOCH if isinstance(cell, str) else _day(cell)

    return total(read)

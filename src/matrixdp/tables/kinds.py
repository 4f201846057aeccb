"""The kinds of columns: categorical, ordered, boolean, numeric, date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp.privacy import records
from matrixdp.queries import cells
from matrixdp.queries.cells import EPOCH, Gap
from matrixdp.tables.columns import MISSING_LABEL, MOST_CATEGORIES, Codes, Column, check_distinct, texts_of


@dataclass(frozen=True, eq=False)
class Categorical(Column):
    """Values from a public list. Text and numbers are compared as text: 1, 1.0 and "1" are the same value.

    Example:
        >>> from matrixdp.tables import Categorical
        >>> Categorical(["north", "south"], missing="out").labels  # "other" is for cells that are not in the list
        ('north', 'south', 'other')
    """

    values: tuple[Any, ...]

    def _check(self) -> None:
        object.__setattr__(self, "values", texts_of("values", self.values))
        if not self.values:
            raise InvalidInput("values must list at least one value that the column can have, from public knowledge")
        if not len(self.values) <= MOST_CATEGORIES:
            raise InvalidInput(f"values must be at most {MOST_CATEGORIES}, got {len(self.values)}")
        check_distinct("values", self.values)
        if self.unexpected == "category" and self.other in self.values:
            raise InvalidInput(
                f"other is {self.other!r}, which is one of the values; choose another label, or "
                f'unexpected={{"fill": {self.other!r}}} to count unexpected cells with it'
            )
        if self.missing == "category" and MISSING_LABEL in self.values:
            raise InvalidInput(
                f'values has {MISSING_LABEL!r}, the label of missing cells; use missing={{"fill": {MISSING_LABEL!r}}}'
            )

    @property
    def categories(self) -> tuple[str, ...]:
        """The values."""
        return self.values

    def _reader(self) -> Callable[[Any], float | Gap]:
        return _by_text({value: place for place, value in enumerate(self.values)}, str)


@dataclass(frozen=True, eq=False)
class Ordered(Categorical):
    """Values from a public list whose order is meaningful, such as grades.

    Example:
        >>> from matrixdp.tables import Ordered
        >>> Ordered(["low", "middle", "high"], missing="out", unexpected="out").labels
        ('low', 'middle', 'high')
    """


TRUE, FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


@dataclass(frozen=True, eq=False, kw_only=True)
class Boolean(Column):
    """True or false, also as one of the texts in `true` and `false`, in upper or lower case.

    Example:
        >>> from matrixdp.tables import Boolean
        >>> Boolean(missing="out").labels
        ('false', 'true', 'other')
    """

    true: tuple[str, ...] = TRUE
    false: tuple[str, ...] = FALSE

    def _check(self) -> None:
        for name in ("true", "false"):
            object.__setattr__(self, name, tuple(text.casefold() for text in texts_of(name, getattr(self, name))))
        if {"true", *self.true} & {"false", *self.false}:
            raise InvalidInput("true and false must have no text in common, upper and lower case alike")

    @property
    def categories(self) -> tuple[str, ...]:
        """False and true."""
        return "false", "true"

    def _reader(self) -> Callable[[Any], float | Gap]:
        places = {**dict.fromkeys(self.false, 0), **dict.fromkeys(self.true, 1), "false": 0, "true": 1}
        return _by_text(places, str.casefold)


def _by_text(places: Mapping[str, int], form: Callable[[str], str]) -> Callable[[Any], float | Gap]:
    """A reader that looks up a cell's text, in this form, among the known texts."""

    def read(cell: Any) -> float | Gap:
        text = cells.text_of(cell)
        return text if isinstance(text, Gap) else places.get(form(text), cells.UNEXPECTED)

    return read


@dataclass(frozen=True, eq=False)
class Numeric(Column):
    """Numbers between public bounds. Numbers outside are clipped to the nearer bound, or unexpected.

    Attributes:
        low: the least number.
        high: the largest number.
        bins: for counts, the borders of bins from low to high, or a number of bins of equal width. A bin includes its
            lower border; the last one includes both.
        outside: "clip" moves numbers outside the bounds to the nearer one; "unexpected" applies that policy.

    Example:
        >>> from matrixdp.tables import Numeric
        >>> Numeric(0, 100, bins=[0, 18, 65, 100], missing="out", unexpected="out").labels
        ('[0, 18)', '[18, 65)', '[65, 100]')
    """

    low: float
    high: float
    bins: Any = None
    outside: str = field(default="clip", kw_only=True)

    def _check(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, _check.number(name, getattr(self, name)))
        if not self.high > self.low:
            raise InvalidInput(f"high must be above low, got low {self.low!r} and high {self.high!r}")
        object.__setattr__(self, "clips", _outside(self.outside))
        object.__setattr__(self, "bounds", (self.low, self.high))
        if self.bins is not None:
            object.__setattr__(self, "bins", self._borders())

    def _borders(self) -> tuple[float, ...]:
        if isinstance(self.bins, int):
            number = _check.count("bins", self.bins)
            if not number <= MOST_CATEGORIES:
                raise InvalidInput(f"bins must be at most {MOST_CATEGORIES}, got {number}")
            borders = np.linspace(self.low, self.high, number + 1)
        else:
            borders = _check.finite("bins", self.bins, ndim=1)
        rising = len(borders) >= 2 and np.all(np.diff(borders) > 0)
        if not (rising and borders[0] == self.low and borders[-1] == self.high):
            raise InvalidInput(
                f"bins must be increasing borders that begin with low ({self.low:g}) and end with high ({self.high:g})"
            )
        return tuple(float(border) for border in borders)

    @cached_property
    def _bin_labels(self) -> tuple[str, ...]:
        if self.bins is None:
            return ()
        ends = [f"{border:g}" if float(f"{border:g}") == border else repr(border) for border in self.bins]
        labels = [f"[{low}, {high})" for low, high in pairwise(ends)]
        return (*labels[:-1], labels[-1][:-1] + "]")

    @property
    def categories(self) -> tuple[str, ...]:
        """The bins, as intervals."""
        return self._bin_labels

    @property
    def _numbers_are_positions(self) -> bool:
        return not self.missing_values

    def _reader(self) -> Callable[[Any], float | Gap]:
        return cells.number_of

    def _index(self, positions: Array) -> Codes:
        if self.bins is None:
            raise InvalidInput("bins are needed to count by numbers: public borders, or a number of equal bins")
        found = np.searchsorted(self.bins, positions, side="right") - 1
        return np.minimum(found, len(self.bins) - 2).astype(np.int64)


PERIODS = ("day", "week", "month", "year")


@dataclass(frozen=True, eq=False)
class Date(Column):
    """Days from `start` to `end`, both public, counted by day, week (from Monday), month or year.

    Attributes:
        start: the first day, such as "2026-01-01".
        end: the last day.
        by: "day", "week", "month" or "year".
        format: the form of dates in text, as for `strptime`; ISO dates by default.
        outside: "unexpected" applies that policy to days outside; "clip" moves them to the nearer end.

    Example:
        >>> from matrixdp.tables import Date
        >>> Date("2026-01-01", "2026-03-31", by="month", missing="out", unexpected="out").labels
        ('2026-01', '2026-02', '2026-03')
    """

    start: Any
    end: Any
    by: str = "month"
    format: str | None = field(default=None, kw_only=True)
    outside: str = field(default="unexpected", kw_only=True)

    def _check(self) -> None:
        ends = []
        for name in ("start", "end"):
            day = cells.day_of(getattr(self, name))
            if isinstance(day, Gap):
                raise InvalidInput(
                    f'{name} must be a date such as "2026-01-31", got {_check.shown(getattr(self, name))}'
                )
            ends.append(day)
            object.__setattr__(self, name, _day(day).isoformat())
        if not ends[1] >= ends[0]:
            raise InvalidInput(f"end must not lie before start, got start {self.start} and end {self.end}")
        if not ends[1] - ends[0] < MOST_CATEGORIES:
            raise InvalidInput(f"end must lie less than {MOST_CATEGORIES} days after start, got {ends[1] - ends[0]}")
        _check.choice("by", self.by, PERIODS)
        if self.format is not None and (not isinstance(self.format, str) or "%" not in self.format):
            raise InvalidInput(f'format must be a form such as "%d/%m/%Y", got {_check.shown(self.format)}')
        object.__setattr__(self, "clips", _outside(self.outside))
        object.__setattr__(self, "bounds", (float(ends[0]), float(ends[1])))

    @cached_property
    def _periods(self) -> dict[int, str]:
        """The first day of each period, and its label."""
        assert self.bounds is not None
        first, last = (int(end) for end in self.bounds)
        found, previous = dict[int, str](), ""
        for ordinal in range(first, last + 1):
            day = _day(ordinal)
            year, week, _ = day.isocalendar()
            label = {
                "day": day.isoformat(),
                "week": f"{year}-W{week:02d}",
                "month": day.isoformat()[:7],
                "year": day.isoformat()[:4],
            }[self.by]
            if label != previous:
                found[ordinal] = previous = label
        return found

    @cached_property
    def _starts(self) -> Array:
        return np.array(list(self._periods), dtype=np.float64)

    @property
    def categories(self) -> tuple[str, ...]:
        """The periods."""
        return tuple(self._periods.values())

    def _reader(self) -> Callable[[Any], float | Gap]:
        return cells.day_of if self.format is None else cells.day_in(self.format)

    def _position(self, value: Any, name: str = "missing") -> float:
        day = cells.day_of(value)
        return super()._position(value if isinstance(day, Gap) else _day(day), name)

    def _index(self, positions: Array) -> Codes:
        return (np.searchsorted(self._starts, positions, side="right") - 1).astype(np.int64)


def _day(ordinal: int) -> date:
    return date.fromordinal(EPOCH) + timedelta(days=ordinal)


def _outside(policy: Any) -> bool:
    return _check.choice("outside", policy, ("clip", "unexpected")) == "clip"


KINDS: dict[str, type[Column]] = {
    "categorical": Categorical,
    "ordered": Ordered,
    "boolean": Boolean,
    "numeric": Numeric,
    "date": Date,
}
for _kind, _class in KINDS.items():
    records.register(_kind, _class)

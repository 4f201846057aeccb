"""Columns: each maps every cell to a public category, or leaves its row out of the count, by fixed rules.

A cell is *missing* (None, NaN, NaT, blank text, or a text listed in `missing_values`), *unexpected* (not a value that
the column knows), or has a value. The first two each have a policy: "category" (a separate category), "out" (the row is
not counted), or {"fill": value} (read as this value). Policies are public parameters of a query and part of its
certificate.

Guarantee: reading a cell neither raises nor warns, and depends on that cell and the column alone. So a row contributes
to one cell of a table or to none, whatever the other rows hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput
from matrixdp.queries import cells
from matrixdp.queries.cells import Gap

Codes = npt.NDArray[np.int64]
States = npt.NDArray[np.uint8]

OUT = -1
"""The code of a cell whose row is not counted."""

STATES = ("within", "clipped", "unexpected", "missing")
"""The states that a cell can be in."""

WITHIN, CLIPPED, UNEXPECTED, MISSING = range(4)
MOST_CATEGORIES = 1_000_000
MISSING_LABEL = "missing"
_STATE = {cells.MISSING: MISSING, cells.UNEXPECTED: UNEXPECTED}
# The most distinct cells of a column that are cached while it is read.
REMEMBERED = 1 << 18
# Equal cells of one of these types have the same text. Equal decimals or times may be written in several ways.
_ALIKE = (str, bytes, bool, int, float, date)


@dataclass(frozen=True, eq=False, kw_only=True)
class Column(ABC):
    """A column of a table: the values that its cells can have, and the policies for all other cells.

    Attributes:
        missing: the policy for missing cells: "category", "out" or {"fill": value}.
        unexpected: the policy for cells that the column does not know, likewise.
        missing_values: texts that mean "missing", such as "?" or "NA".
        other: the label of the category of unexpected cells.
    """

    missing: Any = "category"
    unexpected: Any = "category"
    missing_values: tuple[str, ...] = ()
    other: str = "other"

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing_values", texts_of("missing_values", self.missing_values))
        if not isinstance(self.other, str) or not self.other.strip():
            raise InvalidInput(f"other must be the label of a category, got {_check.shown(self.other)}")
        policies = {name: _policy(name, getattr(self, name)) for name in ("missing", "unexpected")}
        for name, policy in policies.items():
            object.__setattr__(self, name, policy)
        self._check()
        for name, policy in policies.items():
            if isinstance(policy, Mapping):
                self._position(policy["fill"], name)
        if self.is_counted:
            check_distinct("labels", self.labels)

    @abstractmethod
    def _check(self) -> None:
        """Raises InvalidInput unless the fields of this kind of column are valid."""

    @abstractmethod
    def _reader(self) -> Callable[[Any], float | Gap]:
        """A total function: the position of a cell's value (an index, a number, a day)."""

    def _index(self, positions: Array) -> Codes:
        """The categories of positions within the bounds; the positions themselves by default."""
        return positions.astype(np.int64)

    @property
    @abstractmethod
    def categories(self) -> tuple[str, ...]:
        """Labels of the values that cells can have, in order; empty for numbers without bins."""

    bounds: tuple[float, float] | None = field(default=None, init=False, repr=False)
    """The least and the largest position, if the column has bounds."""

    clips: bool = field(default=False, init=False, repr=False)
    """Whether positions outside the bounds move to the nearer end; otherwise they are unexpected."""

    @property
    def is_counted(self) -> bool:
        """Whether rows can be counted by this column."""
        return bool(self.categories)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all categories, those of unexpected and missing cells last."""
        return (
            *self.categories,
            *([self.other] if self.unexpected == "category" else []),
            *([MISSING_LABEL] if self.missing == "category" else []),
        )

    # --- reading ---

    def read(self, values: Sequence[Any] | npt.NDArray[Any]) -> tuple[States, Array]:
        """The state and the position of each cell, clipped where the column clips; positions of gaps are 0."""
        if isinstance(values, np.ndarray) and values.dtype.kind in "iuf" and self._numbers_are_positions:
            with np.errstate(all="ignore"):
                positions = values.astype(np.float64)
            states = np.where(np.isnan(positions), MISSING, WITHIN).astype(np.uint8)
            positions[states == MISSING] = 0.0
        else:
            states, positions = self._read_each(values)
        if self.bounds is not None:
            low, high = self.bounds
            outside = (states == WITHIN) & ~((positions >= low) & (positions <= high))
            states[outside] = CLIPPED if self.clips else UNEXPECTED
            positions = np.clip(positions, low, high) if self.clips else np.where(outside, 0.0, positions)
        return states, positions

    @property
    def _numbers_are_positions(self) -> bool:
        return False

    def _read_each(self, values: Sequence[Any] | npt.NDArray[Any]) -> tuple[States, Array]:
        reader, known = self._reader(), set(self.missing_values)
        remembered: dict[Any, tuple[int, float]] = {}
        states, positions = np.zeros(len(values), dtype=np.uint8), np.zeros(len(values))
        for row, cell in enumerate(values):
            key = (type(cell), cell) if type(cell) in _ALIKE else None
            found = None if key is None else remembered.get(key)
            if found is None:
                position = cells.MISSING if known and cells.text_of(cell) in known else reader(cell)
                found = (_STATE[position], 0.0) if isinstance(position, Gap) else (WITHIN, float(position))
                if key is not None and len(remembered) < REMEMBERED:
                    remembered[key] = found
            states[row], positions[row] = found
        return states, positions

    def codes(self, states: States, positions: Array) -> Codes:
        """The index of each cell's label, or OUT."""
        has_value = states <= CLIPPED
        found = np.full(len(states), OUT, dtype=np.int64)
        found[has_value] = self._index(positions[has_value])
        for state, policy, label in (
            (UNEXPECTED, self.unexpected, self.other),
            (MISSING, self.missing, MISSING_LABEL),
        ):
            if policy == "category":
                found[states == state] = self.labels.index(label)
            elif policy != "out":
                found[states == state] = self._index(np.array([self._position(policy["fill"])]))[0]
        return found

    def numbers(self, states: States, positions: Array) -> tuple[npt.NDArray[np.bool_], Array]:
        """Which cells have a position, and the positions; the policy "category" gives a cell none."""
        inside, values = states <= CLIPPED, positions.copy()
        for state, policy in ((UNEXPECTED, self.unexpected), (MISSING, self.missing)):
            if isinstance(policy, Mapping):
                values[states == state] = self._position(policy["fill"])
                inside |= states == state
        return inside, values

    def _position(self, value: Any, name: str = "missing") -> float:
        position = self._reader()(value)
        low, high = self.bounds or (-np.inf, np.inf)
        if isinstance(position, Gap) or not low <= position <= high:
            raise InvalidInput(f"{name}: the value to fill in must be one that the column lists, or in its bounds")
        return float(position)


def _policy(name: str, policy: Any) -> Any:
    if isinstance(policy, str) and policy in ("category", "out"):
        return policy
    if isinstance(policy, Mapping) and set(policy) == {"fill"}:
        fill = policy["fill"]
        return {"fill": fill.isoformat() if isinstance(fill, date) else fill}
    raise InvalidInput(
        f'{name} must be "category", "out" or {{"fill": value}}, got {_check.shown(policy)}; it is the policy for '
        f"cells that are {name}"
    )


def texts_of(name: str, values: Any) -> tuple[str, ...]:
    """A public list of values as texts, each as a cell with this value would be read."""
    if isinstance(values, (str, bytes, Mapping)) or not np.iterable(values):
        raise InvalidInput(f"{name} must be a list of values, got {_check.kind(values)}")
    texts = [cells.text_of(value) for value in values]
    for place, text in enumerate(texts):
        if isinstance(text, Gap):
            raise InvalidInput(f"{name}: entry {place} must be a text, a number or a date, and not blank")
    return tuple(str(text) for text in texts)


def check_distinct(name: str, texts: Sequence[str]) -> None:
    """Raises InvalidInput if a text is listed twice; it is not quoted, as it may be data given by mistake."""
    seen: dict[str, int] = {}
    for place, text in enumerate(texts):
        if seen.setdefault(text, place) != place:
            raise InvalidInput(f"{name} must differ from each other; entries {seen[text]} and {place} are the same")

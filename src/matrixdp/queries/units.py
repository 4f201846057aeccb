"""The unit of privacy: whose rows a guarantee covers, and how many of them count.

A unit is whoever has an id, with all rows of that id. At most `contributions` of these rows count, chosen uniformly at
random and in secret, independently of other units' rows. Rows without an id do not count: if each were a unit, one
person could have many.

Guarantee: let D' be D without all rows of one unit. Couple the draws of both so that every other unit keeps the same
rows. Then the rows that count differ by at most `contributions` rows, all of that unit. A release that is
(epsilon, delta)-differentially private for such a difference is also private for D and D', since the hockey-stick
divergence is jointly convex and the choice of rows is independent of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp.adjacency import ADD_REMOVE, checked
from matrixdp.errors import InvalidInput
from matrixdp.queries import cells
from matrixdp.queries.answer import Answer, query
from matrixdp.queries.cells import Gap
from matrixdp.queries.clipping import at_least
from matrixdp.secure.entropy import Key
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, RankOne, Sensitivity

Ids = npt.NDArray[np.int64]

NO_UNIT = -1
"""The number of rows without an id, which are left out."""

# How many rows are kept before those that can no longer count are dropped.
KEPT = 1 << 22
MOST_CONTRIBUTIONS = 1 << 20


class Numbering:
    """Numbers the ids of units in the order of their appearance; ids with the same stripped text are one unit."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def numbers(self, ids: Sequence[Any] | npt.NDArray[Any]) -> Ids:
        """The number of each row's unit, or NO_UNIT."""
        found = np.empty(len(ids), dtype=np.int64)
        for place, cell in enumerate(ids):
            text = cells.text_of(cell)
            found[place] = NO_UNIT if isinstance(text, Gap) else self._known.setdefault(text, len(self._known))
        return found


def listed(ids: Any) -> list[Any]:
    """The ids in the order of the rows, whatever the labels of an index are.

    Raises:
        InvalidInput: unless there is an ordered sequence of ids.
    """
    unordered = not hasattr(ids, "__len__") or isinstance(ids, (str, bytes, Mapping, Set))
    if unordered or getattr(ids, "ndim", 1) != 1:  # a table would list its columns
        raise InvalidInput(f"ids must be a sequence with one id per record, in the same order, got {_check.kind(ids)}")
    return ids.tolist() if type(ids).__name__ == "Tensor" else list(ids)


class Selection:
    """At most `contributions` rows of each unit, chosen in secret; it keeps only rows that can still be chosen."""

    def __init__(self, contributions: int, key: Key | None = None) -> None:
        self._contributions = contributions
        self._stream, self._block = (key or Key()).stream(), 0
        self._parts: list[tuple[Ids, npt.NDArray[np.uint64], npt.NDArray[Any]]] = []
        self._rows = 0

    def add(self, units: Ids, rows: npt.NDArray[Any]) -> None:
        """Adds rows (along the first axis), with the unit of each."""
        if not len(units):
            return
        ranks = np.empty(len(units), dtype=np.uint64)
        self._stream.fill(ranks, self._block)
        self._block += 1
        self._parts.append((units, ranks, rows))
        self._rows += len(units)
        if self._rows > KEPT:
            self._keep()

    def rows(self) -> npt.NDArray[Any] | None:
        """The rows that count, in no meaningful order; None if no row was added."""
        self._keep()
        return self._parts[0][2] if self._parts else None

    def _keep(self) -> None:
        """Keeps each unit's rows with the smallest ranks: a uniform choice, as ranks are independent and uniform."""
        if not self._parts:
            return
        units, ranks, rows = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        order = np.lexsort((ranks, units))
        units = units[order]
        starts = np.flatnonzero(np.r_[True, units[1:] != units[:-1]])
        place_in_unit = np.arange(len(units)) - np.repeat(starts, np.diff(np.r_[starts, len(units)]))
        kept = order[place_in_unit < self._contributions]
        self._parts = [(units[place_in_unit < self._contributions], ranks[kept], rows[kept])]
        self._rows = len(kept)


def chosen_rows(ids: Sequence[Any], contributions: int) -> Ids:
    """The positions of the rows that count: a few of each unit, chosen in secret; as private as the ids.

    Args:
        ids: the unit of each row; rows without an id do not count.
        contributions: how many rows of a unit count.

    Example:
        >>> from matrixdp.queries import chosen_rows
        >>> len(chosen_rows(["ann", "ann", "bob", None], contributions=1))
        2
    """
    units = Numbering().numbers(listed(ids))
    selection = Selection(checked_contributions(contributions))
    known = np.flatnonzero(units != NO_UNIT)
    selection.add(units[known], known)
    found = selection.rows()
    return known if found is None else found


def bounded(records: npt.ArrayLike, ids: Sequence[Any], contributions: int) -> npt.NDArray[Any]:
    """At most `contributions` records of each unit, for queries on records that have ids.

    Args:
        records: an array, one record per row.
        ids: the unit of each record; records without one are left out.
        contributions: how many records of a unit count.

    Guarantee: removing all records of one unit changes the result by at most `contributions` records. So a query on the
        result needs the set of that many records, as `by_unit` states it. The number of records in the result is
        private too.

    Example:
        >>> from matrixdp.queries import bounded
        >>> visits, patients = [[1.0], [2.0], [3.0], [4.0]], ["ann", "ann", "ann", "bob"]
        >>> bounded(visits, patients, contributions=2).shape
        (3, 1)
    """
    rows, places = _check.array_of("records", records), listed(ids)
    if rows.ndim == 0 or len(rows) != len(places):
        raise InvalidInput(f"ids must have one entry per record, got {len(places)} for {_check.kind(rows)}")
    return np.asarray(rows[chosen_rows(places, contributions)])


def by_unit(
    asked: Callable[..., Answer], records: npt.ArrayLike, ids: Sequence[Any], contributions: int, **options: Any
) -> Answer:
    """A query on records that have ids, with the sensitivity set of a unit.

    Args:
        asked: a query of `matrixdp.queries`.
        records: an array, one record per row.
        ids: the unit of each record; records without one are left out.
        contributions: how many records of a unit count.
        **options: of the query; its adjacency is add/remove.

    Guarantee: a unit with all its records changes the value by a member of the set; see `of_units`.

    Example:
        >>> from matrixdp import queries
        >>> visits, patients = [[1.0], [2.0], [3.0], [4.0]], ["ann", "ann", "ann", "bob"]
        >>> queries.by_unit(queries.sum, visits, patients, 2, norm=5.0).sensitivity
        Frobenius(radius=10.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    rows = _check.array_of("records", records)
    of_units(asked(_example(rows), **options), contributions)  # so that no refusal depends on the ids
    return of_units(answered(asked, bounded(rows, ids, contributions), **options), contributions)


def answered(asked: Callable[..., Answer], rows: npt.NDArray[Any], *arguments: Any, **options: Any) -> Answer:
    """A query's answer, also if no row is left: under add/remove that is zero, since an error would reveal it."""
    if len(rows):
        return asked(rows, *arguments, **options)
    answer = asked(_example(rows), *arguments, **options)
    return Answer(np.zeros_like(answer.value), answer.sensitivity, answer.query)


def _example(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Two rows of zeros of the same type."""
    return np.zeros((2, *rows.shape[1:]), dtype=rows.dtype)


def of_units(answer: Answer, contributions: int) -> Answer:
    """An answer from bounded records, with the set of that many records of a unit.

    Guarantee: adding or removing k records one by one changes the value by a sum of k members of the set of one record.
        For a convex set that is a member of k times the set. Counts that change in c cells by 1 per record add up to at
        most c k in all, and k in one cell. Second moments, all added or all removed, add up to a semidefinite matrix of
        trace at most k r^2: a mixture of matrices x x^T with |x| <= sqrt(k) r, and mu is convex.
    """
    rows = checked_contributions(contributions)
    assert answer.query is not None
    parameters = {**answer.query["parameters"], "unit": "unit", "contributions": rows}
    return Answer(answer.value, several(answer.sensitivity, rows), query(answer.query["name"], **parameters))


def several(one: Sensitivity, rows: int) -> Sensitivity:
    """The set of several records that are all added or all removed, from that of one; see `of_units`."""
    check_added(one.adjacency)
    if isinstance(one, Frobenius):
        return Frobenius(at_least(rows * Fraction(one.radius)))
    if isinstance(one, Entrywise):
        return Entrywise(np.nextafter(np.asarray(one.bound, dtype=np.float64) * rows, np.inf))
    if isinstance(one, RankOne):
        return RankOne(at_least(Fraction(math.sqrt(rows)) * Fraction(one.radius)) * (1 + 1e-15))
    if isinstance(one, Counts) and one.bound == 1:
        return one if rows == 1 else L1(one.cells * rows, rows if one.cells > 1 else None, step=1)
    if isinstance(one, L1):
        return L1(one.radius * rows, None if one.bound is None else one.bound * rows, step=one.step)
    raise InvalidInput(f"the set of several records of a unit is not known for this query: {one}")


def check_added(adjacency: str) -> None:
    """Raises InvalidInput unless the adjacency is add/remove."""
    if checked(adjacency) != ADD_REMOVE:
        raise InvalidInput(f"adjacency must be add/remove for units with several records, got {adjacency}")


def checked_contributions(contributions: Any) -> int:
    """How many rows of a unit count; raises InvalidInput unless it is a whole number in range."""
    most = _check.count("contributions", contributions)
    if not most <= MOST_CONTRIBUTIONS:
        raise InvalidInput(f"contributions must be at most {MOST_CONTRIBUTIONS}, got {most}")
    return most

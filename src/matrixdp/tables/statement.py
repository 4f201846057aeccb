"""A released table on one page, for decision makers who are not specialists.

The picture shows what the guarantee means. Somebody guesses whether a given person's rows were used, from the release
and any other knowledge; both are equally likely beforehand. The guess is right with probability at most
(1 + delta(0))/2, since delta(0) bounds the total-variation distance between the releases with and without the person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixdp._check import Array
from matrixdp._pages import (
    NOT_ABOUT_GROUPS,
    NOT_FOR_SEVERAL,
    NOT_SIGNED,
    Part,
    covered,
    guess,
    guess_picture,
    in_numbers,
    listed,
    page,
)
from matrixdp._rounding import rounded_up
from matrixdp.accounting.composition import saved
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.privacy.records import digest
from matrixdp.tables.columns import MISSING_LABEL, Column
from matrixdp.tables.kinds import Date, Numeric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matrixdp.tables.outputs import Axes, Labelled


def statement(out: Labelled, kind: str, level: float) -> str:
    """The page, as Markdown or HTML."""
    hashed = digest(saved(out.certificate)[0].encode())
    closing = (
        "The certificate holds every number that the guarantee follows from. Anybody can check it without the data: "
        f"matrixdp verify FILE. SHA-256 of the certificate as saved: {hashed}"
    )
    picture = guess_picture(_best_guess(out), "with this release, at most")
    return page("What was released, and what is guaranteed", _parts(out, level), closing, kind, picture)


def _parts(out: Labelled, level: float) -> list[Part]:
    return [
        ("What was released", list(_released(out, level))),
        ("About whom", list(_about(out))),
        ("What is guaranteed", list(_guaranteed(out))),
        ("What is not guaranteed", list(_not_guaranteed())),
    ]


COUNTED = ("counts", "cell-states", "table-marginals")
"""The queries whose numbers are numbers of rows."""

NOT_RELIABLE = "The noise is large here: intervals that are marked as not reliable may hold less often."

FITTED = ("regression", "logistic-regression", "moments")
"""The queries whose intervals are to first order in the noise."""


def _released(out: Labelled, level: float) -> Iterator[str]:
    asked, parts = out.query["parameters"], out.parts(level)
    cells = sum(len(numbers["value"]) for _, numbers in parts)
    by = f"by {listed([name for name, _ in out.axes])}, " if out.axes else ""
    yield f"{_WHAT.get(out.query['name'], _other)(out, asked, by)} {cells} number{'s' if cells != 1 else ''} in all."
    if out.query["name"] in COUNTED:
        errors = np.concatenate([numbers["standard_error"] for _, numbers in parts])
        widest = max(float(np.max(numbers["high"] - numbers["low"])) for _, numbers in parts) / 2
        whole = all(float(value).is_integer() for _, numbers in parts for value in numbers["value"])
        yield (
            f"Random noise was added to every number, with a standard error of {_range(errors)}. A number is within "
            f"{rounded_up(widest)} of what the data say in {covered(level)} of cases. So numbers can be "
            f"negative{'' if whole else ' or not whole'}."
        )
    else:
        about = " about" if out.query["name"] in FITTED else " at least"
        yield (
            "Random noise was added before they were computed. Each number has an interval, which contains what "
            f"the data say in{about} {covered(level)} of cases."
        )
        if not are_reliable(parts):
            yield NOT_RELIABLE
    alike: dict[str, list[str]] = {}
    for name, column in dict(asked.get("columns", [])).items():
        computed = out.query["name"] in ("quantiles", *FITTED) or name == asked.get("of")
        alike.setdefault(_rules(column, computed), []).append(name)
    for rules, names in alike.items():
        yield f"{listed(names)}: {rules}"


def are_reliable(parts: Iterable[tuple[Axes, Mapping[str, Any]]]) -> bool:
    """Whether no interval of these tables is marked as not reliable."""
    return all(bool(np.all(numbers.get("reliable", True))) for _, numbers in parts)


def _other(out: Labelled, asked: Mapping[str, Any], by: str) -> str:
    return f"Answers to the query {out.query['name']}."


def _total(out: Labelled, asked: Mapping[str, Any], by: str) -> str:
    groups = [name for name, _ in out.axes if name not in ("mean", "sum")]
    apart = f", for each {listed(groups)}" if groups else ""
    return f"The {out.query['name'].removesuffix('s')} of {asked['of']}{apart}."


def _explained(out: Labelled, asked: Mapping[str, Any], by: str) -> str:
    features = [name for name, _ in asked["columns"] if name != asked["target"]]
    kind = "linear" if out.query["name"] == "regression" else "logistic"
    return f"How {asked['target']} changes with {listed(features)}: a {kind} regression, one number per term."


def _of_moments(out: Labelled, asked: Mapping[str, Any], by: str) -> str:
    names = listed([name for name, _ in asked["columns"]])
    what = {"variance": "variances", "covariance": "covariances", "correlation": "correlations"}
    return f"The {what.get(asked['of'], 'principal components')} of {names}."


_WHAT: dict[str, Callable[[Labelled, Mapping[str, Any], str], str]] = {
    "counts": lambda out, asked, by: f"How many rows there are, {by}".removesuffix(", ") + ".",
    "table-marginals": lambda out, asked, by: (
        f"How many rows there are, in {len(out.parts())} tables that agree with each other, of {by[3:-2]}."
    ),
    "cell-states": lambda out, asked, by: (
        "How many cells of each column lie within its bounds, were moved to a bound, are unexpected or missing."
    ),
    "means": _total,
    "sums": _total,
    "quantiles": lambda out, asked, by: (
        f"Values of {asked['columns'][0][0]} below which a given share of the rows lies: {', '.join(out.axes[0][1])}."
    ),
    "regression": _explained,
    "logistic-regression": _explained,
    "moments": _of_moments,
}
"""What was released, in words, by query."""


def _rules(column: Column, computed: bool) -> str:
    """How a column treats its cells, in words; what is computed from numbers leaves out cells that are not numbers."""
    named = {"out": "are not counted", "category": "are not counted" if computed else "are a separate category"}
    words = []
    if isinstance(column, (Numeric, Date)):
        ends = (f"{column.low:g}", f"{column.high:g}") if isinstance(column, Numeric) else (column.start, column.end)
        moved = "are moved to the nearer end" if column.clips else "count as unexpected"
        words.append(f"from {ends[0]} to {ends[1]}; values outside {moved}")
    for state, policy in ((MISSING_LABEL, column.missing), ("unexpected", column.unexpected)):
        words.append(f"{state} values " + (named[policy] if isinstance(policy, str) else f"become {policy['fill']}"))
    return "; ".join(words) + "."


def _about(out: Labelled) -> Iterator[str]:
    asked = out.query["parameters"]
    unit, rows = asked.get("unit"), asked.get("contributions", 1)
    if unit is None:
        yield "Every row of the data is protected by itself. A person with several rows is protected less."
    else:
        most = f"One row of each {unit} was" if rows == 1 else f"At most {rows} rows of each {unit} were"
        yield f"Everybody with an entry in the column {unit}, with all of his or her rows, is protected as a whole."
        yield (
            f"{most} counted, drawn at random. Rows without an entry were not counted. Error bars do not show what the "
            "rows that were left out would change."
        )


def _guaranteed(out: Labelled) -> Iterator[str]:
    certificate = out.certificate
    delta = certificate.budget.delta if certificate.budget else 1e-6
    epsilon, who = certificate.epsilon(delta), _who(out)
    changed = {ADD_REMOVE: "were left out", REPLACE: "were replaced by others"}.get(
        certificate.adjacency, "were counted as nothing"
    )
    yield (
        f"The release would look nearly the same if {who} {changed}. So whatever happens to somebody because of this "
        "release would have been nearly as likely without that person in the data."
    )
    yield in_numbers(epsilon, delta)
    yield guess(who, _best_guess(out), "this release")
    if not certificate.float_safe:
        yield f"It covers {certificate.covers}."


def _not_guaranteed() -> Iterator[str]:
    yield NOT_ABOUT_GROUPS
    yield "Anything about other releases from the same data. Their losses add up; a ledger keeps the sum."
    yield "That the data are right or complete. The error bars are for the noise alone."
    yield from (NOT_FOR_SEVERAL, NOT_SIGNED)


def _who(out: Labelled) -> str:
    unit = out.query["parameters"].get("unit")
    return "any one row" if unit is None else f"all rows of any one {unit}"


def _best_guess(out: Labelled) -> float:
    return min(1.0, (1.0 + out.certificate.delta(0.0)) / 2)


def _range(numbers: Array) -> str:
    low, high = f"{float(numbers.min()):.3g}", f"{float(numbers.max()):.3g}"
    return low if low == high else f"{low} to {high}"

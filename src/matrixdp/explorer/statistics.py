"""Statistics of a table as one line of text each, such as `counts by region, age`; in Python, and as options.

The columns of a line are public names from the domain; they end at commas, as on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.tables import Table, TableAnswer

FORMS = {
    "counts": "counts by region, age",
    "cell states": "cell states",
    "mean": "mean of cost by region",
    "quantiles": "quantiles of age at 0.25, 0.5, 0.75",
    "regression": "regression of cost on age, sex",
    "marginals": "marginals of region, age; region, sex",
}
"""An example of each kind of line. `weight 2: ` before a line doubles how much its error counts in a plan."""

_WEIGHT = re.compile(r"weight\s+([^:\s]+)\s*:\s*(.*)")
_LINES = (
    re.compile(r"(?P<kind>counts)\s+by\s+(?P<by>.+)"),
    re.compile(r"(?P<kind>cell states)"),
    re.compile(r"(?P<kind>mean)\s+of\s+(?P<of>.+?)(?:\s+by\s+(?P<by>.+))?"),
    re.compile(r"(?P<kind>quantiles)\s+of\s+(?P<of>.+)\s+at\s+(?P<at>[\d.,\s]+)"),
    re.compile(r"(?P<kind>regression)\s+of\s+(?P<of>.+?)\s+on\s+(?P<by>.+)"),
    re.compile(r"(?P<kind>marginals)\s+up\s+to\s+(?P<up_to>\d+)"),
    re.compile(r"(?P<kind>marginals)\s+of\s+(?P<tables>.+)"),
)


@dataclass(frozen=True)
class Statistic:
    """One thing to release from a table.

    Attributes:
        text: the line, without its weight.
        method: the method of `Table` that answers it.
        arguments: its arguments.
        options: the options of `matrixdp release` that ask for the same.
        named: its arguments by name.
        weight: how much its squared error counts in a plan.
    """

    text: str
    method: str
    arguments: tuple[Any, ...]
    options: tuple[str, ...]
    named: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    def answer(self, table: Table) -> TableAnswer:
        """The answer from a table; still private if the table is."""
        found: TableAnswer = getattr(table, self.method)(*self.arguments, **self.named)
        return found

    def python(self) -> str:
        """The call in Python, on `table`."""
        given = [repr(each) for each in self.arguments] + [f"{name}={value!r}" for name, value in self.named.items()]
        return f"table.{self.method}({', '.join(given)})"


def statistic(line: str) -> Statistic:
    """The statistic that a line asks for.

    Raises:
        InvalidInput: if the line has none of the known forms.
    """
    text, weight = line.strip(), 1.0
    weighted = _WEIGHT.fullmatch(text)
    if weighted is not None:
        try:
            weight = float(weighted[1])
        except ValueError:
            raise InvalidInput(f"weight must be a number above 0, got {weighted[1]!r}") from None
        weight, text = _check.positive("weight", weight), weighted[2]
    found = next((match for match in (form.fullmatch(text) for form in _LINES) if match), None)
    if found is None:
        raise InvalidInput(f"a statistic must look like one of: {'; or '.join(FORMS.values())}. Got {text!r}")
    part = {name: value.strip() for name, value in found.groupdict().items() if value is not None}
    return Statistic(text, weight=weight, **_STATISTICS[part["kind"]](part))


def statistics(text: str) -> tuple[Statistic, ...]:
    """The statistics of a text, one per line; blank lines do not count."""
    found = tuple(statistic(line) for line in text.splitlines() if line.strip())
    if not found:
        raise InvalidInput("name at least one statistic, one per line")
    return found


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _counts(part: Mapping[str, str]) -> dict[str, Any]:
    by = _listed(part["by"])
    return {"method": "counts", "arguments": by, "options": ("--by", ",".join(by))}


def _cell_states(part: Mapping[str, str]) -> dict[str, Any]:
    return {"method": "cell_states", "arguments": (), "options": ("--cell-states",)}


def _mean(part: Mapping[str, str]) -> dict[str, Any]:
    by: Sequence[str] = _listed(part["by"]) if "by" in part else ()
    grouped = ("--by", ",".join(by)) if by else ()
    arguments = (part["of"], list(by)) if by else (part["of"],)
    return {"method": "means", "arguments": arguments, "options": ("--mean", part["of"], *grouped)}


def _quantiles(part: Mapping[str, str]) -> dict[str, Any]:
    try:
        wanted = [float(each) for each in part["at"].split(",")]
    except ValueError:
        raise InvalidInput(f"quantiles are at numbers between 0 and 1, got {part['at']!r}") from None
    option = f"{part['of']}:{','.join(f'{each:g}' for each in wanted)}"
    return {"method": "quantiles", "arguments": (part["of"], wanted), "options": ("--quantiles", option)}


def _regression(part: Mapping[str, str]) -> dict[str, Any]:
    on = _listed(part["by"])
    options = ("--regress", f"{part['of']}~{'+'.join(on)}")
    return {"method": "regression", "arguments": (part["of"], list(on)), "options": options}


def _marginals(part: Mapping[str, str]) -> dict[str, Any]:
    if "up_to" in part:
        up_to = part["up_to"]
        return {
            "method": "marginals",
            "arguments": (),
            "named": {"up_to": int(up_to)},
            "options": ("--marginals", up_to),
        }
    tables = tuple(_listed(table) for table in part["tables"].split(";"))
    option = ";".join(",".join(table) for table in tables)
    return {"method": "marginals", "arguments": tables, "options": ("--marginals", option)}


_STATISTICS = {
    "counts": _counts,
    "cell states": _cell_states,
    "mean": _mean,
    "quantiles": _quantiles,
    "regression": _regression,
    "marginals": _marginals,
}

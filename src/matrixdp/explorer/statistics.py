"""Statistics of a table, one line of text each, such as `counts by region, age`, translated to Python and to options.

The columns of a line are public names from the domain, separated by commas, as on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.explorer.snippets import call
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
        return call(f"table.{self.method}", *self.arguments, named=self.named)


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
    return Statistic(text, weight=weight, **_asked(part))


def statistics(text: str) -> tuple[Statistic, ...]:
    """The statistics of a text, one per line; blank lines do not count."""
    found = tuple(statistic(line) for line in text.splitlines() if line.strip())
    if not found:
        raise InvalidInput("name at least one statistic, one per line")
    return found


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _asked(part: Mapping[str, str]) -> dict[str, Any]:
    """The method of a statistic, its arguments, and its options, from the parts of a line."""
    kind, of, by = part["kind"], part.get("of", ""), _listed(part["by"]) if "by" in part else ()
    grouped = ("--by", ",".join(by)) if by else ()
    if kind == "counts":
        return {"method": kind, "arguments": by, "options": grouped}
    if kind == "cell states":
        return {"method": "cell_states", "arguments": (), "options": ("--cell-states",)}
    if kind == "mean":
        return {"method": "means", "arguments": (of, list(by)) if by else (of,), "options": ("--mean", of, *grouped)}
    if kind == "regression":
        return {"method": kind, "arguments": (of, list(by)), "options": ("--regress", f"{of}~{'+'.join(by)}")}
    if kind == "quantiles":
        try:
            wanted = [float(each) for each in part["at"].split(",")]
        except ValueError:
            raise InvalidInput(f"quantiles are at numbers between 0 and 1, got {part['at']!r}") from None
        option = f"{of}:{','.join(f'{each:g}' for each in wanted)}"
        return {"method": kind, "arguments": (of, wanted), "options": ("--quantiles", option)}
    if "up_to" in part:
        named = {"up_to": int(part["up_to"])}
        return {"method": kind, "arguments": (), "named": named, "options": ("--marginals", part["up_to"])}
    tables = tuple(_listed(table) for table in part["tables"].split(";"))
    option = ";".join(",".join(table) for table in tables)
    return {"method": kind, "arguments": tables, "options": ("--marginals", option)}

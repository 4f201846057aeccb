"""A domain: the columns of a table and the values of their cells, from public knowledge alone; also as a TOML file."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.tables.columns import Column
from matrixdp.tables.kinds import KINDS

MOST_CELLS = 1 << 24
"""The most cells of a table: 128 megabytes."""


class Domain(Mapping[str, Column]):
    """Columns by name. Cells with values that it does not list have a place too: see `matrixdp.tables.columns`.

    Example:
        >>> from matrixdp.tables import Categorical, Domain, Numeric
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> domain = Domain({"region": Categorical(["north", "south"]), "age": ages})
        >>> list(domain), domain["age"].labels
        (['region', 'age'], ('[0, 18)', '[18, 65)', '[65, 100]', 'other', 'missing'))
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not isinstance(columns, Mapping) or not columns:
            raise InvalidInput(f"a domain must have at least one column, got {_check.kind(columns)}")
        for place, (name, column) in enumerate(columns.items()):  # names are not quoted: they may be data by mistake
            if not isinstance(name, str) or not name.strip():
                raise InvalidInput(f"names of columns must be texts that are not blank, got {_check.kind(name)}")
            if not isinstance(column, Column):
                raise InvalidInput(
                    f"entry {place} of a domain must be a {', '.join(kind.__name__ for kind in KINDS.values())}, "
                    f"got {_check.kind(column)}"
                )
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Column:
        if not isinstance(name, str) or name not in self._columns:
            asked = repr(name) if isinstance(name, str) and len(name) <= 100 else _check.kind(name)
            raise UnknownColumn(f"the domain has no column {asked}; it has {', '.join(map(repr, self._columns))}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Domain({', '.join(f'{name}: {type(column).__name__}' for name, column in self.items())})"

    @property
    def sizes(self) -> dict[str, int]:
        """How many categories each column has, for the columns by which rows can be counted."""
        return {name: len(column.labels) for name, column in self.items() if column.is_counted}

    def distinct(self, names: Iterable[Any]) -> dict[str, Column]:
        """The columns of these names, in order.

        Raises:
            InvalidInput: if a column is unknown or named twice.
        """
        found: dict[str, Column] = {}
        for name in names:
            column = self[name]
            if name in found:
                raise InvalidInput(f"column {name!r} is named twice")
            found[name] = column
        return found

    def chosen(self, names: Iterable[Any]) -> dict[str, Column]:
        """The columns of a table of counts, in order.

        Raises:
            InvalidInput: if a column is unknown, named twice or has no categories, or the table is too large.
        """
        found = self.distinct(names)
        for name, column in found.items():
            if not column.is_counted:
                raise InvalidInput(
                    f"column {name!r} needs bins to be counted by: public borders from low to high, or a number of bins"
                )
        sides = [len(column.labels) for column in found.values()]
        if not math.prod(sides) <= MOST_CELLS:
            raise InvalidInput(
                f"the table would have {' x '.join(map(str, sides))} = {math.prod(sides)} cells, more than "
                f"{MOST_CELLS}; count by fewer columns or wider bins, or release marginals of fewer columns each"
            )
        return found

    @classmethod
    def from_toml(cls, path: str | Path) -> Domain:
        """Reads a domain from a TOML file: a table `[columns.NAME]` for each column, with its kind and its fields."""
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as reason:
            raise InvalidInput(f"domain {str(path)!r} cannot be read ({reason.strerror})") from None
        except ValueError as reason:
            raise InvalidInput(f"domain {str(path)!r} is not TOML: {reason}") from None
        columns = content.get("columns")
        if set(content) != {"columns"} or not isinstance(columns, dict):
            raise InvalidInput(f"domain {str(path)!r} must have a table [columns.NAME] for each column, and no other")
        return cls({name: _column(name, entries) for name, entries in columns.items()})

    def to_toml(self) -> str:
        """The domain as a TOML text."""
        kinds = {kind: name for name, kind in KINDS.items()}
        parts = []
        for name, column in self.items():
            lines = [f"[columns.{_toml(name)}]", f"kind = {_toml(kinds[type(column)])}"]
            for entry in sorted(fields(column), key=lambda entry: entry.kw_only is True):
                value = getattr(column, entry.name)
                if entry.init and value is not None and (value != entry.default or not entry.kw_only):
                    lines.append(f"{entry.name} = {_toml(value)}")
            parts.append("\n".join(lines) + "\n")
        return "\n".join(parts)


class UnknownColumn(InvalidInput, KeyError):
    """A column that a domain does not have; also a KeyError, as mappings raise."""

    __str__ = Exception.__str__


def _column(name: str, entries: Any) -> Column:
    if not isinstance(entries, dict) or "kind" not in entries:
        raise InvalidInput(f"domain, column {name!r}: must be a table with a kind: {', '.join(KINDS)}")
    if entries["kind"] == FILL_IN:
        raise InvalidInput(
            f"domain, column {name!r}: kind must be one of {', '.join(KINDS)}; fill it in, or remove the column if it "
            "is not asked for (a column of ids never is)"
        )
    kind = KINDS[_check.choice(f"domain, column {name!r}: kind", entries["kind"], KINDS)]
    given = {key: value for key, value in entries.items() if key != "kind"}
    known = [entry.name for entry in fields(kind) if entry.init]
    for key in given:
        if key not in known:
            raise InvalidInput(f"domain, column {name!r}: {entries['kind']} has no {key!r}; it has {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError:
        needed = [entry.name for entry in fields(kind) if entry.init and not entry.kw_only and entry.name not in given]
        raise InvalidInput(f"domain, column {name!r}: needs {' and '.join(needed)}") from None
    except InvalidInput as reason:
        raise InvalidInput(f"domain, column {name!r}: {reason}") from None


def _toml(value: Any) -> str:
    """A value in TOML, whose basic strings are those of JSON, except for the character DEL."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- drafts ---

FILL_IN = "FILL IN"
_DRAFTS: dict[str, Sequence[str]] = {
    "categorical": (f"values = []  # {FILL_IN}",),
    "boolean": (),
    "numeric": (f'low = "{FILL_IN}"', f'high = "{FILL_IN}"', "bins = 10"),
    "date": (f'start = "{FILL_IN}"', f'end = "{FILL_IN}"', 'by = "month"'),
}


def draft(columns: Mapping[str, str | None]) -> str:
    """A domain to be completed by a person, as TOML.

    Args:
        columns: the names of the columns, each with its kind as a schema declares it, or None. It must not come from
            the values: a list of those that occur, or their range, would reveal them.
    """
    head = [
        f"# A draft. Replace every {FILL_IN} from public knowledge: a code book, a form, the law. Values in the data",
        "# must not decide it, for the domain is published with every release. Remove columns that are not needed.",
        "# Columns of ids, for --unit, are not needed here.",
        "# Kinds: categorical, ordered (values), boolean (true, false), numeric (low, high, bins),",
        "# date (start, end, by); low, high, start and end belong to the range.",
        '# missing and unexpected: "category" (their own), "out" (not counted), or { fill = VALUE }.',
        '# missing_values = ["?", "n/a"] lists texts that mean missing.',
        "# Two columns that are filled in, as an example:",
        '#   kind = "categorical"       kind = "numeric"',
        '#   values = ["f", "m"]        low = 0',
        "#                              high = 110",
        "#                              bins = [0, 18, 65, 110]",
        "",
    ]
    lines = []
    for name, kind in columns.items():
        entries = () if kind is None else _DRAFTS[kind]
        lines += [f"[columns.{_toml(name)}]", f"kind = {_toml(kind or FILL_IN)}", *entries]
        lines += ['missing = "category"', 'unexpected = "category"', ""]
    return "\n".join(head + lines)

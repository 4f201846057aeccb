"""Studies: experiments of the papers, reproduced, with results as tables, pictures and a short report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from matplotlib.figure import Figure
from scipy.special import stdtrit

from matrixdp import plots
from matrixdp.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Item = TypeVar("Item")
NO_NOISE = "no noise"
# Differences of accuracies below this are not reported.
NOTABLE = 0.005


class Progress(Protocol):
    """Shows progress through a list of steps, under a label."""

    def __call__(self, steps: Sequence[Item], label: str) -> Iterable[Item]:
        """The steps, one by one."""


def silent(steps: Sequence[Item], label: str) -> Iterable[Item]:
    """Progress that shows nothing."""
    return steps


@dataclass(frozen=True)
class Mean:
    """The mean of repeated runs, with a 95 % confidence interval of `mean` plus or minus `half_width`."""

    mean: float
    half_width: float
    runs: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of these runs, with Student's interval; it is NaN for a single run."""
        runs = np.asarray(list(values), dtype=np.float64)
        if len(runs) == 1:
            return cls(float(runs[0]), math.nan, 1)
        error = float(np.std(runs, ddof=1)) / math.sqrt(len(runs))
        return cls(float(np.mean(runs)), float(stdtrit(len(runs) - 1, 0.975)) * error, len(runs))

    def __str__(self) -> str:
        return _number(self.mean) + ("" if math.isnan(self.half_width) else f" ± {self.half_width:.2g}")


@dataclass(frozen=True)
class Table:
    """A table of results; the first cell of a row names it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise InvalidInput(f"every row of the table {self.title!r} must have {len(self.columns)} cells")

    def to_dict(self) -> dict[str, Any]:
        """Title, note, and rows as dictionaries of plain numbers and words."""
        rows = [dict(zip(self.columns, map(plain, row), strict=True)) for row in self.rows]
        return {"title": self.title, "note": self.note, "rows": rows}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Table:
        """The table of a document made by `to_dict`."""
        rows = [{name: _read(cell) for name, cell in row.items()} for row in document["rows"]]
        columns = tuple(rows[0]) if rows else ()
        return cls(document["title"], columns, tuple(tuple(row.values()) for row in rows), document["note"])

    def __getitem__(self, column: str) -> dict[Any, Any]:
        """A column, by the first cell of each row."""
        place = self.columns.index(column)
        return {row[0]: row[place] for row in self.rows}

    def records(self) -> list[dict[str, Any]]:
        """The rows by the names of the columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_markdown(self) -> str:
        """The table under its title."""
        lines = [f"### {self.title}", "", _line(self.columns), "|" + "---|" * len(self.columns)]
        lines += [_line(map(shown, row)) for row in self.rows]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, split into parts that fit the width, each with the first column."""
        from rich.table import Table as RichTable

        cells = [tuple(map(shown, row)) for row in self.rows]
        longest = [max(len(row[place]) for row in ((*self.columns,), *cells)) for place in range(len(self.columns))]
        widths = [
            max([*map(len, column.split()), *(len(row[place]) for row in cells)]) + 3
            for place, column in enumerate(self.columns)
        ]
        parts: list[list[int]] = [[]]
        for place in range(1, len(self.columns)):
            if parts[-1] and 1 + widths[0] + sum(widths[other] for other in (*parts[-1], place)) > options.max_width:
                parts.append([])
            parts[-1].append(place)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            table = RichTable(title=None if number else self.title, caption=self.note or None if last else None)
            roomy = 1 + sum(longest[place] + 3 for place in (0, *part)) <= options.max_width
            for place in (0, *part):
                # A fixed width where headings have to wrap: rich may cut cells, or exceed the requested width.
                width = None if roomy else widths[place] - 3
                table.add_column(self.columns[place], justify="right" if place else "left", width=width)
            for row in cells:
                table.add_row(*(row[place] for place in (0, *part)))
            yield table


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a study.

    Attributes:
        setting: what was run, as plain values.
        tables: the numbers.
        found: what came out, in Markdown.
        difference: why it differs from what the paper says, in Markdown.
        figures: pictures by name; None for one that cannot be drawn without the data, and is kept from an earlier run.
    """

    setting: Mapping[str, Any]
    tables: tuple[Table, ...]
    found: str
    difference: str
    figures: Mapping[str, Figure | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """An experiment of a paper.

    Attributes:
        name: how users ask for it.
        title: what it is about.
        source: the papers' keys in docs/references.bib.
        claim: what the papers say, in Markdown.
        load: reads the data from a folder; None if it needs none.
        run: (data, smoke, progress) -> results; smoke runs take seconds and show only that the study runs.
        tell: (setting, tables) -> results, from the measurements of an earlier run; None if the study has to be run.
    """

    name: str
    title: str
    source: str
    claim: str
    load: Callable[[Any], Any] | None
    run: Callable[[Any, bool, Progress], Results]
    tell: Callable[[Mapping[str, Any], tuple[Table, ...]], Results] | None = None

    def remake(self, *paths: Path) -> Results:
        """Makes report and pictures from stored results, without measuring again. Later files add to the first."""
        if self.tell is None:
            raise InvalidInput(f"the study {self.name} has to be run: leave --results out")
        (setting, tables), *added = map(self._stored, paths)
        for other, found in added:
            for name, value in other.items():
                if setting.setdefault(name, value) != value:
                    setting[f"added run, {name}"] = value
            tables = merged(tables, found)
        return self.tell(setting, tables)

    def _stored(self, path: Path) -> tuple[dict[str, Any], tuple[Table, ...]]:
        """The setting and the tables of a results.json."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            name, setting = document["study"], dict(document["setting"])
            tables = tuple(map(Table.from_dict, document["tables"]))
        except (OSError, ValueError, KeyError, TypeError) as reason:
            raise InvalidInput(f"results must be a results.json of a study, got {str(path)!r} ({reason})") from None
        if name != self.name:
            raise InvalidInput(f"results must be those of the study {self.name}, got those of {name!r}")
        return setting, tables

    def report(self, results: Results) -> str:
        """The page to read: the claim, what came out, why they differ, and the numbers."""
        setting = "; ".join(f"{name} {shown(value)}" for name, value in results.setting.items())
        parts = [
            f"# {self.title}",
            f"Made by `matrixdp study {self.name}`; do not edit by hand. Source: {self.source}.",
            f"## What the paper says\n\n{self.claim}",
            f"## What came out\n\n{results.found}",
            f"## Why they differ\n\n{results.difference}",
            *(f"![{name}]({name}.png)" for name in results.figures),
            f"## Numbers\n\nSetting: {setting}.",
            *(table.to_markdown().rstrip() for table in results.tables),
        ]
        return "\n\n".join(parts) + "\n"

    def write(self, results: Results, out: Path) -> list[Path]:
        """Writes results.json, report.md and the pictures into a folder, and returns their paths."""
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise InvalidInput(f"out must be a folder that can be written, got {str(out)!r} ({reason})") from None
        document = {
            "study": self.name,
            "setting": plain(dict(results.setting)),
            "tables": [table.to_dict() for table in results.tables],
        }
        (out / "results.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (out / "report.md").write_text(self.report(results), encoding="utf-8")
        drawn = {out / f"{name}.png": figure for name, figure in results.figures.items() if figure is not None}
        for path, figure in drawn.items():
            plots.save(figure, path)
        return [out / "results.json", out / "report.md", *drawn]


def beside(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """The paper's numbers beside ours, in Markdown: what, the paper's, ours, and why they differ."""
    return "\n".join([_line(("quantity", "paper", "ours", "why")), "|---|---|---|---|", *map(_line, rows)])


def beaten(without: Mean, scores: Iterable[tuple[str, Mean]]) -> str:
    """Names a noisy run that was more accurate than training without noise, by more than NOTABLE; empty if none was."""
    name, best = max(scores, key=lambda score: score[1].mean)
    return f"{name} ({best})" if best.mean > without.mean + NOTABLE else ""


def titled(tables: Iterable[Table], words: str) -> list[Table]:
    """The tables whose title ends in these words."""
    return [table for table in tables if table.title.endswith(words)]


def merged(tables: Iterable[Table], added: Iterable[Table]) -> tuple[Table, ...]:
    """The tables of two runs of a study, where the second adds to the first.

    A table with a new title is added, and a whole one takes the place of the first: one with other columns, more rows,
    or as many rows and no cell empty that was filled. Otherwise each added row updates the row of the same setting,
    which is the one that agrees in all cells but means and empty ones. An empty cell leaves the value that was there.
    A row without such a partner is refused, as two settings would be mixed.
    """
    found = {table.title: table for table in tables}
    for table in added:
        old = found.get(table.title, table)
        found[table.title] = table if _whole(table, old) else _updated(old, table)
    return tuple(found.values())


def _whole(table: Table, old: Table) -> bool:
    if table.columns != old.columns or len(table.rows) != len(old.rows):
        return table.columns != old.columns or len(table.rows) > len(old.rows)
    pairs = zip(chain(*table.rows), chain(*old.rows), strict=True)
    return all(cell is not None or before is None for cell, before in pairs)


def _updated(table: Table, added: Table) -> Table:
    rows = list(table.rows)
    for new in added.rows:
        same = [place for place, row in enumerate(rows) if all(map(_agree, row, new))]
        if len(same) != 1:
            raise InvalidInput(
                f"results to add must be of the same settings; {len(same)} rows of the table {table.title!r} agree "
                f"with the added row {shown(new[0])!r}. Run the study with the same code and settings, or leave it out"
            )
        rows[same[0]] = tuple(old if cell is None else cell for old, cell in zip(rows[same[0]], new, strict=True))
    return replace(table, rows=tuple(rows))


def _agree(cell: Any, other: Any) -> bool:
    if any(value is None or isinstance(value, Mean) for value in (cell, other)):
        return True
    numbers = isinstance(cell, (int, float)) and isinstance(other, (int, float))
    return math.isclose(cell, other, rel_tol=1e-6) if numbers else bool(cell == other)


def _read(value: Any) -> Any:
    """A cell of results.json; a missing interval means a single run."""
    if isinstance(value, dict):
        return Mean(value["mean"], math.nan if value["half_width"] is None else value["half_width"], value["runs"])
    return value


def plain(value: Any) -> Any:
    """A value as JSON can represent it; None for a number that is not finite."""
    if isinstance(value, Mean):
        return {"mean": plain(value.mean), "half_width": plain(value.half_width), "runs": value.runs}
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value


def shown(value: Any) -> str:
    """A value in human-readable form."""
    if isinstance(value, (list, tuple)):
        return " x ".join(map(shown, value))
    return _number(value) if isinstance(value, (int, float, np.number)) else "" if value is None else str(value)


def _number(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    if math.isnan(value):
        return ""
    if 0 < value < 1e-300:
        return "< 1e-300"
    return f"{value:.4g}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"

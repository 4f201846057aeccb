"""Released tables: labels, values and error bars, as a frame, a file, a figure or a statement."""

from __future__ import annotations

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from matrixdp import _check, _extras
from matrixdp.pipeline import Release

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from matrixdp.privacy.certificate import Certificate

Axes = tuple[tuple[str, tuple[str, ...]], ...]
"""The name and the labels of each axis of a table; its cells are in row-major order."""

NUMBERS = ("value", "standard_error", "low", "high")
"""The columns of numbers in a table that is written out."""

FRAMES = ("pandas", "polars", "arrow")

_PRINTED = 20  # rows, at most


class Labelled(ABC):
    """Labelled numbers with error bars, as a frame, a file, a figure or a statement."""

    axes: Axes

    if TYPE_CHECKING:

        @property
        def certificate(self) -> Certificate:
            """The guarantee of the release: a field or a property of subclasses."""

    @property
    def query(self) -> Mapping[str, Any]:
        """The name and the public parameters of the query."""
        return self.certificate.query or {"name": "query", "parameters": {}}

    def columns(self, level: float = 0.95, *, simultaneous: bool = False) -> dict[str, Any]:
        """The columns of the table: labels, values, and the ends of intervals of this level.

        If simultaneous, each has the level 1 - (1 - level)/numbers, so that all together cover with the level.
        """
        labels = self._labels()
        numbers = len(next(iter(labels.values()), [()]))
        _check.probability("level", level)
        return labels | self._numbers(1 - (1 - level) / numbers if simultaneous else level)

    @abstractmethod
    def _numbers(self, level: float) -> dict[str, Any]:
        """The columns of numbers, with intervals of this level each."""

    def parts(self, level: float = 0.95) -> list[tuple[Axes, dict[str, Any]]]:
        """The tables of the release, each with its axes and its columns of numbers."""
        return [(self.axes, self._numbers(level))]

    @abstractmethod
    def certified(self, certificate: Certificate) -> Labelled:
        """The same with this certificate, such as the one that names the file it was written to."""

    def plot(self, *, level: float = 0.95) -> Figure:
        """A figure: bars or points with intervals for one column of labels, a heat map with margins for several."""
        from matrixdp.tables.figures import figure

        return figure(self, level)

    def statement(self, kind: str = "markdown", *, level: float = 0.95) -> str:
        """One page in plain language: what was released, about whom, what is guaranteed and what is not.

        Args:
            kind: "markdown" or "html".
            level: of the error bars on the page.
        """
        from matrixdp.tables.statement import statement

        return statement(self, _check.choice("kind", kind, ("markdown", "html")), level)

    def __str__(self) -> str:
        """The first rows of the table, with three digits of the widths of intervals, and the certificate."""
        columns = self.columns()
        rows = len(columns["value"])
        places = [_decimals(width) for width in (columns["high"] - columns["low"])[:_PRINTED]]
        texts = [[name, *map(_cell, column[:_PRINTED], places)] for name, column in columns.items()]
        sides = ["<" if isinstance(column, list) else ">" for column in columns.values()]
        form = "  ".join(f"{{:{side}{max(map(len, column))}}}" for side, column in zip(sides, texts, strict=True))
        lines = [form.format(*row).rstrip() for row in zip(*texts, strict=True)]
        more = [f"... and {rows - _PRINTED} more rows"] if rows > _PRINTED else []
        return "\n".join([*lines, *more, "Intervals from low to high hold with 95 %.", "", str(self.certificate)])

    __repr__ = __str__

    @property
    def _tables(self) -> tuple[tuple[str, ...], ...]:
        """The tables that are written out, each by its axes: one of all axes."""
        return (tuple(name for name, _ in self.axes),)

    def _labels(self) -> dict[str, list[str | None]]:
        """The columns of labels; None where a table lacks an axis."""
        labels = dict(self.axes)
        found: dict[str, list[str | None]] = {name: [] for name in labels}
        for table in self._tables:
            cells = list(product(*(labels[name] for name in table)))
            for name, column in found.items():
                place = table.index(name) if name in table else None
                column += [None if place is None else cell[place] for cell in cells]
        named: dict[str, list[str | None]] = {}
        for name, column in found.items():
            while name in named or name in (*NUMBERS, "reliable"):
                name += "_"
            named[name] = column
        return named

    def table(self, kind: str = "pandas", *, level: float = 0.95, simultaneous: bool = False) -> Any:
        """A frame with one row per cell: labels, value, standard error, and an interval.

        Args:
            kind: "pandas", "polars" or "arrow".
            level: the probability with which an interval covers the number without noise.
            simultaneous: whether all intervals cover at once with this probability, or each by itself.
        """
        _check.choice("kind", kind, FRAMES)
        columns = self.columns(level, simultaneous=simultaneous)
        if kind == "pandas":
            _extras.require("tables", "pandas")
            import pandas

            return pandas.DataFrame(columns)
        if kind == "polars":
            _extras.require("tables", "polars")
            import polars

            return polars.DataFrame(columns)
        _extras.require("tables", "pyarrow")
        import pyarrow

        return pyarrow.table(columns)

    def to_csv(self, path: str | Path | io.TextIOBase, *, level: float = 0.95, simultaneous: bool = False) -> None:
        """Writes the table as CSV in UTF-8, with a header; to a new file, or to a stream of text."""
        if not isinstance(path, io.TextIOBase):
            with Path(path).open("x", encoding="utf-8", newline="") as file:
                self.to_csv(file, level=level, simultaneous=simultaneous)
            return
        columns = self.columns(level, simultaneous=simultaneous)
        writer = csv.writer(path, lineterminator="\n")
        writer.writerow(columns)
        parts = [part.tolist() if isinstance(part, np.ndarray) else part for part in columns.values()]
        writer.writerows(zip(*parts, strict=True))

    def to_parquet(self, path: str | Path | BinaryIO, *, level: float = 0.95, simultaneous: bool = False) -> None:
        """Writes the table as Parquet; to a new file, or to a stream of bytes."""
        if isinstance(path, (str, Path)):
            with Path(path).open("xb") as file:
                self.to_parquet(file, level=level, simultaneous=simultaneous)
            return
        table = self.table("arrow", level=level, simultaneous=simultaneous)
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)


def _decimals(width: float) -> int:
    """How many digits after the point show three digits of a width; six if it is 0 or infinite."""
    return min(12, max(0, 2 - math.floor(math.log10(width)))) if 0.0 < width < math.inf else 6


def _cell(content: Any, decimals: int) -> str:
    """A cell of a printed table; whole numbers have no digits after the point."""
    if not isinstance(content, float):
        return "" if content is None else str(content)
    return f"{content:.{0 if content.is_integer() else decimals}f}"


@dataclass(frozen=True, eq=False, repr=False)
class TableRelease(Release, Labelled):
    """A noisy table that may be published: labels, values, error bars, and what it guarantees.

    Error bars cover the noise: how far a number may be from its value in the rows. They do not cover how well the rows
    represent a larger population.

    Example:
        >>> import pandas
        >>> from matrixdp import Budget
        >>> from matrixdp.tables import Categorical, Domain, Numeric, Table
        >>> frame = pandas.DataFrame({"region": ["north", "south", "north"], "age": [31, 45, 28]})
        >>> ages = Numeric(0, 100, bins=[0, 18, 65, 100])
        >>> table = Table(frame, Domain({"region": Categorical(["north", "south"]), "age": ages}))
        >>> out = table.counts("region").release(Budget(1.0, 1e-6))
        >>> out.table()["region"].tolist()
        ['north', 'south', 'other', 'missing']
    """

    axes: Axes = field(default=())

    __str__, __repr__ = Labelled.__str__, Labelled.__repr__

    def certified(self, certificate: Certificate) -> TableRelease:
        """The same with this certificate."""
        return replace(self, certificate=certificate)

    def columns(self, level: float = 0.95, *, simultaneous: bool = False) -> dict[str, Any]:
        """The columns of the table: labels, values, standard errors, and the ends of intervals of this level."""
        return self._labels() | self._numbers(level, simultaneous)

    def _numbers(self, level: float, simultaneous: bool = False) -> dict[str, Any]:
        interval = self.interval(level, simultaneous=simultaneous)
        numbers = (self.value, self.standard_error, interval.low, interval.high)
        shape = np.shape(self.value)
        return {name: np.broadcast_to(part, shape).reshape(-1) for name, part in zip(NUMBERS, numbers, strict=True)}

"""`matrixdp release --domain`: a labelled table of people's data, with error bars, and what goes with it."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from matrixdp.cli import files
from matrixdp.errors import InvalidInput

if TYPE_CHECKING:
    from matrixdp.budget import Budget
    from matrixdp.pipeline import Spends
    from matrixdp.privacy.certificate import Certificate
    from matrixdp.tables.outputs import Axes, TableRelease

# More than the bytes of a number and a separator, in CSV and in Parquet, and of what Parquet adds for a column.
_NUMBER, _COLUMN = 26, 4096


def release_table(
    records: str,
    domain: Path,
    output: Path,
    budget: Budget,
    account: Spends | None,
    mechanism: str,
    options: dict[str, Any],
    *,
    by: str | None = None,
    cell_states: bool = False,
    unit: str | None = None,
    contributions: int | None = None,
    adjacency: str | None = None,
    sql: str | None = None,
    separator: str | None = None,
    statement: Path | None = None,
    figure: Path | None = None,
) -> tuple[Certificate, list[Path]]:
    """Releases a table and writes it; all that can fail does so before the ledger is charged.

    Returns:
        The certificate as written, and the other files.
    """
    from matrixdp.tables import Domain, Table

    if output.suffix not in (".csv", ".parquet"):
        raise InvalidInput(f"output of a table must end in .csv or .parquet, got {str(output)!r}")
    if (by is None) != cell_states:
        raise InvalidInput("say what to count: --by with columns, or --cell-states")
    also = {path: suffixes for path, suffixes in ((statement, (".html", ".md")), (figure, (".png",))) if path}
    for path, suffixes in also.items():
        _check_free(path, suffixes)
    if figure is not None:
        from matrixdp import plots
    table = Table(
        _source(records, sql, separator),
        Domain.from_toml(domain),
        unit=unit,
        contributions=contributions,
        **({} if adjacency is None else {"adjacency": adjacency}),
    )
    answer = table.cell_states() if by is None else table.counts(*(name.strip() for name in by.split(",")))
    prepared = answer.prepare(budget, mechanism, **options)
    content = files.Content(_size(answer.axes), lambda file, out: _write(file, output.suffix, out))
    with files.reserved(output, prepared.prepared.certificate, content) as place:
        out = prepared.release(account, note=answer.query["name"] if answer.query else "")
        certificate = place.publish(out)
    out = replace(out, certificate=certificate)
    if statement is not None:
        statement.write_text(out.statement("html" if statement.suffix == ".html" else "markdown"), encoding="utf-8")
    if figure is not None:
        plots.save(out.plot(), figure)
    return certificate, list(also)


def _source(records: str, sql: str | None, separator: str | None) -> Any:
    from matrixdp import tables

    if sql is not None:
        return tables.sql(records, sql)
    if records == "-":
        return tables.csv_file(sys.stdin.buffer, separator=separator or ",")
    return records if separator is None else tables.csv_file(records, separator=separator)


def _check_free(path: Path, suffixes: tuple[str, ...]) -> None:
    if path.suffix not in suffixes:
        raise InvalidInput(f"{str(path)!r} must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise InvalidInput(f"{str(path)!r} must lie in a folder that exists; create the folder first")
    if path.exists() or path.is_symlink():
        raise InvalidInput(f"{str(path)!r} exists already and is not replaced; choose another name")


def _size(axes: Axes) -> int:
    """Bytes of the table in its file, from above; in CSV a label may be quoted, and every quote in it doubled."""
    rows = math.prod(len(labels) for _, labels in axes)
    label = sum(max(len(label.encode()) for label in labels) * 2 + 16 for _, labels in axes)
    header = sum(len(name.encode()) * 2 + 16 for name, _ in axes)
    return rows * (label + 4 * _NUMBER) + header + _COLUMN * (len(axes) + 5)


def _write(file: BinaryIO, suffix: str, out: TableRelease) -> None:
    if suffix == ".parquet":
        out.to_parquet(file)  # type: ignore[arg-type]
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    out.to_csv(text)
    text.flush()
    text.detach()

"""`matrixdp release --domain`: a labelled table of people's data, with error bars, statement and figure."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from matrixdp.cli import files, show, specs
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrixdp.accounting.composition import Composition
    from matrixdp.budget import Budget
    from matrixdp.pipeline import Spends
    from matrixdp.privacy.certificate import Certificate
    from matrixdp.tables import Table, TableAnswer
    from matrixdp.tables.logistic import LogisticAnswer
    from matrixdp.tables.outputs import Labelled

# Upper bounds on the bytes of a number and a separator, in CSV and in Parquet, and on what Parquet adds for a column.
_NUMBER, _COLUMN = 26, 4096


def release_table(
    records: str,
    domain: Path,
    output: Path,
    budget_for: Callable[[Any], Budget],
    account: Spends | None,
    mechanism: str,
    options: dict[str, Any],
    *,
    by: str | None = None,
    cell_states: bool = False,
    marginals: str | None = None,
    weights: str | None = None,
    mean: str | None = None,
    sum: str | None = None,
    quantiles: str | None = None,
    bins: str | None = None,
    regress: str | None = None,
    classify: str | None = None,
    ridge: float | None = None,
    unit: str | None = None,
    contributions: int | None = None,
    adjacency: str | None = None,
    sql: str | None = None,
    separator: str | None = None,
    statement: Path | None = None,
    figure: Path | None = None,
) -> tuple[Certificate | Composition, list[Path], list[str]]:
    """Releases a table and writes it; arguments, names and space are checked before the ledger is charged.

    Returns:
        The certificate as written, the other files, and notes on how to read the numbers.
    """
    from matrixdp.tables import Domain, Table

    if output.suffix not in (".csv", ".parquet"):
        raise InvalidInput(f"output of a table must end in .csv or .parquet, got {str(output)!r}")
    given = {"marginals": marginals, "mean": mean, "sum": sum, "quantiles": quantiles}
    given |= {"regress": regress, "classify": classify}
    asked = {name: text for name, text in given.items() if text is not None}
    if len(asked) + cell_states + (by is not None and not {"mean", "sum"} & set(asked)) != 1:
        raise InvalidInput(
            "say one thing to release: --by with columns, --cell-states, --marginals, --mean or --sum (also with "
            "--by), --quantiles, --regress or --classify"
        )
    more: dict[str, Any] = {}
    for name, goes_with, value in (
        ("weights", ["marginals"], None if weights is None else _weights(weights)),
        ("bins", ["quantiles"], None if bins is None else _bins(bins)),
        ("ridge", ["regress", "classify"], ridge),
    ):
        if value is not None and not set(goes_with) & set(asked):
            raise InvalidInput(f"--{name} goes with --{' or --'.join(goes_with)}")
        more |= {} if value is None else {name: value}
    also = {"statement": statement, "figure": figure}
    for name, path in also.items():
        if path is not None:
            _check_free(name, path)
    if figure is not None:
        from matrixdp import plots
    table = Table(
        _source(records, sql, separator),
        Domain.from_toml(domain),
        unit=unit,
        contributions=contributions,
        **({} if adjacency is None else {"adjacency": adjacency}),
    )
    groups = [] if by is None else _listed(by)
    with show.working("Reading rows and sizing the noise"):
        if asked:
            ((name, text),) = asked.items()
            answer: TableAnswer | LogisticAnswer = _ASKED[name](table, text, groups, **more)
        else:
            answer = table.cell_states() if by is None else table.counts(*groups)
        if figure is not None:
            _check_figure(answer)
        prepared = answer.prepare(budget_for(answer), mechanism, **options)
    content = files.Content(_size(answer), lambda file, out: _write(file, output.suffix, out))
    with files.reserved(output, prepared.prepared.certificate, content) as place:
        out = prepared.release(account, note=answer.query["name"] if answer.query else "")
        certificate = place.publish(out)
    out = out.certified(certificate)
    try:
        if statement is not None:
            statement.write_text(out.statement("html" if statement.suffix == ".html" else "markdown"), encoding="utf-8")
        if figure is not None:
            plots.save(out.plot(), figure)
    except (OSError, MatrixDPError) as reason:
        raise InvalidInput(
            f"{str(output)!r} and its certificate were released and charged, but not all of --statement and --figure "
            f"could be written ({getattr(reason, 'strerror', None) or reason}); do not release again for that"
        ) from None
    return certificate, [path for path in also.values() if path is not None], _notes(out, bins)


def _notes(out: Labelled, bins: str | None) -> list[str]:
    """Notes on the numbers, computed from them and from public parameters."""
    from matrixdp.secure.quantile_search import MOST_BINS
    from matrixdp.tables.statement import FITTED, NOT_RELIABLE, are_reliable

    fitted = out.query["name"] in FITTED
    notes = [NOT_RELIABLE] if fitted and not are_reliable(out.parts()) else []
    if out.query["name"] == "quantiles" and bins is None:
        ((name, column),) = out.query["parameters"]["columns"]
        if column.low.is_integer() and column.high.is_integer() and column.high - column.low < MOST_BINS:
            notes.append(f"If {name} holds whole numbers alone, use --bins whole, which gives whole numbers.")
    return notes


def _marginals(table: Table, text: str, by: list[str], **more: Any) -> TableAnswer:
    if text.strip().isdecimal():
        return table.marginals(up_to=int(text), **more)
    return table.marginals(*(_listed(part) for part in text.split(";")), **more)


def _weights(text: str) -> dict[tuple[str, ...], float]:
    """Weights of tables, such as region,sex=2;age=0.5."""
    found = {}
    for part in text.split(";"):
        table, _, weight = part.rpartition("=")
        try:
            found[tuple(_listed(table))] = float(weight)
        except ValueError:
            raise InvalidInput("--weights must be tables and numbers, such as region,sex=2;age=0.5") from None
    return found


def _bins(text: str) -> Any:
    """A number of bins, the word whole, or edges."""
    if text.strip() == "whole":
        return "whole"
    if text.strip().isdecimal():
        return int(text)
    if not {",", ":"} & set(text):
        raise InvalidInput(
            f"--bins must be a number of bins, the word whole, or edges (start:stop:count, or a list), got {text!r}"
        )
    return specs.edges(text)


def _quantiles(table: Table, text: str, by: list[str], **more: Any) -> TableAnswer:
    column, _, given = text.rpartition(":")
    try:
        wanted = [float(part) for part in given.split(",")]
    except ValueError:
        wanted = []
    if not column or not wanted:
        raise InvalidInput("--quantiles must be a column and numbers between 0 and 1, such as age:0.25,0.5,0.75")
    return table.quantiles(column.strip(), wanted, **more)


def _formula(option: str, text: str) -> tuple[str, list[str]]:
    """The target and the features of a formula such as cost~age+sex."""
    target, _, features = text.partition("~")
    if not target or not features:
        raise InvalidInput(f"--{option} must be a column and those that explain it, such as cost~age+sex")
    return target.strip(), [name.strip() for name in features.split("+")]


_ASKED: dict[str, Callable[..., TableAnswer | LogisticAnswer]] = {
    "marginals": _marginals,
    "mean": lambda table, text, by: table.means(text.strip(), by),
    "sum": lambda table, text, by: table.sums(text.strip(), by),
    "quantiles": _quantiles,
    "regress": lambda table, text, by, **more: table.regression(*_formula("regress", text), **more),
    "classify": lambda table, text, by, **more: table.logistic_regression(*_formula("classify", text), **more),
}
"""The query of each option: a function of the table, the option's text, the columns of --by, and further options."""


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _source(records: str, sql: str | None, separator: str | None) -> Any:
    from matrixdp import tables

    if sql is not None:
        return tables.sql(records, sql)
    if records == "-":
        return tables.csv_file(sys.stdin.buffer, separator=separator or ",")
    return records if separator is None else tables.csv_file(records, separator=separator)


def _check_free(name: str, path: Path) -> None:
    suffixes = {"statement": (".html", ".md"), "figure": (".png",)}[name]
    if path.suffix not in suffixes:
        raise InvalidInput(f"--{name} must end in {' or '.join(suffixes)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InvalidInput(f"--{name} {str(path)!r} must lie in a folder that exists; create the folder first")
    if path.exists() or path.is_symlink():
        raise InvalidInput(f"--{name} {str(path)!r} exists already and is not replaced; choose another name")


def _check_figure(answer: TableAnswer | LogisticAnswer) -> None:
    """Raises InvalidInput, before anything is charged, if there is more than a figure can show."""
    from matrixdp.tables.figures import sizes_of
    from matrixdp.tables.table_marginals import MarginalsAnswer

    labels = dict(answer.axes)
    tables = answer.tables if isinstance(answer, MarginalsAnswer) else (tuple(labels),)
    try:
        sizes_of([tuple((name, labels[name]) for name in table) for table in tables])
    except InvalidInput as reason:
        raise InvalidInput(f"--figure: {reason}; or leave --figure out. Nothing was released") from None


def _size(answer: TableAnswer | LogisticAnswer) -> int:
    """The most bytes of the table in its file; in CSV a label may be quoted, and every quote in it doubled."""
    label = sum(max(len(label.encode()) for label in labels) * 2 + 16 for _, labels in answer.axes)
    header = sum(len(name.encode()) * 2 + 16 for name, _ in answer.axes)
    return answer.cells * (label + 5 * _NUMBER) + header + _COLUMN * (len(answer.axes) + 6)


def _write(file: BinaryIO, suffix: str, out: Labelled) -> None:
    if suffix == ".parquet":
        out.to_parquet(file)
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    out.to_csv(text)
    text.flush()
    text.detach()

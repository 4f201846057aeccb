"""`matrixdp domain`: a draft of a domain from names and declared types, never from values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matrixdp.cli import files
from matrixdp.errors import InvalidInput

DATABASES = (".db", ".sqlite", ".sqlite3", ".duckdb")


def domain(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="CSV, Parquet, SQLite, DuckDB, or an address postgresql://...")
    ],
    header: Annotated[
        bool, typer.Option("--header", help="The first line of the text holds names of columns, and no record.")
    ] = False,
    separator: Annotated[str, typer.Option(help="The separator of cells, for text.")] = ",",
    sql: Annotated[str | None, typer.Option(help="The SELECT whose columns are meant, for a database.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Write it to this new file.", show_default="print it")
    ] = None,
) -> None:
    """Draft a domain (TOML) from the names of columns and the types that a schema declares, never from values.

    It marks what a person must fill in from public knowledge, without looking at the values in the data.

    Example: matrixdp domain patients.csv --header --out domain.toml
    """
    from matrixdp.tables.domain import draft

    text = draft(_columns(source, header, separator, sql))
    if output is None:
        typer.echo(text)
        return
    files.write_new(output, text)
    typer.echo(f"Written: {output}; fill it in from public knowledge before it is used")


def _columns(source: str, header: bool, separator: str, sql: str | None) -> dict[str, str | None]:
    from matrixdp import tables
    from matrixdp.tables.arrow import draft_kinds
    from matrixdp.tables.files import Parquet

    if sql is not None:
        return tables.sql(source, sql).declared()
    if "://" in source or Path(source).suffix.lower() in DATABASES:
        raise InvalidInput("a database needs --sql, the SELECT whose columns are meant, as in 'SELECT * FROM visits'")
    if not Path(source).is_file():
        raise InvalidInput(f"source: there is no file {source}")
    if Path(source).suffix.lower() == ".parquet":
        found = tables.source_of(source)
        assert isinstance(found, Parquet)
        return draft_kinds(found.schema)
    if not header:
        raise InvalidInput(
            "the first line of a text may be a record, which must not be copied into a draft; say --header if it holds "
            "the names of the columns"
        )
    names = tables.csv_file(source, separator=separator).names
    if any(
        letter < " " or "\ud800" <= letter <= "\udfff" for name in names for letter in name
    ):  # bytes that are not text
        raise InvalidInput(f"the first line of {source} is not UTF-8 text with names of columns; is it a CSV file?")
    return dict.fromkeys(names)

"""`matrixdp domain`: a draft of a domain from names and declared types, never from values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from matrixdp.errors import InvalidInput


def domain(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="CSV, Parquet, SQLite, DuckDB, or an address postgresql://...")
    ],
    header: Annotated[
        bool, typer.Option("--header", help="The first line of the text holds names of columns, and no record.")
    ] = False,
    separator: Annotated[str, typer.Option(help="What separates cells of text.")] = ",",
    sql: Annotated[str | None, typer.Option(help="The SELECT whose columns are meant, for a database.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "--out", help="Write it to this new file.", show_default="print it")
    ] = None,
) -> None:
    """Draft a domain (TOML) from the names of columns and the types that a schema declares, never from values.

    It marks everything that a person must fill in from public knowledge: values in the data must not decide it.

    Example: matrixdp domain patients.csv --header --out domain.toml
    """
    from matrixdp.tables.domain import draft

    text = draft(_columns(source, header, separator, sql))
    if output is None:
        typer.echo(text)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidInput(f"output {str(output)!r} exists already and is not replaced; choose another name") from None
    except OSError as reason:
        raise InvalidInput(f"output {str(output)!r} cannot be written ({reason.strerror})") from None
    typer.echo(f"Written: {output}; fill it in from public knowledge before it is used")


def _columns(source: str, header: bool, separator: str, sql: str | None) -> dict[str, str | None]:
    from matrixdp import tables
    from matrixdp.tables.arrow import draft_kinds
    from matrixdp.tables.files import Parquet

    if sql is not None:
        return tables.sql(source, sql).declared()
    if Path(source).suffix.lower() == ".parquet":
        found = tables.source_of(source)
        assert isinstance(found, Parquet)
        return draft_kinds(found.schema)
    if not header:
        raise InvalidInput(
            "the first line of a text may be a record, which must not be copied into a draft; say --header if it holds "
            "the names of the columns, or --sql with a SELECT for a database"
        )
    return dict.fromkeys(tables.csv_file(source, separator=separator).names)

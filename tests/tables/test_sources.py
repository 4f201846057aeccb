"""One table from every source: the same counts, no failure by a cell, and no cell in a message."""

import bz2
import csv
import datetime
import gzip
import io
import lzma
import sqlite3
import warnings

import duckdb
import narwhals
import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hospital import domain, hospital
from matrixdp.errors import InvalidInput
from matrixdp.tables import Boolean, Categorical, Date, Domain, Numeric, Table, csv_file, source_of, sql

VISITS = hospital(120)
BY = ("region", "diagnosis", "smoker")


def _csv(path, opener=open, separator=","):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        VISITS.to_csv(file, index=False, sep=separator)
    return path


def _parquet(folder, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pandas(VISITS), folder / "a.parquet", **options)
    return folder / "a.parquet"


def _sqlite(folder):
    with sqlite3.connect(folder / "a.db") as connection:
        VISITS.to_sql("visits", connection, index=False)
    connection.close()
    return sql(folder / "a.db", "SELECT * FROM visits;")


def _duckdb(folder):
    visits = VISITS
    with duckdb.connect(folder / "a.duckdb") as connection:
        connection.execute("CREATE TABLE visits AS SELECT * FROM visits")
    del visits
    return sql(folder / "a.duckdb", "SELECT * FROM visits")


def _dask(folder):
    dataframe = pytest.importorskip("dask.dataframe")
    return dataframe.from_pandas(VISITS, npartitions=3)


SOURCES = {
    "pandas": lambda folder: VISITS,
    "pandas strings": lambda folder: VISITS.astype("string"),
    "pandas categories": lambda folder: VISITS.astype("category"),
    "pandas, arrow": lambda folder: VISITS.astype(pandas.ArrowDtype(pyarrow.string())),
    "polars": lambda folder: polars.from_pandas(VISITS),
    "polars categories": lambda folder: polars.from_pandas(VISITS).cast(polars.Categorical),
    "polars lazy": lambda folder: polars.from_pandas(VISITS).lazy(),
    "polars lazy file": lambda folder: polars.scan_parquet(_parquet(folder)),
    "narwhals": lambda folder: narwhals.from_native(VISITS),
    "arrow": lambda folder: pyarrow.Table.from_pandas(VISITS),
    "arrow dictionary": lambda folder: _dictionary(pyarrow.Table.from_pandas(VISITS)),
    "numpy fields": lambda folder: VISITS.to_records(index=False),
    "csv": lambda folder: _csv(folder / "a.csv"),
    "csv path as text": lambda folder: str(_csv(folder / "a.csv")),
    "csv.gz": lambda folder: _csv(folder / "a.csv.gz", gzip.open),
    "csv.bz2": lambda folder: _csv(folder / "a.csv.bz2", bz2.open),
    "csv.xz": lambda folder: _csv(folder / "a.csv.xz", lzma.open),
    "tsv": lambda folder: _csv(folder / "a.tsv", separator="\t"),
    "csv ;": lambda folder: csv_file(_csv(folder / "a.txt", separator=";"), separator=";"),
    "parquet": lambda folder: _parquet(folder),
    "parquet, small groups": lambda folder: _parquet(folder, row_group_size=17),
    "sqlite": _sqlite,
    "sqlite connection": lambda folder: sql(sqlite3.connect(_sqlite(folder).database), "SELECT * FROM visits"),
    "duckdb": _duckdb,
    "duckdb relation": lambda folder: duckdb.from_df(VISITS),
    "duckdb csv": lambda folder: duckdb.read_csv(str(_csv(folder / "a.csv")), all_varchar=True),
    "dask": _dask,
}


def _dictionary(table):
    return pyarrow.table({name: table[name].dictionary_encode() for name in table.column_names})


@pytest.fixture(scope="module")
def expected():
    return Table(VISITS, domain()).counts(*BY).value


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_source_gives_the_same_counts(name, tmp_path, expected):
    source = SOURCES[name](tmp_path)
    assert np.array_equal(Table(source, domain()).counts(*BY).value, expected)


def test_the_counts_are_those_of_pandas(expected):
    texts = VISITS.fillna("").map(str.strip)
    known = {"region": domain()["region"].categories, "diagnosis": domain()["diagnosis"].categories}
    for name, values in known.items():
        found = Table(VISITS, domain()).counts(name).value
        assert found[: len(values)].tolist() == [(texts[name] == value).sum() for value in values]
        assert found[-1] == texts[name].isin(["", "NA", "?"]).sum()
        assert found.sum() == len(VISITS)
    assert expected.sum() == len(VISITS)


def test_a_pipe_is_read_once(tmp_path, expected):
    content = _csv(tmp_path / "a.csv").read_bytes()
    for stream in (io.BytesIO(content), io.StringIO(content.decode(), newline="")):
        table = Table(csv_file(stream), domain())
        assert np.array_equal(table.counts(*BY).value, expected)
        with pytest.raises(InvalidInput, match="read already"):
            table.counts("region")


def test_separated_text_without_a_header(tmp_path, expected):
    _csv(tmp_path / "a.csv")
    rows = (tmp_path / "a.csv").read_text(encoding="utf-8").split("\n", 1)[1]
    (tmp_path / "b.csv").write_text(rows, encoding="utf-8", newline="")
    table = Table(tmp_path / "b.csv", domain(), columns=list(VISITS.columns))
    assert np.array_equal(table.counts(*BY).value, expected)


def test_arrays_have_names_beside_them(expected):
    table = Table(VISITS.to_numpy(dtype=object), domain(), columns=list(VISITS.columns))
    assert np.array_equal(table.counts(*BY).value, expected)
    with pytest.raises(InvalidInput, match="columns must name the 9"):
        Table(VISITS.to_numpy(dtype=object), domain(), columns=["a"])
    with pytest.raises(InvalidInput, match="this source has names"):
        Table(VISITS, domain(), columns=["a"])


def test_batches_are_small_and_add_up(tmp_path, monkeypatch, expected):
    for module in ("frames", "files", "databases"):
        monkeypatch.setattr(f"matrixdp.tables.{module}.ROWS", 7)
    for name in ("pandas", "polars lazy", "arrow", "csv", "parquet", "sqlite", "duckdb relation"):
        folder = tmp_path / name
        folder.mkdir()
        assert np.array_equal(Table(SOURCES[name](folder), domain()).counts(*BY).value, expected), name


# --- declared types ---

TYPED = {
    "whole": [1, None, 2**62, -5],
    "number": [0.5, None, float("inf"), float("nan")],
    "flag": [True, None, False, True],
    "day": [datetime.date(2026, 1, 31), None, datetime.date(1, 1, 1), datetime.date(9999, 12, 31)],
    "time": [datetime.datetime(2026, 3, 1, 23), None, datetime.datetime(1900, 1, 1), datetime.datetime(2026, 12, 31)],
    "text": ["1", None, "", "2"],
}
TYPES = Domain(
    {
        "whole": Categorical([1, 2**62, -5]),
        "number": Numeric(0, 1, bins=2),
        "flag": Boolean(),
        "day": Date("2026-01-01", "2026-12-31"),
        "time": Date("2026-01-01", "2026-12-31", by="year"),
        "text": Categorical([1, 2]),
    }
)
LABELS = {
    "whole": ["1", "missing", str(2**62), "-5"],
    "number": ["[0.5, 1]", "missing", "[0.5, 1]", "missing"],
    "flag": ["true", "missing", "false", "true"],
    "day": ["2026-01", "missing", "other", "other"],
    "time": ["2026", "missing", "other", "2026"],
    "text": ["1", "missing", "missing", "2"],
}


def _typed_duckdb(folder):
    typed = pyarrow.table(TYPED)
    with duckdb.connect(folder / "t.duckdb") as connection:
        connection.execute("CREATE TABLE typed AS SELECT * FROM typed")
    del typed
    return sql(folder / "t.duckdb", "SELECT * FROM typed")


def _typed_parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table(TYPED), folder / "t.parquet")
    return folder / "t.parquet"


def _typed_sqlite(folder):
    with sqlite3.connect(folder / "t.db") as connection:
        connection.execute(
            "CREATE TABLE typed (whole INT, number REAL, flag BOOL, day DATE, time TIMESTAMP, text TEXT)"
        )
        texts = [
            [str(cell) if isinstance(cell, datetime.date) else cell for cell in row]
            for row in zip(*TYPED.values(), strict=True)
        ]
        connection.executemany("INSERT INTO typed VALUES (?, ?, ?, ?, ?, ?)", texts)
    connection.close()
    return sql(folder / "t.db", "SELECT * FROM typed")


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: pandas.DataFrame(TYPED, dtype=object),
        lambda folder: pandas.DataFrame({**TYPED, "whole": pandas.array(TYPED["whole"], dtype="Int64")}),
        lambda folder: polars.DataFrame(TYPED, strict=False),
        lambda folder: pyarrow.table(TYPED),
        _typed_parquet,
        _typed_duckdb,
        _typed_sqlite,
    ],
    ids=["pandas objects", "pandas", "polars", "arrow", "parquet", "duckdb", "sqlite"],
)
def test_declared_types_say_the_same(make, tmp_path):
    table = Table(make(tmp_path), TYPES)
    for name, labels in LABELS.items():
        column = TYPES[name]
        wanted = [labels.count(label) for label in column.labels]
        assert table.counts(name).value.tolist() == wanted, name


def test_days_of_any_range_and_zone():
    tokyo = pyarrow.array(
        [datetime.datetime(2026, 1, 31, 20, tzinfo=datetime.UTC)], pyarrow.timestamp("us", "Asia/Tokyo")
    )
    far = pyarrow.array([2**62, -(2**62), None], pyarrow.timestamp("s"))
    column = Domain({"t": Date("2026-01-01", "2026-12-31")})
    assert Table(pyarrow.table({"t": tokyo}), column).counts("t").value[1] == 1  # there it is February already
    assert Table(pyarrow.table({"t": far}), column).counts("t").value[-2:].tolist() == [2, 1]
    frame = polars.DataFrame({"t": [2**62, None]}).cast(polars.Datetime("us"))
    assert Table(frame, column).counts("t").value[-2:].tolist() == [1, 1]


def _on_arrow(cells, kind):
    return pandas.arrays.ArrowExtensionArray(pyarrow.array([*cells, None]).view(kind))


def _in_zone(day, zone):
    return pandas.Series([day, day, None]).dt.tz_localize("UTC").dt.tz_convert(zone)


FAR, FAR_DAYS = (2**62, -(2**62)), np.array([2**30, -(2**30)], dtype=np.int32)


@pytest.mark.parametrize(
    "column",
    [
        _on_arrow(FAR, pyarrow.timestamp("s", "Asia/Tokyo")),
        _on_arrow(FAR, pyarrow.timestamp("us", "America/New_York")),
        _on_arrow(FAR, pyarrow.date64()),
        _on_arrow(FAR, pyarrow.time64("ns")),
        _on_arrow(FAR_DAYS, pyarrow.date32()),
        _on_arrow([b"\xff", b"\xfe"], pyarrow.string()),
        _in_zone(pandas.Timestamp.max, "Asia/Tokyo"),
        _in_zone(pandas.Timestamp.min, "EST"),
    ],
    ids=lambda column: str(column.dtype),
)
def test_no_cell_of_a_pandas_column_makes_reading_fail(column):
    """Python has no object for such days, and no text for such bytes."""
    frame = pandas.DataFrame({"t": column})
    for kind in (Date("2026-01-01", "2026-12-31"), Categorical(["a"]), Numeric(0, 1, bins=2), Boolean()):
        assert Table(frame, Domain({"t": kind})).counts("t").value[-2:].tolist() == [2, 1]
        assert Table(frame, Domain({"t": kind}), unit="t", contributions=1).counts("t").value.sum() <= 2


@pytest.mark.parametrize(
    "cell",
    [
        "170141183460469231731687303715884105727::HUGEINT", "340282366920938463463374607431768211455::UHUGEINT",
        "'infinity'::DATE", "'-infinity'::TIMESTAMP", "'290309-12-22'::TIMESTAMP", "INTERVAL 3 YEARS", "uuid()",
        "[1, 2]", "{'x': 1}", "'b'::ENUM ('a', 'b')", "'\\xFF'::BLOB", "'nan'::FLOAT", "1e308::DOUBLE",
        "0.1::DECIMAL(38, 37)", "'2026-01-01 10:00:00+05'::TIMESTAMPTZ",
    ],
)  # fmt: skip
def test_any_type_of_duckdb_has_a_place(cell):
    relation = duckdb.sql(f"SELECT {cell} AS a FROM range(2)")
    for column in (Categorical(["b"]), Numeric(0, 1, bins=2), Date("2026-01-01", "2026-12-31"), Boolean()):
        assert Table(relation, Domain({"a": column})).counts("a").value.sum() == 2


def test_days_before_the_year_1_are_not_those_after():
    relation = duckdb.sql("SELECT '2026-01-01 (BC)'::DATE AS a FROM range(2)")
    assert Table(relation, Domain({"a": Date("2026-01-01", "2026-12-31", by="year")})).counts("a").value[0] == 0


def test_whole_numbers_of_duckdb_stay_whole():
    relation = duckdb.sql(f"SELECT {2**128 - 1}::UHUGEINT AS a FROM range(2)")  # -1 in Arrow
    assert Table(relation, Domain({"a": Categorical([2**128 - 1])})).counts("a").value.tolist() == [2, 0, 0]


def test_types_without_a_text_are_unexpected():
    frames = [
        pyarrow.table({"a": [[1], None, [2, 3]], "b": [{"x": 1}, None, {"x": 2}]}),
        polars.DataFrame({"a": [[1], None, [2]], "b": [{"x": 1}, None, {"x": 2}]}),
        polars.DataFrame([polars.Series(name, [object(), None, "y"], dtype=polars.Object) for name in "ab"]),
    ]  # fmt: skip
    for frame in frames:
        for name in "ab":
            table = Table(frame, Domain({"a": Categorical(["x"]), "b": Categorical(["x"])}))
            assert table.counts(name).value.tolist() == [0, 2, 1]
    wide = polars.DataFrame({"a": [2**100, None]}, schema={"a": polars.Int128})
    assert Table(wide, Domain({"a": Categorical([2**100])})).counts("a").value.tolist() == [1, 0, 1]


# --- garbage ---

CANARY = "Canary-Zq7"


PLACES = Domain(
    {
        "a": Categorical(["x", "1", "é"], missing="out"),
        "b": Numeric(-1, 1, bins=2, unexpected={"fill": 0}),
        "c": Date("2026-01-01", "2026-12-31", by="year"),
        "d": Boolean(),
    }
)
SOME = st.sampled_from(
    ["x", "1", " é", "e\u0301", "nan", "-inf", "1e400", "2026-05-01", "2026-02-30", "YES", "0", "", "\x00", '"']
)
GARBAGE = st.lists(st.tuples(*[SOME | st.text(max_size=8) | st.none()] * 4), max_size=12)


@given(GARBAGE)
@settings(max_examples=25, deadline=None)
def test_random_texts_say_the_same_everywhere(rows):
    columns = {name: [row[place] for row in rows] for place, name in enumerate("abcd")}
    frame = pandas.DataFrame(columns, dtype=object)
    texts = io.StringIO(newline="")
    writer = csv.writer(texts, quoting=csv.QUOTE_ALL)
    writer.writerows([list("abcd"), *rows])
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (a, b, c, d)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
    arrow = pyarrow.table({name: pyarrow.array(cells, pyarrow.string()) for name, cells in columns.items()})
    sources = [
        frame, arrow, polars.from_arrow(arrow).lazy(), duckdb.from_arrow(arrow), sql(connection, "SELECT * FROM t"),
        csv_file(io.BytesIO(texts.getvalue().encode())),
    ]  # fmt: skip
    found = [Table(source, PLACES).counts("a", "b", "c", "d").value for source in sources]
    connection.close()
    assert all(np.array_equal(value, found[0]) for value in found[1:])


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.dates(), st.datetimes(),
    st.timedeltas(), st.decimals(), st.complex_numbers(), st.lists(st.integers(), max_size=2), st.just(object()),
    st.from_type(type), st.sampled_from([pandas.NaT, pandas.NA, np.datetime64("NaT"), np.float32("nan"), np.array([])]),
)  # fmt: skip


@given(st.lists(st.tuples(*[ANYTHING] * 4), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_random_objects_have_a_place(rows):
    cells = np.empty((len(rows), 4), dtype=object)
    for place in np.ndindex(cells.shape):
        cells[place] = rows[place[0]][place[1]]
    objects = polars.DataFrame(
        [polars.Series(name, list(cells[:, i]), dtype=polars.Object) for i, name in enumerate("abcd")]
    )
    for source, names in (
        (cells, list("abcd")),
        (pandas.DataFrame(cells, columns=list("abcd")), None),
        (objects, None),
    ):
        table = Table(source, PLACES, columns=names, unit="a", contributions=1)
        assert table.cell_states().value.shape == (4, 4)
        assert Table(source, PLACES, columns=names).counts("b", "c", "d").value.sum() == len(rows)


@pytest.mark.parametrize(
    "content",
    [
        b'a,b\n1,"x, y"\n2\n3,z,w\n"4,\n' + CANARY.encode(),
        b"a,b\n1,\xff\xfe\n\n2,\x00\n,NULL\r\n5,\n6,\"multi\nline\"\n",
        b'a,b\n"' + b"y" * 300_000 + b"\n1,x\n2,x\n",
        b"a,b",
        b"a,b\n" + b"," * 10_000 + b"\n",
        "a,b\n1,é\n".encode("utf-16"),
    ],
    ids=["odd lines", "odd bytes", "a quote that does not close", "no rows", "long line", "other encoding"],
)  # fmt: skip
def test_any_bytes_are_rows(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = Table(
            csv_file(tmp_path / "a.csv", columns=["a", "b"]), Domain({"a": Boolean(), "b": Categorical(["x"])})
        )
        assert table.counts("a", "b").value.shape == (4, 3)
        assert table.cell_states().value.sum() % 2 == 0


def test_texts_of_a_database_need_not_be_texts(tmp_path):
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.execute(
            "INSERT INTO t VALUES (CAST(x'ff41' AS TEXT)), (x'00ff'), (1e999), (9223372036854775807), ('x')"
        )
    connection.close()
    value = Table(sql(tmp_path / "a.db", "SELECT a FROM t"), Domain({"a": Categorical(["x"])})).counts("a").value
    assert value.tolist() == [1, 4, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "none.csv",
        lambda folder: folder / "a.xlsx",
        lambda folder: folder / "broken.parquet",
        lambda folder: folder / "broken.csv.gz",
        lambda folder: csv_file(io.TextIOWrapper(io.BytesIO(f"a,b\n{CANARY}\xe9".encode()), encoding="ascii")),
        lambda folder: f"a,b\n{CANARY},1\n" * 100,
        lambda folder: sql(folder / "a.db", f"SELECT a, {CANARY} FROM t"),
        lambda folder: sql(folder / "none.db", "SELECT 1"),
        lambda folder: duckdb.sql(f"SELECT CAST('{CANARY}' AS INT) AS a, 1 AS b FROM range(3)"),
        lambda folder: duckdb.sql(f"SELECT if(range < 9, '1', '{CANARY}')::INT AS a, 1 AS b FROM range(99)"),
        lambda folder: [CANARY],
        lambda folder: pandas.Series([CANARY]),
        lambda folder: np.array([CANARY]),
        lambda folder: pandas.DataFrame({"a": [1], CANARY: [1]}),
        lambda folder: pandas.DataFrame([[1, 2, 3]], columns=["a", "b", "b"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_without_a_cell(tmp_path, make):
    (tmp_path / "broken.parquet").write_text(CANARY)
    (tmp_path / "broken.csv.gz").write_bytes(gzip.compress(f"a,b\n{CANARY},1\n".encode() * 999)[:-20])
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("CREATE TABLE t (a)")
    connection.close()
    with pytest.raises(InvalidInput) as caught:
        Table(make(tmp_path), Domain({"a": Boolean(), "b": Boolean()})).counts("a", "b")
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert str(caught.value)


def test_options_are_checked(tmp_path):
    (tmp_path / "a.csv").write_text("a\n")
    for options in ({"separator": ""}, {"separator": ",,"}, {"separator": '"'}, {"encoding": "utf-99"}):
        with pytest.raises(InvalidInput):
            csv_file(tmp_path / "a.csv", **options)
    for query in ("", " ", None):
        with pytest.raises(InvalidInput, match="query"):
            sql(tmp_path / "a.db", query)
    with pytest.raises(InvalidInput, match="database must be"):
        sql(tmp_path / "a.csv", "SELECT 1")
    assert list(source_of(tmp_path / "a.csv").names) == ["a"]

"""Every cell has a place: columns are total, and say what they do with what they do not know."""

import datetime
import json
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixdp.errors import InvalidInput
from matrixdp.privacy.records import decode, encode
from matrixdp.tables import Boolean, Categorical, Date, Domain, Numeric, Ordered
from matrixdp.tables.columns import CLIPPED, MISSING, OUT, UNEXPECTED, WITHIN

COLUMNS = {
    "categorical": Categorical(["north", 1, 2.5, "Süd"]),
    "ordered": Ordered(["low", "high"], missing="out", unexpected={"fill": "low"}),
    "boolean": Boolean(missing_values=["?"]),
    "numeric": Numeric(-10, 100, bins=[-10, 0, 18.5, 100]),
    "numeric, refusing": Numeric(0, 1, bins=3, outside="unexpected", missing={"fill": 0.5}),
    "date": Date("2026-01-01", "2026-12-31", by="week"),
    "date, by day": Date("2026-01-01", "2026-02-01", by="day", format="%d/%m/%Y", outside="clip", missing="out"),
}


class Hostile:
    """Fails on everything that one can do with it."""

    def __eq__(self, other):
        raise RuntimeError("secret")

    __hash__ = __str__ = __repr__ = __float__ = __bool__ = __len__ = __iter__ = __array__ = __eq__


ODD = [
    None, np.nan, pandas.NA, pandas.NaT, np.datetime64("NaT"), np.timedelta64(5, "ns"), float("inf"), -np.inf, -0.0,
    10**400, -(10**5000), 2**64, True, np.bool_(False), np.float16(3.5), np.longdouble("1e4000"), np.uint8(7), 3 + 4j,
    Decimal("sNaN"), Decimal("NaN"), Decimal("1e999999"), Decimal("-Infinity"), Decimal("2.50"), Fraction(1, 3),
    "", "  \t\n", "nan", "NaT", "inf", "-inf", "1_000", "١٢", "1e400", "0x10", "9" * 5000, "\ud800", "\x00", "é",
    "e\u0301", "2026-02-30", "2026-W01-1", "20260101", "2026-01-01T25:00", "31/12/2026", "0000-00-00", "99999-01-01",
    b"north", b"\xff\xfe", bytearray(b"x"), memoryview(b"y"), [], [1, 2], {}, {"a": 1}, (), set(), object(), Hostile(),
    Hostile, np.array([]), np.array([1, 2]), np.array("north"), lambda: None, ..., NotImplemented,
    datetime.date.min, datetime.date.max, datetime.datetime.max, datetime.time(), datetime.timedelta(1),
    datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC), pandas.Timestamp("2026-05-01", tz="Asia/Tokyo"),
    pandas.Period("2026-01"), pandas.Interval(0, 1), np.datetime64("2026-05-01T10", "h"), np.datetime64(2**62, "s"),
]  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
@given(cells=st.lists(st.sampled_from(ODD) | st.text() | st.floats() | st.integers() | st.binary() | st.datetimes()))
@settings(deadline=None)
def test_every_cell_has_a_place(name, cells):
    column = COLUMNS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states, positions = column.read(cells)
        codes = column.codes(states, positions)
    assert len(codes) == len(states) == len(cells)
    assert np.all((codes >= OUT) & (codes < len(column.labels)))
    assert np.all(np.isfinite(positions))
    for cell, state, code in zip(cells, states, codes, strict=True):  # and it depends on that cell alone
        alone = column.read([cell])
        assert (alone[0][0], column.codes(*alone)[0]) == (state, code)


@pytest.mark.parametrize("cell", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("name", COLUMNS)
def test_odd_cells_by_themselves(name, cell):
    column = COLUMNS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (code,) = column.codes(*column.read([cell]))
    assert OUT <= code < len(column.labels)


@pytest.mark.parametrize(
    ("column", "cells", "label"),
    [
        (Categorical([1, "b"]), [1, "1", 1.0, " 1 ", np.int8(1), Decimal("1.0"), b"1"], "1"),
        (Categorical([1, "b"]), ["B", "1.0", 2, [1], "2026-01-01"], "other"),
        (Categorical(["1", "b"]), [None, np.nan, pandas.NA, "", " "], "missing"),
        (Categorical(["é"]), ["e\u0301", "\u00e9 "], "é"),
        (Categorical(["true", "false"]), [True, np.True_, "true"], "true"),
        (Categorical(["2026-05-01"]), [datetime.date(2026, 5, 1), pandas.Timestamp("2026-05-01")], "2026-05-01"),
        (Boolean(), [True, 1, 1.0, "YES", "t", " y "], "true"),
        (Boolean(), [2, "maybe", -1], "other"),
        (Boolean(true=["ja"], false=["nein"]), ["NEIN", False], "false"),
        (Numeric(0, 100, bins=[0, 18, 65, 100]), [0, "17.9", -3, "-inf", b"1e1", True], "[0, 18)"),
        (Numeric(0, 100, bins=[0, 18, 65, 100]), [65, 100, "1e9", 10**400, np.inf], "[65, 100]"),
        (Numeric(0, 100, bins=4), ["forty", "1_0", "4O", datetime.date(2026, 1, 1), "12,5"], "other"),
        (Numeric(0, 100, bins=4), ["nan", np.float32("nan"), Decimal("NaN")], "missing"),
        (Numeric(0, 1, bins=2, outside="unexpected"), [-0.1, 1.1, np.inf], "other"),
        (Date("2026-01-15", "2026-12-31"), ["2026-01-15", "2026-01-31T23:59", np.datetime64("2026-01-20")], "2026-01"),
        (Date("2026-01-15", "2026-12-31"), ["2026-01-14", "2027-01-01", "2026-02-30", "1/2/2026", 20260120], "other"),
        (Date("2026-01-15", "2026-12-31", outside="clip"), ["1999-01-01", datetime.date.min], "2026-01"),
        (Date("2026-01-01", "2026-12-31", by="week"), ["2026-01-01", "2026-01-04"], "2026-W01"),
        (Date("2026-01-01", "2026-12-31", "year", format="%d.%m.%y"), ["31.12.26", datetime.date(2026, 5, 1)], "2026"),
        (Ordered(["a", "b"], missing={"fill": "b"}), [None, "b"], "b"),
        (Date("2026-01-01", "2026-12-31", missing={"fill": "2026-06-01"}), [None, "2026-06-30"], "2026-06"),
    ],
)  # fmt: skip
def test_what_cells_become(column, cells, label):
    codes = column.codes(*column.read(cells))
    assert [column.labels[code] for code in codes] == [label] * len(cells)


def test_cells_that_are_equal_and_say_different_things():
    column = Categorical([1, "true", "2026-01-01"])
    codes = column.codes(*column.read([True, 1, 1.0, np.True_, Decimal(1)]))
    assert codes.tolist() == [1, 0, 0, 1, 0]


def test_policies_take_rows_out_or_fill_them():
    column = Numeric(0, 10, bins=2, missing="out", unexpected={"fill": 7})
    states, positions = column.read([None, "x", 3, 99])
    assert states.tolist() == [MISSING, UNEXPECTED, WITHIN, CLIPPED]
    assert column.codes(states, positions).tolist() == [OUT, 1, 0, 1]
    assert column.labels == ("[0, 5)", "[5, 10]")
    inside, numbers = column.numbers(states, positions)
    assert inside.tolist() == [False, True, True, True]
    assert numbers[inside].tolist() == [7, 3, 10]


def test_arrays_of_numbers_read_as_their_cells_do():
    column = COLUMNS["numeric"]
    for array in (np.array([np.nan, np.inf, -np.inf, 18.5, 1e300]), np.array([2**63, 5], dtype=np.uint64)):
        for one, other in zip(column.read(array), column.read(list(array)), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_records(name):
    written = encode(COLUMNS[name])
    again = decode(json.loads(json.dumps(written)))
    assert encode(again) == written
    assert again.labels == COLUMNS[name].labels


def test_a_domain_as_toml(tmp_path):
    domain = Domain({name + ' "x" é': column for name, column in COLUMNS.items()})
    path = tmp_path / "domain.toml"
    path.write_text(domain.to_toml(), encoding="utf-8")
    again = Domain.from_toml(path)
    assert {name: encode(column) for name, column in again.items()} == {n: encode(c) for n, c in domain.items()}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Numeric(10, 0), "high must be above low"),
        (lambda: Numeric(0, np.nan), "high"),
        (lambda: Numeric(0, 10, bins=[0, 5]), "bins"),
        (lambda: Numeric(0, 10, bins=[0, 5, 5, 10]), "bins"),
        (lambda: Numeric(0, 10, bins=True), "bins"),
        (lambda: Numeric(0, 10, outside="ignore"), "outside"),
        (lambda: Categorical([]), "values"),
        (lambda: Categorical("north"), "values"),
        (lambda: Categorical(["a", "a "]), "entries 0 and 1"),
        (lambda: Categorical(["a", None]), "entry 1"),
        (lambda: Categorical(["a", "other"]), "other"),
        (lambda: Categorical(["a", "missing"]), "missing"),
        (lambda: Categorical(["a"], missing="b"), "missing must be"),
        (lambda: Categorical(["a"], missing={"fill": "b"}), "fill"),
        (lambda: Numeric(0, 1, missing={"fill": 2}), "fill"),
        (lambda: Categorical(["a"], other=" "), "other"),
        (lambda: Boolean(true=["x"], false=["X"]), "in common"),
        (lambda: Boolean(true=["FALSE"]), "in common"),
        (lambda: Categorical(["a"], missing=np.array(["category", "out"])), "missing must be"),
        (lambda: Date("2026-12-31", "2026-01-01"), "end must not lie before"),
        (lambda: Date("soon", "2026-01-01"), "start"),
        (lambda: Date("0001-01-01", "9999-01-01"), "days"),
        (lambda: Date("2026-01-01", "2026-12-31", by="decade"), "by"),
        (lambda: Date("2026-01-01", "2026-12-31", format="iso"), "format"),
        (lambda: Domain({}), "at least one"),
        (lambda: Domain({"a": "categorical"}), "entry 0"),
        (lambda: Domain({" ": Boolean()}), "blank"),
    ],
)
def test_bad_domains_are_refused(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[columns.a]\nkind = 'numeric'\nlow = 0", "column 'a': needs high"),
        ("[columns.a]\nkind = 'FILL IN'", "column 'a': kind must be one of"),
        ("[columns.a]\nkind = 'categorical'\nvalues = []", "column 'a': values"),
        ("[columns.a]\nkind = 'numeric'\nlow = 'FILL IN'\nhigh = 3", "column 'a': low"),
        ("[columns.a]\nkind = 'boolean'\nlow = 0", "has no 'low'"),
        ("[columns.a]\nvalues = [1]", "with a kind"),
        ("[column.a]\nkind = 'boolean'", "table"),
        ("a = ", "not TOML"),
        ("", "table"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, words):
    path = tmp_path / "domain.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        Domain.from_toml(path)
    with pytest.raises(InvalidInput, match="cannot be read"):
        Domain.from_toml(tmp_path / "none.toml")

"""Records from arrays, data frames and files, and errors that name the place."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from matrixdp.errors import InvalidInput
from matrixdp.queries import load
from matrixdp.queries.records import read

TABLE = np.array([[1.0, 2.5], [3.0, -4.0], [5.0, 1e300]])


def csv(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "people.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_read_keeps_the_order_in_memory_and_makes_a_new_matrix():
    turned = np.asfortranarray(TABLE)
    for source, flag in ((TABLE, "C_CONTIGUOUS"), (turned, "F_CONTIGUOUS"), (pd.DataFrame(TABLE), "F_CONTIGUOUS")):
        matrix = read(source)
        np.testing.assert_array_equal(matrix, TABLE)
        assert matrix.flags[flag]
        assert not np.shares_memory(matrix, source)


def test_every_source_gives_the_same_matrix(tmp_path):
    frame = pd.DataFrame(TABLE, columns=["a", "b"], index=["x", "y", "z"])
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    np.save(tmp_path / "t.npy", TABLE)
    (tmp_path / "bare.CSV").write_text("1,2.5\n3,-4\n5,1e300\n")
    paths = [tmp_path / name for name in ("t.csv", "t.parquet", "t.npy", "bare.CSV")]
    for source in (TABLE, TABLE.tolist(), np.asfortranarray(TABLE), frame, *paths, *map(str, paths)):
        loaded = load(source)
        np.testing.assert_array_equal(loaded, TABLE)
        assert loaded.dtype == np.float64
        assert loaded.flags.c_contiguous
        np.testing.assert_array_equal(load(source, columns=[1]), TABLE[:, 1:])
        np.testing.assert_array_equal(load(source, columns=[1, 0]), TABLE[:, ::-1])
    for source in (frame, *paths[:2]):
        np.testing.assert_array_equal(load(source, columns=["b", "a"]), TABLE[:, ::-1])
        np.testing.assert_array_equal(load(source, columns="b"), TABLE[:, 1:])


def test_one_dimension_and_series():
    for source in ([1, 2, 3], np.array([1, 2, 3]), pd.Series([1, 2, 3]), pd.Series([1, 2, 3], name="age")):
        np.testing.assert_array_equal(load(source), [[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(load(pd.Series([1, 2], name="age"), columns="age"), [[1.0], [2.0]])


def test_what_counts_as_a_number():
    np.testing.assert_array_equal(load(np.array([[True, False]])), [[1.0, 0.0]])
    np.testing.assert_array_equal(load(np.array([1, 255], dtype=np.uint8)), [[1.0], [255.0]])
    np.testing.assert_array_equal(load(np.array([0.5], dtype=np.float16)), [[0.5]])
    frame = pd.DataFrame(
        {
            "whole": pd.array([1, 2], dtype="Int64"),
            "real": pd.array([0.5, 1.5], dtype="Float64"),
            "yes": pd.array([True, False], dtype="boolean"),
            "plain": [True, False],
        }
    )
    np.testing.assert_array_equal(load(frame), [[1, 0.5, 1, 1], [2, 1.5, 0, 0]])


def test_the_result_is_a_copy():
    X = np.ones((2, 2))
    load(X)[:] = 0
    assert np.all(X == 1)


def test_csv_dialect(tmp_path):
    for text in ("a,b\n1,2\n", "\ufeffa,b\n1,2\n", "a,b\r\n1,2\r\n", '"a","b"\n"1","2"\n', "a,b\n 1 , 2 \n\n\n", "1,2"):
        np.testing.assert_array_equal(load(csv(tmp_path, text)), [[1.0, 2.0]])
    # columns that are not read may hold anything, line breaks too; an unnamed index column among them
    path = csv(tmp_path, ',name,age\n0,"Ann\nLee",41\n1,,42\n')
    np.testing.assert_array_equal(load(path, columns=["age"]), [[41.0], [42.0]])


def test_integer_labels_are_names():
    frame = pd.DataFrame([[1.0, 2.0]], columns=[1, 0])
    np.testing.assert_array_equal(load(frame, columns=[0]), [[2.0]])
    frame = pd.DataFrame([[1.0, 2.0]], columns=[10, 20])
    with pytest.raises(InvalidInput, match="no column 0"):
        load(frame, columns=[0])


def test_parquet_index_is_not_a_record(tmp_path):
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=pd.Index([7, 9], name="id"))
    frame.to_parquet(tmp_path / "t.parquet")
    np.testing.assert_array_equal(load(tmp_path / "t.parquet"), [[1.0], [2.0]])


CSV_ERRORS = {
    "empty cell": ("a,b\n1,2\n3,\n", r"people\.csv, line 3, column 1: empty"),
    "spaces only": ("a,b\n1,2\n3,  \n", r"line 3, column 1: empty"),
    "NaN": ("a,b\n1,2\n3,nan\n", r"line 3, column 1: missing"),
    "infinite": ("a,b\n1,2\n-inf,4\n", r"line 3, column 0: infinite"),
    "overflow": ("a,b\n1,2\n1e999,4\n", r"line 3, column 0: infinite"),
    "text": ("a,b\n1,2\n3,SECRET\n", r"line 3, column 1: not a number"),
    "NA": ("a,b\nNA,2\n", r"line 2, column 0: not a number"),
    "bool": ("a,b\nTrue,2\n", r"line 2, column 0: not a number"),
    "underscore": ("a,b\n1_0,2\n", r"line 2, column 0: not a number"),
    "decimal comma": ('a,b\n"1,5",2\n', r"line 2, column 0: not a number"),
    "semicolons": ("a;b\n1;2\n", r"line 2, column 0: not a number"),
    "no header": ("1,2\n3,SECRET\n", r"line 2, column 1: not a number"),
    "no header NaN": ("1,2\nnan,3\n", r"line 2, column 0: missing"),
    "mixed first line": ("1,SECRET\n3,4\n", r"line 1: .*column 1 is not a number"),
    "hole in the first line": ("1,,3\n3,4,5\n", r"line 1: .*column 1 is not a number"),
    "short line": ("a,b\n1,2\n3\n", r"people\.csv, line 3: has 1 cells"),
    "long line": ("a,b\n1,2,3\n", r"line 2: has 3 cells"),
    "blank line": ("a\n1\n\n2\n", r"line 3: blank"),
    "blank first line": ("\na\n1\n", r"line 1: blank"),
    "after a line break in a cell": ('a,b\n1,"2\n"\n3,SECRET\n', r"line 4, column 1: not a number"),
    "header only": ("a,b\n", r"people\.csv: holds no records"),
    "empty file": ("", r"people\.csv: holds no records"),
    "repeated name": ("a,a\n1,2\n", r"columns 0 and 1 have the same name"),
    "nameless": (",a\n1,2\n", r"column 0 has no name"),
    "open quote": ('a,b\n1,"2\n', r"line \d: not valid CSV"),
    "quote inside": ('a,b\n1,"2"3\n', r"line 2: not valid CSV"),
}


@pytest.mark.parametrize("name", CSV_ERRORS)
def test_csv_errors_name_file_line_and_column(tmp_path, name):
    text, message = CSV_ERRORS[name]
    with pytest.raises(InvalidInput, match=message) as caught:
        load(csv(tmp_path, text))
    assert "people.csv" in str(caught.value)
    assert "SECRET" not in str(caught.value)  # cells are private


def test_csv_in_another_encoding(tmp_path):
    with pytest.raises(InvalidInput, match="UTF-8"):
        load(csv(tmp_path, "größe\n1\n", encoding="latin-1"))


FRAME_ERRORS = {
    "NaN": (pd.DataFrame({"a": [1.0, np.nan]}, index=["x", "y"]), r"records, row 1, column 0: missing"),
    "infinite": (pd.DataFrame({"a": [1.0, -np.inf]}), r"row 1, column 0: infinite"),
    "NA": (pd.DataFrame({"a": pd.array([1, None], dtype="Int64")}), r"row 1, column 0: missing"),
    "text": (pd.DataFrame({"a": [1, 2], "b": ["SECRET", "t"]}), r"row 0, column 1: not a real number"),
    "one text": (pd.DataFrame({"b": [1.0, "SECRET"]}, index=[10, 20]), r"row 1, column 0: not a real number"),
    "None": (pd.DataFrame({"b": [True, None]}), r"row 1, column 0: not a real number"),
    "objects": (pd.DataFrame({"b": pd.Series([1, 2], dtype=object)}), r"column 0: has dtype object; convert"),
    "decimals": (pd.DataFrame({"b": [Decimal(1)]}), r"row 0, column 0: not a real number"),
    "dates": (pd.DataFrame({"b": pd.to_datetime(["2020-01-01"])}), r"row 0, column 0: not a real number"),
    "categories": (pd.DataFrame({"b": pd.Categorical(["SECRET"])}), r"row 0, column 0: not a real number"),
    "complex": (pd.DataFrame({"b": [1j]}), r"row 0, column 0: not a real number"),
    "repeated name": (pd.DataFrame([[1, 2]], columns=["a", "a"]), r"columns 0 and 1 have the same name"),
    "no rows": (pd.DataFrame({"a": np.array([])}), r"records: holds no records"),
    "no columns": (pd.DataFrame(index=[0, 1]), r"records: holds no records"),
    "series": (pd.Series([1.0, np.nan], name="s"), r"row 1, column 0: missing"),
}


@pytest.mark.parametrize("name", FRAME_ERRORS)
def test_frame_errors_name_row_and_column(name):
    frame, message = FRAME_ERRORS[name]
    with pytest.raises(InvalidInput, match=message) as caught:
        load(frame)
    assert "SECRET" not in str(caught.value)


ARRAY_ERRORS = {
    "NaN": (np.array([[1.0, 2.0], [3.0, np.nan]]), r"records, row 1, column 1: missing"),
    "infinite": (np.array([np.inf]), r"row 0, column 0: infinite"),
    "long double": (np.array([np.longdouble(1e300) * np.longdouble(1e300)]), r"row 0, column 0: infinite"),
    "objects": (np.array([1, None]), "dtype object"),
    "text": (np.array(["1"]), "dtype str"),
    "complex": (np.array([1j]), "dtype complex"),
    "dates": (np.array(["2020-01-01"], dtype="M8[D]"), "dtype datetime64"),
    "named fields": (np.array([(1.0,)], dtype=[("a", float)]), "dtype"),
    "three dimensions": (np.ones((2, 2, 2)), "3 dimensions"),
    "a number": (3.0, "0 dimensions"),
    "None": (None, "dtype object"),
    "empty": (np.zeros((0, 3)), "no records"),
    "no columns": (np.zeros((3, 0)), "no records"),
    "empty list": ([], "no records"),
    "ragged": ([[1, 2], [3]], "one length"),
    "masked": (np.ma.masked_invalid([1.0, np.nan]), "masked"),
}


@pytest.mark.parametrize("name", ARRAY_ERRORS)
def test_array_errors(name):
    given, message = ARRAY_ERRORS[name]
    with pytest.raises(InvalidInput, match=message):
        load(given)


def test_file_errors(tmp_path):
    with pytest.raises(InvalidInput, match=r"no file .*absent\.csv"):
        load(tmp_path / "absent.csv")
    with pytest.raises(InvalidInput, match=r"must end in \.csv, \.npy, \.parquet"):
        load(tmp_path / "data.xlsx")
    with pytest.raises(InvalidInput, match="must end in"):
        load("records")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InvalidInput, match="no file"):
        load(tmp_path / "folder.csv")


def test_npy_errors(tmp_path):
    path = tmp_path / "t.npy"
    np.save(path, np.array([[1.0, 2.0], [np.nan, 4.0]]))
    with pytest.raises(InvalidInput, match=r"t\.npy, row 1, column 0: missing"):
        load(path)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"t\.npy is not a plain \.npy file.*pickles"):
        load(path)
    np.save(path, np.array([1j]))
    with pytest.raises(InvalidInput, match=r"t\.npy must be .*complex"):
        load(path)
    for content in (b"", b"not an array", b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        with pytest.raises(InvalidInput, match=r"t\.npy is not a plain"):
            load(path)
    with open(path, "wb") as file:
        np.savez(file, a=np.ones(2))
    with pytest.raises(InvalidInput, match=r"t\.npy"):
        load(path)


def test_parquet_errors(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": [1.0, None], "b": ["SECRET", "t"]}, index=["x", "y"]).to_parquet(path)
    with pytest.raises(InvalidInput, match=r"t\.parquet, row 1, column 0: missing"):
        load(path, columns=["a"])
    with pytest.raises(InvalidInput, match=r"t\.parquet, row 0, column 1: not a real number") as caught:
        load(path, columns=["b"])
    assert "SECRET" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"t\.parquet has no column 'c'; it has 2 columns, .* position 0 to 1"):
        load(path, columns=["c"])
    path.write_bytes(b"not parquet")
    with pytest.raises(InvalidInput, match=r"t\.parquet is not a Parquet file"):
        load(path)


@pytest.mark.parametrize(
    "columns", [["c"], [2], [-1], [True], [None], [1.5], [[0]], [], ["a", "a"], [0, 0], 5, 1.5, "ab"]
)
def test_columns_that_are_refused(columns):
    for source in (pd.DataFrame(TABLE, columns=["a", "b"]), TABLE):
        with pytest.raises(InvalidInput, match="columns"):
            load(source, columns=columns)

"""Queries on partitions against the same queries on one machine, without a cluster."""

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from matrixdp import distributed, queries
from matrixdp.distributed import partitions
from matrixdp.errors import InvalidInput

RECORDS = np.random.default_rng(1).normal(size=(1024, 5))
FRAME = pd.DataFrame(RECORDS, columns=list("abcde"))
CASES = [
    ("sum", {"norm": 1.0}),
    ("sum", {"low": -1.0, "high": [1.0, 2.0, 0.5, 1.0, 1.0], "relation": "replace"}),
    ("mean", {"adjacency": "replace", "norm": 1.5}),
    ("mean", {"low": -1.0, "high": 1.0, "relation": "add/remove", "size": 1000}),
    ("second_moment", {"norm": 1.0, "columns": [3, 0]}),
    ("second_moment", {"norm": 1.0, "average": True, "relation": "replace"}),
    ("covariance", {"adjacency": "replace", "norm": 1.0, "center": [0.1, 0.0, 0.0, 0.0, 0.2]}),
    ("covariance", {"adjacency": "replace", "norm": 1.5}),
    ("covariance", {"norm": 1.0, "relation": "add/remove", "size": 1000, "columns": [4, 1]}),
    ("histogram", {"edges": np.linspace(-2, 2, 9), "columns": [2]}),
    ("histogram", {"edges": [[-1, 0, 1], [-2, 0, 2]], "columns": [1, 4], "relation": "replace"}),
    ("identity", {"norm": 1.0}),
    ("identity", {"low": -1.0, "high": 1.0, "columns": [1, 2]}),
]


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("people")
    for number in range(2):
        write(path / f"part-{number}.parquet", FRAME[512 * number : 512 * (number + 1)], 256)
    return path


def write(path, frame, rows):
    pq.write_table(pa.Table.from_pandas(frame), path, row_group_size=rows)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("kind", ["array", "frame", "folder"])
def test_the_answer_is_that_of_one_machine(name, options, kind, folder):
    records = {
        "array": lambda: da.from_array(RECORDS, chunks=(256, 3)),
        "frame": lambda: dd.from_pandas(FRAME, npartitions=4),
        "folder": lambda: folder,
    }[kind]()
    got = getattr(distributed, name)(records, **options)
    want = getattr(queries, name)(RECORDS, **options)
    assert np.array_equal(np.asarray(got.value), want.value)  # sums are exact: not one bit differs
    assert repr(got) == repr(want)
    assert str(got.sensitivity) == str(want.sensitivity)
    assert got.sensitivity.frobenius_radius(want.value.shape) == want.sensitivity.frobenius_radius(want.value.shape)


@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "identity"])
@pytest.mark.parametrize("chunks", [(1024,), (1,) * 24 + (1000,), (1, 700, 0, 300, 23), (513, 511)])
def test_the_partitions_do_not_matter_to_the_last_bit(name, options, chunks):
    got = getattr(distributed, name)(da.from_array(RECORDS, chunks=(chunks, (5,))), **options)
    assert np.array_equal(got.value, getattr(queries, name)(RECORDS[::-1], **options).value)


def test_records_in_columns():
    turned = da.from_array(RECORDS.T, chunks=(2, 300))
    got = distributed.identity(turned, norm=1.0, records_are="columns")
    want = queries.identity(RECORDS.T, norm=1.0, records_are="columns")
    assert np.array_equal(got.value.compute(), want.value)
    assert repr(got) == repr(want)


def test_a_row_group_larger_than_a_batch_is_read_in_pieces(folder, monkeypatch):
    monkeypatch.setattr(partitions, "BATCH_ENTRIES", 64 * 5)
    want = queries.sum(RECORDS, norm=1.0).value
    assert np.array_equal(distributed.sum(folder, norm=1.0).value, want)
    assert np.array_equal(
        distributed.identity(folder, norm=1.0).value.compute(), queries.identity(RECORDS, norm=1.0).value
    )


def test_columns_of_several_types_are_read_alike(tmp_path):
    frame = FRAME.astype({"a": np.float32, "b": np.float16, "c": np.int16, "d": bool})
    for columns in (["a", "b", "e"], ["a", "c", "d", "e"]):  # floats alone go another way
        write(tmp_path / "a.parquet", frame, 300)
        want = queries.identity(frame, norm=1.0, columns=columns).value
        assert np.array_equal(distributed.identity(tmp_path, norm=1.0, columns=columns).value.compute(), want)
    table = pa.table({"a": pa.array([1.0, 2.0, None, 4.0]), "b": pa.array([1.0, 2.0, 3.0, 4.0])})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match=r"row group 0: records, row 2, column 0: missing"):
        distributed.sum(tmp_path, norm=1.0)


def test_a_covariance_about_the_mean_keeps_its_digits():
    """Records far from 0 and close together, where sum x x^T - s s^T/n loses most."""
    norm, records = 200.0, 60.0 + RECORDS / 1000
    got = distributed.covariance(da.from_array(records, chunks=(100, 5)), adjacency="replace", norm=norm)
    want = queries.covariance(records, adjacency="replace", norm=norm)
    assert np.array_equal(got.value, want.value)
    assert np.abs(got.value - np.cov(RECORDS.T, bias=True) / 1e6).max() <= 1e-9
    with pytest.raises(InvalidInput, match="at least 2 records"):
        distributed.covariance(da.ones((1, 2)), adjacency="replace", norm=1.0)


def test_columns_that_are_not_chosen_may_hold_anything(tmp_path):
    write(tmp_path / "a.parquet", FRAME.assign(name="x", hole=np.nan), 300)
    got = distributed.sum(tmp_path, norm=1.0, columns=["a", "c"])
    assert np.array_equal(got.value, queries.sum(FRAME, norm=1.0, columns=["a", "c"]).value)


def test_files_may_order_their_columns_differently(tmp_path):
    write(tmp_path / "a.parquet", FRAME[:512], 512)
    write(tmp_path / "b.parquet", FRAME[512:][list("edcba")], 512)
    want = queries.sum(RECORDS, norm=1.0).value
    assert np.array_equal(distributed.sum(tmp_path, norm=1.0).value, want)


def test_empty_partitions_count_for_nothing(folder):
    frame = dd.from_pandas(FRAME, npartitions=4)
    kept = frame[frame.a > 2.0]  # some partitions may be left with no record
    want = queries.mean(FRAME[FRAME.a > 2.0], adjacency="replace", norm=1.0)
    assert np.array_equal(distributed.mean(kept, adjacency="replace", norm=1.0).value, want.value)
    with pytest.raises(InvalidInput, match="every partition is empty"):
        distributed.sum(frame[frame.a > 100], norm=1.0)
    with pytest.raises(InvalidInput, match="every partition is empty"):
        distributed.identity(frame[frame.a > 100], norm=1.0)


@pytest.mark.parametrize("query", ["sum", "identity"])
@pytest.mark.parametrize(("bad", "word"), [(np.nan, "missing"), (np.inf, "infinite")])
def test_a_row_group_with_a_hole_is_named(tmp_path, query, bad, word, monkeypatch):
    monkeypatch.setattr(partitions, "BATCH_ENTRIES", 64 * 5)
    write(tmp_path / "a.parquet", FRAME[:512], 256)
    broken = FRAME[512:].reset_index(drop=True)
    broken.loc[256 + 77, "d"] = bad
    write(tmp_path / "b.parquet", broken, 256)
    with pytest.raises(InvalidInput, match=rf"b\.parquet, row group 1: records, row 77, column 3: {word}"):
        np.asarray(getattr(distributed, query)(tmp_path, norm=1.0).value)


def test_a_file_with_other_columns_is_named(tmp_path):
    write(tmp_path / "a.parquet", FRAME[:512], 256)
    write(tmp_path / "b.parquet", FRAME[512:].drop(columns="c"), 256)
    with pytest.raises(InvalidInput, match=r"b\.parquet, row group 0: its 4 columns .*missing: positions \[2\] "):
        distributed.sum(tmp_path, norm=1.0)


def test_a_file_that_changes_after_the_look_at_its_footer_is_named(tmp_path):
    """The same noise on other values would show their difference."""
    for change in (FRAME.drop(columns="c"), FRAME[:100], FRAME[::-1]):
        write(tmp_path / "a.parquet", FRAME, 1024)
        value = distributed.identity(tmp_path, norm=1.0).value
        write(tmp_path / "a.parquet", change, 1024)
        with pytest.raises(InvalidInput, match=r"a\.parquet, row group 0: the file was changed"):
            value.compute()


def test_blocks_and_partitions_are_named():
    holed = RECORDS.copy()
    holed[600, 1] = np.nan
    with pytest.raises(InvalidInput, match=r"block 2: records, row 88, column 1"):
        distributed.sum(da.from_array(holed, chunks=(256, 5)), norm=1.0)
    with pytest.raises(InvalidInput, match=r"partition 2: records, row 88, column 1"):
        distributed.sum(dd.from_pandas(pd.DataFrame(holed, columns=list("abcde")), npartitions=4), norm=1.0)
    ragged = [da.from_delayed(dask.delayed(np.ones)((4, width)), (4, 5), float) for width in (5, 6)]
    with pytest.raises(InvalidInput, match=r"block 1: its 6 columns are not the 5"):
        distributed.sum(da.concatenate(ragged), norm=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distributed.sum(RECORDS, norm=1.0), "must be a Dask array"),
        (lambda: distributed.sum(da.zeros((2, 2, 2)), norm=1.0), "got 3 dimensions"),
        (lambda: distributed.sum("nowhere", norm=1.0), "no file or folder"),
        (lambda: distributed.sum(da.zeros((9, 2)), columns=[2], norm=1.0), "no column 2"),
        (lambda: distributed.sum(da.zeros((9, 2))), "either norm"),
        (lambda: distributed.mean(da.zeros((9, 2)), norm=1.0, relation="add/remove"), "size is missing"),
        (lambda: distributed.second_moment(da.zeros((9, 2)), norm=1.0, size=5), "only when average=True"),
        (lambda: distributed.covariance(da.zeros((9, 2)), norm=1.0, relation="add/remove"), "size is missing"),
        (lambda: distributed.covariance(da.zeros((9, 2)), adjacency="replace", norm=-1.0), "norm"),
        (lambda: distributed.histogram(da.zeros((9, 3)), edges=[0, 1]), "1 or 2 dimensions"),
        (lambda: distributed.identity(da.zeros((9, 2)), norm=1.0, relation="add/remove"), "replace"),
        (lambda: distributed.identity(dd.from_pandas(FRAME), norm=1.0, records_are="columns"), "for Dask arrays"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(call, message):
    def unread(*_):
        raise AssertionError("something was computed")

    with dask.config.set(scheduler=unread), pytest.raises(InvalidInput, match=message):
        call()


def test_folders_inside_the_folder_and_strange_files_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"holds no files that end in \.parquet"):
        distributed.sum(tmp_path, norm=1.0)
    (tmp_path / "year=2020").mkdir()
    write(tmp_path / "year=2020" / "a.parquet", FRAME, 1024)
    with pytest.raises(InvalidInput, match="may be columns"):
        distributed.sum(tmp_path, norm=1.0)
    text = tmp_path / "year=2020" / "b.parquet"
    text.write_text("no table")
    with pytest.raises(InvalidInput, match="not a Parquet file"):
        distributed.sum(text, norm=1.0)

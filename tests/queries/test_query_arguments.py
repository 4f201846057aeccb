"""What queries refuse, why, and that an answer does not show its value."""

from __future__ import annotations

import io
import pprint

import numpy as np
import pytest
from rich.console import Console

from matrixdp import queries
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import RankOne

X = np.arange(12.0).reshape(6, 2)


def test_an_answer_hides_its_value():
    answer = queries.Answer(np.array([[123456.75]]), RankOne(2.0))
    screen = io.StringIO()
    Console(file=screen).print(answer)
    shown = [repr(answer), str(answer), f"{answer}", pprint.pformat(answer), screen.getvalue(), repr([answer])]
    for text in shown:
        assert "12345" not in text
        assert "(1, 1)" in text
        assert "norm at most 2" in text
        assert "add/remove" in text
    value, sensitivity = answer
    assert value is answer.value
    assert sensitivity is answer.sensitivity


REFUSED = {
    "identity add/remove": (lambda: queries.identity(X, norm=1.0, relation="add/remove"), "changes the shape"),
    "identity records_are": (lambda: queries.identity(X, norm=1.0, records_are="cells"), "records_are"),
    "identity chosen records": (lambda: queries.identity(X, norm=1.0, records_are="columns", columns=[0]), "columns"),
    "sum relation": (lambda: queries.sum(X, norm=1.0, relation="swap"), "adjacency"),
    "mean without size": (lambda: queries.mean(X, norm=1.0, relation="add/remove"), "size is missing.*private"),
    "mean size 0": (lambda: queries.mean(X, adjacency="replace", norm=1.0, size=0), "size"),
    "mean size 2.5": (lambda: queries.mean(X, adjacency="replace", norm=1.0, size=2.5), "size"),
    "mean size NaN": (lambda: queries.mean(X, adjacency="replace", norm=1.0, size=np.nan), "size"),
    "moment without size": (lambda: queries.second_moment(X, norm=1.0, average=True), "size is missing.*private"),
    "moment size unused": (lambda: queries.second_moment(X, norm=1.0, size=5), "average=True"),
    "moment norm": (lambda: queries.second_moment(X, norm=np.nan), "norm"),
    "moment relation": (lambda: queries.second_moment(X, norm=1.0, relation=None), "adjacency"),
    "covariance without size": (lambda: queries.covariance(X, norm=1.0, relation="add/remove"), "size is missing"),
    "covariance of one": (lambda: queries.covariance(X[:1], adjacency="replace", norm=1.0), "2 records"),
    "covariance center shape": (
        lambda: queries.covariance(X, adjacency="replace", norm=1.0, center=[1.0, 2.0, 3.0]),
        "center",
    ),
    "covariance center NaN": (
        lambda: queries.covariance(X, adjacency="replace", norm=1.0, center=[np.nan, 0.0]),
        "center",
    ),
    "covariance center huge": (
        lambda: queries.covariance(X, adjacency="replace", norm=1.0, center=[1e200, 0.0]),
        "center",
    ),
    "edges number": (lambda: queries.histogram(X[:, 0], edges=10), "from the data"),
    "edges rule": (lambda: queries.histogram(X[:, 0], edges="auto"), "from the data"),
    "edges none": (lambda: queries.histogram(X[:, 0], edges=None), "from the data"),
    "edges numbers": (lambda: queries.histogram(X, edges=(10, 10)), "from the data"),
    "edges falling": (lambda: queries.histogram(X[:, 0], edges=[2, 1, 0]), "increasing"),
    "edges equal": (lambda: queries.histogram(X[:, 0], edges=[0, 1, 1]), "increasing"),
    "edges one": (lambda: queries.histogram(X[:, 0], edges=[0]), "increasing"),
    "edges empty": (lambda: queries.histogram(X[:, 0], edges=[]), "empty|dtype"),
    "edges NaN": (lambda: queries.histogram(X[:, 0], edges=[0, np.nan, 1]), "finite"),
    "edges infinite": (lambda: queries.histogram(X[:, 0], edges=[0, np.inf]), "finite"),
    "edges text": (lambda: queries.histogram(X[:, 0], edges=["a", "b"]), "edges"),
    "edges pair for one": (lambda: queries.histogram(X[:, 0], edges=([0, 1], [0, 1, 2])), "one column"),
    "edges one for pair": (lambda: queries.histogram(X, edges=[0, 1, 2]), "pair"),
    "edges word for pair": (lambda: queries.histogram(X, edges="ab"), "pair"),
    "edges number for pair": (lambda: queries.histogram(X, edges=4), "pair"),
    "edges second of pair": (lambda: queries.histogram(X, edges=([0, 1], [1, 0])), r"edges\[1\]"),
    "three columns": (lambda: queries.histogram(np.ones((3, 3)), edges=[0, 1]), "choose one or two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, reason = REFUSED[name]
    with pytest.raises(InvalidInput, match=reason):
        call()


RECORDS = [np.array([[1.0, np.nan]]), np.array([[np.inf, 1.0]]), np.zeros((0, 2)), np.array([["a", "b"]]), None]
EVERY = {
    "identity": lambda records: queries.identity(records, norm=1.0),
    "sum": lambda records: queries.sum(records, low=0, high=1),
    "mean": lambda records: queries.mean(records, adjacency="replace", norm=1.0),
    "second_moment": lambda records: queries.second_moment(records, norm=1.0),
    "covariance": lambda records: queries.covariance(records, adjacency="replace", norm=1.0),
    "sparse_sum": lambda records: queries.sparse_sum(records, radius=2.0),
    "moment_entries": lambda records: queries.moment_entries(records, norm=1.0),
    "histogram": lambda records: queries.histogram(records, edges=([0, 1], [0, 1])),
}


@pytest.mark.parametrize("bad", RECORDS, ids=repr)
@pytest.mark.parametrize("name", EVERY)
def test_bad_records_are_refused_not_clipped(name, bad):
    with pytest.raises(InvalidInput, match="records"):
        EVERY[name](bad)


def test_histogram_counts_as_numpy_does():
    rng = np.random.default_rng(0)
    edges = [np.array([-1.0, -0.25, 0.5, 2.0]), np.array([0.0, 1.0, 1.5])]
    records = np.vstack(
        [rng.standard_normal((400, 2)), [[2.0, 1.5], [-1.0, 0.0], [0.5, 1.0], [2.0, 9.0], [1e308, -1e308]]]
    )
    for column, border in enumerate(edges):
        counts = queries.histogram(records, columns=[column], edges=border).value
        np.testing.assert_array_equal(counts, np.histogram(records[:, column], border)[0])
    pair = queries.histogram(records, edges=edges).value
    np.testing.assert_array_equal(pair, np.histogram2d(*records.T, bins=edges)[0])
    assert pair.shape == (3, 2)
    assert pair.dtype == np.float64
    assert queries.histogram([5.0, -5.0], edges=[0, 1]).value == [0.0]  # outside the grid: not counted


def test_every_query_reads_files_and_columns(tmp_path):
    path = tmp_path / "records.csv"
    path.write_text("a,b,name\n1,2,Ann\n3,4,Bob\n")
    assert queries.sum(path, low=0, high=10, columns=["b"]).value == pytest.approx([6.0])
    assert queries.mean(path, adjacency="replace", low=0, high=10, columns=[0, 1]).value == pytest.approx([2.0, 3.0])
    assert queries.second_moment(path, norm=99.0, columns="a").value == pytest.approx(np.array([[10.0]]))
    assert queries.covariance(path, adjacency="replace", norm=99.0, columns="a").value == pytest.approx(
        np.array([[1.0]])
    )
    assert queries.histogram(path, columns="a", edges=[0, 2, 4]).value == pytest.approx([1, 1])
    assert queries.identity(path, low=0, high=10, columns=["a"]).value == pytest.approx(np.array([[1.0], [3.0]]))

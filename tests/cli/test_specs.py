"""The short texts of the command line."""

import numpy as np
import pytest

from matrixdp.cli import specs
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices


@pytest.mark.parametrize(
    ("text", "shape"), [("89x89", (89, 89)), ("6X248", (6, 248)), ("100", (100,)), (" 2 x 3 ", (2, 3))]
)
def test_shape(text, shape):
    assert specs.shape(text) == shape


@pytest.mark.parametrize("text", ["", "x", "3x", "2x3x", "-1x2", "2.5x2", "a", "nan", "1e3x2", "²"])
def test_bad_shape(text):
    with pytest.raises(InvalidInput, match="shape must look like"):
        specs.shape(text)


@pytest.mark.parametrize(
    ("text", "kind", "shape", "radius", "relation"),
    [
        ("frobenius:2.449", Frobenius, (6, 248), 2.449, "add/remove"),
        ("entrywise:1", Entrywise, (3, 3), 3.0, "add/remove"),
        ("onecolumn:2", OneColumn, (3, 4), 2.0, "replace"),
        ("onecolumn:0,1", OneColumn, (9, 4), 3.0, "replace"),
        ("onerow:-1,1", OneRow, (3, 4), 4.0, "replace"),
        ("counts:1", Counts, (5, 5), 1.0, "add/remove"),
        ("counts:4,1.5", Counts, (5, 5), 3.0, "add/remove"),
        ("l1:2.5", L1, (5, 5), 2.5, "add/remove"),
        ("l1:5,4", L1, (5, 5), 17**0.5, "add/remove"),
        ("l1:5,3,1", L1, (5, 5), 13**0.5, "add/remove"),
        ("rankone:2", RankOne, (5, 5), 4.0, "add/remove"),
    ],
)
def test_sensitivity(text, kind, shape, radius, relation):
    found = specs.sensitivity(text)
    assert type(found) is kind
    assert found.frobenius_radius(shape) == pytest.approx(radius)
    assert found.relation == relation
    box = kind in (OneColumn, OneRow) and "," in text
    for asked in ("replace",) if box else ("add/remove", "replace"):
        assert specs.sensitivity(text, asked).relation == asked


@pytest.mark.parametrize("changes", [np.eye(3), np.arange(12.0).reshape(2, 3, 2)])
def test_vertices(tmp_path, changes):
    path = tmp_path / "changes.npy"
    np.save(path, changes)
    found = specs.sensitivity(f"vertices:{path}", "replace")
    assert isinstance(found, Vertices)
    assert found.relation == "replace"
    np.testing.assert_array_equal(np.stack(found.differences), changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count:1", "one of frobenius, entrywise, onecolumn, onerow, counts, l1, rankone, vertices"),
        ("", "one of frobenius"),
        ("1", "one of frobenius"),
        ("frobenius", "is written frobenius:RADIUS"),
        ("frobenius:", "is written frobenius:RADIUS"),
        ("frobenius:a", "numbers separated by commas"),
        ("frobenius:1,2", "is written frobenius:RADIUS"),
        ("onecolumn:0,1,2", "is written onecolumn:NORM or LOW,HIGH"),
        ("onecolumn:1,0", "high must be above low"),
        ("counts:1,2,3", "is written counts:CELLS or CELLS,BOUND"),
        ("counts:1.5", "whole number"),
        ("counts:0", "whole number"),
        ("rankone:-1", "above 0"),
        ("rankone:nan", "finite"),
        ("rankone:inf", "finite"),
        ("vertices:", "vertices"),
        ("vertices:nowhere.npy", "there is no file 'nowhere.npy'"),
    ],
)
def test_bad_sensitivity(text, message):
    with pytest.raises(InvalidInput, match=message):
        specs.sensitivity(text)


def test_bad_relation():
    with pytest.raises(InvalidInput, match="adjacency must be one of add/remove, replace"):
        specs.sensitivity("counts:1", "swap")


def test_vertices_of_the_wrong_form(tmp_path):
    flat, text, pickled, several = (tmp_path / name for name in ("flat.npy", "text.npy", "pickled.npy", "several.npz"))
    np.save(flat, np.ones(3))
    text.write_text("not an array")
    np.save(pickled, np.array([object()]), allow_pickle=True)
    np.savez(several, np.eye(2), np.eye(2))
    for path, message in ((flat, "k x shape"), (text, "can be read"), (pickled, "can be read"), (several, "several")):
        with pytest.raises(InvalidInput, match=message):
            specs.sensitivity(f"vertices:{path}")


def test_options(tmp_path):
    path = tmp_path / "weights.npy"
    np.save(path, np.eye(2))
    found = specs.options(
        [
            "releases=3",
            "share=.5",
            "small=1e-3",
            "exact=true",
            "radius=published",
            "row-utility=1,2,3",
            f"weights={path}",
        ]
    )
    arrays = {name: found.pop(name) for name in ("row_utility", "weights")}
    assert found == {"releases": 3, "share": 0.5, "small": 1e-3, "exact": True, "radius": "published"}
    assert type(found["releases"]) is int
    np.testing.assert_array_equal(arrays["row_utility"], [1, 2, 3])
    np.testing.assert_array_equal(arrays["weights"], np.eye(2))


@pytest.mark.parametrize("pairs", [["releases"], ["=3"], ["a b=3"], ["3=a"], ["a=1", "a=2"]])
def test_bad_options(pairs):
    with pytest.raises(InvalidInput, match="option"):
        specs.options(pairs)


def test_edges():
    np.testing.assert_allclose(specs.edges("0:10:5"), [0, 2, 4, 6, 8, 10])
    np.testing.assert_array_equal(specs.edges("0,1,5.5"), [0, 1, 5.5])
    np.testing.assert_allclose(specs.edges("-1:1:2"), [-1, 0, 1])


@pytest.mark.parametrize("text", ["0:10", "0:10:0", "0:10:-2", "0:10:2.5", "0:nan:3", "a:b:3", "", "1,,2", "0:10:3:4"])
def test_bad_edges(text):
    with pytest.raises(InvalidInput, match="edges"):
        specs.edges(text)


def test_columns_and_bounds():
    assert specs.columns("age, income,3") == ["age", "income", 3]
    assert specs.bounds("low", None) is None
    assert specs.bounds("low", "-1") == -1
    np.testing.assert_array_equal(specs.bounds("low", "0,1"), [0, 1])

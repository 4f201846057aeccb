"""Queries on records with ids: the set is that of a unit, the certificate and the ledger say so."""

import numpy as np
import pytest

from matrixdp import L1, REPLACE, Budget, Certificate, Counts, Entrywise, Frobenius, Ledger, RankOne, queries, release
from matrixdp.errors import InvalidInput
from matrixdp.queries.units import several

BUDGET = Budget(1.0, 1e-6)
RECORDS = np.random.default_rng(0).random((60, 2))
IDS = np.repeat(np.arange(12), 5)
ASKED = {
    "sum": (queries.sum, {"norm": 1.0}),
    "sum in a box": (queries.sum, {"low": -1.0, "high": 2.0}),
    "mean": (queries.mean, {"norm": 1.0, "size": 50}),
    "second moment": (queries.second_moment, {"norm": 1.0}),
    "covariance": (queries.covariance, {"norm": 1.0, "size": 50, "center": 0.0}),
    "histogram": (queries.histogram, {"edges": [0.0, 0.5, 1.0], "columns": [0]}),
    "sparse sum": (queries.sparse_sum, {"radius": 1.0, "step": 0.25}),
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_query_by_unit_is_certified_for_units(asked, tmp_path):
    function, options = ASKED[asked]
    answer = queries.by_unit(function, RECORDS, IDS, 3, **options)
    one, shape = function(RECORDS, **options).sensitivity, answer.value.shape
    assert answer.sensitivity.frobenius_radius(shape) == pytest.approx(3 * one.frobenius_radius(shape))
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-5))
    out = release(*answer, BUDGET, query=answer.query, ledger=ledger)
    assert Certificate.from_json(out.certificate.to_json()).verify()
    assert "all rows of one unit" in str(out.certificate)
    assert [entry.unit for entry in ledger.history()] == ["unit"]


@pytest.mark.parametrize("asked", [*ASKED, "covariance about the mean"])
def test_without_any_id_the_answer_is_zero_and_no_error(asked):
    """Whether there is an id is private: an error would show it."""
    function, options = ASKED.get(asked, (queries.covariance, {"norm": 1.0, "size": 50}))
    some = queries.by_unit(function, RECORDS, IDS, 3, **options)
    none = queries.by_unit(function, RECORDS, [None] * 60, 3, **options)
    assert none.value.shape == some.value.shape
    assert not none.value.any()
    assert (str(none.sensitivity), str(none.query)) == (str(some.sensitivity), str(some.query))


@pytest.mark.parametrize("ids", [[None] * 60, [1] + [None] * 59, IDS], ids=["none", "one", "many"])
def test_other_adjacencies_are_refused_whoever_has_an_id(ids):
    for function in (queries.covariance, queries.sum):
        with pytest.raises(InvalidInput, match="adjacency must be add/remove for units"):
            queries.by_unit(function, RECORDS, ids, 1, norm=1.0, adjacency=REPLACE)
    with pytest.raises(InvalidInput, match="adjacency must be add/remove for units"):
        queries.by_unit(queries.identity, RECORDS, ids, 1, norm=1.0)


def test_a_certificate_with_too_small_a_set_does_not_verify():
    answer = queries.by_unit(queries.sum, RECORDS, IDS, 3, norm=1.0)
    wrong = release(answer.value, Frobenius(2.0), BUDGET, query=answer.query)
    assert not wrong.certificate.verify()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("one", [Frobenius(0.7), Entrywise([[0.3, 1.0]]), Counts(1), Counts(2), L1(0.5, 0.3)])
def test_sums_of_members_lie_in_the_set_of_several(one, seed):
    rng, rows, shape = np.random.default_rng(seed), 3, (1, 2)
    members = []
    for _ in range(rows):
        drawn = rng.choice([-1.0, 0.0, 1.0], size=shape) if isinstance(one, Counts) else rng.normal(size=shape)
        while not one.contains(drawn):
            drawn = drawn / 2 if not isinstance(one, Counts) else np.array([[1.0, 0.0]])
        members.append(drawn)
    found = several(one, rows)
    assert found.contains(np.sum(members, axis=0))
    assert not several(one, rows - 1).contains(rows * _longest(one, shape))


def _longest(one, shape):
    """A member that no smaller multiple of the set holds."""
    sizes = {Frobenius: lambda: one.radius, Entrywise: lambda: 0.3}
    return np.array([[1.0, 0.0]]) * sizes.get(type(one), lambda: one.largest_entry(shape))()


def test_second_moments_of_a_unit():
    assert several(RankOne(2.0), 4).radius == pytest.approx(4.0)
    assert several(RankOne(2.0), 4).radius >= 4.0


def test_other_adjacencies_and_sets_are_refused():
    with pytest.raises(InvalidInput, match="add/remove"):
        queries.by_unit(queries.sum, RECORDS, IDS, 2, norm=1.0, adjacency=REPLACE)
    with pytest.raises(InvalidInput, match="not known"):
        several(Counts(1, 0.5), 2)
    with pytest.raises(InvalidInput, match="one entry per record"):
        queries.by_unit(queries.sum, RECORDS, IDS[1:], 2, norm=1.0)


def test_chosen_rows_are_places_for_a_data_set():
    rows = queries.chosen_rows([*IDS.tolist(), None], 2)
    assert len(rows) == 24
    assert rows.max() < 60
    assert np.all(np.bincount(IDS[rows]) == 2)


def test_ids_are_a_sequence_by_place():
    pandas = pytest.importorskip("pandas")
    shuffled = pandas.Series(IDS, index=range(60)[::-1])
    assert sorted(IDS[queries.chosen_rows(shuffled, 1)]) == list(range(12))
    for ids in (dict(enumerate(IDS)), set(range(60)), pandas.DataFrame({"id": IDS}), IDS[:, None], "x" * 60, 60):
        with pytest.raises(InvalidInput, match="one id per record, in the same order"):
            queries.bounded(RECORDS, ids, 1)

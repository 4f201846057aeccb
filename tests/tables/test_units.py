"""The unit of privacy: at most k rows of each count, drawn in secret; the set covers what that changes."""

import itertools
import json
import math

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hospital import domain, hospital
from matrixdp import ADD_REMOVE, L1, REPLACE, Budget, Certificate, Ledger, calibrate, certify
from matrixdp.errors import InvalidInput
from matrixdp.queries.units import NO_UNIT, Numbering, Selection
from matrixdp.tables import Categorical, Domain, Table, bounded

LETTERS = Domain({"letter": Categorical(["a", "b", "c"], unexpected="out", missing="out")})


def table(rows, contributions, **options):
    frame = pandas.DataFrame(rows, columns=["id", "letter"], dtype=object)
    return Table(frame, LETTERS, unit="id", contributions=contributions, **options)


@given(
    st.lists(st.tuples(st.sampled_from(["x", "y", "z", None, " "]), st.sampled_from("abcd")), max_size=40),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_at_most_so_many_rows_of_a_unit_count(rows, contributions):
    value = table(rows, contributions).counts("letter").value
    counted = [(unit, letter) for unit, letter in rows if unit not in (None, " ") and letter in "abc"]
    wanted = sum(min(contributions, sum(unit == other for other, _ in counted)) for unit in "xyz")
    assert value.sum() == wanted
    for letter, count in zip("abc", value, strict=True):
        assert count <= sum(found == letter for _, found in counted)


@pytest.mark.parametrize("adjacency", [ADD_REMOVE, REPLACE])
def test_the_set_has_every_change_that_a_unit_can_make(adjacency):
    """Every choice of up to three rows of one unit in three cells, against none or against every other choice."""
    contributions = 3
    changes = [
        np.bincount(cells, minlength=3)
        for size in range(contributions + 1)
        for cells in itertools.combinations_with_replacement(range(3), size)
    ]
    changed = table([("x", "a")], contributions, adjacency=adjacency).counts("letter").sensitivity
    others = changes if adjacency == REPLACE else [np.zeros(3)]
    differences = [(one - other).astype(float) for one in changes for other in others]
    assert all(changed.contains(difference) for difference in differences if np.any(difference))
    largest = max(np.linalg.norm(difference) for difference in differences)
    assert largest == pytest.approx(changed.frobenius_radius((3,)), rel=1e-12)
    assert max(np.count_nonzero(difference) for difference in differences) <= changed.changed_entries((3,))
    assert not changed.contains([4.0, 0.0, 0.0])


def test_which_rows_count_is_drawn_evenly():
    """Two of five rows, 3000 times: a chi-square of the ten pairs above 51.2 has a probability of 6e-8."""
    seen = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    units = np.zeros(5, dtype=np.int64)
    for _ in range(3000):
        selection = Selection(2)
        selection.add(units, np.arange(5))
        seen[tuple(sorted(selection.rows().tolist()))] += 1
    expected = 3000 / len(seen)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < 51.2


def test_rows_that_cannot_count_are_dropped_on_the_way(monkeypatch):
    monkeypatch.setattr("matrixdp.queries.units.KEPT", 50)
    selection, rng = Selection(2), np.random.default_rng(0)
    for _ in range(40):
        units = rng.integers(0, 9, size=17)
        selection.add(units, units * 10)
        assert selection._rows <= 50 + 17
    found = selection.rows()
    assert sorted(found.tolist()) == sorted([10 * unit for unit in range(9)] * 2)


def test_parts_do_not_share_their_draws():
    """Each of two parts decides with fresh ranks: were they equal, the first row of the first part would always win."""
    wins = 0
    for _ in range(200):
        selection = Selection(1)
        selection.add(np.zeros(1, dtype=np.int64), np.array([0]))
        selection.add(np.zeros(1, dtype=np.int64), np.array([1]))
        wins += int(selection.rows()[0])
    assert 60 < wins < 140  # a false alarm has a probability of 2e-8


def test_ids_are_texts_without_space_around_them():
    ids = ["7", 7, 7.0, " 7 ", np.int64(7), b"7", "07", None, "", np.nan, [7], "é", "e\u0301"]
    numbers = Numbering().numbers(ids)
    assert numbers.tolist() == [0, 0, 0, 0, 0, 0, 1, *[NO_UNIT] * 4, 2, 2]


def test_large_whole_numbers_are_different_ids():
    frame = pandas.DataFrame({"id": pandas.array([2**60, 2**60 + 1, None], dtype="Int64"), "letter": ["a"] * 3})
    assert Table(frame, LETTERS, unit="id", contributions=1).counts("letter").value.tolist() == [2, 0, 0]


def test_bounded_keeps_whole_records():
    records, ids = np.arange(20.0).reshape(10, 2), ["a"] * 6 + ["b"] * 3 + [None]
    found = bounded(records, ids, 2)
    assert found.shape == (4, 2)
    assert {tuple(row) for row in found} <= {tuple(row) for row in records[:9]}
    assert bounded(records[:1], [None], 1).shape == (0, 2)
    for bad in (0, 1.5, True, 2**21):
        with pytest.raises(InvalidInput, match="contributions"):
            bounded(records, ids, bad)
    with pytest.raises(InvalidInput, match="ids"):
        bounded(records, ids[1:], 1)


# --- the set ---


def test_no_spread_change_is_hidden_worse_by_discrete_noise():
    """The profile of every way to divide three steps among three cells, by summing over all outcomes."""
    law = calibrate("laplace", shape=(3,), sensitivity=L1(3, step=1), budget=Budget(1.0, 0.01))
    places = np.arange(-60, 61)
    masses = np.exp(-np.abs(places) / law.scale_in_steps)
    masses /= masses.sum()

    def joint(shift):
        parts = [np.interp(places - by, places, masses, left=0.0, right=0.0) for by in shift]
        return parts[0][:, None, None] * parts[1][None, :, None] * parts[2][None, None, :]

    stated = certify(law, L1(3, step=1)).delta(1.0)
    for shift in ((3, 0, 0), (2, 1, 0), (1, 1, 1), (-1, 2, 0), (-1, -1, 1)):
        delta = np.maximum(joint(shift) - math.e * joint((0, 0, 0)), 0.0).sum()
        assert delta <= stated * (1 + 1e-6) + 1e-12, shift


# --- certificates and ledgers ---


def test_certificate_and_ledger_speak_of_units(tmp_path):
    answer = Table(hospital(50), domain(), unit="patient_id", contributions=3).counts("region")
    ledger = Ledger(tmp_path / "budget.db", Budget(3.0, 1e-6))
    out = answer.release(Budget(1.0, 1e-7), ledger=ledger, note="regions")
    (entry,) = ledger.history()
    assert (entry.unit, entry.note) == ("patient_id", "regions")
    assert "add/remove (all rows of one patient_id added or removed)" in str(out.certificate)
    document = json.loads(out.certificate.to_json())
    parameters = document["query"]["parameters"]
    assert (parameters["unit"], parameters["contributions"]) == ("patient_id", 3)
    assert document["sensitivity"]["radius"] == 3
    assert Certificate.from_json(json.dumps(document)).verify()
    for name, value in (("contributions", 2), ("unit", None), ("adjacency", "replace"), ("columns", [])):
        parameters_now = {**parameters, name: value}
        changed = {**document, "query": {**document["query"], "parameters": parameters_now}}
        assert not Certificate.from_json(json.dumps(changed)).verify(), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": "id"}, "go together"),
        ({"contributions": 2}, "go together"),
        ({"unit": "name", "contributions": 2}, "no column 'name'"),
        ({"unit": "id", "contributions": 0}, "contributions"),
        ({"unit": ["id"], "contributions": 2}, "unit must be"),
        ({"adjacency": "both"}, "adjacency"),
    ],
)
def test_bad_units_are_refused(options, words):
    with pytest.raises(InvalidInput, match=words):
        Table(pandas.DataFrame({"id": [1], "letter": ["a"]}), LETTERS, **options)

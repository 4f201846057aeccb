"""Sensitivity sets: radii, membership, relations, and what they refuse."""

import numpy as np
import pytest

from cases import SETS, SHAPE
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices


@pytest.mark.parametrize("name", SETS)
def test_radius_is_the_longest_member(name):
    case = SETS[name]
    rng = np.random.default_rng(0)
    radius = case.sensitivity.frobenius_radius(SHAPE)
    members = [case.member(rng) for _ in range(500)]
    longest = max(np.linalg.norm(v) for v in members)
    assert 0.95 * radius <= longest <= radius * (1 + 1e-12)
    entry = case.sensitivity.largest_entry(SHAPE)
    assert 0.9 * entry <= max(np.max(np.abs(v)) for v in members) <= entry * (1 + 1e-12)
    assert max(np.count_nonzero(v) for v in members) == case.sensitivity.changed_entries(SHAPE)
    extreme = max(members, key=np.linalg.norm)
    assert case.sensitivity.contains(extreme)
    assert case.sensitivity.contains(0 * extreme)
    assert not case.sensitivity.contains(1.2 * extreme)


@pytest.mark.parametrize(
    ("sensitivity", "outsider"),
    [
        (Frobenius(1.0), np.full(SHAPE, 1.0)),
        (Entrywise(1.0), 1.01 * np.eye(3)),
        (OneColumn(5.0), np.eye(3)),
        (OneRow(0.0, 5.0), np.eye(3)),
        (Counts(2), np.eye(3)),
        (RankOne(2.0), np.diag([1.0, 1.0, 0.0])),
        (RankOne(2.0), np.diag([1.0, -1.0, 0.0])),
        (RankOne(2.0, relation="replace"), np.diag([1.0, 1.0, 0.0])),
        (RankOne(2.0, relation="replace"), np.triu(np.ones((3, 3)))),
        (Vertices(np.eye(3)), np.diag([1.0, 1.0, 0.9])),
    ],
)
def test_outsiders_are_recognised(sensitivity, outsider):
    assert not sensitivity.contains(outsider)


def test_vertices_hold_mixtures():
    hull = Vertices(np.eye(2), np.ones((2, 2)))
    assert hull.contains(0.5 * np.eye(2) - 0.5 * np.ones((2, 2)))
    assert not hull.contains(0.6 * np.eye(2) + 0.5 * np.ones((2, 2)))


def test_relations():
    assert Counts(1).relation == "add/remove"
    assert OneRow(1.0).relation == "replace"
    assert RankOne(3.0, relation="replace").frobenius_radius((2, 2)) == pytest.approx(9 * np.sqrt(2))
    assert RankOne(3.0, relation="replace").frobenius_radius((1, 1)) == 9.0
    for build in (Frobenius, Entrywise, OneColumn, OneRow, Counts, RankOne):
        with pytest.raises(InvalidInput, match="adjacency must be one of add/remove, replace"):
            build(1, relation="both")


def test_one_line_takes_a_radius_or_a_box_but_not_both():
    assert OneColumn(0.0, 2.0).frobenius_radius((4, 3)) == pytest.approx(4.0)
    assert OneRow(low=0.0, high=2.0).frobenius_radius((4, 3)) == pytest.approx(2 * np.sqrt(3))
    for arguments, named in (
        ((), {}),
        ((1, 2, 3), {}),
        ((1,), {"low": 0, "high": 1}),
        ((), {"low": 0.0}),
        ((2, 1), {}),
    ):
        with pytest.raises(InvalidInput):
            OneColumn(*arguments, **named)
    with pytest.raises(InvalidInput, match="shape"):
        OneRow(np.zeros(2), np.ones(2)).frobenius_radius((4, 3))


def test_vertices_of_one_shape_and_not_all_zero():
    with pytest.raises(InvalidInput, match="shape"):
        Vertices(np.ones(2), np.ones(3))
    with pytest.raises(InvalidInput, match="not zero"):
        Vertices(np.zeros(2))
    with pytest.raises(InvalidInput, match="at least one"):
        Vertices()


def test_sets_cannot_be_changed_afterwards():
    bound = np.ones((2, 2))
    box = Entrywise(bound)
    bound[0, 0] = 100.0
    assert box.frobenius_radius((2, 2)) == 2.0
    with pytest.raises(AttributeError):
        Frobenius(1.0).radius = 0.1
    with pytest.raises(AttributeError):
        OneRow(1.0).radius = 0.1


@pytest.mark.parametrize(("adjacency", "change"), [("zero-out", "x x^T,"), ("replace", "x x^T - y y^T,")])
def test_rank_one_describes_one_record_unless_it_is_replaced(adjacency, change):
    assert RankOne(1.0, adjacency=adjacency).describe().startswith(change)

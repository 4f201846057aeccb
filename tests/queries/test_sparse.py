"""Sums of sparse records: clipped in l1, in whole steps, and released with discrete noise that pays for no rounding."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixdp import Budget, Certificate, queries, release
from matrixdp.errors import InvalidInput
from matrixdp.queries.sparse import _clipped
from matrixdp.sensitivity import L1

entries = st.one_of(st.floats(-9, 9), st.sampled_from([0.0, 1e308, -1e308, 5e-324, 3.0]))


@settings(max_examples=300, deadline=None)
@given(
    record=st.lists(entries, min_size=1, max_size=6),
    steps=st.integers(1, 60),
    largest=st.integers(1, 60),
    step=st.sampled_from([2.0**-20, 0.25, 1.0, 8.0]),
)
def test_a_clipped_record_lies_in_the_ball_exactly(record, steps, largest, step):
    one = L1(steps * step, largest * step, step=step)
    clipped = _clipped(np.array([record]), one, step)[0]
    assert sum(abs(int(x)) for x in clipped) <= steps
    assert max(abs(int(x)) for x in clipped) <= largest
    for given_entry, entry in zip(record, clipped, strict=True):
        assert entry == 0 or (entry < 0) == (given_entry < 0)
        assert abs(Fraction(int(entry)) * Fraction(step)) <= abs(Fraction(given_entry))


def test_what_fits_is_only_rounded_towards_zero():
    rows = np.array([[1.0, 2.0, 0.0], [-0.9, 1.7, -1.2], [0.0, 0.0, 3.0]])
    assert queries.sparse_sum(rows, radius=4).value.tolist() == [1.0, 3.0, 2.0]
    assert queries.sparse_sum(rows, radius=4, step=0.5).value.tolist() == [0.5, 3.5, 2.0]
    assert queries.sparse_sum(rows, radius=4, largest_entry=2).value.tolist() == [1.0, 3.0, 1.0]


def test_long_records_are_scaled():
    value = queries.sparse_sum([[30.0, 10.0, 0.0]], radius=4, step=2.0**-20).value
    assert value == pytest.approx([3.0, 1.0, 0.0], abs=2.0**-19)
    assert np.sum(value) <= 4.0


@pytest.mark.parametrize("budget", [Budget(1.0, 0), Budget(1.0, 1e-6)], ids=str)
def test_a_release_is_exact_and_its_query_verifies(budget):
    answer = queries.sparse_sum(np.eye(5), radius=3, largest_entry=1, adjacency="replace")
    out = release(*answer, budget, "laplace", query=answer.query)
    assert out.certificate.exact
    assert out.noise.step == 1.0
    back = Certificate.from_json(out.certificate.to_json())
    assert back.verify(), str(back.verify())
    wider = queries.sparse_sum(np.eye(5), radius=4, largest_entry=1, adjacency="replace")
    assert not release(*answer, budget, "laplace", query=wider.query).certificate.verify()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 1.5}, "whole multiple"),
        ({"radius": 2.0**40}, "2.31 steps"),
        ({"radius": 2, "step": 0.3}, "power of two"),
        ({"radius": -1}, "radius"),
        ({"radius": 2, "largest_entry": float("nan")}, "largest_entry"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidInput, match=message):
        queries.sparse_sum(np.eye(3), **options)

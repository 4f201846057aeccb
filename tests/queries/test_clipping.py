"""Clipping holds in exact arithmetic, depends on one record alone, and radii are rounded up."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixdp import queries
from matrixdp.errors import InvalidInput
from matrixdp.queries.clipping import Ball, at_least, region, root_at_least

EXTREMES = [0.0, 1e308, -1.7e308, 1e155, 1e-155, 5e-324, -1e-310, 1.0, 1e-100, 1e100]
entries = st.one_of(st.sampled_from(EXTREMES), st.floats(-2, 2), st.floats(allow_nan=False, allow_infinity=False))
norms = st.one_of(st.sampled_from([1e-30, 1e30, 1.0, 0.1, 3.0]), st.floats(1e-6, 1e6))


def exact_square(row):
    return sum(Fraction(float(x)) ** 2 for x in row)


@settings(max_examples=300, deadline=None)
@given(row=st.lists(entries, min_size=1, max_size=12), norm=norms)
def test_the_norm_is_kept_in_exact_arithmetic(row, norm):
    records = np.array([row, np.zeros(len(row))])
    clipped = Ball(norm).clip(records)
    bound = Fraction(norm) ** 2
    before, after = exact_square(row), exact_square(clipped[0])
    assert after <= bound
    if before <= bound * (1 - Fraction(1, 10**12)):
        np.testing.assert_array_equal(clipped, records)
    else:
        assert after >= bound * (1 - Fraction(1, 10**12))
    assert np.all(np.sign(clipped) * np.sign(records) >= 0)


@pytest.mark.parametrize("order", ["C", "F"])
def test_each_record_is_clipped_by_itself(order):
    rng = np.random.default_rng(3)
    records = np.asarray(rng.standard_normal((60, 9)) * 10.0 ** rng.choice([-300, -3, 3, 200], (60, 1)), order=order)
    given = records.copy()
    clipped = Ball(0.7).clip(records)
    assert all(exact_square(row) <= Fraction(0.7) ** 2 for row in clipped)
    alone = np.vstack([Ball(0.7).clip(row[None]) for row in records])
    np.testing.assert_array_equal(clipped, alone)
    np.testing.assert_array_equal(Ball(0.7).clip(np.asfortranarray(records[::-1]))[::-1], alone)
    short = np.abs(records).max(axis=1) < 0.1
    assert 0 < short.sum() < 60
    np.testing.assert_array_equal(clipped[short], records[short])
    np.testing.assert_array_equal(records, given)
    records[7, 2] = np.nan
    assert np.isnan(Ball(0.7).clip(records)[7]).any()  # never taken for a short one


def test_long_records_and_many_columns():
    rng = np.random.default_rng(0)
    for columns in (1, 2, 7, 100, 1000):
        records = rng.standard_normal((20, columns)) * 10.0 ** rng.integers(-5, 300, (20, 1))
        clipped = Ball(1.0).clip(records)
        assert all(exact_square(row) <= 1 for row in clipped)
        directions = records / np.abs(records).max(axis=1, keepdims=True)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        too_long = np.linalg.norm(clipped, axis=1) > 0.5
        np.testing.assert_allclose(clipped[too_long], directions[too_long], rtol=1e-11)


def test_the_exact_check_catches_plain_scaling():
    """A planted fault: x r/|x| ends above the norm about half of the time."""
    records = np.random.default_rng(1).standard_normal((200, 5)) * 9
    plain = records * (1.0 / np.linalg.norm(records, axis=1, keepdims=True))
    assert sum(exact_square(row) > 1 for row in plain) > 20
    assert all(exact_square(row) <= 1 for row in Ball(1.0).clip(records))


@settings(max_examples=200, deadline=None)
@given(low=st.floats(-1e30, 1e30), high=st.floats(-1e30, 1e30), divisor=st.integers(1, 10**9))
def test_widths_are_rounded_up(low, high, divisor):
    if not high > low:
        low, high = high, low
    if low == high:
        return
    box = region(None, low, high, 1)
    exact = (Fraction(high) - Fraction(low)) / divisor
    width = box.widths("replace", divisor)
    assert Fraction(math.nextafter(width, 0)) < exact <= Fraction(width)
    assert Fraction(box.widths("add/remove", divisor)) >= max(abs(Fraction(low)), abs(Fraction(high))) / divisor


@settings(deadline=None)
@given(numerator=st.integers(1, 10**30), denominator=st.integers(1, 10**30))
def test_rounding_up(numerator, denominator):
    exact = Fraction(numerator, denominator)
    assert exact <= Fraction(at_least(exact)) <= exact * (1 + Fraction(1, 2**52))
    assert exact <= Fraction(root_at_least(exact)) ** 2 <= exact * (1 + Fraction(1, 2**49))


NO_BOUND = {
    "nothing": {},
    "both": {"norm": 1.0, "low": 0, "high": 1},
    "only low": {"low": 0},
    "only high": {"high": 1},
    "norm and low": {"norm": 1.0, "low": 0},
    "norm 0": {"norm": 0},
    "norm negative": {"norm": -1.0},
    "norm NaN": {"norm": np.nan},
    "norm infinite": {"norm": np.inf},
    "norm text": {"norm": "1"},
    "norm bool": {"norm": True},
    "norm too small": {"norm": 1e-200},
    "norm too large": {"norm": 1e200},
    "low above high": {"low": 1, "high": 0},
    "low at high": {"low": 1, "high": 1},
    "one column reversed": {"low": [0, 2], "high": [1, 1]},
    "NaN": {"low": np.nan, "high": 1},
    "NaN in one column": {"low": [0, np.nan], "high": 1},
    "infinite": {"low": -np.inf, "high": np.inf},
    "too large": {"low": 0, "high": 1e300},
    "wrong number of columns": {"low": [0, 0, 0], "high": 1},
    "text": {"low": "a", "high": "b"},
    "a matrix": {"low": [[0, 0], [0, 0]], "high": 1},
}


@pytest.mark.parametrize("query", [queries.identity, queries.sum, queries.mean])
@pytest.mark.parametrize("name", NO_BOUND)
def test_bounds_that_are_refused(query, name):
    with pytest.raises(InvalidInput, match=r"norm|low|high"):
        query(np.ones((3, 2)), **NO_BOUND[name])


X = np.random.default_rng(6).standard_normal((50, 2))
LONGEST = float(np.linalg.norm(X, axis=1).max())
FROM_DATA = {
    "norm": lambda: queries.second_moment(X, norm=LONGEST),
    "norm of a sum": lambda: queries.sum(X, norm=max(math.hypot(*row) for row in X)),
    "norm about a center": lambda: queries.covariance(
        X, norm=float(np.linalg.norm(X - [1, 2], axis=1).max()), center=[1.0, 2.0], size=50
    ),
    "low and high": lambda: queries.identity(X, low=X.min(axis=0), high=X.max(axis=0)),
    "low and high of all": lambda: queries.mean(X, adjacency="replace", low=X.min(), high=X.max()),
    "only high": lambda: queries.sum(X, low=-10, high=X.max()),
    "only low": lambda: queries.sum(X, low=X.min(axis=0), high=10),
    "columns": lambda: queries.identity(X.T, low=X.min(axis=0), high=5, records_are="columns"),
    "edges": lambda: queries.histogram(X[:, 0], edges=np.linspace(X[:, 0].min(), X[:, 0].max(), 5)),
    "second edges": lambda: queries.histogram(X, edges=([-1, 0, 1], np.linspace(-9, X[:, 1].max(), 5))),
    "center": lambda: queries.covariance(X, adjacency="replace", norm=3.0, center=X.mean(axis=0)),
    "size": lambda: queries.mean(np.ones(1234), norm=1.0, relation="add/remove", size=1234),
}


@pytest.mark.parametrize("name", FROM_DATA)
def test_nothing_is_said_of_bounds_that_look_like_the_data(name):
    """A warning would depend on the records, and no guarantee would cover it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FROM_DATA[name]()

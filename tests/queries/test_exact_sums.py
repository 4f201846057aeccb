"""Sums of records against exact arithmetic: nothing is lost, in any order, and a neighbour moves them by one record."""

from __future__ import annotations

import math
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixdp import queries
from matrixdp.errors import InvalidInput
from matrixdp.queries import exact_sums
from matrixdp.queries.clipping import Ball, Box, region
from matrixdp.queries.exact_sums import Integers, moments, truncated, vector
from matrixdp.secure.grid import Grid

EXTREMES = [0.0, -0.0, 1e308, -1.7e308, 1e155, 1e-155, 5e-324, -1e-310, 1.0, -0.5, 1e-100, 0.1, 0.7]
entries = st.one_of(st.sampled_from(EXTREMES), st.floats(-2, 2), st.floats(allow_nan=False, allow_infinity=False))
datasets = st.lists(st.lists(entries, min_size=3, max_size=3), min_size=2, max_size=9).map(np.array)
norms = st.one_of(st.sampled_from([1e-30, 1e30, 1.0, 0.1, 3.0, 2.0**-9]), st.floats(1e-6, 1e6))
ends = st.one_of(
    st.sampled_from([0.0, 0.1, -0.1, 1.0, -1.0, 1e30, -1e-3, 1e-60]), st.floats(-1e6, 1e6, allow_subnormal=False)
)
boxes = st.lists(st.tuples(ends, ends).filter(lambda pair: abs(pair[0] - pair[1]) > 1e-60), min_size=3, max_size=3).map(
    lambda pairs: region(None, [min(pair) for pair in pairs], [max(pair) for pair in pairs], 3)
)


def steps(bounds, bits):
    """The step of each of three columns, from its definition."""
    reach = [bounds.norm] * 3 if isinstance(bounds, Ball) else np.maximum(np.abs(bounds.low), np.abs(bounds.high))
    powers = []
    for bound in reach:
        power = Fraction(1)
        while power >= 2 * Fraction(float(bound)):
            power /= 2
        while power < Fraction(float(bound)):
            power *= 2
        powers.append(power / 2**bits)
    return powers


def in_steps(X, bounds, bits):
    """The clipped records as whole steps, rounded towards zero."""
    return [
        [math.trunc(Fraction(float(x)) / step) for x, step in zip(row, steps(bounds, bits), strict=True)]
        for row in bounds.clip(X)
    ]


def added(rows):
    return [sum(column) for column in zip(*rows, strict=True)]


def outer(row):
    return [[x * y for y in row] for x in row]


@contextmanager
def small_blocks():
    """Several groups of several chunks of several blocks, from nine records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sums, "ROWS", 2)
        patch.setattr(exact_sums, "ENTRIES", 12)
        patch.setattr(exact_sums, "GROUP", 6)
        yield


@settings(max_examples=150, deadline=None)
@given(X=datasets, bounds=st.one_of(norms.map(Ball), boxes))
def test_a_sum_is_that_of_the_truncated_records(X, bounds):
    rows = in_steps(X, bounds, 53)
    with small_blocks():
        assert vector(X, bounds).exact().tolist() == added(rows)
    options = {"norm": bounds.norm} if isinstance(bounds, Ball) else {"low": bounds.low, "high": bounds.high}
    exact = [total * step for total, step in zip(added(rows), steps(bounds, 53), strict=True)]
    assert queries.sum(X, **options).value.tolist() == [float(x) for x in exact]
    assert queries.mean(X, adjacency="replace", **options, size=7).value.tolist() == [float(x / 7) for x in exact]


@settings(max_examples=150, deadline=None)
@given(X=datasets, norm=norms)
def test_moments_are_those_of_the_truncated_records(X, norm):
    rows, count, step = in_steps(X, Ball(norm), 42), len(X), steps(Ball(norm), 42)[0]
    total = [added(lines) for lines in zip(*map(outer, rows), strict=True)]
    vector = added(rows)
    with small_blocks():
        assert moments(X, Ball(norm)).exact().tolist() == [*total, vector]
    value = queries.second_moment(X, norm=norm, average=True, size=7).value
    assert value.tolist() == [[float(x * step**2 / 7) for x in line] for line in total]
    about = [
        [x - Fraction(z, count) for x, z in zip(*lines, strict=True)]
        for lines in zip(total, outer(vector), strict=True)
    ]
    value = queries.covariance(X, adjacency="replace", norm=norm, size=7).value
    assert value.tolist() == [[float(x * step**2 / 7) for x in line] for line in about]


@settings(max_examples=150, deadline=None)
@given(X=datasets, new=st.lists(entries, min_size=3, max_size=3), norm=norms, where=st.integers(0, 9))
def test_a_neighbour_changes_a_sum_by_no_more_than_the_norm_in_exact_arithmetic(X, new, norm, where):
    ball = Ball(norm)
    more = np.insert(X, where % (len(X) + 1), new, axis=0)
    change = vector(more, ball).exact() - vector(X, ball).exact()
    step = steps(ball, 53)[0]
    assert sum(Fraction(x) ** 2 for x in change) * step**2 <= Fraction(norm) ** 2
    moved = moments(more, ball).exact() - moments(X, ball).exact()
    record, step = moved[-1], steps(ball, 42)[0]
    assert moved[:-1].tolist() == outer(record.tolist())
    assert sum(Fraction(x) ** 2 for x in record) * step**2 <= Fraction(norm) ** 2


@settings(max_examples=150, deadline=None)
@given(X=datasets, new=st.lists(entries, min_size=3, max_size=3), box=boxes, size=st.integers(1, 10**6))
def test_a_neighbour_changes_a_sum_by_no_more_than_the_box_in_exact_arithmetic(X, new, box, size):
    bounds = {"low": box.low, "high": box.high}
    other = X.copy()
    other[0] = new
    for relation, there in (("replace", other), ("add/remove", X[1:])):
        change = vector(X, box).exact() - vector(there, box).exact()
        allowed = queries.mean(X, **bounds, relation=relation, size=size).sensitivity.bound
        for x, step, bound in zip(change, steps(box, 53), allowed, strict=True):
            assert abs(x) * step / size <= Fraction(float(bound))


def test_truncation_can_widen_a_box_and_the_set_covers_it():
    """0.1 is no whole number of steps of 2^-53, so that it moves and 1 does not."""
    low, high = 0.1, 1.0
    ends = truncated(Box(np.array(low), np.array(high)))
    wider = Fraction(float(ends.high)) - Fraction(float(ends.low))
    assert Fraction(high) - Fraction(low) < wider < Fraction(high) - Fraction(low) + Fraction(1, 2**53)
    one, other = (queries.sum([x], low=low, high=high, relation="replace") for x in (low, high))
    assert Fraction(float(other.value[0])) - Fraction(float(one.value[0])) == wider
    assert wider <= Fraction(float(one.sensitivity.bound)) <= wider + Fraction(1, 2**53)


@pytest.mark.parametrize(("low", "high"), [(0.0, 5e-324), (-1e-320, 1e-310), (2.0**-900, 2.0**-899)])
def test_tiny_boxes_are_refused(low, high):
    with pytest.raises(InvalidInput, match="bound must lie between"):
        queries.sum([low, high, 1.0], low=low, high=high, relation="replace")


def test_columns_of_different_sizes_have_steps_of_their_own():
    X = np.random.default_rng(0).uniform(-1, 1, (1000, 3)) * [1e-20, 1.0, 1e20]
    got = queries.sum(X, low=[-1e-20, -1, -1e20], high=[1e-20, 1, 1e20]).value
    np.testing.assert_allclose(got, [math.fsum(column) for column in X.T], rtol=1e-12)


def hostile():
    """Half of the records lead to just below a power of two, one over it, the rest back in parts that a float loses."""
    rng = np.random.default_rng(1)
    ups = np.full((1 << 16, 2), 1.0 - 2.0**-20)
    downs = -rng.uniform(0, 2.0**-36, (1 << 16, 2))
    return np.vstack([ups, [[0.9, 0.9]], downs])


ORDERED = {
    "sum": lambda X: queries.sum(X, norm=2.0),
    "sum box": lambda X: queries.sum(X, low=-1, high=1),
    "mean": lambda X: queries.mean(X, adjacency="replace", norm=2.0),
    "second moment": lambda X: queries.second_moment(X, norm=2.0),
    "second moment clipped": lambda X: queries.second_moment(X, norm=0.7),
    "covariance": lambda X: queries.covariance(X, adjacency="replace", norm=2.0),
    "covariance center": lambda X: queries.covariance(X, adjacency="replace", norm=0.3, center=[0.1, 0.9]),
}


@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_the_records_does_not_matter(name):
    X, query = hostile(), ORDERED[name]
    want = query(X).value
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(X))
        np.testing.assert_array_equal(query(X[order]).value, want)
    np.testing.assert_array_equal(query(np.asfortranarray(X[::-1])).value, want)


def test_the_order_matters_to_sums_in_floating_point():
    """The planted fault of the test above: these records do move a sum of floats."""
    X = hostile()
    for total in (lambda X: X.sum(axis=0), lambda X: X.T @ X):
        orders = (np.random.default_rng(seed).permutation(len(X)) for seed in range(3))
        assert any((total(X[order]) != total(X)).any() for order in orders)


@pytest.mark.parametrize("name", [name for name in ORDERED if "covariance" not in name and name != "mean"])
def test_one_record_more_moves_a_large_sum_as_far_as_a_small_one(name):
    """The sums are 65,000 and the record is 1e-9, where a float sum may move by 1e-11 more or less."""
    X, query = hostile()[:-1000], ORDERED[name]
    new = np.array([[1e-9, -2e-9]])
    bounds = Box(np.array(-1.0), np.array(1.0)) if name == "sum box" else Ball(0.7 if "clipped" in name else 2.0)
    total = vector if name.startswith("sum") else moments
    change = total(np.vstack([new, X]), bounds).exact() - total(X, bounds).exact()
    assert change.tolist() == total(new, bounds).exact().tolist()
    assert query(new).value.any()


def test_products_of_full_blocks_are_exact():
    """Entries whose halves are about as large as can be, in full blocks and more than one group."""
    count = (1 << 21) + 3
    short = np.random.default_rng(2).integers(1, 1000, count)  # steps of 2^-42 below 1
    X = 1 - short[:, None] * 2.0**-42
    first, second = int(short.sum()), int((short**2).sum())
    assert moments(X, Ball(1.0)).exact().tolist() == [[(count << 84) - (first << 43) + second], [(count << 42) - first]]
    assert vector(-X, Ball(1.0)).exact().tolist() == [(first << 11) - (count << 53)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**62), 2**62), st.sampled_from([0, 21, 27, 42])), min_size=1, max_size=20))
def test_integers_add_up(parts):
    total = Integers.of(np.zeros(1, dtype=np.int64), 0)
    for value, shift in parts:
        total = total + Integers.of(np.array([value]), shift)
        assert 0 <= total.low[0] < 2**62
    assert total.exact()[0] == sum(value << shift for value, shift in parts)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_million_million_records_fit(sign):
    total = Integers.of(np.array([sign * 2**42]), 42)  # the largest entry of x x^T
    for _ in range(40):
        total = total + total
    assert total.exact()[0] == sign * 2 ** (42 + 42 + 40)


@pytest.mark.parametrize("levels", range(1, 6))
def test_the_grids_displacement_covers_the_rounding_of_a_mean(levels):
    """From the exact quotient, before it became a float, to the grid; close to the most steps that are allowed."""
    rng, grid, size = np.random.default_rng(levels), Grid(levels), 1_000_003
    X = rng.uniform(0.9, 1, (40, 500))
    exact = [Fraction(total, 2**53 * size) for total in vector(X, Box(np.array(0.0), np.array(1.0))).exact()]
    values = queries.mean(X, adjacency="replace", low=0, high=1, size=size).value
    std = float(exact[0]) / (grid.step * 2.0**48.9)
    unit = std * grid.step
    errors = [abs(Fraction(np.rint(v * (1 / unit))) - x / Fraction(unit)) for v, x in zip(values, exact, strict=True)]
    assert Fraction(1, 2) < max(errors) <= Fraction(grid.displacement / grid.step) / 2

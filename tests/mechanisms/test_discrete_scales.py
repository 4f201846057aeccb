"""Scales and exponents of discrete noise: within reach of the best, certified, tight; bad input."""

import math

import numpy as np
import pytest

from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.mechanisms.solvers.discrete_scales import best_exponent, scale_for
from matrixdp.privacy.discrete import DiscreteProfile

REACH = [
    (1.0, 1e-6, 1, 1.842),
    (1.0, 1e-6, 4, 31.84),
    (1.0, 1e-6, 8, 117.5),
    (1.0, 1e-6, 16, 274.0),
    (1.0, 1e-6, 32, 566.0),
    (0.5, 1e-7, 1, 7.836),
    (0.5, 1e-7, 2, 31.84),
    (0.5, 1e-7, 4, 127.9),
    (0.5, 1e-7, 8, 512.0),
]


@pytest.mark.parametrize(("epsilon", "delta", "count", "most"), REACH)
def test_the_variance_of_the_best_exponent(epsilon, delta, count, most):
    best = best_exponent(epsilon, delta, 1, count)
    assert best.variance <= most
    assert best.delta(epsilon) <= delta
    for exponent in (1.0, 2.0):
        assert best.variance <= steps_variance(exponent, scale_for(epsilon, delta, 1, count, exponent)) * (1 + 1e-6)


def test_the_best_exponent_lies_next_to_an_end_too():
    """The optima are about 1.1 and 1.9; both lie between the points that a search starts from."""
    for epsilon, delta, count in ((0.1, 1e-3, 1), (1.0, 1e-6, 64)):
        best = best_exponent(epsilon, delta, 1, count)
        tried = [steps_variance(t, scale_for(epsilon, delta, 1, count, t)) for t in np.linspace(1.0, 2.0, 17)]
        assert best.variance <= min(tried) * (1 + 1e-3)


def test_more_cells_want_a_larger_exponent():
    exponents = [best_exponent(1.0, 1e-6, 1, count).exponent for count in (1, 8, 16, 32)]
    assert exponents == sorted(exponents)
    assert exponents[0] == 1.0 < exponents[1]


@pytest.mark.parametrize(
    ("epsilon", "delta", "shift", "count", "exponent"),
    [
        (1.0, 1e-6, 1, 1, 1.0),
        (1.0, 1e-6, 1, 500, 1.0),
        (0.01, 1e-9, 3, 2, 1.0),
        (0.0, 1e-3, 1, 2, 1.0),
        (8.0, 1e-6, 1, 2, 1.0),
        (1.0, 1e-6, 1, 3, 1.5),
        (0.3, 1e-5, 2, 12, 1.2),
        (2.0, 1e-10, 1, 20, 2.0),
        (20.0, 1e-3, 1, 5, 1.7),
        (0.0, 1e-2, 1, 4, 2.0),
    ],
)
def test_a_scale_is_certified_and_tight(epsilon, delta, shift, count, exponent):
    scale = scale_for(epsilon, delta, shift, count, exponent)
    assert DiscreteProfile(exponent, scale, shift, count).delta(epsilon) <= delta
    assert DiscreteProfile(exponent, scale * (1 - 1e-5), shift, count).delta(epsilon) > delta


def test_where_delta_is_not_monotone_the_smaller_scale_is_found():
    """Exponent 2, shift 2, epsilon 5.95: delta is 0.0242 at scale 1.16, 0.0305 at 1.27, and 0.0248 again at 1.35."""
    deltas = [DiscreteProfile(2.0, scale, 2).delta(5.95) for scale in (1.16, 1.27, 1.35)]
    assert deltas[0] < deltas[2] < deltas[1]
    scale = scale_for(5.95, 0.0265, 2, 1, 2.0)
    assert scale < 1.165
    assert DiscreteProfile(2.0, scale, 2).delta(5.95) <= 0.0265 < DiscreteProfile(2.0, 1.27, 2).delta(5.95)


def test_pure_scales():
    scale = scale_for(0.7, 0.0, 3, 2, 1.0)
    assert DiscreteProfile(1.0, scale, 3, 2).pure_epsilon <= 0.7
    assert scale == pytest.approx(6 / 0.7, rel=1e-14)
    assert best_exponent(0.7, 0.0, 3, 2) == DiscreteProfile(1.0, scale, 3, 2)
    for epsilon, exponent in ((0.0, 1.0), (1.0, 1.5)):
        with pytest.raises((NotCertifiable, InvalidInput), match="delta"):
            scale_for(epsilon, 0.0, 1, 1, exponent)


@pytest.mark.parametrize("function", [scale_for, best_exponent])
@pytest.mark.parametrize("bad", [-1.0, math.nan, "1", None])
def test_bad_budgets(function, bad):
    with pytest.raises(InvalidInput, match="epsilon"):
        function(bad, 1e-6)
    with pytest.raises(InvalidInput, match="delta"):
        function(1.0, bad)


def test_budgets_that_no_scale_keeps():
    with pytest.raises(InvalidInput, match="delta"):
        scale_for(0.0, 0.0)
    with pytest.raises(NotCertifiable, match="scale"):
        scale_for(1e-4, 1e-9, 1, 4, 1.2)

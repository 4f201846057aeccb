"""The set of differences bounded in l1: its worst difference, what flooring costs, and noise on it."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from matrixdp import L1, Budget, Certificate, Counts, Frobenius, calibrate, certify, compare, release
from matrixdp.audit import audit_law
from matrixdp.distributions import Product
from matrixdp.distributions.product import steps_probabilities
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.privacy.laws import steps_changed

BUDGET = Budget(1.0, 1e-6)


def brute_delta(law, difference, epsilon):
    """H of a difference in steps, as a sum over all outcomes of the entries that change."""
    p = steps_probabilities(law.exponent, law.scale_in_steps)
    size = len(p) // 2
    ours, theirs = np.ones(1), np.ones(1)
    for shift in difference:
        moved = np.zeros(len(p))
        moved[shift:] = p[: len(p) - shift]
        ours, theirs = np.multiply.outer(ours, p).ravel(), np.multiply.outer(theirs, moved).ravel()
    assert size > 40
    return float(np.sum(np.maximum(theirs - math.exp(epsilon) * ours, 0.0)))


@pytest.mark.parametrize("exponent", [1.0, 1.4, 2.0])
@pytest.mark.parametrize(("radius", "largest"), [(4, None), (5, 2), (3, 1), (2, 5)])
def test_no_difference_is_worse_than_the_certified_one(exponent, radius, largest):
    law = Product((3,), 1.0, exponent, 1.3 if exponent == 1.0 else 6.0)
    sensitivity = L1(radius, largest, step=1)
    certificate = certify(law, sensitivity)
    assert certificate.exact
    most = min(radius, largest or radius)
    differences = [v for v in itertools.product(range(most + 1), repeat=3) if sum(v) <= radius and v[0] >= v[1] >= v[2]]
    for epsilon in (0.05, 0.4, 1.1):
        worst = max(brute_delta(law, [x for x in v if x], epsilon) for v in differences if any(v))
        assert worst * (1 - 1e-9) <= certificate.delta(epsilon) <= worst * (1 + 1e-4) + 1e-15
        witness = np.sort(np.abs(certificate.witness))[::-1].astype(int)
        assert brute_delta(law, [int(x) for x in witness if x], epsilon) >= worst * (1 - 1e-9)


def test_flooring_never_passes_the_steps_that_are_charged():
    rng = np.random.default_rng(5)
    for trial in range(300):
        entries, step = int(rng.integers(1, 6)), 2.0 ** int(rng.integers(-4, 2))
        radius = float(rng.uniform(0.1, 4.0))
        ((total, cells),), attained = steps_changed(L1(radius), (entries,), step)
        assert (cells, attained) == (1, False)
        value = rng.uniform(-9, 9, entries)
        change = rng.dirichlet(np.ones(entries)) * radius * rng.choice([-1, 1], entries) * (1 - 1e-12)
        if trial % 3 == 0:  # just across the edges of the grid, in every entry
            value = step * np.round(value / step) - 1e-12
            change = np.full(entries, min(2e-12, radius / entries))
        moved = np.abs(np.floor((value + change) / step) - np.floor(value / step))
        assert np.sum(moved) <= total


def test_the_charge_for_flooring_is_needed():
    """Two values within 1e-12 in l1 whose floors differ by a step in every entry."""
    one, other = np.full(50, -1e-14), np.full(50, 1e-14)
    assert np.sum(np.abs(np.floor(one) - np.floor(other))) == 50
    ((total, _),), _ = steps_changed(L1(1e-12), (50,), 1.0)
    assert total >= 50


@pytest.mark.parametrize(
    ("sensitivity", "groups"),
    [
        (L1(5, step=1), ((5, 1),)),
        (L1(5, 2, step=1), ((2, 2), (1, 1))),
        (L1(4, 2, step=1), ((2, 2),)),
        (L1(9, 2, step=1), ((2, 3),)),
        (L1(5, 7, step=1), ((5, 1),)),
        (L1(0.75, 0.5, step=0.25), ((2, 1), (1, 1))),
        (L1(100_000, 50_000, step=1), ((100_000, 1),)),
    ],
    ids=str,
)
def test_steps_on_a_grid(sensitivity, groups):
    step = sensitivity.step
    assert steps_changed(sensitivity, (3,), step)[0] == groups
    finer = steps_changed(sensitivity, (3,), step / 2)[0]
    assert finer[0][0] == 2 * groups[0][0]
    coarser, attained = steps_changed(sensitivity, (3,), 2 * step)  # off this grid: as any other values
    assert coarser == ((math.ceil(sensitivity.radius / (2 * step)) + 5, 1),)
    assert not attained


@pytest.mark.parametrize("mechanism", ["laplace", "discrete", "discrete-gaussian", "analytic", "auto"])
@pytest.mark.parametrize(
    "sensitivity", [L1(3), L1(3, 1), L1(5, 2, step=1), L1(8, 1, adjacency="replace", step=0.5)], ids=str
)
def test_a_release_keeps_the_budget_and_verifies(mechanism, sensitivity):
    if mechanism == "discrete-gaussian" and sensitivity.step is None:
        with pytest.raises(NotApplicable, match="L1"):
            release(np.ones((6, 10)), sensitivity, BUDGET, mechanism)
        return
    out = release(np.ones((6, 10)), sensitivity, BUDGET, mechanism)
    assert out.certificate.meets(BUDGET)
    back = Certificate.from_json(out.certificate.to_json())
    assert back.verify(), str(back.verify())
    assert str(back.sensitivity) == str(sensitivity)
    assert out.certificate.delta(1.0) >= 0.99e-6


def test_it_has_less_noise_than_the_ball_around_it():
    plain, bounded = (calibrate("laplace", shape=(60,), sensitivity=s, budget=BUDGET) for s in (L1(4), L1(4, step=1)))
    assert bounded.variance <= plain.variance <= 1.1 * bounded.variance
    gaussian = calibrate("analytic", shape=(60,), sensitivity=L1(4), budget=BUDGET)
    around = calibrate("analytic", shape=(60,), sensitivity=Frobenius(4.0), budget=BUDGET)
    assert gaussian.root_mean_square == pytest.approx(around.root_mean_square)
    assert plain.variance < 0.15 * gaussian.root_mean_square**2
    eight = calibrate("discrete", shape=(60,), sensitivity=L1(8, 1, step=1), budget=BUDGET)
    assert eight.variance == pytest.approx(
        calibrate("discrete", shape=(60,), sensitivity=Counts(8), budget=BUDGET).variance, rel=1e-9
    )


def test_an_audit_rejects_noise_for_a_smaller_radius():
    budget = Budget(1.0, 0.01)
    law = calibrate("discrete", shape=(4,), sensitivity=L1(2, 1, step=1), budget=budget)
    given = {"samples": 20_000, "rng": np.random.default_rng(4)}
    assert not audit_law(law, L1(2, 1, step=1), budget, **given).rejected
    assert audit_law(law, L1(4, step=1), budget, **given).rejected


def test_compare_takes_it():
    rows = {row.mechanism: row for row in compare(shape=(6, 10), sensitivity=L1(3, step=1), budget=BUDGET)}
    assert rows["laplace"].verdict == "exact"
    assert rows["laplace"].expected_squared_error < 0.12 * rows["analytic"].expected_squared_error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"radius": 2.5, "step": 1}, "radius must be a whole multiple of step"),
        ({"radius": 3, "largest_entry": 1.5, "step": 1}, "largest_entry must be a whole multiple of step"),
        ({"radius": 3, "step": 3}, "power of two"),
        ({"radius": 2.0**60, "step": 1}, "below 2"),
        ({"radius": 3, "largest_entry": -1}, "largest_entry must be above 0"),
        ({"radius": 3, "adjacency": "swap"}, "adjacency"),
    ],
)
def test_what_is_no_such_set(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        L1(**arguments)


def test_radii_that_floats_round_are_divided_exactly():
    """0.3 / 0.1 rounds to 3 although three times the float 0.1 is more than the float 0.3."""
    assert Fraction(0.1) * 3 > Fraction(0.3)
    largest, whole, rest = L1(0.3, 0.1).worst((9,))
    assert (largest, whole) == (0.1, 2)
    assert Fraction(rest) + 2 * Fraction(0.1) >= Fraction(0.3)

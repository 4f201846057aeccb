"""Independent discrete noise as a mechanism: the least noise for counts, certified, released, composed and verified."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from matrixdp import (
    Accountant,
    Budget,
    Certificate,
    Counts,
    Entrywise,
    Frobenius,
    Ledger,
    calibrate,
    certify,
    compare,
    release,
)
from matrixdp.accounting.ledger import verify_export
from matrixdp.audit import audit_law
from matrixdp.distributions import Product
from matrixdp.errors import InvalidInput, MatrixDPError, NotApplicable, NotCertifiable

BUDGET = Budget(1.0, 1e-6)
REACH = {
    (1.0, 1e-6): {1: 1.842, 4: 31.84, 8: 117.5, 16: 274.0, 32: 566.0},
    (0.5, 1e-7): {1: 7.836, 2: 31.84, 4: 127.9, 8: 512.0},
}


@pytest.mark.parametrize(("budget", "cells"), [(b, k) for b, reach in REACH.items() for k in reach])
def test_the_variance_of_an_entry_is_within_reach_and_the_budget_is_kept(budget, cells):
    law = calibrate("discrete", shape=(8, 8), sensitivity=Counts(cells), budget=Budget(*budget))
    assert law.variance <= REACH[budget][cells]
    certificate = certify(law, Counts(cells), Budget(*budget))
    assert certificate.exact
    assert budget[1] * (1 - 1e-4) <= certificate.delta(budget[0]) <= budget[1]
    laplace = calibrate("laplace", shape=(8, 8), sensitivity=Counts(cells), budget=Budget(*budget))
    assert certify(laplace, Counts(cells)).meets(Budget(*budget))
    assert law.variance <= laplace.variance * (1 + 1e-9)


@pytest.mark.parametrize("mechanism", ["laplace", "discrete"])
@pytest.mark.parametrize(
    "sensitivity", [Counts(1), Counts(8), Counts(2, bound=3.0, adjacency="replace"), Counts(1, bound=0.3)], ids=str
)
def test_a_release_keeps_the_budget_and_verifies(mechanism, sensitivity):
    out = release(np.full((6, 10), 7.0), sensitivity, BUDGET, mechanism)
    assert isinstance(out.noise, Product)
    steps = out.value / out.noise.step
    assert np.array_equal(steps, np.round(steps))
    assert out.certificate.float_safe
    assert 0.0 < out.certificate.total_variation < 1e-12
    assert out.certificate.meets(BUDGET)
    back = Certificate.from_json(out.certificate.to_json())
    assert back.verify(), str(back.verify())
    assert back.to_json() == out.certificate.to_json()


@pytest.mark.parametrize("epsilon", [0.01, 10.0, 22.0, 30.0])
@pytest.mark.parametrize("mechanism", ["laplace", "discrete"])
def test_the_tables_fit_into_the_budget_at_any_epsilon(mechanism, epsilon):
    """Their error counts e^epsilon times."""
    budget = Budget(epsilon, 1e-6)
    out = release(np.zeros(3), Counts(1), budget, mechanism)
    assert out.certificate.meets(budget)
    assert 0.9e-6 <= out.certificate.delta(epsilon) <= 1e-6


def test_a_law_that_was_not_drawn_says_so_and_nothing_worse():
    certificate = certify(calibrate("laplace", shape=(3,), sensitivity=Counts(1), budget=BUDGET), Counts(1), BUDGET)
    assert certificate.covers == "the law of the noise, which has not been drawn"
    assert "(exact)" in str(certificate)


def test_counts_come_out_as_whole_numbers():
    out = release(np.array([12.0, 3.0, 40.0]), Counts(1), BUDGET, "laplace")
    assert np.array_equal(out.value, np.round(out.value))


def test_noise_has_the_certified_variance():
    """False alarm 1e-8, by a normal bound on the mean of 10^6 squares; 95 % of the scale must be seen."""
    out = release(np.zeros((1000, 1000)), Counts(1), BUDGET, "laplace")
    q = math.exp(-1 / out.noise.scale_in_steps)
    fourth = 2 * q * (1 + 10 * q + q**2) / (1 - q) ** 4
    spread = 6 * math.sqrt(fourth - out.noise.variance**2) / 1000
    assert abs(np.mean(out.value**2) - out.noise.variance) < spread
    narrow = replace(out.noise, scale=0.95 * out.noise.scale).sample()
    assert not abs(np.mean(narrow**2) - out.noise.variance) < spread


def test_no_changed_number_of_its_certificate_passes():
    certificate = release(np.zeros((3, 4)), Counts(2), BUDGET, "discrete").certificate
    text = certificate.to_json()
    places = [
        ("law", "exponent"), ("law", "scale"), ("law", "step"), ("sensitivity", "bound"), ("sensitivity", "cells"),
        ("drawing", "step"), ("drawing", "total_variation"), ("budget", "epsilon"), ("budget", "delta"),
        ("guarantee", "epsilon"), ("guarantee", "delta"), ("facts", "expected_squared_error"),
    ]  # fmt: skip
    for group, name in places:
        document = json.loads(text)
        value = document[group][name]
        document[group][name] = value + 1 if isinstance(value, int) else value * 1.001
        try:
            assert not Certificate.from_json(json.dumps(document)).verify(), (group, name)
        except MatrixDPError:
            continue  # refused when it was read


@pytest.mark.parametrize("count", [1, 3, 10])
def test_releases_compose_never_below_the_truth(count):
    """With one cell and one step the loss is +-a, so the truth is a binomial sum."""
    law = calibrate("laplace", shape=(5,), sensitivity=Counts(1), budget=Budget(0.3, 1e-9))
    a = 1 / law.scale_in_steps
    accountant = Accountant()
    accountant.add(certify(law, Counts(1)), count)
    up = 1 / (1 + math.exp(-a))
    for epsilon in (0.1, 0.5 * count * a, 0.9 * count * a):
        truth = sum(
            math.comb(count, k) * up**k * (1 - up) ** (count - k) * max(0.0, -math.expm1(epsilon - (2 * k - count) * a))
            for k in range(count + 1)
        )
        assert truth * (1 - 1e-9) <= accountant.delta(epsilon) <= truth * 1.06 + 1e-9


def test_a_ledger_of_a_plan_adds_it_up_and_its_export_verifies(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(1.0, 1e-6), adaptive=False)
    for _ in range(3):
        release(np.zeros(4), Counts(1), Budget(0.3, 1e-8), "laplace", ledger=ledger)
    assert ledger.spent() <= 0.9
    found = verify_export(Ledger(tmp_path / "budget.db").export())
    assert found, str(found)


def test_an_audit_rejects_noise_that_is_too_small():
    budget = Budget(1.0, 0.01)
    law = calibrate("discrete", shape=(4,), sensitivity=Counts(2), budget=budget)
    given = {"samples": 20_000, "rng": np.random.default_rng(3)}
    assert not audit_law(law, Counts(2), budget, **given).rejected
    assert audit_law(replace(law, scale=0.6 * law.scale), Counts(2), budget, **given).rejected


def test_compare_names_the_least_noise():
    rows = {row.mechanism: row for row in compare(shape=(6, 10), sensitivity=Counts(1), budget=BUDGET)}
    assert rows["laplace"].verdict in ("exact", "loose")
    assert rows["laplace"].expected_squared_error < 0.11 * rows["analytic"].expected_squared_error
    assert rows["analytic"].planned_epsilon < rows["laplace"].planned_epsilon  # ten of them, at one delta
    words = " ".join(str(compare((6, 10), Counts(1), BUDGET)).split())
    assert "auto takes laplace:" in words or "auto takes discrete:" in words
    assert "Where 10 share a budget" in words


def test_entries_with_bounds_of_their_own_are_certified():
    law = Product((3,), 1.0, 1.0, 10.0)
    certificate = certify(law, Entrywise([1.0, 2.0, 0.0]))
    # shifts of 1 and 2 steps, and one each for values that were rounded: a pure epsilon of 5 steps over the scale
    assert certificate.epsilon(1e-300) <= 0.5 * (1 + 1e-9)
    assert certificate.delta(0.49) > 0.0
    assert certify(law, Entrywise([1.0, 1.5, 0.0])).delta(0.1) == pytest.approx(certificate.delta(0.1), rel=1e-9)
    assert not certificate.exact


def test_sums_that_were_rounded_stay_within_the_certified_shift():
    """Two sums that differ by the bound exactly, and whose floats differ by two steps on the grid."""
    step = 2.0**-10
    one = Fraction(1) - Fraction(8, 10**17)  # rounds down, as floats are dense below 1
    other = one + Fraction(step)  # rounds up, as they are not above it
    shift = math.floor(float(other) / step) - math.floor(float(one) / step)
    assert shift == 2
    assert certify(Product((1,), step, 1.0, 9.0), Entrywise(step)).profile.shift == 2


def test_values_are_floored_wherever_it_is_drawn():
    """Noise added to a value off the grid would show the value in the last digits."""
    from matrixdp.backends.numpy import draw
    from matrixdp.privacy.drawing import drawing_for

    law = Product((50,), 1.0, 1.0, 3.0)
    out = draw(np.full(50, 0.3), law, drawing_for(law, Counts(1), None))
    assert np.array_equal(out, np.round(out))


def test_gradients_are_not_drawn_with_it():
    pytest.importorskip("torch")
    from matrixdp.learn.noise import ParameterNoise

    with pytest.raises(InvalidInput, match="must be Gaussian"):
        ParameterNoise(Product((3,), 1.0, 1.0, 3.0), Entrywise(1.0), 5.0)


def test_a_step_that_is_no_power_of_two_is_not_certified():
    with pytest.raises(NotCertifiable, match="power of two"):
        certify(Product((3,), 0.3, 1.0, 5.0), Counts(1))


@pytest.mark.parametrize("mechanism", ["laplace", "discrete"])
def test_sets_that_it_is_not_for(mechanism):
    for shape, sensitivity in (((9,), Frobenius(1.0)), ((200,), Counts(100)), ((3,), Entrywise([1.0, 2.0, 3.0]))):
        with pytest.raises(NotApplicable):
            calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=BUDGET)
    with pytest.raises(NotCertifiable, match="their own bounds"):
        certify(Product((3,), 1.0, 1.0, 5.0), Frobenius(1.0))
    with pytest.raises(InvalidInput, match="too large"):
        release(np.full(3, 2.0**60), Counts(1), BUDGET, mechanism)


@pytest.mark.parametrize(("bound", "shape"), [(0.535, (2, 2)), (1.116, (3, 3)), (1.282, (4, 1))])
def test_discrete_is_never_worse_than_laplace(bound, shape):
    """Also where "laplace" may use a finer grid."""
    errors = [
        calibrate(name, shape=shape, sensitivity=Entrywise(bound), budget=Budget(0.5, 1e-8)).expected_squared_error()
        for name in ("discrete", "laplace")
    ]
    assert errors[0] <= errors[1]

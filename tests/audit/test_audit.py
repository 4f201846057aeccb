"""What must be rejected is rejected, what is honest is not rejected. All audits run at a false-alarm rate of 1e-6."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cases import spd
from matrixdp import Budget, calibrate, certify, release
from matrixdp.audit import audit, audit_law, audit_scores
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Kronecker
from matrixdp.errors import InvalidInput
from matrixdp.mechanisms import RECIPES
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Counts, Frobenius, Participation, RankOne, Vertices

OPTIONS: dict[str, dict[str, object]] = {
    "mvg": {"gamma": 3.0},
    "matrix-mechanism": {"workload": "prefix"},
    "rank-r": {"rank": 1},
}
HONEST = [name for name, recipe in RECIPES.items() if not recipe.refuted and name != "marginals"]  # on tables
BUDGET, ONE_CELL = Budget(0.9, 1e-3), Counts(1)
OVER_TIME = dict.fromkeys(
    ("banded", "toeplitz", "inverse-banded", "binary-tree"), Participation(1.0, separation=2, times=2)
)
# Where few samples tell most: epsilon 1 and a delta of 0.1.
FRIENDLY = Budget(1.0, 0.1)


@cache
def honest(name, sensitivity=ONE_CELL, shape=(4, 4)):
    return calibrate(name, shape=shape, sensitivity=sensitivity, budget=BUDGET, **OPTIONS.get(name, {}))


def adding(law, rng):
    return lambda value: value + law.sample(rng)


@pytest.mark.parametrize("method", ["auto", "clopper-pearson"])
@pytest.mark.parametrize("name", HONEST)
def test_every_honest_mechanism_is_not_rejected(name, method):
    change = OVER_TIME.get(name, ONE_CELL)
    law = honest(name, change)
    result = audit_law(law, change, BUDGET, samples=2000, method=method, rng=np.random.default_rng(0))
    assert result.verdict == "not rejected"
    truth = certify(law, change)
    assert result.epsilon_lower <= truth.epsilon(BUDGET.delta)
    assert result.delta_lower <= truth.delta(BUDGET.epsilon)


@pytest.mark.parametrize(
    ("name", "sensitivity"),
    [("analytic", Frobenius(1.0)), ("imgm", Counts(1)), ("matrix-mechanism", Counts(1)), ("optimal", RankOne(1.0))],
)
@pytest.mark.parametrize("shape", [(4, 4), (21, 21)])
def test_the_gaussian_method_comes_close_to_the_truth_and_sees_ten_percent(name, sensitivity, shape):
    """An acquittal means something only if the bound is near the claim. 21 x 21 is too large for all coordinates."""
    law, rng = honest(name, sensitivity, shape), np.random.default_rng(1)
    result = audit_law(law, sensitivity, BUDGET, samples=3000, rng=rng)
    assert 0.9 * BUDGET.epsilon < result.epsilon_lower <= BUDGET.epsilon
    assert result.method == "gaussian"
    wrong = audit_law(law, sensitivity, BUDGET, samples=3000, release_fn=adding(law.scaled(0.9), rng))
    assert wrong.verdict == "rejected"
    assert wrong.epsilon_lower > BUDGET.epsilon
    assert wrong.delta_lower > BUDGET.delta


def test_release_itself_is_not_rejected():
    """From secure entropy, on its grid; the bound is near enough to the claim to have seen a shortage."""

    def whole_way(value):
        return release(value, ONE_CELL, BUDGET, "analytic").value

    result = audit_law(honest("analytic"), ONE_CELL, BUDGET, samples=500, release_fn=whole_way)
    assert 0.7 * BUDGET.epsilon < result.epsilon_lower <= BUDGET.epsilon


@pytest.mark.parametrize(
    ("shape", "sensitivity", "budget"),
    [
        ((100,), Frobenius(1.0), Budget(0.005, 1e-5)),
        ((89, 89), Counts(2, relation="replace"), Budget(1e-5, 1e-7)),
    ],
    ids=["table 1", "histogram"],
)
def test_r1smg_is_rejected_at_the_papers_settings(shape, sensitivity, budget):
    law, rng = calibrate("r1smg", shape=shape, sensitivity=sensitivity, budget=budget), np.random.default_rng(2)
    known = audit_law(law, sensitivity, budget, samples=1500, rng=rng)
    truth = certify(law, sensitivity)
    given = np.zeros(shape), truth.witness, budget.epsilon, budget.delta
    unknown = audit(adding(law, rng), *given, samples=1500)
    for result in (known, unknown):
        assert result.verdict == "rejected"
        assert 1000 * budget.delta < result.delta_lower < truth.delta(budget.epsilon)
    assert unknown.statistic == "radial"


def gaussian_box(factor, rng, budget=FRIENDLY):
    std = factor / gaussian.mu(budget.epsilon, budget.delta)
    return lambda value: value + std * rng.standard_normal(value.shape)


CELL = np.zeros((3, 3)), np.eye(3)[:1].T @ np.eye(3)[:1]


def test_a_gaussian_that_is_ten_percent_short_is_rejected_in_a_black_box():
    rng = np.random.default_rng(3)
    verdicts = {
        factor: audit(gaussian_box(factor, rng), *CELL, 1.0, 0.1, samples=80_000, statistic="linear").verdict
        for factor in (1.0, 0.9)
    }
    assert verdicts == {1.0: "not rejected", 0.9: "rejected"}


@pytest.mark.parametrize("show", [lambda pair: (pair[0] + pair[1]) / 2, lambda pair: pair], ids=["average", "pair"])
def test_two_releases_counted_as_one_are_rejected(show):
    rng = np.random.default_rng(4)
    once = gaussian_box(1.0, rng)

    def twice(value):
        return show((once(value), once(value)))

    assert audit(twice, *CELL, 1.0, 0.1, samples=8000).verdict == "rejected"
    # two releases are honest about the budget of both
    both = gaussian.epsilon(np.sqrt(2) * gaussian.mu(1.0, 0.1), 0.1)
    assert audit(twice, *CELL, float(both), 0.1, samples=8000).verdict == "not rejected"


def swapped_factors(rows, columns, difference):
    """An exactly calibrated Kronecker law, and the same with its factors exchanged."""
    right, wrong = Gaussian(Kronecker(rows, columns)), Gaussian(Kronecker(columns, rows))
    scale = certify(right, Vertices(difference)).mu / gaussian.mu(1.0, 0.1) * (1 + 1e-11)
    return right.scaled(scale), wrong.scaled(scale)


def test_swapped_kronecker_factors_are_rejected():
    rng = np.random.default_rng(5)
    rows, columns = spd(4, 2), spd(4, 3)
    difference = Kronecker(columns, rows).least_noise_direction()
    right, wrong = swapped_factors(rows, columns, difference)
    for law, verdict in ((right, "not rejected"), (wrong, "rejected")):
        result = audit_law(right, Vertices(difference), FRIENDLY, samples=3000, release_fn=adding(law, rng))
        assert result.verdict == verdict


def test_swapped_kronecker_factors_are_rejected_in_a_black_box():
    rng = np.random.default_rng(6)
    difference = np.outer([1.0, 0, 0], [0, 1.0, 1.0])
    right, wrong = swapped_factors(np.array([4.0, 1.0, 1.0]), np.ones(3), difference)
    for law, verdict in ((right, "not rejected"), (wrong, "rejected")):
        result = audit(
            lambda value, law=law: value + law.sample(rng), 0 * difference, difference, 1.0, 0.1, samples=4000
        )
        assert result.verdict == verdict


def test_noise_that_depends_on_the_value_needs_the_learned_statistic():
    rng = np.random.default_rng(7)

    def leaky(value):
        return value + (5 + value[0]) * rng.standard_normal(20)

    given = np.zeros(20), np.eye(20)[0], 0.5, 1e-3
    assert audit(leaky, *given, samples=4000, statistic="linear").verdict == "not rejected"
    found = audit(leaky, *given, samples=4000)
    assert (found.verdict, found.statistic) == ("rejected", "learned")


def test_outputs_need_not_look_like_the_inputs():
    rng = np.random.default_rng(8)

    def count(records):  # a sensitivity of 1, and noise for a twentieth of it
        return len(records) + 0.05 * rng.standard_normal()

    result = audit(count, ["ann", "bob"], ["ann"], 1.0, 1e-6, samples=400)
    assert result.verdict == "rejected"


def test_noiseless_and_constant_mechanisms():
    assert audit(lambda value: value, *CELL, 1.0, 1e-6, samples=400).verdict == "rejected"
    assert audit(lambda value: np.zeros(3), *CELL, 0.0, 0.0, samples=400).verdict == "not rejected"
    assert audit(lambda value: 7, 0, 1, 0.0, 0.0, samples=400).verdict == "not rejected"


def test_a_statistic_of_the_callers_own():
    rng = np.random.default_rng(9)

    def first_entry(outputs):
        assert outputs.shape[1:] == (3, 3)
        return outputs[:, 0, 0]

    result = audit(gaussian_box(0.5, rng), *CELL, 1.0, 0.1, samples=4000, statistic=first_entry)
    assert (result.verdict, result.statistic) == ("rejected", "first_entry")


def test_a_mechanism_that_writes_into_its_input_cannot_spoil_the_audit():
    rng = np.random.default_rng(10)

    def in_place(value):
        value += rng.standard_normal(value.shape) / gaussian.mu(1.0, 0.1)
        return value

    cell = CELL[1].copy()
    assert audit(in_place, CELL[0], cell, 1.0, 0.1, samples=2000).verdict == "not rejected"
    np.testing.assert_array_equal(cell, CELL[1])


def test_every_output_is_drawn_once_and_reported():
    calls, told = [], []

    def mechanism(value):
        calls.append(value)
        return np.random.default_rng(len(calls)).standard_normal(2)

    for statistic in ("auto", lambda outputs: outputs[:, 0]):
        calls.clear(), told.clear()
        audit(mechanism, 0.0, 1.0, 1.0, 0.1, samples=1501, statistic=statistic, progress=lambda *now: told.append(now))
        assert len(calls) == 2 * 1501 + 1  # the first call only shows the shape
        assert (calls[1:].count(0.0), calls[1:].count(1.0)) == (1501, 1501)
        assert told[-1] == (3002, 3002)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_results_print_their_claim_bounds_and_assumptions():
    law = honest("analytic")
    result = audit_law(law, Counts(1), BUDGET, samples=500, rng=np.random.default_rng(0))
    text = str(result)
    for part in ("epsilon 0.9, delta 0.001", "500 outputs", "holds if the noise is Gaussian", "not rejected", "1e-06"):
        assert part in text
    assert result.to_dict() == {
        "epsilon": 0.9,
        "delta": 0.001,
        "epsilon_lower": result.epsilon_lower,
        "delta_lower": result.delta_lower,
        "statistic": "every linear statistic",
        "samples": 500,
        "confidence": 1 - 1e-6,
        "method": "gaussian",
        "verdict": "not rejected",
    }
    assert "at least 0.1234 at" in str(replace(result, epsilon_lower=0.12349))  # a lower bound is rounded down
    assert "at least 0 at" in str(replace(result, delta_lower=5e-324))
    again = audit_law(law, Counts(1), BUDGET, samples=500, rng=np.random.default_rng(0))
    assert again == result


GOOD = {"release_fn": lambda value: value, "value": 0.0, "neighbour": 1.0, "epsilon": 1.0, "delta": 0.1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"release_fn": 3}, "release_fn must be a function"),
        ({"release_fn": lambda value: "a"}, "release_fn must return numbers"),
        ({"release_fn": lambda value: None}, "release_fn must return"),
        ({"release_fn": lambda value: []}, "release_fn must return finite"),
        ({"release_fn": lambda value: np.nan}, "release_fn must return finite"),
        ({"release_fn": lambda value: np.zeros(1 + int(value))}, "must return one shape"),
        ({"release_fn": lambda value: release(np.zeros(2), Counts(1), BUDGET, "analytic")}, "its .value"),
        ({"neighbour": 0.0}, "value and neighbour are the same"),
        ({"epsilon": -1.0}, "epsilon must be 0 or above"),
        ({"epsilon": np.nan}, "epsilon must be finite"),
        ({"delta": 1.0}, "delta must be below 1"),
        ({"delta": -0.1}, "delta must be 0 or above"),
        ({"samples": 19}, "samples must be at least 20"),
        ({"samples": 1e4}, "samples must be a whole number"),
        ({"confidence": 1.0}, "confidence must be at least 0.5 and below 1"),
        ({"confidence": 1e-6}, "0.999 is a common choice"),
        ({"confidence": np.nan}, "confidence must be finite"),
        ({"statistic": "best"}, "statistic must be one of auto, linear, radial, learned"),
        ({"statistic": lambda outputs: 1.0}, "one number"),
        ({"statistic": lambda outputs: np.full(len(outputs), np.nan)}, "never NaN"),
    ],
)
def test_bad_arguments_of_audit(change, message):
    with pytest.raises(InvalidInput, match=message):
        audit(**{**GOOD, "samples": 40, **change})


def test_errors_of_the_mechanism_itself_pass_through():
    with pytest.raises(ZeroDivisionError):
        audit(lambda value: 1 / 0, 0.0, 1.0, 1.0, 0.1)


def test_bad_arguments_of_the_others():
    law = calibrate("l2", shape=(3,), sensitivity=Frobenius(1.0), budget=FRIENDLY)
    with pytest.raises(InvalidInput, match="method 'gaussian' is for Gaussian noise"):
        audit_law(law, Frobenius(1.0), FRIENDLY, method="gaussian")
    with pytest.raises(InvalidInput, match="method must be one of"):
        audit_law(law, Frobenius(1.0), FRIENDLY, method="best")
    with pytest.raises(InvalidInput, match="budget must be"):
        audit_law(law, Frobenius(1.0), (1.0, 0.1))
    with pytest.raises(InvalidInput, match="noise must be"):
        audit_law(3, Frobenius(1.0), FRIENDLY)
    with pytest.raises(InvalidInput, match="rng must be"):
        audit_law(law, Frobenius(1.0), FRIENDLY, rng=3)
    with pytest.raises(InvalidInput, match="its input with noise"):
        audit_law(law, Frobenius(1.0), FRIENDLY, release_fn=lambda value: value[:2])
    with pytest.raises(InvalidInput, match="equally long"):
        audit_scores(np.zeros(30), np.zeros(31), 1.0, 0.1)
    with pytest.raises(InvalidInput, match="value_scores must be finite"):
        audit_scores(np.full(30, np.nan), np.zeros(30), 1.0, 0.1)
    with pytest.raises(InvalidInput, match="at least 20"):
        audit_scores(np.zeros(10), np.zeros(10), 1.0, 0.1)

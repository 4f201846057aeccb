"""What every mechanism in the registry owes: a law of the right shape whose certificate keeps the claim."""

from dataclasses import replace

import numpy as np
import pytest

from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.distributions import Gaussian
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.mechanisms import RECIPES
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, Participation, RankOne, Vertices

SETTINGS = [
    ((4, 3), Frobenius(2.0)),
    ((4, 3), Entrywise(0.1)),
    ((4, 3), OneColumn(1.0)),
    ((4, 3), OneRow(0.0, 1.0)),
    ((4, 3), Counts(1)),
    ((4, 3), Counts(2, relation="replace")),
    ((4, 4), RankOne(1.0)),
    ((4, 4), RankOne(1.0, relation="replace")),
    ((2, 2), Vertices(np.eye(2), np.ones((2, 2)))),
    ((5,), Frobenius(1.0)),
    ((1, 1), Frobenius(1.0)),
    ((6, 2), Participation(1.0, separation=2, times=2)),
]
# Mechanisms that take seconds are checked on one setting.
CASES = [(r.name, *setting) for r in RECIPES.values() for setting in (SETTINGS[:1] if r.slow else SETTINGS)]
BUDGETS = [Budget(0.1, 1e-9), Budget(0.9, 1e-5), Budget(8.0, 1e-3)]
OPTIONS: dict[str, dict[str, object]] = {
    "mvg": {"gamma": 3.0},
    "matrix-mechanism": {"workload": "prefix"},
    "rank-r": {"rank": 1},
}


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize(("name", "shape", "sensitivity"), CASES, ids=str)
def test_the_certificate_keeps_the_budget(name, shape, sensitivity, budget):
    try:
        law = calibrate(name, shape=shape, sensitivity=sensitivity, budget=budget, **OPTIONS.get(name, {}))
    except NotApplicable:
        return
    assert law.shape == shape
    assert RECIPES[name].source in law.source
    certificate = certify(law, sensitivity, budget)
    assert certificate.relation == sensitivity.relation
    assert certificate.meets(budget) or RECIPES[name].refuted
    drawn = law.sample(np.random.default_rng(0))
    assert drawn.shape == shape
    assert np.all(np.isfinite(drawn))


@pytest.mark.parametrize("name", ["analytic", "imgm", "optimal"])
@pytest.mark.parametrize(("shape", "sensitivity"), [((4, 3), Frobenius(2.0)), ((3, 3), RankOne(1.5))], ids=str)
def test_tight_mechanisms_leave_no_room(name, shape, sensitivity):
    """The right scale is kept, two thirds of it is not, and even 1e-6 less is not."""
    budget = Budget(0.7, 1e-6)
    law = calibrate(name, shape=shape, sensitivity=sensitivity, budget=budget)
    assert certify(law, sensitivity).meets(budget)
    for share in (2 / 3, 1 - 1e-6):
        short = replace(law, covariance=law.covariance.scaled(share))
        assert not certify(short, sensitivity).meets(budget)


def test_every_mechanism_has_a_source_in_the_bibliography():
    from pathlib import Path

    keys = (Path(__file__).parents[2] / "docs" / "references.bib").read_text()
    for recipe in RECIPES.values():
        key = recipe.source.split(",")[0]
        assert key == "matrixdp" or f"{{{key}," in keys, key


def test_reasons_why_a_mechanism_does_not_apply_are_for_people():
    for shape, sensitivity in SETTINGS:
        for row in compare(shape, sensitivity, Budget(2.0, 1e-6)):
            assert row.verdict != "not applicable" or len(row.note) > 20


def test_classic_is_refused_at_epsilon_one_and_above():
    for epsilon in (1.0, 10.0):
        with pytest.raises(NotApplicable, match="below 1"):
            calibrate("classic", shape=(2, 2), sensitivity=Frobenius(1.0), budget=Budget(epsilon, 1e-5))


@pytest.mark.parametrize(("epsilon", "true_delta"), [(10.0, 2.3e-5), (20.0, 1.5e-3)])
def test_classic_forced_above_its_proof_is_caught(epsilon, true_delta):
    given = {"shape": (2, 2), "sensitivity": Frobenius(1.0), "budget": Budget(epsilon, 1e-5)}
    law = calibrate("classic", beyond_proof=True, **given)
    assert certify(law, Frobenius(1.0)).delta(epsilon) == pytest.approx(true_delta, rel=0.05)
    with pytest.raises(GuaranteeViolated, match="does not keep"):
        release(np.zeros((2, 2)), Frobenius(1.0), Budget(epsilon, 1e-5), mechanism="classic", beyond_proof=True)
    assert compare(mechanisms=["classic"], beyond_proof=True, **given).rows[0].verdict == "violated"


def test_classic_has_the_published_scale():
    law = calibrate("classic", shape=(2, 2), sensitivity=Frobenius(3.0), budget=Budget(0.5, 1e-5))
    assert law.root_mean_square == pytest.approx(3 * np.sqrt(2 * np.log(1.25e5)) / 0.5)


def test_analytic_known_value():
    """Balle-Wang at epsilon 1, delta 1e-5: the std for sensitivity 1 is 3.7306 (their published code)."""
    law = calibrate("analytic", shape=(6, 248), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-5))
    assert law.root_mean_square == pytest.approx(3.730631634944931, rel=1e-9)


def test_imgm_is_analytic_by_default_and_scales_any_pair():
    budget, ball = Budget(1.0, 1e-5), Frobenius(2.0)
    plain = calibrate("imgm", shape=(3, 2), sensitivity=ball, budget=budget)
    assert plain.root_mean_square == pytest.approx(
        calibrate("analytic", shape=(3, 2), sensitivity=ball, budget=budget).root_mean_square
    )
    shaped = calibrate(
        "imgm", shape=(3, 2), sensitivity=ball, budget=budget, rows=np.array([1.0, 4.0, 9.0]), columns=2 * np.eye(2)
    )
    assert shaped.covariance.smallest_std == pytest.approx(plain.root_mean_square)
    np.testing.assert_allclose(shaped.covariance.variances()[:, 0] / plain.root_mean_square**2, [1, 4, 9], rtol=1e-9)
    several = calibrate("imgm", shape=(3, 2), sensitivity=ball, budget=budget, releases=16)
    assert several.root_mean_square == pytest.approx(4 * plain.root_mean_square)
    for bad in ({"rows": np.ones(2)}, {"columns": np.ones(3)}, {"releases": 0}, {"releases": 1.5}):
        with pytest.raises(InvalidInput):
            calibrate("imgm", shape=(3, 2), sensitivity=ball, budget=budget, **bad)


@pytest.mark.parametrize("seed", range(5))
def test_optimal_entrywise_beats_every_other_covariance(seed):
    """The closed form against random diagonal and random correlated noise, each scaled to the same mu."""
    rng = np.random.default_rng(seed)
    bounds, weights, budget = rng.uniform(0.1, 2, (2, 2)), rng.uniform(0.1, 5, (2, 2)), Budget(1.0, 1e-6)
    box = Entrywise(bounds)
    best = calibrate("optimal", shape=(2, 2), sensitivity=box, budget=budget, weights=weights)
    mu = certify(best, box).mu
    error = best.expected_squared_error(weights)
    assert error == pytest.approx(np.sum(bounds * np.sqrt(weights)) ** 2 / mu**2, rel=1e-9)
    corners = [bounds * np.reshape(s, (2, 2)) for s in np.ndindex(2, 2, 2, 2) for s in [2 * np.array(s) - 1]]
    for _ in range(200):
        factor = rng.standard_normal((4, 4)) * 10.0 ** rng.uniform(-1, 1, 4)[:, None]
        covariance = factor @ factor.T + 1e-3 * np.eye(4)
        inverse = np.linalg.inv(covariance)
        worst = max(c.ravel() @ inverse @ c.ravel() for c in corners)
        other = np.sum(weights.ravel() * np.diag(covariance)) * worst / mu**2
        assert other >= error * (1 - 1e-9)


def test_optimal_entrywise_with_entries_that_do_not_count_or_cannot_change():
    budget = Budget(1.0, 1e-6)
    box = Entrywise(np.array([1.0, 1.0, 0.0]))
    law = calibrate("optimal", shape=(3,), sensitivity=box, budget=budget, weights=np.array([1.0, 0.0, 1.0]))
    assert certify(law, box).meets(budget)
    std = law.covariance.std
    alone = calibrate("analytic", shape=(1,), sensitivity=Frobenius(1.0), budget=budget).root_mean_square
    assert std[0] == pytest.approx(alone, rel=2e-3)
    assert std[1] > 10 * std[0]
    assert std[2] < 1e-5 * std[0]
    with pytest.raises(InvalidInput, match="weights"):
        calibrate("optimal", shape=(3,), sensitivity=box, budget=budget, weights=np.zeros(3))
    with pytest.raises(InvalidInput, match="weights"):
        calibrate("optimal", shape=(3,), sensitivity=box, budget=budget, weights=np.array([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("relation", ["add/remove", "replace"])
@pytest.mark.parametrize("d", [1, 2, 3, 10])
def test_optimal_rank_one_beats_every_other_pair_of_scales(d, relation):
    budget, records = Budget(1.0, 1e-6), RankOne(1.5, relation=relation)
    best = calibrate("optimal", shape=(d, d), sensitivity=records, budget=budget)
    mu, error = certify(best, records).mu, best.expected_squared_error()
    for ratio in np.geomspace(0.01, 100, 401):
        other = Gaussian(type(best.covariance)(d, 1.0, ratio))
        scaled = other.expected_squared_error() * (certify(other, records).mu / mu) ** 2
        assert scaled >= error * (1 - 1e-9)
    if relation == "add/remove" and d > 1:
        free = d * (d + 1) / 2 - 1
        closed = 1.5**4 / mu**2 * (np.sqrt(1 / d) + np.sqrt(free * (1 - 1 / d))) ** 2
        assert error == pytest.approx(closed, rel=1e-9)
    plain = calibrate("analytic", shape=(d, d), sensitivity=records, budget=budget).expected_squared_error()
    assert error <= plain * (1 + 1e-9)


@pytest.mark.parametrize("relation", ["add/remove", "replace"])
def test_optimal_rank_one_keeps_the_budget_in_many_dimensions(relation):
    budget = Budget(1.0, 1e-7)
    for d in (300, 784, 1500):
        law = calibrate("optimal", shape=(d, d), sensitivity=RankOne(1.0, relation), budget=budget)
        assert certify(law, RankOne(1.0, relation)).meets(budget)


def test_auto_takes_the_least_error_and_honours_options():
    budget = Budget(0.5, 1e-6)
    law = calibrate("auto", shape=(5, 5), sensitivity=RankOne(1.0), budget=budget)
    assert law.source.startswith("optimal")
    assert calibrate("auto", shape=(50, 50), sensitivity=Counts(1), budget=budget).exponent == 1.0
    weights = np.geomspace(1, 1e4, 400)
    law = calibrate("auto", shape=(400,), sensitivity=Entrywise(1.0), budget=budget, weights=weights)
    assert law.covariance.std[-1] < law.covariance.std[0]
    # With few entries a spherical law has less error, but no proof against floating-point attacks: not by itself.
    assert calibrate("auto", shape=(3,), sensitivity=Frobenius(1.0), budget=budget).source.startswith("analytic")
    for length, names in ((16, ("laplace", "discrete")), (256, ("matrix-mechanism",))):
        task = calibrate("auto", shape=(length,), sensitivity=Counts(1), budget=budget, workload="prefix")
        assert task.source.startswith(names)


def test_unknown_names_and_options_are_errors():
    given = {"shape": (2, 2), "sensitivity": Frobenius(1.0), "budget": Budget(0.5, 1e-6)}
    with pytest.raises(InvalidInput, match="mechanism must be one of classic, analytic"):
        calibrate("magic", **given)
    with pytest.raises(InvalidInput, match="analytic has no option 'sigma'"):
        calibrate("analytic", sigma=1.0, **given)
    with pytest.raises(InvalidInput, match="option 'sigma'"):
        calibrate("auto", sigma=1.0, **given)

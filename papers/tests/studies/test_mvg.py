"""The study of MVG's experiments."""

import numpy as np
import pytest

from matrixdp import certify
from matrixdp_papers.studies import mvg
from matrixdp_papers.studies.base import Mean, silent


def trials(experiment):
    return {trial.name: trial for trial in experiment.trials}


def test_it_runs_on_small_data(small_mvg):
    found = mvg.run(small_mvg, True, silent)
    assert len(found.tables) == 3
    assert all(isinstance(row[4], Mean) for table in found.tables for row in table.rows[2:])


def test_without_noise_the_regression_is_the_reference(small_mvg, rng):
    experiment = mvg.regression(small_mvg.liver, rng)
    found = trials(experiment)
    analytic = found["analytic"]
    assert analytic.score(analytic.answer.value) == experiment.references["no noise"]
    # the answer is a mean of the inputs, which a linear model finds
    assert experiment.references["no noise"] < 0.3 * experiment.references["0.5 without data"]


def test_without_noise_the_component_misses_nothing(small_mvg, rng):
    experiment = mvg.component(small_mvg.movement, rng)
    trial = experiment.trials[0]
    assert trial.score(trial.answer.value) == pytest.approx(0, abs=1e-12)
    # the last axis is the worst direction
    assert trial.score(np.diag([0.0, 0.0, 0.0, 1.0])) > 0.2


def test_the_known_variance_is_taken_off_the_covariance(small_mvg):
    # Without this the diagonal would be too large by the noise's variance: 6 x std^4 in squared distance.
    rng = np.random.default_rng(3)
    heart = np.tile(small_mvg.cardiotocography, (200, 1))
    trial = trials(mvg.covariance(heart))["analytic"]
    distance = np.mean([trial.score(trial.answer.value + trial.law.sample(rng)) for _ in range(5)])
    assert distance < 0.5 * 6 * trial.law.root_mean_square**4


def test_equal_guarantees_are_equal(small_mvg, rng):
    for experiment in (mvg.regression(small_mvg.liver, rng), mvg.covariance(small_mvg.cardiotocography)):
        found = trials(experiment)
        for name in ("mvg, binary, rescaled", "analytic", "optimal"):
            delta = certify(found[name].law, found[name].answer.sensitivity).delta(1.0)
            assert delta == pytest.approx(experiment.budget.delta, rel=1e-6)
            assert delta <= experiment.budget.delta
        binary = certify(found["mvg, binary"].law, found["mvg, binary"].answer.sensitivity)
        assert binary.delta(1.0) < 1e-10 * experiment.budget.delta


def test_the_favoured_row_gets_less_noise(small_mvg, rng):
    law = trials(mvg.regression(small_mvg.liver, rng))["mvg, binary, rescaled"].law
    variances = law.covariance.variances()[:, 0]
    assert np.argmin(variances) == len(variances) - 1


def test_without_gamma_the_condition_is_that_of_the_change_alone():
    """(H + H_1/2) gamma^2 + 2 H gamma s = H s^2 with H = 11/6 for three rows."""
    harmonic, half, s = 11 / 6, 1 + 2**-0.5 + 3**-0.5, 0.7
    gamma = mvg.gamma_free((3, 8), s)
    assert (harmonic + half) * gamma**2 + 2 * harmonic * gamma * s == pytest.approx(harmonic * s**2)


def test_without_gamma_mvg_keeps_its_claim_with_less_noise(small_mvg, rng):
    for experiment, kind in ((mvg.regression(small_mvg.liver, rng), "binary"),
                             (mvg.component(small_mvg.movement, rng), "uniform")):  # fmt: skip
        found = {name: trial.law for name, trial in trials(experiment).items()}
        sensitivity = experiment.trials[0].answer.sensitivity
        for radius in ("", ", radius"):
            free, published = found[f"mvg, {kind}{radius}, no gamma"], found[f"mvg, {kind}{radius}"]
            assert free.root_mean_square < published.root_mean_square
            assert certify(free, sensitivity).delta(1.0) <= experiment.budget.delta


def test_the_real_data_lie_inside_their_public_ends(folder):
    data = mvg.load(folder)
    assert [part.shape for part in data] == [(345, 6), (2021, 4), (2126, 21)]
    for scaled in (data.liver, data.cardiotocography):
        # nothing was clipped on either side by more than a few records
        assert np.mean((scaled == 0) | (scaled == 1)) < 0.5
        assert scaled.min() >= 0
        assert scaled.max() <= 1

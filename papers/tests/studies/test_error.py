"""The study of expected errors."""

import math

import numpy as np
import pytest

from matrixdp import Budget, calibrate, certify
from matrixdp.sensitivity import Entrywise, Frobenius
from matrixdp_papers.studies import error
from matrixdp_papers.studies.base import silent
from matrixdp_papers.studies.recalibrated import recalibrated


def test_it_runs_and_says_what_it_found():
    found = error.run(None, True, silent)
    assert "Adult" in found.found
    assert set(found.figures) == {"figure-9"}


def test_the_papers_gaussian_spends_a_share_on_every_entry():
    law = error.laws((2, 3), 0.5)["Gaussian, entry by entry"]
    std = 1.0 * math.sqrt(2 * math.log(1.25 / (1e-5 / 6))) / (1 / 6)
    assert law.root_mean_square == pytest.approx(std)


def test_all_but_the_analytic_gaussian_are_loose():
    rows = [row for row in error.errors(True, silent).rows if row[0] == "gradient, Adult"]
    assert {row[2]: row[6] for row in rows}.pop("analytic") == "exact"
    assert all(row[6] == "loose" and row[4] > 1 for row in rows if row[2] != "analytic")


def test_the_growth_is_that_of_table_4():
    powers = {row[0]: row[1:3] for row in error.growth().rows}
    for name in ("Gaussian, entry by entry", "UDN", "IDN"):
        assert powers[name] == pytest.approx(error.PAPER_GROWTH[name], abs=0.06)
    assert powers["analytic"] == pytest.approx((2, 2))


def test_figure_9_has_the_losses_of_the_paper_and_the_true_delta():
    table = error.dimensions(True, silent)
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        assert cells["analytic"] < cells["classic"]
        assert cells["true delta of analytic"] == pytest.approx(1e-10, rel=1e-6)
        assert cells["r1smg"] >= 2 / cells["epsilon"]
        assert cells["true delta of r1smg"] > 1e6 * 1e-10
        assert cells["r1smg that keeps the claim"] > 1000 * cells["analytic"]
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["M"], first["epsilon"]) == (100, 1e-7)
    assert first["true delta of r1smg"] == pytest.approx(0.0044540, rel=1e-4)


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [("classic", {"beyond_proof": True}), ("mvg", {"gamma": 5.0}), ("mgm", {}), ("r1smg", {}), ("l2", {})],
)
def test_recalibrated_noise_keeps_the_budget_and_wastes_nothing(mechanism, options):
    budget, sensitivity = Budget(1.0, 1e-6), Frobenius(2.0)
    law = calibrate(mechanism, shape=(3, 4), sensitivity=sensitivity, budget=budget, **options)
    true = recalibrated(law, sensitivity, budget)
    delta = certify(true, sensitivity).delta(1.0)
    assert 1e-6 * (1 - 1e-6) <= delta <= 1e-6
    if mechanism in ("classic", "mvg", "mgm"):
        analytic = calibrate("analytic", shape=(3, 4), sensitivity=sensitivity, budget=budget)
        assert true.root_mean_square == pytest.approx(analytic.root_mean_square, rel=1e-9)


def test_recalibration_keeps_the_shape_of_directional_noise():
    budget, sensitivity = Budget(1.0, 1e-6), Entrywise(np.array([[1.0, 1.0], [2.0, 2.0]]))
    law = calibrate("mvg", shape=(2, 2), sensitivity=sensitivity, budget=budget, gamma=4.0, precision="binary")
    true = recalibrated(law, sensitivity, budget)
    ratio = true.covariance.variances() / law.covariance.variances()
    assert np.ptp(ratio) < 1e-9 * ratio.max()
    assert certify(true, sensitivity).meets(budget)

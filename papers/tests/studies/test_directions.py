"""The study of directional noise."""

import numpy as np
import pytest

from matrixdp import certify
from matrixdp_papers.studies import directions
from matrixdp_papers.studies.base import silent
from matrixdp_papers.studies.recalibrated import recalibrated


@pytest.fixture
def small(rng):
    heart = rng.random((60, 5))
    return directions.Data(rng.random((40, 3)), heart, (heart[:, 0] > 0.5).astype(float))


def tasks(data):
    return (
        directions.group_means(data.liver),
        directions.scores(data.liver),
        directions.cross_moments(data.heart, data.normal),
    )


def rows_of(table):
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_it_runs_on_small_data(small):
    found = directions.run(small, True, silent)
    assert len(found.tables) == 4
    assert found.found.startswith("| quantity | paper | ours | why |")


def test_everything_is_compared_at_the_same_true_guarantee(small):
    for task in tasks(small):
        for name, law in task.laws.items():
            equal = law if name in task.exact else recalibrated(law, task.answer.sensitivity, task.budget)
            certificate = certify(equal, task.answer.sensitivity)
            assert certificate.delta(1.0) <= task.budget.delta
            assert certificate.delta(1.0) == pytest.approx(task.budget.delta, rel=1e-5)


def test_drawn_errors_are_the_expected_ones_and_the_optimum_is_least(small, rng):
    for task in tasks(small):
        rows = rows_of(directions.measure(task, 300, rng, silent))
        least = min(row["error at equal guarantee"] for row in rows.values())
        assert rows["optimal"]["error at equal guarantee"] <= least * (1 + 1e-3)
        for row in rows.values():
            # 300 sums of four squares or more: 45 % is over 5 standard errors, one false alarm in a million
            assert row["drawn"].mean == pytest.approx(row["error at equal guarantee"], rel=0.45)


def test_noise_for_group_means_is_that_of_the_means_themselves(small):
    task = directions.group_means(small.liver)
    share = rows_of(directions.measure(task, 2, np.random.default_rng(0), silent))["optimal"][
        "error at equal guarantee"
    ]
    assert share == pytest.approx(directions.GROUPS / len(small.liver), rel=5e-3)


def test_optimized_idn_has_less_error_than_idn_and_none_less_than_the_score_itself(small, rng):
    task = directions.scores(small.liver)
    rows = rows_of(directions.measure(task, 2, rng, silent))
    assert rows["IDN, optimized"]["error as published"] < rows["IDN"]["error as published"]
    # the score alone, released with noise for what one record can move it by, is the least possible
    (score,) = task.options["row_utility"]
    least = np.sum(np.abs(score)) ** 2 / (len(score) * np.sum(score**2))
    for row in rows.values():
        assert row["error at equal guarantee"] >= least * (1 - 1e-6)
    assert rows["optimal"]["error at equal guarantee"] == pytest.approx(least, rel=2e-3)


def test_the_real_data_have_both_diagnoses(folder):
    data = directions.load(folder)
    assert data.heart.shape == (2126, 21)
    assert 0.5 < data.normal.mean() < 0.95

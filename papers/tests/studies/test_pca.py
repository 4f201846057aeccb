"""The study of principal components."""

import numpy as np
import pytest

from matrixdp_papers.studies import pca
from matrixdp_papers.studies.base import silent


@pytest.fixture
def problem(small_tasks, rng):
    return pca.Problem(small_tasks[0], rng)


def test_it_runs_on_small_data(small_tasks):
    found = pca.run(small_tasks, True, silent)
    assert set(found.figures) == {"figure-6"}
    titles, colours = [], {}
    for panel in found.figures["figure-6"].axes:
        titles.append(panel.get_title())
        for curve, label in zip(*panel.get_legend_handles_labels(), strict=True):
            colours.setdefault(label, set()).add(curve.lines[0].get_color())
    assert sum(", all " in title for title in titles) == len(small_tasks)
    assert all(len(used) == 1 for used in colours.values())  # in every panel, also in that without PPCA
    assert len(found.tables) == 6
    assert "synthetic" in found.found


def test_the_true_basis_is_worth_most(problem, rng):
    assert problem.deviation(problem.basis) == pytest.approx(0, abs=1e-12)
    assert problem.missed(problem.basis) == pytest.approx(0, abs=1e-12)
    random = np.linalg.qr(rng.normal(size=(24, problem.kept)))[0]
    assert problem.deviation(random) > 0.1
    assert problem.missed(random) > 0.3
    assert problem.accuracy(random) < problem.accuracy(problem.basis)
    np.testing.assert_allclose(np.abs(problem.leading(problem.answer.value).T @ problem.basis), np.eye(6), atol=1e-6)


def test_only_the_order_free_measure_ignores_a_rotation(problem, rng):
    turned = problem.basis @ np.linalg.qr(rng.normal(size=(problem.kept, problem.kept)))[0]
    assert problem.missed(turned) == pytest.approx(0, abs=1e-12)
    assert problem.deviation(turned) > 0.01


def test_mvg_finds_nothing_at_the_epsilon_it_is_said_to_need(small_tasks):
    (row,) = pca.larger_epsilons(small_tasks, 8).rows
    _, random, least, *_, most = row
    assert least.mean > 0.5 * random.mean
    assert most.mean < 0.1 * random.mean


def test_the_verdicts(problem):
    found = {name: method.verdict for name, method in pca.methods(problem, 0.8).items()}
    assert {name for name, word in found.items() if word == "violated"} == {"r1smg", "Wishart"}
    assert {name for name, word in found.items() if word == "exact"} == {"analytic", "optimal", "r1smg, rescaled"}
    assert {name for name, word in found.items() if word == "loose"} == {"classic", "mvg", "mgm", "MOD-SULQ"}


def test_every_method_draws_an_orthonormal_basis(problem, rng):
    for name, method in pca.methods(problem, 1.6).items():
        basis = method.draw(rng)
        assert basis.shape == (24, problem.kept), name
        np.testing.assert_allclose(basis.T @ basis, np.eye(problem.kept), atol=1e-8)


def test_the_rivals_here_are_those_of_the_baselines(small_tasks, problem):
    from matrixdp import Budget
    from matrixdp_papers.rivals.modsulq import mod_sulq
    from matrixdp_papers.rivals.ppca import ppca
    from matrixdp_papers.rivals.wishart import wishart

    budget, records = Budget(0.8, pca.DELTA), small_tasks[0].records
    mine = pca.rivals(problem, budget)
    draws = {
        "PPCA": ppca(records, problem.kept, 0.8, sweeps=pca.SWEEPS, rng=np.random.default_rng(5)),
        "MOD-SULQ": mod_sulq(records, problem.kept, budget, rng=np.random.default_rng(5)).components,
        "Wishart": problem.leading(wishart(records, 0.8, accept_violation=True, rng=np.random.default_rng(5))),
    }
    for name, theirs in draws.items():
        ours = mine[name].draw(np.random.default_rng(5))
        np.testing.assert_allclose(np.abs(np.sum(ours * theirs, axis=0)), 1, atol=1e-6, err_msg=name)

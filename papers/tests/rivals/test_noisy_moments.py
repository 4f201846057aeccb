"""MOD-SULQ, whose certificate shows how much noise it wastes, and the Wishart mechanism, which keeps no promise."""

import itertools
import math

import numpy as np
import pytest

from matrixdp import Budget, calibrate
from matrixdp.comparison import verdict
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.sensitivity import RankOne
from matrixdp_papers.claims import wishart as wishart_claim
from matrixdp_papers.rivals import wishart as wishart_module
from matrixdp_papers.rivals.modsulq import mod_sulq, modsulq_certificate, published_std
from matrixdp_papers.rivals.wishart import impossible, wishart

RECORDS = np.random.default_rng(0).standard_normal((50, 3))


def test_the_published_noise_is_loose_and_never_violated():
    settings = itertools.product(
        (1, 2, 10, 784), (0.01, 0.5, 1.0, 5.0, 50.0), (0.3, 1e-5, 1e-12), ("replace", "add/remove")
    )
    for dimension, epsilon, delta, adjacency in settings:
        budget = Budget(epsilon, delta)
        certificate = modsulq_certificate(dimension, published_std(dimension, budget), RankOne(1.0, adjacency), budget)
        assert certificate.exact
        assert verdict(certificate, budget) == "loose"


def test_what_the_certificate_says_at_the_size_of_a_study():
    """784 features at (1, 1e-7): the std is nearly 900 times what is needed, the epsilon 1,400 times too small."""
    budget = Budget(1.0, 1e-7)
    std = published_std(784, budget)
    assert 7.1e-4 < modsulq_certificate(784, std, RankOne(1.0, "replace")).epsilon(1e-7) < 7.3e-4
    needed = calibrate(
        "analytic", shape=(784, 784), sensitivity=RankOne(1.0, "replace"), budget=budget
    ).root_mean_square
    assert 850 < std / needed < 900


def test_the_upper_triangle_has_the_frobenius_radius():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 3000, 3))
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    for adjacency, differences, axes in (
        ("add/remove", np.einsum("ni,nj->nij", x, x), np.diag([1.0, 0, 0])),
        ("replace", np.einsum("ni,nj->nij", x, x) - np.einsum("ni,nj->nij", y, y), np.diag([1.0, -1, 0])),
    ):
        radius = RankOne(1.0, adjacency).frobenius_radius((3, 3))
        assert np.linalg.norm(np.triu(differences), axis=(1, 2)).max() <= radius
        assert np.linalg.norm(np.triu(axes)) == pytest.approx(radius)
        # and mu of the certificate is that length over the std
        assert modsulq_certificate(3, 2.0, RankOne(1.0, adjacency)).mu == pytest.approx(radius / 2)


def test_noise_is_symmetric_with_the_certified_std_in_every_entry():
    """Each variance within 5 standard errors (6e-7 each); 10 % more noise is told apart."""
    budget, draws, rng = Budget(0.9, 1e-6), 2000, np.random.default_rng(2)
    answers = [mod_sulq(RECORDS, 2, budget, norm=1.5, rng=rng) for _ in range(draws)]
    noisy = np.array([answer.second_moment for answer in answers])
    assert np.array_equal(noisy, noisy.transpose(0, 2, 1))
    std = published_std(3, budget) * 1.5**2 / 50
    assert answers[0].certificate.mu == pytest.approx(math.sqrt(2) * 1.5**2 / 50 / std)
    error = 5 * std**2 * math.sqrt(2 / draws)
    variances = noisy.var(axis=0)
    assert np.all(np.abs(variances - std**2) < error)
    assert np.any(np.abs(1.21 * variances - std**2) > error)


def test_components_are_the_leading_eigenvectors():
    answer = mod_sulq(RECORDS, 2, Budget(1.0, 1e-6), rng=np.random.default_rng(3))
    first, second = answer.components.T
    energies = [v @ answer.second_moment @ v for v in (first, second)]
    assert energies == pytest.approx(np.linalg.eigvalsh(answer.second_moment)[::-1][:2])
    assert answer.components.shape == (3, 2)


def test_the_size_is_public_under_add_remove():
    with pytest.raises(InvalidInput, match="size"):
        mod_sulq(RECORDS, 1, Budget(1.0, 1e-6), adjacency="add/remove")
    answer = mod_sulq(RECORDS, 1, Budget(1.0, 1e-6), adjacency="add/remove", size=100)
    assert answer.certificate.adjacency == "add/remove"


def test_bad_arguments_of_mod_sulq():
    budget = Budget(1.0, 1e-6)
    with pytest.raises(InvalidInput, match="k must"):
        mod_sulq(RECORDS, 4, budget)
    with pytest.raises(InvalidInput, match="records"):
        mod_sulq([[np.nan]], 1, budget)
    with pytest.raises(InvalidInput, match="rng"):
        mod_sulq(RECORDS, 1, budget, rng=1)
    with pytest.raises(InvalidInput, match="budget"):
        mod_sulq(RECORDS, 1, 1.0)
    with pytest.raises(NotApplicable, match="delta"):
        published_std(1, Budget(1.0, 0.5))


def test_wishart_is_refused():
    with pytest.raises(GuaranteeViolated, match=r"0\.283"):
        wishart(RECORDS, 1.0)
    with pytest.raises(GuaranteeViolated):
        wishart(RECORDS, 1.0, accept_violation="yes")
    with pytest.raises(InvalidInput, match="epsilon"):
        wishart(RECORDS, np.nan)


def test_wishart_noise_is_as_published():
    """E W = (d + 1) 3/(2 n epsilon) I, within 5 standard errors; positive semidefinite."""
    rng, draws = np.random.default_rng(4), 3000
    true = wishart(RECORDS, 1e12, norm=10.0, accept_violation=True, rng=rng)
    noise = np.array([wishart(RECORDS, 0.5, norm=10.0, accept_violation=True, rng=rng) for _ in range(draws)]) - true
    assert np.linalg.eigvalsh(noise).min() > -1e-9
    expected = 4 * 1.5 * 100 / (50 * 0.5) * np.eye(3)
    error = 5 * noise.std(axis=0) / math.sqrt(draws)
    assert np.all(np.abs(noise.mean(axis=0) - expected) < error)
    assert np.any(np.abs(1.1 * noise.mean(axis=0) - expected) > error)


def test_outputs_that_a_neighbour_never_gives():
    """With the probability of the claims page, within 5 standard errors: noise that is not above x x^T."""
    epsilon, draws, rng = 1.0, 4000, np.random.default_rng(5)
    x = np.array([0.6, 0.0, 0.8])
    noise = np.array([wishart_module.noise(3, 1.5 / epsilon, rng=rng) for _ in range(draws)])
    never = np.linalg.eigvalsh(noise - np.outer(x, x))[:, 0] < 0
    share = impossible(epsilon)
    assert share == pytest.approx(wishart_claim(Budget(epsilon, 1e-6)).exact_delta)
    assert abs(never.mean() - share) < 5 * math.sqrt(share * (1 - share) / draws)

"""Every sensitivity set with every covariance: the witness is a member, attains an exact mu, and nothing beats it."""

import json
import math
import re
from fractions import Fraction
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.optimize import minimize

from cases import COVARIANCES, SETS, SHAPE, spd
from matrixdp import Accountant, Budget, calibrate, certify, release
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Dense, Diagonal, FullCovariance, Isotropic, Kronecker, Symmetric
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import epsilon_with_total_variation, with_total_variation
from matrixdp.privacy.suprema import supremum
from matrixdp.secure.discrete import Sampler
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices

PAIRS = [(s, c) for s in SETS for c in COVARIANCES]
SYMMETRIC_ONLY = ("RankOne, add", "RankOne, replace", "Vertices")
TOLERANCE = 1e-7


def certifiable(set_name, covariance_name):
    return isinstance(COVARIANCES[covariance_name].covariance, FullCovariance) or set_name in SYMMETRIC_ONLY


@pytest.mark.parametrize(("set_name", "covariance_name"), PAIRS)
def test_supremum(set_name, covariance_name):
    case, cov = SETS[set_name], COVARIANCES[covariance_name]
    law = Gaussian(cov.covariance)
    if not certifiable(set_name, covariance_name):
        with pytest.raises(NotCertifiable, match="symmetric"):
            certify(law, case.sensitivity)
        return
    certificate = certify(law, case.sensitivity)
    inverse = np.linalg.pinv(cov.oracle)

    def mu(v):
        return np.sqrt(v.ravel() @ inverse @ v.ravel())

    assert case.sensitivity.contains(certificate.witness, tolerance=1e-8)
    assert mu(certificate.witness) <= certificate.mu
    if certificate.exact:
        assert mu(certificate.witness) >= certificate.mu * (1 - TOLERANCE)
    rng = np.random.default_rng(11)
    members = [case.member(rng) for _ in range(3000)]
    assert all(case.sensitivity.contains(v) for v in members[:50])
    best = max(members, key=mu)
    assert mu(best) <= certificate.mu
    # The search comes close, so a supremum that is much too large would show as a certificate that is not exact.
    assert mu(best) >= (0.8 if certificate.exact else 0.3) * certificate.mu


EXACT = {
    "Frobenius": set(COVARIANCES),
    "OneColumn, norm": set(COVARIANCES),
    "OneRow, norm": set(COVARIANCES),
    "Counts, one": set(COVARIANCES),
    "Vertices": set(COVARIANCES),
    "Entrywise": {"isotropic", "diagonal", "kronecker diagonal"},
    "Entrywise, one bound": {"isotropic", "diagonal", "kronecker diagonal"},
    "OneColumn, box": {"isotropic", "diagonal", "kronecker diagonal"},
    "OneRow, box": {"isotropic", "diagonal", "kronecker diagonal"},
    "Counts, two": {"isotropic", "diagonal", "kronecker diagonal", "dense"},
    "Counts, four": {"isotropic", "diagonal", "kronecker diagonal"},
    "L1": set(COVARIANCES),
    "L1, largest entry": {"isotropic", "diagonal", "kronecker diagonal"},
    "RankOne, add": {"isotropic", "symmetric", "symmetric, two scales"},
    "RankOne, replace": {"isotropic", "symmetric", "symmetric, two scales"},
    "Participation, once": set(COVARIANCES),
    "Participation, separated": set(COVARIANCES) - {"dense"},
    "Participation, often": {
        "isotropic",
        "diagonal",
        "kronecker diagonal",
        "over time, toeplitz",
        "over time, inverse",
    },
    "Participation, cyclic": set(COVARIANCES) - {"dense"},
}


@pytest.mark.parametrize(("set_name", "covariance_name"), [p for p in PAIRS if p[1] in EXACT[p[0]]])
def test_closed_forms_are_marked_exact(set_name, covariance_name):
    if certifiable(set_name, covariance_name):
        law = Gaussian(COVARIANCES[covariance_name].covariance)
        assert certify(law, SETS[set_name].sensitivity).exact


@pytest.mark.parametrize(
    ("sensitivity", "covariance", "mu"),
    [
        (Frobenius(3.0), Isotropic((2, 5), 1.5), 2.0),
        (Frobenius(3.0), Kronecker(np.array([4.0, 9.0]), np.array([0.25, 1.0])), 3.0 / (2 * 0.5)),
        (Entrywise(np.array([[1.0, 2.0]])), Diagonal(np.array([[1.0, 4.0]])), np.sqrt(1 + 0.25)),
        (OneColumn(2.0), Diagonal(np.array([[1.0, 0.5], [4.0, 2.0]])), 4.0),
        (OneRow(0.0, 1.0), Diagonal(np.array([[1.0, 0.5], [0.25, 2.0]])), np.sqrt(16 + 0.25)),
        (OneColumn(0.0, 1.0), Diagonal(np.array([[1.0, 0.5], [0.25, 2.0]])), np.sqrt(1 + 16)),
        (Counts(2, 3.0), Diagonal(np.array([1.0, 0.5, 0.25])), 3 * np.sqrt(16 + 4)),
        (Counts(5), Isotropic((2,), 1.0), np.sqrt(2)),
        (L1(3.0), Diagonal(np.array([1.0, 0.5, 0.25])), 12.0),
        (L1(3.0, 2.0), Diagonal(np.array([1.0, 0.5, 0.25])), np.sqrt(64 + 4)),
        (L1(3.0, 5.0), Isotropic((4,), 1.0), 3.0),
        (L1(3.0, 0.5), Isotropic((4,), 1.0), 1.0),
        (RankOne(2.0), Symmetric(3, 2.0), 2.0),
        (RankOne(2.0, relation="replace"), Symmetric(3, 2.0), 2.0 * np.sqrt(2)),
        (RankOne(2.0), Symmetric(3, 2.0, 1.0), 4 * np.sqrt((1 / 3) + (2 / 3) / 4)),
        (RankOne(2.0, relation="replace"), Symmetric(3, 2.0, 0.1), 4 * np.sqrt((1 / 3) * 100 + (2 / 3) / 4)),
        (RankOne(2.0), Symmetric(1, 2.0, 0.5), 8.0),
        (RankOne(2.0, relation="replace"), Isotropic((2, 2), 1.0), 4 * np.sqrt(2)),
        (Vertices([np.eye(2), 3 * np.ones((2, 2))]), Isotropic((2, 2), 2.0), 3.0),
    ],
)
def test_closed_forms(sensitivity, covariance, mu):
    got = certify(Gaussian(covariance), sensitivity)
    assert mu <= got.mu <= mu * (1 + 1e-10)
    assert got.exact


def test_kronecker_one_column_uses_the_inverse_diagonal():
    rows, columns = spd(3, 8), spd(4, 9)
    got = certify(Gaussian(Kronecker(rows, columns)), OneColumn(2.0)).mu
    exact = 2 * np.sqrt(np.diag(np.linalg.inv(columns)).max() / np.linalg.eigvalsh(rows)[0])
    assert exact <= got <= exact * (1 + 1e-9)


def test_entrywise_is_exact_when_the_precision_has_no_negative_entry():
    precision = np.eye(3) + 0.3 * np.ones((3, 3))
    got = certify(Gaussian(Dense(np.linalg.inv(precision))), Entrywise(1.0))
    assert got.exact
    assert got.mu == pytest.approx(np.sqrt(precision.sum()))


def test_entrywise_bound_is_marked_when_it_is_not_attained():
    # Every pair of entries pulls apart: no choice of signs satisfies all three.
    precision = np.eye(3) + 0.3 * (np.ones((3, 3)) - np.eye(3)) * np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1]])
    got = certify(Gaussian(Dense(np.linalg.inv(precision))), Entrywise(1.0))
    best = max(np.array(s) @ precision @ np.array(s) for s in np.ndindex(2, 2, 2) for s in [2 * np.array(s) - 1])
    assert not got.exact
    assert np.sqrt(best) < got.mu < 1.5 * np.sqrt(best)
    assert np.linalg.norm(np.linalg.cholesky(precision).T @ got.witness) == pytest.approx(np.sqrt(best))


@pytest.mark.parametrize("relation", ["add/remove", "replace"])
def test_rank_one_with_symmetric_noise_over_all_pairs(relation):
    """Optimises over x and y directly, from many starts."""
    law = Gaussian(Symmetric(4, 1.0, 0.4))
    got = certify(law, RankOne(1.0, relation=relation)).mu
    rng = np.random.default_rng(12)

    def loss(z):
        x, y = (v / max(1.0, np.linalg.norm(v)) for v in (z[:4], z[4:]))
        second = np.outer(y, y) if relation == "replace" else 0.0
        return -np.linalg.norm(law.covariance.whiten(np.outer(x, x) - second))

    starts = [
        np.concatenate([rng.standard_normal(4), 10 ** rng.uniform(-3, 1) * rng.standard_normal(4)]) for _ in range(20)
    ]
    best = max(-minimize(loss, start, method="Nelder-Mead").fun for start in starts)
    assert best == pytest.approx(got, rel=1e-3)
    assert best <= got


def test_the_certificate_is_the_gaussian_profile_of_mu():
    certificate = certify(Gaussian(Isotropic((6, 248), 2.0)), Frobenius(1.0))
    assert certificate.delta(0.5) == gaussian.delta(certificate.mu, 0.5)
    assert certificate.epsilon(1e-6) == gaussian.epsilon(certificate.mu, 1e-6)
    assert certificate.meets(Budget(certificate.epsilon(1e-6), 1e-6))
    assert not certificate.meets(Budget(certificate.epsilon(1e-6) * 0.999, 1e-6))


def test_printing_is_for_people_and_never_rounds_the_guarantee_down():
    budget = Budget(1.0, 1e-6)
    certificate = certify(Gaussian(Isotropic((6, 8), 5.0), source="somewhere"), Counts(2, relation="replace"), budget)
    text = str(certificate)
    for word in ("replace", "mu =", "at delta = 1e-06", "exact", "i.i.d. Gaussian", "somewhere", "6 x 8"):
        assert word in text
    printed = float(text.split("epsilon = ")[1].split()[0])
    assert certificate.epsilon(1e-6) <= printed <= certificate.epsilon(1e-6) * 1.002
    assert json.loads(certificate.to_json())["guarantee"]["adjacency"] == "replace"


@pytest.mark.parametrize("budget", [Budget(0.5, 1e-7), Budget(0.1, 0.0), Budget(0.12345678, 1e-6)], ids=str)
def test_discrete_noise_prints_its_delta_at_the_epsilon_asked_for(budget):
    law = calibrate("laplace", shape=(3,), sensitivity=Counts(1), budget=budget)
    certificate = certify(law, Counts(1), budget)
    _, delta, _, _, epsilon = certificate.in_short.split()
    assert f"guarantee  {certificate.in_short} (exact" in str(certificate)
    assert budget.epsilon <= float(epsilon) <= budget.epsilon * 1.0001
    assert certificate.delta(float(epsilon)) <= float(delta) <= 1.01 * budget.delta


def test_a_set_that_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match="square"):
        certify(Gaussian(Isotropic((2, 3), 1.0)), RankOne(1.0))
    with pytest.raises(InvalidInput, match="rows and columns"):
        certify(Gaussian(Isotropic((3,), 1.0)), OneRow(1.0))
    with pytest.raises(InvalidInput, match="shape"):
        certify(Gaussian(Isotropic(SHAPE, 1.0)), Entrywise(np.ones((2, 2))))
    with pytest.raises(InvalidInput, match="noise law"):
        certify(1.0, Frobenius(1.0))
    with pytest.raises(InvalidInput, match=r"matrixdp\.sensitivity"):
        certify(Gaussian(Isotropic(SHAPE, 1.0)), 1.0)


def test_skewed_directions_never_lower_mu():
    """Directions that are off orthonormal by rounding, with variances far apart, against the law that is sampled."""
    from matrixdp.distributions.covariance import Spectrum

    skewed = np.array([[1.0, 5e-9], [0.0, 1.0]])
    covariance = Dense(Spectrum(np.array([1e-18, 1.0]), skewed))
    factor = np.stack([covariance.color(e) for e in np.eye(2)], axis=1)
    change = np.array([0.0, 1.0])
    true = np.linalg.norm(np.linalg.solve(factor, change))
    assert true <= certify(Gaussian(covariance), Vertices(change)).mu


@pytest.mark.parametrize("scales", [(1e-4, 1e4), (1e-8, 1.0), (1e-6, 1.0)])
def test_symmetric_noise_with_scales_far_apart_never_lowers_mu(scales):
    import mpmath

    with mpmath.workdps(50):
        for seed in range(20):
            V = np.random.default_rng(seed).standard_normal((4, 4))
            V = V + V.T
            trace = mpmath.fsum(mpmath.mpf(float(x)) for x in np.diag(V)) / 4
            rest = [mpmath.mpf(float(V[i, j])) - (trace if i == j else 0) for i in range(4) for j in range(4)]
            true = mpmath.sqrt(mpmath.fsum(x**2 for x in rest) / scales[0] ** 2 + 4 * (trace / scales[1]) ** 2)
            assert true <= certify(Gaussian(Symmetric(4, *scales)), Vertices(V)).mu


def far_apart(size, seed):
    """A float64 matrix with variances from 1e-8 to 1, and its inverse to 50 digits."""
    import mpmath

    turned = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]
    matrix = (turned * np.geomspace(1e-8, 1.0, size)) @ turned.T
    matrix = (matrix + matrix.T) / 2
    with mpmath.workdps(50):
        return matrix, mpmath.matrix(matrix.tolist()) ** -1


def largest_root(matrix):
    """The root of the largest eigenvalue, to 50 digits."""
    import mpmath

    with mpmath.workdps(50):
        return mpmath.sqrt(max(mpmath.eigsy(matrix, eigvals_only=True)))


def test_the_error_of_the_eigendecomposition_is_in_mu():
    """Against exact inverses: eigenvalues far below the largest are known to a few digits only."""
    short = 0
    for seed in range(10):
        matrix, inverse = far_apart(4, seed)
        covariance, true = Dense(matrix), largest_root(inverse)
        assert certify(Gaussian(covariance), Frobenius(1.0)).mu >= true
        short += supremum(Frobenius(1.0), covariance).mu * (1 + 1e-12) < true
    assert short  # without the allowance, some would be too small


@pytest.mark.parametrize("sensitivity", [OneRow(1.0), OneColumn(1.0)])
def test_the_error_of_a_block_of_the_inverse_is_in_its_supremum(sensitivity, monkeypatch):
    import mpmath

    short, lines = 0, Dense.lines

    def without_slack(self, axis):
        for index, line in lines(self, axis):
            yield index, Dense(Spectrum._trusted(line.matrix.variances, line.matrix.directions, 0.0))

    for seed in range(6):
        matrix, inverse = far_apart(6, seed)
        covariance, true = Dense(matrix, (2, 3)), mpmath.mpf(0)
        numbers = np.arange(6).reshape(2, 3)
        for line in numbers if isinstance(sensitivity, OneRow) else numbers.T:
            block = mpmath.matrix([[inverse[int(i), int(j)] for j in line] for i in line])
            true = max(true, largest_root(block))
        assert supremum(sensitivity, covariance).mu >= true
        with monkeypatch.context() as patch:
            patch.setattr(Dense, "lines", without_slack)
            short += supremum(sensitivity, covariance).mu < true
    assert short


def test_the_slack_of_a_line_counts():
    rng = np.random.default_rng(3)
    from matrixdp.distributions.covariance import Spectrum

    for _ in range(20):
        W = np.linalg.qr(np.eye(8) + 1e-5 * rng.standard_normal((8, 8)))[0]
        covariance = Dense(Spectrum(10.0 ** rng.uniform(-10, 0, 8), W), (2, 4))
        got = certify(Gaussian(covariance), OneRow(np.zeros(4), np.ones(4)))
        white = np.linalg.norm(covariance.whiten(got.witness))
        assert white <= got.mu * (1 + 1e-12)


def test_extreme_scales_are_refused_not_rounded_to_nothing():
    for build in (lambda: Isotropic((3,), 1e155), lambda: Counts(1, 1e160), lambda: Frobenius(1e-90), lambda: Kronecker(
        np.full(2, 1e165), np.ones(2))):  # fmt: skip
        with pytest.raises(InvalidInput, match="between 1e-75 and 1e\\+75"):
            build()


def test_a_law_that_draws_by_itself_is_not_certified():
    class Mine(Gaussian):
        def sample(self, rng=None):
            return np.zeros(self.shape)

    with pytest.raises(InvalidInput, match="noise law"):
        certify(Mine(Isotropic((2,), 1.0)), Frobenius(1.0))


def test_a_box_is_for_replacing_records():
    with pytest.raises(InvalidInput, match="replacing"):
        OneRow(5.0, 6.0, relation="add/remove")


def test_epsilon_with_the_samplers_error_ends_even_where_it_can_hardly_be_met():
    from matrixdp.privacy.guarantee import epsilon_with_total_variation, with_total_variation

    calls = []
    for mu in (3.5720383, 3.57203837, 3.5720384, 3.6, 0.2):

        def epsilon_at(delta, mu=mu):
            calls.append(delta)
            return gaussian.epsilon(mu, delta)

        epsilon = epsilon_with_total_variation(epsilon_at, 1e-6, 4.2e-17)
        if np.isfinite(epsilon):
            assert with_total_variation(gaussian.delta(mu, epsilon), epsilon, 4.2e-17) <= 1e-6 * (1 + 1e-9)
    assert len(calls) <= 5 * 101


@pytest.mark.parametrize("bad", [-1e-3, np.nan])
def test_a_sampling_cannot_give_budget_back(bad):
    from matrixdp.privacy.drawing import Drawing

    with pytest.raises(InvalidInput):
        Drawing(total_variation=bad)
    with pytest.raises(InvalidInput):
        Drawing(enlargement=bad)


def test_the_smallest_error_of_a_sampler_is_not_rounded_away():
    """In exact numbers: what is added may lie far below the last digit of delta."""
    rng = np.random.default_rng(5)
    for _ in range(2000):
        delta, epsilon, t = (
            float(10 ** rng.uniform(-9, -2)),
            float(rng.uniform(0, 10)),
            float(10 ** rng.uniform(-26, -17)),
        )
        least = Fraction(delta) + (1 + Fraction(math.exp(epsilon)) * (1 - Fraction(1, 2**50))) * Fraction(t)
        assert Fraction(with_total_variation(delta, epsilon, t)) >= least
        asked = Mock(return_value=epsilon)
        epsilon_with_total_variation(asked, delta, t)
        assert Fraction(asked.call_args.args[0]) <= 2 * Fraction(delta) - least


def test_the_error_of_the_tables_counts_for_every_cell_that_changes():
    out = release(np.zeros(5), Counts(3), Budget(1.0, 1e-6), "laplace").certificate
    single = Sampler(out.law.exponent, out.law.scale_in_steps).total_variation
    assert out.total_variation == out.drawing.total_variation == 3 * single > 0


@pytest.mark.parametrize("sensitivity", [Counts(1), Frobenius(1.0)])
@pytest.mark.parametrize("epsilon", [0.628414, 0.389705])
def test_print_does_not_look_larger_than_what_was_asked_for(sensitivity, epsilon):
    certificate = release(np.zeros(3), sensitivity, Budget(epsilon, 1e-6)).certificate
    assert f"epsilon = {epsilon} at" in str(certificate)


@pytest.mark.parametrize("number", [1.2345644, 1.0, 0.3, 2.5e-7])
def test_a_printed_budget_is_never_smaller_than_the_budget(number):
    """epsilon at a smaller delta would be another claim, and so would a smaller budget that is kept."""
    budget = Budget(number, number * 1e-7)
    certificate = certify(Gaussian(Isotropic((2,), 9.0 / number)), Frobenius(1.0), budget)
    accountant = Accountant()
    accountant.add(certificate)
    for text in (str(budget), str(certificate), str(accountant.composition(budget))):
        for printed in re.findall(r"delta (?:= )?([\d.e+-]+\d)", text):
            assert float(printed) >= budget.delta * (1 - 1e-9)
        assert all(float(found) >= budget.epsilon * (1 - 1e-9) for found in re.findall(r"epsilon ([\d.e+-]+\d),", text))

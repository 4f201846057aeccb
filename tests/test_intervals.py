"""Error bars: intervals of real releases cover as often as they say, and not much more often.

Each count has a false-alarm rate of 1e-8, so that all of them together have one of 2e-6. Each test is shown to reject
a planted fault, which it would miss with a chance far below 1e-6.
"""

import decimal
import math
from dataclasses import dataclass, replace

import dask.array
import numpy as np
import pytest
import scipy
import torch

from cases import COVARIANCES
from matrixdp import Budget, Certificate, Counts, Entrywise, Frobenius, RankOne, calibrate, certify, intervals, release
from matrixdp.backends import numpy as numpy_backend
from matrixdp.distributions import Gaussian, NoiseLaw, Product, Spherical, sums
from matrixdp.distributions.covariance import Blocks, Dense, Diagonal, Isotropic, Kronecker, Symmetric
from matrixdp.distributions.gaussian import normal_quantile
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.pipeline import Release
from matrixdp.privacy.drawing import Drawing
from matrixdp.secure.grid import Grid

BUDGET = Budget(1.0, 1e-6)
LEVELS = (0.9, 0.95, 0.99)
FALSE_ALARM = 1e-8


def plausible(covered, trials, level, *, upper=True):
    """Whether so many of independent trials are covered as is likely at this level, or at a higher one."""
    low, high = scipy.stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], trials, level)
    return low <= covered and (covered <= high or not upper)


def covered(value, interval):
    return (np.asarray(interval.low) <= value) & (value <= np.asarray(interval.high))


def paired(count):
    """A covariance in which entries 0, 2, 4, ... are independent of each other, and each depends on the next."""
    blocks = np.zeros((2 * count, 2 * count))
    for i in range(count):
        blocks[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = (1 + i / count) * np.array([[2.0, 1.2], [1.2, 1.0]])
    return blocks


def off_diagonal(value):
    return np.triu_indices_from(value, 1)


KRONECKER = Kronecker(paired(100), paired(100))
SECOND = np.s_[::2, ::2]
# covariance, the set, which of its entries are independent, how many releases make 20,000 of them
GAUSSIANS = {
    "isotropic": (Isotropic((100, 200), 3.0), Frobenius(0.5), ..., 1),
    "diagonal": (Diagonal(np.linspace(1.0, 9.0, 20_000)), Frobenius(0.2), ..., 1),
    "kronecker": (KRONECKER, Frobenius(0.02), SECOND, 2),
    "dense": (Dense(paired(250), (20, 25)), Frobenius(0.05), ..., 80),
    "blocks": (Blocks((Isotropic((100, 100), 2.0), Diagonal(np.linspace(1.0, 2.0, 10_000)))), Frobenius(0.2), ..., 1),
    "symmetric": (Symmetric(201, 4.0, 6.0), RankOne(0.5), off_diagonal, 1),
}


def released(law, sensitivity, repeats, seed):
    """The same private value, released so often."""
    value = 100 * np.random.default_rng(seed).standard_normal(law.shape)
    value = (value + value.T) / 2 if isinstance(sensitivity, RankOne) else value
    return value, [release(value, sensitivity, BUDGET, law) for _ in range(repeats)]


@pytest.mark.parametrize("name", GAUSSIANS)
def test_gaussian_intervals_cover_as_often_as_they_say(name):
    covariance, sensitivity, independent, repeats = GAUSSIANS[name]
    value, releases = released(Gaussian(covariance), sensitivity, repeats, 1)
    if name == "dense":  # one entry of each correlated pair
        independent = np.arange(value.size).reshape(value.shape) % 2 == 0
    place = independent(value) if callable(independent) else independent
    trials = repeats * value[place].size
    assert trials >= 10_000
    for level in LEVELS:
        hits = sum(int(np.sum(covered(value, out.interval(level))[place])) for out in releases)
        assert plausible(hits, trials, level)
    squares = np.sum([np.sum(((out.value - value) / out.standard_error)[place] ** 2) for out in releases])
    likely = scipy.stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], trials)
    assert likely[0] <= squares <= likely[1]
    assert not likely[0] <= squares / 0.93**2 <= likely[1]  # planted faults: std x 0.93, and what it does to intervals
    small = [replace(out, noise=out.noise.scaled(0.9)) for out in releases]
    hits = sum(int(np.sum(covered(value, out.interval(0.9))[place])) for out in small)
    assert not plausible(hits, trials, 0.9)


@pytest.mark.parametrize("name", COVARIANCES)
def test_intervals_of_every_covariance_cover_as_often_as_they_say(name):
    """One entry of each of 1,500 draws, in turn."""
    law = Gaussian(COVARIANCES[name].covariance)
    symmetric = name.startswith("symmetric")
    value = np.arange(9.0).reshape(3, 3)
    value = value + value.T if symmetric else value
    out = release(value, RankOne(0.05) if symmetric else Frobenius(0.05), BUDGET, law)
    drawing = out.certificate.drawing
    noisy = np.array([numpy_backend.prepared(value, out.noise, drawing)() for _ in range(1500)])
    apart = np.abs(noisy - value).reshape(1500, 9)[np.arange(1500), np.arange(1500) % 9]
    for level in LEVELS:
        sizes = ((out.interval(level).high - out.interval(level).low) / 2).ravel()[np.arange(1500) % 9]
        assert plausible(np.sum(apart <= sizes), 1500, level)
        assert not plausible(np.sum(apart <= 0.7 * sizes), 1500, level)  # the planted fault


PRODUCTS = {
    "laplace": Product((20_000,), 1.0, 1.0, 2.0),
    "between": Product((20_000,), 0.5, 1.5, 2.0),
    "discrete Gaussian": Product((20_000,), 1.0, 2.0, 3.0),
    "fine laplace": Product((20_000,), 2.0**-10, 1.0, 2.0),
}


@pytest.mark.parametrize(
    ("name", "delta"), [*((name, 0.5) for name in PRODUCTS), ("laplace", 0.0), ("fine laplace", 0.0)]
)
def test_discrete_intervals_attain_the_level_they_state(name, delta):
    law, counts = PRODUCTS[name], np.random.default_rng(2).integers(0, 50, 20_000)
    out = release(counts, Counts(1, 0.25), Budget(5.0, delta), law)
    assert bool(out.certificate.drawing.exact) == (delta == 0)
    assert out.on_grid
    for level in LEVELS:
        found = out.interval(level)
        assert found.level >= level
        assert plausible(np.sum(covered(counts, found)), counts.size, found.level)
    error = np.sum((out.value - counts) ** 2) / out.standard_error[0] ** 2
    fourth = float(np.mean((law.sample(np.random.default_rng(3)) / out.standard_error[0]) ** 4))  # for the spread of it
    assert abs(error - counts.size) <= 5.5 * math.sqrt((fourth + 1) * counts.size)


@pytest.mark.parametrize("name", ["laplace", "between", "discrete Gaussian"])
def test_values_off_the_grid_are_covered_although_they_were_floored(name):
    law, values = PRODUCTS[name], np.random.default_rng(4).uniform(0, 50, 20_000)
    out = release(values, Counts(1, 0.25), Budget(5.0, 0.5), law)
    assert not out.on_grid
    for level in LEVELS:
        found = out.interval(level)
        assert plausible(np.sum(covered(values, found)), values.size, found.level, upper=False)
    forgotten = replace(out, on_grid=True).interval(0.9)  # the planted fault: the floor is not counted
    assert not plausible(np.sum(covered(values, forgotten)), values.size, forgotten.level, upper=False)


@pytest.mark.parametrize("form", [list, torch.tensor, lambda values: dask.array.from_array(values)])
def test_only_whole_numbers_by_type_are_taken_to_lie_on_the_grid(form):
    """A list or a tensor of fractions is floored too, and its intervals include that."""
    values = np.full(2000, 0.9)
    out = release(form(values), Counts(1), Budget(8.0, 1e-6), "laplace")
    assert not out.on_grid
    found = out.interval(0.9)
    assert plausible(np.sum(covered(values, found)), values.size, 0.9, upper=False)
    assert not release([12, 3.5], Counts(1), BUDGET, "laplace").on_grid
    assert release(np.array([12, 3]), Counts(1), BUDGET, "laplace").on_grid


SPHERICAL = {
    "l2": Spherical((3,), 3.0, 1.0, 2.0),
    "r1smg": Spherical((4,), 1.0, 2.0, 1.0),
    "rank-r": Spherical((6,), 3.0, 2.0, 1.0),
    "one number": Spherical((), 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", SPHERICAL)
def test_spherical_intervals_cover_as_often_as_they_say(name):
    law = SPHERICAL[name]
    certificate = certify(law, Frobenius(1.0))
    value = np.full(law.shape, 10.0)
    finish = numpy_backend.prepared(value, law, Drawing())  # certifying each release anew would take minutes
    outs = [Release(finish(), certificate, law) for _ in range(6000)]
    wide = law.half_width(0.95, simultaneous=True)
    apart = np.array([np.abs(out.value - value) for out in outs])
    for level in LEVELS:
        first = apart.reshape(6000, -1)[:, 0]
        assert plausible(np.sum(first <= law.half_width(level).ravel()[0]), 6000, level)
        assert not plausible(np.sum(first <= 0.75 * law.half_width(level).ravel()[0]), 6000, level)  # a planted fault
    assert plausible(np.sum(np.all(apart <= wide, axis=tuple(range(1, apart.ndim)))), 6000, 0.95, upper=False)
    assert np.all(covered(value, outs[0].interval(1 - 1e-12)))
    along = law.linear(np.full(law.shape, 0.5))
    sums_apart = 0.5 * np.array([abs(np.sum(out.value - value)) for out in outs])
    assert plausible(np.sum(sums_apart <= along.half_width(0.9)), 6000, 0.9)
    assert not plausible(np.sum(sums_apart <= 0.8 * along.half_width(0.9)), 6000, 0.9)


def test_the_quantiles_of_spherical_noise_are_those_of_a_normal_variable_where_it_is_gaussian():
    for entries in (1, 2, 7, 300):
        law = Spherical((entries,), entries, 2.0, 3.0 * math.sqrt(2))
        for level in (0.5, 0.95, 1 - 1e-9):
            truth = 3 * normal_quantile(1 - level)
            assert truth <= law.margin(level).size <= truth * (1 + 1e-8)


SIMULTANEOUS = {
    "isotropic": (Gaussian(Isotropic((5, 8), 1.0)), Frobenius(0.2), True),
    "kronecker": (Gaussian(Kronecker(paired(2), paired(3))), Frobenius(0.05), False),
    "symmetric": (Gaussian(Symmetric(6, 1.0)), RankOne(0.4), False),
    "laplace": (Product((40,), 1.0, 1.0, 2.0), Counts(1, 0.5), True),
}


@pytest.mark.parametrize("name", SIMULTANEOUS)
def test_all_entries_at_once(name):
    law, sensitivity, exact = SIMULTANEOUS[name]
    value = np.ones(law.shape)
    outs = [release(value, sensitivity, Budget(3.0, 0.3), law) for _ in range(500)]
    for level in LEVELS:
        hits = [bool(np.all(covered(value, replace(out, on_grid=True).interval(level, True)))) for out in outs]
        attained = law.margin(level, simultaneous=True).level
        assert attained >= level
        assert plausible(sum(hits), 500, attained, upper=exact)
        entrywise = [bool(np.all(covered(value, out.interval(level)))) for out in outs]
        assert not plausible(sum(entrywise), 500, level, upper=False)  # the planted fault


# --- linear functions ---


@pytest.mark.parametrize("name", GAUSSIANS)
def test_the_covariance_of_linear_functions_against_colouring(name):
    covariance = {
        "kronecker": Kronecker(paired(2), paired(3)),
        "dense": Dense(paired(6), (3, 4)),
        "isotropic": Isotropic((3, 4), 2.0),
        "diagonal": Diagonal(np.linspace(1, 3, 12).reshape(3, 4)),
        "symmetric": Symmetric(4, 2.0, 3.0),
        "blocks": Blocks((Kronecker(paired(1), [1.0, 2.0, 5.0]), Diagonal([1.0, 2.0]))),
    }[name]
    law, size = Gaussian(covariance), math.prod(covariance.shape)
    weights = np.random.default_rng(5).standard_normal((4, size))
    units = np.eye(size).reshape(size, *covariance.shape)
    factor = np.stack([covariance.color(unit).ravel() for unit in units], axis=1)
    np.testing.assert_allclose(law.linear(weights).covariance, weights @ factor @ factor.T @ weights.T, rtol=1e-10)
    np.testing.assert_allclose(np.diagonal(factor @ factor.T), np.square(law.standard_error).ravel(), rtol=1e-10)
    assert law.standard_error_range == pytest.approx((law.standard_error.min(), law.standard_error.max()))
    assert law.linear(np.eye(size)).half_width(0.9) == pytest.approx(law.half_width(0.9).ravel())


WEIGHTS = {
    "total": np.ones(30),
    "whole": np.r_[np.ones(10), -2 * np.ones(10), np.zeros(10)],
    "real": np.random.default_rng(6).standard_normal(30),
}


@pytest.mark.parametrize("name", ["gaussian", "laplace", "between"])
def test_intervals_of_linear_functions(name):
    laws = {
        "gaussian": Gaussian(Kronecker(paired(1), np.eye(15) + 0.3)),
        "laplace": Product((2, 15), 1.0, 1.0, 1.5),
        "between": Product((2, 15), 0.25, 1.4, 0.9),
    }
    law = laws[name]
    counts = np.arange(30).reshape(2, 15)
    sensitivity = Frobenius(0.05) if name == "gaussian" else Counts(1, 0.25)
    outs = [release(counts, sensitivity, Budget(3.0, 0.3), law) for _ in range(1500)]
    rows = np.stack(list(WEIGHTS.values()))
    parts = outs[0].linear([row.reshape(2, 15) for row in rows])
    np.testing.assert_allclose(parts.value, rows @ outs[0].value.ravel())
    np.testing.assert_allclose(parts.standard_error**2, np.diagonal(parts.covariance))
    apart = np.stack([rows @ (out.value - counts).ravel() for out in outs])
    np.testing.assert_allclose(np.cov(apart.T), parts.covariance, atol=0.3 * parts.covariance.max())
    for level in LEVELS:
        found = parts.interval(level)
        size = (found.high - found.low) / 2
        assert found.level >= level
        for column in range(3):
            hits = int(np.sum(np.abs(apart[:, column]) <= size[column]))
            assert plausible(hits, 1500, level, upper=name == "gaussian")
            small = int(np.sum(np.abs(apart[:, column]) <= 0.7 * size[column]))  # the planted fault
            assert level > 0.9 or not plausible(small, 1500, level)
    wide = parts.interval(0.9, simultaneous=True)
    together = np.all(np.abs(apart) <= (wide.high - wide.low) / 2, axis=1)
    assert plausible(np.sum(together), 1500, 0.9, upper=False)
    one_by_one = np.all(np.abs(apart) <= parts.noise.half_width(0.9), axis=1)
    assert not plausible(np.sum(one_by_one), 1500, 0.9, upper=False)


def convolved(exponent, scale, weights):
    """P(T = t) for whole weights, one convolution after the other."""
    law = np.ones(1)
    reach = math.ceil(scale * 60 ** (1 / exponent))
    sizes = np.arange(-reach, reach + 1)
    masses = np.exp(-((np.abs(sizes) / scale) ** exponent))
    for weight in weights:
        spread = np.zeros(2 * reach * weight + 1)
        spread[:: weight or 1] = masses / masses.sum()
        law = np.convolve(law, spread)
    return law


@pytest.mark.parametrize(("exponent", "scale"), [(1.0, 1.0), (1.0, 0.3), (1.3, 4.0), (2.0, 5.0)])
@pytest.mark.parametrize("alpha", [0.3, 0.05, 1e-6])
def test_margins_of_sums_are_the_least_that_hold(exponent, scale, alpha):
    weights = np.array([3, 1, 1, 2, 1, 1, 1, 1])
    law = convolved(exponent, scale, weights)
    middle = len(law) // 2
    beyond = 2 * np.cumsum(law[:middle])[::-1]  # P(|T| > 0), P(|T| > 1), ...
    least = int(np.count_nonzero(beyond > alpha * (1 - 3e-4)))
    size, passed = sums.margin(exponent, scale, 0.7 * weights, alpha)
    assert size == pytest.approx(0.7 * least, rel=1e-8)
    assert size >= 0.7 * least
    assert beyond[least] * (1 - 1e-9) <= passed <= alpha
    bound = sums._bounded(exponent, scale, weights.astype(float), alpha)
    assert least <= bound <= 3 * least + 3


def test_normal_margins_would_be_too_small_for_ten_laplace_variables():
    law = Product((10,), 2.0**-6, 1.0, 1.0)
    total = law.linear(np.ones(10))
    normal = float(total.standard_error[0]) * normal_quantile(1e-6)
    passed = 2 * float(scipy.integrate.quad(lambda x: _laplace_sum(x), normal, 80, epsabs=0)[0])
    assert passed == pytest.approx(2.06e-5, rel=0.01)  # twenty times what it should be
    assert total.margin(1 - 1e-6).size[0] > 1.15 * normal


def _laplace_sum(x):
    """The density of a sum of ten standard Laplace variables: a difference of two gamma variables."""
    return x**9.5 / (math.gamma(10) * math.sqrt(math.pi) * 2**9.5) * scipy.special.kv(9.5, x)


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_coarse_and_rounded_sums_are_never_below_the_exact_ones(exponent, monkeypatch):
    rng = np.random.default_rng(7)
    weights, scale = rng.standard_normal(12), 300.0
    fine = [sums.margin(exponent, scale, w, 0.05)[0] for w in (weights, np.ones(12))]
    monkeypatch.setattr(sums, "_WORK", 1 << 17)
    coarse = [sums.margin(exponent, scale, w, 0.05)[0] for w in (weights, np.ones(12))]
    drawn = Product((100_000, 12), 1.0, exponent, scale).sample(rng)
    for small, large, w in zip(fine, coarse, (weights, np.ones(12)), strict=True):
        assert small <= large <= 1.5 * small
        # at most 5 % lie beyond, and not far fewer
        beyond = int(np.sum(np.abs(drawn @ w) > small))
        assert not plausible(100_000 - beyond, 100_000, 0.94, upper=True)
        assert plausible(100_000 - beyond, 100_000, 0.95, upper=False)
        assert beyond >= 0.035 * 100_000


def test_a_coarse_lattice_is_paid_for(monkeypatch):
    weights = np.ones(3, dtype=int)
    law = convolved(1.0, 20.0, weights)
    beyond = 2 * np.cumsum(law[: len(law) // 2])[::-1]
    monkeypatch.setattr(sums, "_LONGEST", 64)
    for alpha in np.geomspace(0.5, 1e-4, 40):  # the least have no lattice that is fine enough
        found = sums._convolved(1.0, 20.0, weights.astype(float), float(alpha))
        assert found is not None or alpha < 0.05
        exact = np.count_nonzero(beyond > alpha)
        assert found is None or found[0] >= exact


def test_a_sum_too_long_to_convolve_has_a_bound():
    law = Product((4,), 1.0, 1.0, 2.0**39)
    found = law.linear(np.ones(4)).margin(0.95)
    assert 1.9 <= found.size[0] / law.linear(np.ones(4)).standard_error[0] <= 2.3
    assert law.linear(np.zeros(4)).margin(0.95).size[0] == 0
    assert law.linear([0, 0, -2.0, 0]).margin(0.95).size[0] == 2 * law.margin(0.95).size


# --- where values live, and what is refused ---


def test_tensors_keep_their_type_and_rounding_to_single_precision_is_counted():
    torch = pytest.importorskip("torch")
    values = torch.arange(20_000, dtype=torch.float32) * 7 + 1e7  # neighbouring floats lie 1 apart
    out = release(values, Counts(1), BUDGET, Gaussian(Isotropic((20_000,), 4.3)))
    found = out.interval(0.95)
    assert found.low.dtype == torch.float32
    hits = int(((found.low <= values) & (values <= found.high)).sum())
    assert plausible(hits, 20_000, 0.95, upper=False)
    total = out.linear(np.full(20_000, 1e-3)).interval(1 - 1e-9)
    assert total.low <= 1e-3 * float(values.double().sum()) <= total.high


def test_dask_intervals_are_tasks():
    array = pytest.importorskip("dask.array")
    values = np.random.default_rng(8).uniform(0, 9, (100, 200))
    out = release(array.from_array(values, chunks=(50, 70)), Counts(1), BUDGET, "analytic")
    found = out.interval(0.95)
    low, high = array.compute(found.low, found.high)
    assert plausible(np.sum((low <= values) & (values <= high)), values.size, 0.95)
    assert type(found.low).__module__.startswith("dask")
    total = out.linear(np.ones((100, 200))).interval(1 - 1e-9)
    assert total.low.compute() <= values.sum() <= total.high.compute()
    assert out.standard_error.shape == (100, 200)
    assert out.standard_error.strides == (0, 0)  # no array as large as the value


def test_before_anything_is_spent_the_law_says_the_same():
    value = np.zeros((3, 4))
    for mechanism in ("analytic", "laplace"):
        law = calibrate(mechanism, shape=(3, 4), sensitivity=Counts(1), budget=BUDGET)
        out = release(value, Counts(1), BUDGET, mechanism, query=None)
        np.testing.assert_allclose(law.standard_error, out.standard_error, rtol=2e-3)
        half = (out.interval(0.95).high - out.interval(0.95).low) / 2
        floored = 0.5 if mechanism == "laplace" else 0.0  # of a float: one step, on one side
        np.testing.assert_allclose(law.half_width(0.95) + floored, half, rtol=2e-3)


def test_the_root_mean_square_is_not_the_standard_error_of_an_entry():
    law = Gaussian(Diagonal(np.array([1.0, 7.0])))
    assert law.root_mean_square == 5.0
    np.testing.assert_array_equal(law.standard_error, [1.0, 7.0])
    assert not hasattr(law, "std")


def test_the_certificate_prints_the_standard_error_and_an_old_document_need_not():
    out = release(np.zeros((3, 3)), RankOne(1.0), BUDGET)
    least, largest = out.certificate.standard_error_range
    assert (least, largest) == pytest.approx((out.standard_error.min(), out.standard_error.max()))
    assert f"std error  {least:.6g} to {largest:.6g}" in str(out.certificate)
    document = out.certificate.to_dict()
    assert document["facts"]["standard_error"] == [least, largest]
    changed = Certificate.from_json(out.certificate.to_json().replace(repr(largest), repr(0.9 * largest)))
    assert not changed.verify()
    del document["facts"]["standard_error"]
    assert replace(out.certificate, document=document).verify()


def test_rounding_to_a_coarse_grid_is_counted():
    law, drawing, value = Gaussian(Isotropic((5,), 2.0)), Drawing(grid=Grid(1)), np.zeros(5)
    np.testing.assert_allclose(intervals.standard_error(law, drawing), 2 * math.sqrt(1 + 2.0**-14 / 12), rtol=1e-12)
    found = intervals.interval(value, law, drawing, 0.95, simultaneous=False, on_grid=False)
    np.testing.assert_allclose(found.high, law.half_width(0.95) + 2 * 1.375 / 128, rtol=1e-12)
    total = intervals.linear(value, law, drawing, np.ones(5), on_grid=False)
    assert total.standard_error**2 == pytest.approx(5 * 4 * (1 + 2.0**-14 / 12))
    np.testing.assert_allclose(total.interval(0.95).low, -total.noise.half_width(0.95) - 10 * 1.375 / 128, rtol=1e-12)


@dataclass(frozen=True)
class Unknown(NoiseLaw):
    """A law from outside, which says nothing but what it must."""

    shape: tuple = (2,)
    source: str = "acme"
    note: str = ""

    def expected_squared_error(self, weights=None):
        return 2.0

    def sample(self, rng=None):
        return np.zeros(2)

    def describe(self):
        return "acme's noise"


@dataclass(frozen=True)
class SaysItsError(Unknown):
    @property
    def standard_error(self):
        return np.array([1.0, 1.0])


def test_a_law_from_outside_says_its_error_or_is_refused():
    for ask in (lambda law: law.standard_error, lambda law: law.half_width(), lambda law: law.linear([1.0, 1.0])):
        with pytest.raises(NotApplicable, match="acme's noise"):
            ask(Unknown())
    assert SaysItsError().standard_error_range == (1.0, 1.0)
    assert Unknown().root_mean_square == 1.0
    with pytest.raises(NotApplicable, match="intervals are not known"):
        intervals.interval(np.zeros(2), SaysItsError(), None, 0.95, simultaneous=False, on_grid=False)


@pytest.mark.parametrize("level", [0, 1, -1, math.nan, math.inf, "0.9", True, None])
def test_bad_levels_are_refused(level):
    out = release(np.zeros(3), Counts(1), BUDGET, "laplace")
    for ask in (out.interval, out.noise.half_width, out.linear(np.ones(3)).interval):
        with pytest.raises(InvalidInput, match="level must"):
            ask(level)


@pytest.mark.parametrize(
    "weights", [np.ones(4), np.ones((2, 2)), [1.0, math.nan, 1.0], "abc", [], None, np.ones((1, 1, 3))]
)
def test_bad_weights_are_refused(weights):
    out = release(np.zeros(3), Entrywise(1.0), BUDGET, "analytic")
    with pytest.raises(InvalidInput, match="weights"):
        out.linear(weights)


@pytest.mark.parametrize("alpha", [0.5, 0.1, 1e-9])
@pytest.mark.parametrize("scale", [0.3, 7.0, 1e5, 0.7e8, 1e12])
def test_quantiles_of_laplace_noise_are_the_least_at_every_scale(scale, alpha):
    """Against 50 digits: the tail beyond the quantile is at most alpha, and one step less is not enough."""
    with decimal.localcontext(prec=50):
        rate = -1 / decimal.Decimal(scale)

        def beyond(k):
            return 2 * ((k + 1) * rate).exp() / (1 + rate.exp())

        k, stated = sums.quantile(1.0, scale, alpha)
        assert beyond(k) <= decimal.Decimal(alpha) * (1 + decimal.Decimal("1e-13"))
        assert k == 0 or beyond(k - 1) > decimal.Decimal(alpha) * (1 - decimal.Decimal("1e-13"))
        assert abs(decimal.Decimal(stated) / beyond(k) - 1) < decimal.Decimal("1e-13")

"""Noise for the parameters of a network: its size, what layers guarantee together, and the law that is drawn."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.linalg import block_diag

from cases import orthogonal, spd
from matrixdp import Budget, certify, release
from matrixdp.distributions import Gaussian, Spherical
from matrixdp.distributions.covariance import Blocks, Dense, Diagonal, Isotropic, Kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput
from matrixdp.learn.noise import ParameterNoise, as_matrix, balanced, propose
from matrixdp.mechanisms import RECIPES
from matrixdp.pipeline import sized_for_mu
from matrixdp.sensitivity import Counts, Entrywise, Frobenius

SHAPES = [(3, 4), (3,), (2, 3), (2,)]
SIZE = 23
SETS = {"Frobenius": Frobenius(0.7), "Entrywise": Entrywise(0.3)}
OPTIONS = {"mvg": {"gamma": 5.0}}
ON_THE_WHOLE = {"classic", "analytic", "imgm", "r1smg", "l2", "optimal"}
BY_LAYER = {"classic", "analytic", "mvg", "mgm", "udn", "idn", "imgm", "optimal"}

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

sets = pytest.mark.parametrize("sensitivity", SETS.values(), ids=SETS)
devices = pytest.mark.parametrize("device", DEVICES)


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the law ---


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.slow])
@sets
def test_every_mechanism_that_applies_gives_a_law_on_one_vector(name, by_layer, sensitivity):
    if name in (BY_LAYER if by_layer else ON_THE_WHOLE):
        law = propose(name, SHAPES, sensitivity, by_layer=by_layer, **OPTIONS.get(name, {}))
        assert law.shape == (SIZE,)
        assert law.source.startswith(name)
        if by_layer:
            assert [part.shape for part in law.covariance.parts] == [(3, 4), (3, 1), (2, 3), (2, 1)]
            assert law.note == "layer by layer"
    else:
        with pytest.raises(InvalidInput):
            propose(name, SHAPES, sensitivity, by_layer=by_layer, **OPTIONS.get(name, {}))


def test_parameters_as_matrices():
    assert [as_matrix(s) for s in ((), (5,), (5, 3), (16, 6, 5, 5))] == [(1, 1), (5, 1), (5, 3), (16, 150)]


@pytest.mark.parametrize("sensitivity", [Counts(1), Entrywise(np.ones(SIZE))], ids=["Counts", "a bound for each"])
def test_other_sets_are_refused(sensitivity):
    with pytest.raises(InvalidInput, match="Frobenius"):
        propose("analytic", SHAPES, sensitivity)


def test_directions_that_cost_something_are_refused():
    """Their cost would be lost when the noise gets its size."""
    earlier = release(np.eye(3), Frobenius(1.0), Budget(0.1, 1e-7))
    with pytest.raises(InvalidInput, match="earlier release"):
        propose("mvg", [(3, 4)], Frobenius(1.0), by_layer=True, gamma=5.0, directions=earlier)


# --- its size ---


@pytest.mark.parametrize(("name", "by_layer"), [("analytic", False), *((name, True) for name in sorted(BY_LAYER))])
@pytest.mark.parametrize("mu", [0.05, 1.0, 4.0])
@sets
def test_mu_is_reached_from_below(name, by_layer, mu, sensitivity):
    law = propose(name, SHAPES, sensitivity, by_layer=by_layer, **OPTIONS.get(name, {}))
    found = sized_for_mu(balanced(law, sensitivity), sensitivity, mu)
    assert mu * (1 - 1e-6) <= found.mu <= mu
    assert found.float_safe


@pytest.mark.parametrize("name", ["mvg", "idn", "analytic"])
@sets
def test_layers_are_weighed_for_the_least_error(name, sensitivity):
    """Against a search over the sizes of three layers; as the recipe leaves them, the error is larger."""
    options = {"mvg": {"gamma": 5.0, "precision": "binary"}}.get(name, {})
    law = propose(name, [(5, 8), (2,), (3, 2)], sensitivity, by_layer=True, **options)
    parts = law.covariance.parts

    def error(log_sizes):
        sizes = np.exp(np.append(log_sizes, 0.0))
        tried = Gaussian(Blocks(tuple(part.scaled(size) for part, size in zip(parts, sizes, strict=True))))
        return certify(tried, sensitivity).mu ** 2 * tried.expected_squared_error()

    starts = [np.zeros(2), np.array([0.5, -0.5]), np.array([-0.5, 0.5])]
    options = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 1000}
    least = min(optimize.minimize(error, start, method="Nelder-Mead", options=options).fun for start in starts)
    found = sized_for_mu(balanced(law, sensitivity), sensitivity, 1.0)
    assert found.law.expected_squared_error() * (1 - found.drawing.enlargement) ** 2 == pytest.approx(least, rel=1e-5)
    if name != "analytic" or isinstance(sensitivity, Entrywise):
        assert error(np.zeros(2)) > 1.05 * least


@sets
def test_the_joint_certificate_against_a_dense_oracle(sensitivity):
    """Two layers, 2 x 2 and 2, with turned rows: six entries, so that every corner of the box can be tried."""
    law = propose("mvg", [(2, 2), (2,)], sensitivity, by_layer=True, gamma=3.0, directions=orthogonal(2, 1),
                  precision="binary")  # fmt: skip
    law = sized_for_mu(balanced(law, sensitivity), sensitivity, 0.8).law
    first, second = (part.rows for part in law.covariance.parts)
    matrices = [(side.directions * side.variances) @ side.directions.T for side in (first, second)]
    oracle = block_diag(np.kron(matrices[0], np.eye(2)), matrices[1])
    factor = np.stack([law.covariance.color(row) for row in np.eye(6)], axis=1)
    np.testing.assert_allclose(factor @ factor.T, oracle, rtol=1e-10, atol=1e-14)
    found, dense = certify(law, sensitivity), certify(Gaussian(Dense(oracle)), sensitivity)
    assert found.mu == pytest.approx(dense.mu, rel=1e-9)
    precision = np.linalg.inv(oracle)
    if isinstance(sensitivity, Frobenius):
        truth = sensitivity.radius * math.sqrt(np.linalg.eigvalsh(precision)[-1])
    else:
        corners = np.array(list(itertools.product([-1, 1], repeat=6))) * sensitivity.bound
        truth = math.sqrt(np.max(np.einsum("ki,ij,kj->k", corners, precision, corners)))
    assert truth <= found.mu <= truth * (1 + 1e-9)


# --- what is drawn ---

ROWS, COLUMNS = spd(4, 2) * np.outer([1, 2, 3, 4], [1, 2, 3, 4]), spd(6, 3)
STDS = np.linspace(0.5, 2, 24)
TURNED, SPECTRUM = orthogonal(2, 4), np.array([0.5, 3.0])
SIDE = spd(3, 6) * np.outer([1, 2, 4], [1, 2, 4])
VALUE = np.arange(24) / 7
DRAWS = 1500
FALSE_ALARM = 2.5e-7  # of one statistic; there are three


def flat(covariance):
    """A covariance of a matrix as that of its entries in a row: one block."""
    return Blocks((covariance,))


AXES = np.arange(1.0, 5)
LAWS = {
    "isotropic": (Isotropic((24,), 1.7), 1.7**2 * np.eye(24)),
    "diagonal": (Diagonal(STDS), np.diag(STDS**2)),
    "kronecker": (flat(Kronecker(ROWS, COLUMNS)), np.kron(ROWS, COLUMNS)),
    "kronecker of axes": (flat(Kronecker(AXES, np.ones(6))), np.kron(np.diag(AXES), np.eye(6))),
    "dense": (Dense(spd(24, 5)), spd(24, 5)),
    "blocks": (
        Blocks(
            (
                Isotropic((2, 3), 0.4),
                Diagonal(np.array([1.0, 2.0, 3.0, 4.0])),
                Kronecker(Spectrum(SPECTRUM, TURNED), np.array([1.0, 0.25])),
                Dense(spd(10, 7)),
            )
        ),
        block_diag(
            0.16 * np.eye(6),
            np.diag([1.0, 4.0, 9.0, 16.0]),
            np.kron(TURNED @ np.diag(SPECTRUM) @ TURNED.T, np.diag([1.0, 0.25])),
            spd(10, 7),
        ),
    ),
}  # fmt: skip
SPHERICAL = Spherical((24,), k=24.0, p=1.0, scale=0.2)


def noise_for(law, generator=None):
    return ParameterNoise(law, Frobenius(1.0), 30.0, generator=generator)


def draws(noise, dtype=torch.float64, count=DRAWS, device="cpu"):
    value = torch.tensor(VALUE, dtype=dtype, device=device)
    rows = value.repeat(count, 1)
    for row in rows:
        noise.add_(row)
    return (rows.double() - value.double()).cpu().numpy()


def alarms(drawn, covariance):
    """Which of three statistics of the whitened draws has a probability below FALSE_ALARM: mean, size, correlation."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), drawn.T)
    size, count = white.shape
    whole = stats.chi2(size * count)
    square = np.sum(white**2)
    # rows of one length: otherwise the products are spread more widely than chi-square says
    rows = white / np.sqrt(np.mean(white**2, axis=1, keepdims=True))
    products = (rows @ rows.T)[np.triu_indices(size, 1)]
    chances = {
        "mean": stats.chi2.sf(np.sum(white.sum(axis=1) ** 2) / count, size),
        "size": 2 * min(whole.cdf(square), whole.sf(square)),
        "correlation": stats.chi2.sf(np.sum(products**2) / count, len(products)),
    }
    return {name for name, chance in chances.items() if not chance > FALSE_ALARM}


@pytest.mark.parametrize(("covariance", "oracle"), LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@devices
def test_the_law_is_drawn_in_place(covariance, oracle, dtype, device):
    """Noise 5 % short is told apart."""
    noise = noise_for(Gaussian(covariance))
    assert noise.certificate.float_safe
    drawn = draws(noise, dtype, device=device)
    assert not alarms(drawn, oracle)
    assert "size" in alarms(0.95 * drawn, oracle)
    assert "mean" in alarms(drawn + 0.5 * np.sqrt(np.diag(oracle)), oracle)


@pytest.mark.parametrize(("covariance", "oracle"), LAWS.values(), ids=LAWS)
@devices
def test_a_seed_repeats_the_noise_which_has_the_same_law(covariance, oracle, device):
    seeded = [noise_for(Gaussian(covariance), torch.Generator(device).manual_seed(seed)) for seed in (8, 8, 9)]
    assert seeded[0].certificate.drawing.reproducible
    assert not seeded[0].certificate.float_safe
    drawn = draws(seeded[0], device=device)
    assert not alarms(drawn, oracle)
    assert np.array_equal(drawn[:5], draws(seeded[1], count=5, device=device))
    assert not np.any(drawn[:5] == draws(seeded[2], count=5, device=device))


@pytest.mark.parametrize("seed", [None, 3])
def test_spherical_noise_is_drawn(seed):
    """The mean of the squared radius, false alarm 2e-7; noise 5 % short is told apart. Directions by correlation."""
    count = 2000
    drawn = draws(noise_for(SPHERICAL, seed if seed is None else torch.Generator().manual_seed(seed)), count=count)
    second, fourth = SPHERICAL.radius_moment(2), SPHERICAL.radius_moment(4)

    def alarm(values):
        gap = np.mean(np.sum(values**2, axis=1)) - second
        return abs(gap) > 5.2 * math.sqrt((fourth - second**2) / count)

    assert not alarm(drawn)
    assert alarm(0.95 * drawn)
    directions = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    assert not alarms(directions, np.eye(24) / 24) & {"mean", "correlation"}


def test_a_swapped_kronecker_factor_is_told_apart():
    """On a square matrix, where nothing else would notice; turned rows for columns, and a missing turn."""
    rows, columns = SIDE, spd(3, 8)
    drawn = np.zeros((DRAWS, 9))
    noise = ParameterNoise(Gaussian(flat(Kronecker(rows, columns))), Frobenius(1.0), 30.0)
    for row in drawn:
        noise.add_(torch.from_numpy(row))
    assert not alarms(drawn, np.kron(rows, columns))
    assert {"size", "correlation"} & alarms(drawn, np.kron(columns, rows))
    assert "correlation" in alarms(drawn, np.kron(np.diag(np.diag(rows)), columns))


@pytest.mark.parametrize("covariance", [case[0] for case in LAWS.values()], ids=LAWS)
def test_every_draw_is_fresh(covariance):
    """One entry of 24 is the same with 4e-4, as noise lies on a grid of std / 16384; two are with 8e-8."""
    first, second = draws(noise_for(Gaussian(covariance)), count=2)
    assert np.sum(first == second) <= 1


def test_what_is_released_lies_on_the_grid():
    noise = noise_for(Gaussian(Isotropic((24,), 1.7)))
    released = torch.tensor(VALUE)
    noise.add_(released)
    unit = 1.7 * noise.drawing.grid.step
    assert np.array_equal(np.rint(released.numpy() / unit) * unit, released.numpy())
    assert not np.any(np.rint(VALUE[1:] / unit) * unit == VALUE[1:])  # the value itself was not there


def test_a_part_of_a_larger_tensor_is_changed_alone():
    whole = torch.zeros(30)
    noise_for(Gaussian(LAWS["blocks"][0])).add_(whole[3:27])
    assert int((whole[3:27] == 0).sum()) <= 1  # noise on a grid of std / 16384 is 0 twice with 2e-7
    assert not bool(whole[:3].any() or whole[27:].any())


# --- what is refused ---


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(23),
        torch.zeros(4, 6),
        torch.zeros(48)[::2],
        torch.zeros(24, dtype=torch.float16),
        torch.zeros(24, dtype=torch.bfloat16),
        torch.zeros(24, dtype=torch.int64),
    ],
    ids=lambda given: f"{given.dtype} {tuple(given.shape)} {given.stride()}",
)
@pytest.mark.parametrize("law", [Gaussian(LAWS["isotropic"][0]), Gaussian(LAWS["kronecker"][0]), SPHERICAL])
def test_other_tensors_are_refused_and_stay_as_they_were(law, given):
    with pytest.raises(InvalidInput, match="contiguous vector of 24 numbers"):
        noise_for(law).add_(given)
    assert not bool(given.any())


@pytest.mark.parametrize("name", ["isotropic", "diagonal", "kronecker", "blocks"])
def test_vectors_that_may_not_fit_the_grid_are_refused_before_any_data(name):
    with pytest.raises(InvalidInput, match="too large"):
        ParameterNoise(Gaussian(LAWS[name][0]), Frobenius(1.0), 1e13)


@pytest.mark.parametrize("largest", [0.0, -1.0, math.nan, math.inf, "1"])
def test_bad_bounds_on_the_norm_are_refused(largest):
    with pytest.raises(InvalidInput, match="largest_norm"):
        ParameterNoise(Gaussian(Isotropic((3,), 1.0)), Frobenius(1.0), largest)


def test_a_law_on_a_matrix_is_refused():
    with pytest.raises(InvalidInput, match="vector of all parameters"):
        ParameterNoise(Gaussian(Isotropic((3, 2), 1.0)), Frobenius(1.0), 1.0)

"""H_b: the variance formula, least squares on the tree, the guarantee by audit and by certificate."""

import itertools
import math

import numpy as np
import pytest

from matrixdp import Budget, certify
from matrixdp.audit import audit
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Dense
from matrixdp.errors import InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Counts
from matrixdp_papers.rivals.hb import best_branching, consistent, hb, height, range_variance

TREES = [((16,), 4), ((10,), 3), ((17,), 2), ((6,), 6), ((4, 4), 2), ((5, 7), 2), ((3, 9), 3), ((1,), 2)]


def tree(shape, b):
    """The levels of the tree, leaves first: a matrix each, with one row a node."""
    levels = []
    for width in (b**k for k in range(height(shape, b))):
        places = np.indices(shape).reshape(len(shape), -1) // width
        nodes = np.unique(places, axis=1)
        levels.append(np.array([np.all(places == node[:, None], axis=0) for node in nodes.T], dtype=float))
    return levels


def ranges(shape):
    """All ranges (rectangles), one row each."""
    sides = [
        np.array([(np.arange(n) >= a) & (np.arange(n) <= c) for a in range(n) for c in range(a, n)], dtype=float)
        for n in shape
    ]
    return sides[0] if len(sides) == 1 else np.kron(sides[0], sides[1])


def fewest_nodes(shape, b):
    """The mean over all ranges of the number of nodes inside whose parent is not, by looking at every one."""
    levels, queries = tree(shape, b), ranges(shape)
    total = 0
    for child, parent in zip(levels, [*levels[1:], None], strict=True):
        inside = queries @ child.T == child.sum(axis=1)
        if parent is not None:
            covered = (queries @ parent.T == parent.sum(axis=1)) @ (parent @ child.T > 0)
            inside &= ~covered
        total += inside.sum(axis=1).mean()
    return total


@pytest.mark.parametrize(("shape", "b"), TREES)
def test_range_variance_counts_nodes_exactly(shape, b):
    nodes, h = fewest_nodes(shape, b), height(shape, b)
    assert range_variance(shape, b) == pytest.approx(nodes * h**2)
    assert range_variance(shape, b, "gaussian") == pytest.approx(nodes * h)


def published(n, b):
    h = height((n,), b)
    return (b - 1) * h**3 - 2 * (b + 1) * h**2 / 3


@pytest.mark.parametrize(("b", "h"), [(2, 8), (2, 12), (4, 4), (8, 3), (16, 3), (64, 2)])
def test_range_variance_tends_to_the_published_formula(b, h):
    assert range_variance((b**h,), b) == pytest.approx(published(b**h, b), rel=0.01)


@pytest.mark.parametrize("n", [64, 100, 256, 500, 1000, 1024, 4096, 10_000])
def test_the_best_branching_factor_is_the_published_one(n):
    assert best_branching((n,)) == min(range(2, n + 1), key=lambda b: published(n, b))


def test_no_branching_factor_is_better():
    for shape, noise in itertools.product([(50,), (9, 30), (1,)], ["laplace", "gaussian"]):
        least = min(range_variance(shape, b, noise) for b in range(2, max(shape) + 2))
        assert range_variance(shape, best_branching(shape, noise), noise) == pytest.approx(least)


@pytest.mark.parametrize(("shape", "b"), TREES)
def test_inference_is_least_squares_and_consistent(shape, b):
    levels = tree(shape, b)
    rng = np.random.default_rng(0)
    noisy = [rng.standard_normal(len(level)) for level in levels]
    sides = [tuple(-(-side // b**k) for side in shape) for k in range(len(levels))]
    leaves = consistent([y.reshape(s) for y, s in zip(noisy, sides, strict=True)], b)
    exact = np.linalg.lstsq(np.vstack(levels), np.concatenate(noisy), rcond=None)[0]
    assert leaves.ravel() == pytest.approx(exact, abs=1e-12)
    true = [level @ np.arange(leaves.size) for level in levels]  # consistent counts stay as they are
    kept = consistent([y.reshape(s) for y, s in zip(true, sides, strict=True)], b)
    assert kept.ravel() == pytest.approx(np.arange(leaves.size), abs=1e-9)


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
@pytest.mark.parametrize(("shape", "b", "adjacency"), [((16,), 4, "add/remove"), ((5, 7), 2, "replace")])
def test_variance_of_ranges(shape, b, adjacency, noise):
    """As least squares has it, within 5 standard errors (false alarm 6e-7); 10 % more noise is told apart."""
    levels, queries = np.vstack(tree(shape, b)), ranges(shape)
    h, draws, changed = height(shape, b), 3000, 2 if adjacency == "replace" else 1
    epsilon, delta = 0.7, None if noise == "laplace" else 1e-5
    variance = 2 * (changed * h / epsilon) ** 2 if noise == "laplace" else changed * h / gaussian.mu(0.7, 1e-5) ** 2
    inverse = np.linalg.inv(levels.T @ levels)
    exact = variance * np.einsum("qi,ij,qj->q", queries, inverse, queries).mean()
    before_inference = variance / h ** (2 if noise == "laplace" else 1) * range_variance(shape, b, noise)
    assert exact < 0.75 * before_inference

    rng, counts = np.random.default_rng(4), np.arange(math.prod(shape)).reshape(shape)
    given = {"delta": delta, "noise": noise, "adjacency": adjacency, "branching": b, "rng": rng}
    errors = np.array([(hb(counts, epsilon, **given) - counts).ravel() for _ in range(draws)])
    seen = ((errors @ queries.T) ** 2).mean(axis=1)
    assert abs(seen.mean() - exact) < 5 * seen.std() / math.sqrt(draws)
    assert abs(1.21 * seen.mean() - exact) > 5 * seen.std() / math.sqrt(draws)
    assert np.all(np.abs(errors.mean(axis=0)) < 6 * errors.std(axis=0) / math.sqrt(draws))


def test_the_certificate_of_gaussian_noise_is_the_budget():
    """The leaves hold all that the tree tells: their covariance, certified, gives back the budget exactly."""
    budget = Budget(0.8, 1e-6)
    for shape, b in [((16,), 4), ((10,), 3), ((4, 4), 2)]:
        levels = np.vstack(tree(shape, b))
        std = math.sqrt(height(shape, b)) / gaussian.mu(budget.epsilon, budget.delta)
        covariance = Dense(std**2 * np.linalg.inv(levels.T @ levels), shape)
        assert certify(Gaussian(covariance), Counts(1)).delta(0.8) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize(("spent", "rejected"), [(3.0, False), (6.0, True)])
def test_audit(spent, rejected):
    """The claim epsilon 3 stands, and falls when the noise is half as large (false alarms: 1e-6)."""
    rng = np.random.default_rng(5)
    found = audit(
        lambda x: hb(x, spent, branching=2, rng=rng), np.array([0, 1, 0, 2]), np.array([1, 1, 0, 2]), 3.0, 0.0,
        samples=12_000, statistic="linear",
    )  # fmt: skip
    assert found.rejected is rejected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": np.nan}, "epsilon"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"counts": [1.5, 2.0]}, "counts"),
        ({"counts": [-1, 2]}, "counts"),
        ({"counts": [np.nan, 2]}, "counts"),
        ({"counts": np.zeros((2, 2, 2))}, "counts"),
        ({"counts": [2.0**54]}, "counts"),
        ({"delta": 1e-6}, "delta"),
        ({"noise": "gaussian"}, "delta"),
        ({"noise": "gaussian", "delta": 1.0}, "delta"),
        ({"noise": "uniform"}, "noise"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"branching": 1}, "branching"),
        ({"branching": 2.0}, "branching"),
        ({"rng": 0}, "rng"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        hb(**({"counts": [1, 2, 3], "epsilon": 1.0} | arguments))

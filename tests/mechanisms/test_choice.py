"""What "auto" takes: never worse than trying every mechanism, and by the theorems that say so."""

import functools
import itertools
import math

import numpy as np
import pytest

from cases import orthogonal
from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Diagonal
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms import RECIPES, Recipe, expected_error, proposals, recipe, register
from matrixdp.mechanisms.directions import largest_root, squared_radius
from matrixdp.mechanisms.solvers import workloads
from matrixdp.privacy import gaussian
from matrixdp.privacy.drawing import has_safe_sampler
from matrixdp.privacy.suprema import supremum
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices

BUDGETS = [Budget(1.0, 1e-6), Budget(0.05, 1e-9), Budget(6.0, 1e-2)]
SHAPES = [(4, 4), (2, 5), (5,), (1,), (6, 1), (1, 1)]
SETTINGS = [*((shape, BUDGETS[0]) for shape in SHAPES), *itertools.product(SHAPES[1:3], BUDGETS[1:])]
NOT_SAFE = ("r1smg", "rank-r", "l2", "spherical")
DISCRETE = ["laplace", "discrete"]  # always tried; they do not apply to most sets


@functools.cache
def meets(profile, budget):
    return profile.delta(budget.epsilon) <= budget.delta


def brute_force(shape, sensitivity, budget, options):
    """The least error and its mechanism, from certifying everything; of equally good ones the first listed."""
    best = None
    names = [name for name in RECIPES if name not in NOT_SAFE]
    for known, law in proposals(shape, sensitivity, budget, options, names):
        if isinstance(law, NotApplicable):
            continue
        error = expected_error(law, options)
        certificate = certify(law, sensitivity)
        kept = meets(certificate.profile, budget) and has_safe_sampler(law, certificate.mu)
        if kept and (best is None or error < best[0] * (1 - 1e-9)):
            best = error, known.name
    return best


def sets(shape, rng):
    """Every set that fits the shape, with both adjacencies where they matter."""
    several, bounds = rng.standard_normal((6, *shape)), rng.uniform(0.1, 2, shape)
    nearly_one = np.full(shape, 1e-3)
    nearly_one.flat[0] = 1.0
    yield Frobenius(1.3)
    yield from (Entrywise(bound) for bound in (0.7, bounds, np.full(shape, 0.7), nearly_one))
    yield from (Counts(1, 0.5), Counts(2, adjacency=REPLACE), Counts(3), Counts(10**6))
    yield from (Vertices(*several), Vertices(*np.eye(math.prod(shape)).reshape(-1, *shape)))
    if len(shape) == 2:
        for line, length in ((OneRow, shape[1]), (OneColumn, shape[0])):
            low, high = -rng.uniform(0, 1, length), rng.uniform(0, 2, length)
            yield from (line(1.5), line(radius=1.5, adjacency=ADD_REMOVE), line(0.0, 1.0), line(low, high))
        yield Entrywise(np.where(np.arange(shape[0])[:, None] > 0, bounds, 0.0) if shape[0] > 1 else bounds)
    if len(shape) == 2 and shape[0] == shape[1]:
        yield from (RankOne(1.2), RankOne(1.2, adjacency=REPLACE))


def tasks(shape, rng):
    """Weights and workloads, and options that only some mechanisms know."""
    weights, cells = rng.uniform(0.1, 5, shape), math.prod(shape)
    some, first = np.where(rng.uniform(size=shape) < 0.4, 0.0, weights), np.zeros(shape)
    some.flat[0] = first.flat[0] = 1.0
    queries = rng.integers(0, 2, (5, cells)) + np.eye(5, cells)
    yield from ({}, {"weights": 2.0}, {"weights": weights}, {"weights": some}, {"weights": first})
    yield from ({"gamma": 1e-3}, {"gamma": 50.0, "radius": "laurent-massart"}, {"releases": 3})
    yield from ({"workload": name} for name in ("identity", "total", "prefix", "all-ranges"))
    yield from ({"workload": queries}, {"workload": np.diag(some.ravel())}, {"workload": "prefix", "weights": weights})
    if len(shape) == 2:
        utility = rng.uniform(0.01, 9, shape[0])
        yield from ({"row_utility": utility, "weights": weights}, {"row_utility": utility, "workload": "total"})
        sums, pairs = rng.standard_normal((2, shape[0])), rng.standard_normal((3, shape[1]))
        yield from ({"row_utility": sums}, {"column_utility": pairs}, {"row_utility": sums, "column_utility": pairs})
        yield from ({"workload": workloads.marginals(shape, 1)}, {"rows": np.geomspace(1, 50, shape[0])})


@pytest.mark.parametrize(("shape", "budget"), SETTINGS, ids=str)
def test_auto_is_never_worse_than_trying_everything(shape, budget):
    rng = np.random.default_rng(sum(shape))
    for sensitivity, options in itertools.product(list(sets(shape, rng)), list(tasks(shape, rng))):
        given = {"shape": shape, "sensitivity": sensitivity, "budget": budget, **options}
        try:
            least, name = brute_force(shape, sensitivity, budget, options)
        except InvalidInput as reason:  # a task that looks at nothing that can change
            if "needs no noise" not in str(reason):
                raise
            continue
        law = calibrate("auto", **given)
        where = f"{sensitivity}, {options}: {law.source}, not {name}"
        assert expected_error(law, options) <= least * (1 + 1e-9), where
        assert law.source.partition(" ")[0] == name, where
        assert meets(certify(law, sensitivity).profile, budget), where


@pytest.fixture
def calibrated(monkeypatch):
    """The names of the mechanisms that are calibrated."""
    names, original = [], Recipe.calibrate

    def recorded(self, *given, **options):
        names.append(self.name)
        return original(self, *given, **options)

    monkeypatch.setattr(Recipe, "calibrate", recorded)
    return names


WEIGHTS = np.arange(12.0).reshape(4, 3)


@pytest.mark.parametrize(
    ("sensitivity", "options", "others"),
    [
        (Frobenius(2.0), {}, []),
        (Frobenius(2.0), {"weights": WEIGHTS}, []),
        (Frobenius(2.0), {"workload": "prefix"}, []),
        (Counts(3), {}, []),
        (Counts(1), {"weights": WEIGHTS}, []),
        (Counts(2), {"weights": WEIGHTS}, ["optimal"]),
        (Counts(2), {"workload": "identity"}, []),
        (Counts(1), {"workload": np.diag(np.arange(12.0))}, []),
        (Counts(1), {"workload": "prefix", "gamma": 9.0}, ["matrix-mechanism"]),
        (OneRow(1.0), {}, []),
        (OneColumn(0.0, 1.0), {"releases": 2}, []),
        (OneColumn([0.0] * 4, [1.0, 2, 3, 4]), {}, ["optimal"]),
        (Entrywise(0.1), {}, []),
        (Entrywise(WEIGHTS), {"row_utility": np.ones(4)}, ["idn", "optimal"]),
        (Vertices(WEIGHTS), {}, ["optimal"]),
    ],
    ids=str,
)
def test_only_what_no_theorem_rules_out_is_calibrated(sensitivity, options, others, calibrated):
    calibrate("auto", shape=(4, 3), sensitivity=sensitivity, budget=BUDGETS[0], **options)
    assert [name for name in calibrated if name not in DISCRETE] == ["analytic", *others]


def test_records_are_settled_by_two_mechanisms(calibrated):
    """Certifying the others would take seconds in so many dimensions."""
    law = calibrate("auto", shape=(784, 784), sensitivity=RankOne(1.0), budget=BUDGETS[0])
    assert calibrated == ["analytic", *DISCRETE, "optimal"]
    assert law.source.startswith("optimal")


@pytest.mark.parametrize("budget", [*BUDGETS, Budget(1e-4, 1e-15), Budget(40.0, 0.3)], ids=str)
def test_the_directional_mechanisms_add_more_than_analytic_in_every_direction(budget):
    """The Loewner order, so that it holds for every task; random options, which change the directions."""
    rng = np.random.default_rng(0)
    for cells in (1, 2, 50, 10**6):
        z = math.sqrt(squared_radius(cells, budget.delta))
        assert largest_root(1.0, 2 * z, budget.epsilon) < gaussian.mu(budget.epsilon, budget.delta)
    for shape in ((1, 1), (4, 4), (2, 9)):
        for sensitivity in (Frobenius(2.0), Counts(2), Entrywise(rng.uniform(0, 1, shape)), OneRow(radius=1.0)):
            given = {"shape": shape, "sensitivity": sensitivity, "budget": budget}
            row, column = rng.uniform(0, 1, shape[0]) ** 9 + 1e-9, rng.uniform(0, 1, shape[1]) ** 9 + 1e-9
            turned, gamma = orthogonal(shape[0], 1), sensitivity.frobenius_radius(shape) / 2
            laws = [
                calibrate("mgm", row_utility=row, column_utility=column, row_directions=turned, **given),
                calibrate("udn", row_utility=row, **given),
                calibrate("idn", **given),
                calibrate("imgm", rows=row, columns=column, **given),
                calibrate("mvg", gamma=gamma, radius="laurent-massart", precision=row / np.sum(row), **given),
                calibrate("mvg", gamma=gamma, directions=turned, **given),
            ]
            if shape[0] == shape[1]:
                laws.append(calibrate("mvg", gamma=gamma, modes="equimodal", precision=row / np.sum(row), **given))
            for law in laws:
                assert law.covariance.smallest_std >= calibrate("analytic", **given).root_mean_square * (1 - 1e-12), (
                    law.source
                )


def test_rows_that_count_little_get_more_noise_than_the_directional_mechanisms_give():
    """The two that theorems 6 to 10 leave open, on settings where both beat "analytic": "optimal" is below them."""
    weights, precision = np.ones((6, 1)), np.full(6, 0.002)
    weights[0], precision[0] = 1e6, 0.99
    mvg = {"gamma": 1e-6, "radius": "laurent-massart", "precision": precision}
    for budget, name, options in (
        (Budget(1.0, 1e-6), "idn", {"row_utility": weights[:, 0]}),
        (Budget(300.0, 0.3), "mvg", mvg),
    ):
        given = {"shape": (6, 1), "sensitivity": Counts(6), "budget": budget}
        analytic, other = calibrate("analytic", **given), calibrate(name, **given, **options)
        law = calibrate("auto", weights=weights, **given, **options)
        assert law.source.startswith("optimal")
        errors = [each.expected_squared_error(weights) for each in (law, other, analytic)]
        assert errors == sorted(errors)


@pytest.mark.parametrize("options", [{"weights": -1.0}, {"weights": np.ones(3)}, {"workload": "suffix"}], ids=str)
@pytest.mark.parametrize("sensitivity", [Frobenius(1.0), Counts(1), Entrywise(0.1)], ids=str)
def test_a_task_that_makes_no_sense_is_refused_whatever_the_theorem(sensitivity, options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        calibrate("auto", shape=(2, 2), sensitivity=sensitivity, budget=BUDGETS[0], **options)


# --- mechanisms from outside the package ---


@pytest.fixture
def weighed():
    """A mechanism for a workload that the package's own do not make the most of; taken out again afterwards."""

    @register
    @recipe("acme-weighed", source="nowhere")
    def propose(shape, sensitivity, budget, *, importance):
        """Independent noise.

        Args:
            importance: of the entries.
        """
        covariance = Diagonal(np.broadcast_to(importance, shape) ** -0.25)
        mu = supremum(sensitivity, covariance).mu
        return Gaussian(covariance.scaled(mu / gaussian.mu(budget.epsilon, budget.delta) * (1 + 1e-9)))

    yield propose
    del RECIPES["acme-weighed"]


def test_a_mechanism_from_outside_works_by_its_name_everywhere(weighed):
    importance, budget = np.geomspace(1, 1e6, 30), BUDGETS[0]
    given = {"shape": (30,), "sensitivity": Counts(20), "budget": budget, "importance": importance}
    task = {"workload": np.diag(np.sqrt(importance))}
    assert calibrate("auto", **given, **task).source == "acme-weighed [nowhere]"
    assert calibrate("acme-weighed", **given).shape == (30,)
    assert compare(**given, **task).auto == "acme-weighed"
    out = release(np.zeros(30), Counts(20), budget, "acme-weighed", importance=importance)
    assert out.certificate.meets(budget)
    with pytest.raises(InvalidInput, match="needs the option 'importance': of the entries"):
        calibrate("acme-weighed", shape=(3,), sensitivity=Counts(2), budget=budget)


def test_a_mechanism_from_outside_that_breaks_the_budget_is_not_taken():
    @register
    @recipe("acme-short", source="nowhere")
    def propose(shape, sensitivity, budget):
        law = calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=budget)
        return Gaussian(law.covariance.scaled(0.999))

    try:
        law = calibrate("auto", shape=(4,), sensitivity=Frobenius(2.0), budget=BUDGETS[0], weights=np.arange(4.0))
        assert law.source.startswith("analytic")
    finally:
        del RECIPES["acme-short"]


def test_names_are_given_once(weighed):
    for name in ("acme-weighed", "analytic", "auto", "", " ", "two\nlines", 3):
        with pytest.raises(InvalidInput, match="name must be"):
            register(recipe(name, source="nowhere")(weighed.propose))
    with pytest.raises(InvalidInput, match="mechanism must be a Recipe"):
        register(weighed.propose)

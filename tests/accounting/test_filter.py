"""The filter: charges dominate, and totals hold also when blocks are chosen in view of earlier answers."""

import math
from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest

from ledgers import robbed
from matrixdp import Budget
from matrixdp.accounting import filter as privacy_filter
from matrixdp.accounting import losses
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.filter import RESERVE, RESERVE_ALONE, Charge, Spent, charge
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.accounting.methods import Use
from matrixdp.accounting.pairs import Pair
from matrixdp.errors import BudgetExceeded
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

pytestmark = pytest.mark.slow  # privacy-loss distributions of thousands of steps

BUDGET = Budget(2.0, 1e-6)
LAPLACE = spherical.Profile(1, 1, 1.0, 4.0, 1.0)


def use(noise, rate=1.0, variation=0.0):
    return Use(GaussianProfile(noise) if isinstance(noise, float) else noise, variation, rate)


def certificate(noise, relation="add/remove", variation=0.0):
    return Guarantee(use(noise).profile, relation, variation)


def together(*blocks, relation="add/remove"):
    """An accountant, for blocks that were all fixed beforehand."""
    accountant = Accountant()
    for noise, rate, count in blocks:
        accountant.add(certificate(noise, relation), count, rate)
    return accountant


def charged(*blocks, relation="add/remove", budget=BUDGET):
    """The filter's charges for blocks, one after the other."""
    spent = Spent(budget)
    for noise, rate, count in blocks:
        block = {use(noise, rate): count}
        spent.add(block, spent.charge(block, relation), relation)
    return spent


# --- what a block is charged ---

# noise, sampling rate, count, relation, k, and whether the tail of the loss is much heavier than a Gaussian one
BLOCKS = [
    (1 / 1.1, 256 / 60000, 7032, "add/remove", 1.5e-6, True),
    (1.0, 0.01, 1000, "add/remove", 1e-9, True),
    (0.5, 0.1, 100, "add/remove", 1.5e-6, True),
    (2.0, 0.01, 5, "add/remove", 1e-9, True),
    (3.0, 0.5, 1, "add/remove", 1.5e-6, False),
    (0.02, 0.9, 3, "add/remove", 1e-9, False),
    (0.5, 0.05, 20, "replace", 1e-9, False),
    (LAPLACE, 1.0, 3, "add/remove", 1e-9, False),
    (LAPLACE, 0.1, 50, "add/remove", 1.5e-6, False),
]


@pytest.mark.parametrize(("noise", "rate", "count", "relation", "k", "heavy"), BLOCKS)
def test_a_charge_dominates_the_block_at_every_epsilon(noise, rate, count, relation, k, heavy):
    found = charge({use(noise, rate): count}, k, relation)
    assert found.mu < math.inf
    assert found.delta in (0.0, k)
    # the truth from above, in each direction, on grids that were not used for the charge
    curves = losses.curves({(use(noise).profile, rate): count}, relation, (0.3, 1e-2, 1e-4, 3e-8, 1e-10))
    last = curves.epsilon(k / 100)
    epsilons = np.sort(np.append(np.linspace(0.0, last, 1999), 0.999 * last))
    bound = (1 - found.delta) * np.asarray(gaussian.delta(found.mu, epsilons)) + found.delta
    worst = np.zeros(len(epsilons))
    for laws in curves.directions:
        deltas = np.min([law.deltas(epsilons) for law in laws], axis=0)
        assert np.all(deltas <= bound * (1 + 5e-3))  # these curves are themselves rounded up
        worst = np.maximum(worst, deltas)
    if heavy:  # and both parts of the charge are needed
        assert np.any(worst > np.asarray(gaussian.delta(found.mu, epsilons)))
        assert np.any(worst > ((1 - k) * np.asarray(gaussian.delta(0.97 * found.mu, epsilons)) + k))


def test_one_sampled_step_is_dominated_in_exact_curves():
    """A single step, whose curves are known to ten digits, in both directions and without allowance."""
    for mu, rate in [(1.0, 0.01), (4.0, 0.001), (0.3, 0.3), (2.0, 0.5)]:
        found = charge({use(mu, rate): 1}, 1e-7, "add/remove")
        assert 0.0 < found.mu <= mu
        for first in (True, False):
            pair = Pair(GaussianProfile(mu), rate, first)
            epsilons = np.linspace(0.0, pair.window(1e-9)[1], 2000)
            bound = (1 - found.delta) * np.asarray(gaussian.delta(found.mu, epsilons)) + found.delta
            assert np.all(pair.curve(epsilons) <= bound * (1 + 1e-9))


def test_gaussian_noise_is_charged_its_mu_and_sampling_never_costs_more():
    assert astuple(charge({use(0.25): 16}, 1e-7, "add/remove")) == pytest.approx((1.0, 0.0), rel=1e-13)
    assert charge({use(0.25): 1}, 1e-7, "add/remove") == Charge(0.25, 0.0)
    for rate in (0.999, 0.5, 1e-3):
        assert charge({use(0.25, rate): 16}, 1e-7, "add/remove").mu <= 1.0 + 1e-12
    # too many steps for a law of the loss, or a share that is too small: as without sampling, and nothing is infinite
    assert astuple(charge({use(1e-6, 0.5): 10**10}, 1e-7, "add/remove")) == pytest.approx((0.1, 0.0))
    assert astuple(charge({use(0.25, 0.5): 16}, 1e-300, "add/remove")) == pytest.approx((1.0, 0.0))


def test_noise_that_hides_too_little_has_no_charge():
    rank_one = spherical.Profile(200, 1, 2.0, math.sqrt(2 * 2.82), 1.0)
    assert charge({use(rank_one): 10}, 1e-7, "add/remove").mu == math.inf


def test_between_two_points_of_the_grid_the_curve_is_covered():
    """Randomised response has the largest curve of all with its total variation; two points see none of what it does
    between, so the bound there must come from the point before."""
    pure = 1.0
    total_variation = math.tanh(pure / 2)

    def curve(epsilon):
        return np.maximum(total_variation - np.expm1(epsilon) / (math.exp(pure) + 1), 0.0)

    coarse = np.linspace(0.0, 1.05, 4)
    mu = privacy_filter._least_mu(curve(coarse), coarse, 1e-6)
    fine = np.linspace(0.0, 1.1, 2000)
    assert np.all(curve(fine) <= (1 - 1e-6) * np.asarray(gaussian.delta(mu, fine)) + 1e-6)
    assert privacy_filter._least_mu(curve(coarse[:-1]), coarse[:-1], 1e-6) == math.inf  # does not end at k


def test_curves_take_the_worse_direction_and_the_sharpest_law():
    def law(delta, epsilon):
        return SimpleNamespace(deltas=lambda epsilons: np.full(len(epsilons), delta), epsilon=lambda _: epsilon)

    for order in (1, -1):
        curves = losses.Curves((((law(0.2, 2.0), law(0.3, 3.0))), ((law(0.4, 5.0), law(0.5, 4.0))))[::order])
        assert (list(curves.deltas(np.ones(2))), curves.epsilon(1e-6)) == ([0.4, 0.4], 4.0)
    both = losses.curves({(GaussianProfile(1.0), 0.1): 3}, "add/remove", (1e-3,)).directions
    assert len(both) == 2
    assert both[0][0].delta(0.5) > 1.1 * both[1][0].delta(0.5)  # they do differ


@pytest.mark.parametrize("rate", [1.0, 0.05])
@pytest.mark.parametrize("relation", ["add/remove", "replace"])
def test_the_error_of_the_sampler_is_in_the_charge(rate, relation):
    k, variation = 1e-7, 1e-12
    exact, drawn = (charge({use(0.5, rate, t): 10}, k, relation) for t in (0.0, variation))
    assert drawn.mu == exact.mu
    leak = 10 * use(0.5, rate, variation).revealed()
    assert 20 * rate * variation < leak <= drawn.delta - exact.delta <= leak * (1 + 1e-9)


@pytest.mark.parametrize("noise", [0.8, LAPLACE])
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_what_is_revealed_covers_a_sampler_under_replace(noise, rate):
    """Laws on cells, from which t is taken where the other is likely; sampling shows whether the record was drawn."""
    t, cells = 1e-7, np.linspace(-40.0, 40.0, 4001)
    if noise is LAPLACE:
        density, shift = (lambda x: np.exp(-np.abs(x) / 4.0)), 1.0
    else:
        cells = np.linspace(-12.0, 12.0, 4001)
        density, shift = (lambda x: np.exp(-(x**2) / 2)), noise
    p, q = (law / law.sum() for law in (density(cells), density(cells - shift)))

    drawn = robbed(p, q, t), robbed(q, p, t)
    k = use(noise, rate, t).revealed()
    for epsilon in np.linspace(0.0, 6.0, 50):
        true, law = (rate * float(np.sum(np.maximum(a - math.exp(epsilon) * b, 0.0))) for a, b in (drawn, (p, q)))
        assert true <= ((1 - k) * law + k) * (1 + 1e-9)


# --- totals ---


def test_totals_are_never_below_those_of_releases_that_were_fixed_beforehand():
    rng = np.random.default_rng(11)
    for _ in range(6):
        blocks = [
            (float(10 ** rng.uniform(-2, 0)), float(10 ** rng.uniform(-2.5, -0.3)), int(10 ** rng.uniform(0, 2.5))),
            (float(10 ** rng.uniform(-2, -0.5)), 1.0, int(rng.integers(1, 5))),
            (float(10 ** rng.uniform(-2, 0)), float(10 ** rng.uniform(-2.5, -0.3)), int(10 ** rng.uniform(0, 2.5))),
        ]
        spent, accountant = charged(*blocks), together(*blocks)
        assert spent.epsilon("add/remove") >= 0.997 * accountant.epsilon(BUDGET.delta)
        mu, k = astuple(spent._total("add/remove"))
        for epsilon in (0.0, 0.5, 2.0, 6.0):
            assert accountant.delta(epsilon) <= (float(gaussian.delta(mu, epsilon)) + k) * 1.01


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "loss"), [(1.1, 256 / 60000, 7000, 0.02), (1.0, 0.01, 1000, 0.04), (2.0, 0.1, 100, 0.02)]
)
def test_what_the_filter_costs_a_training(noise, rate, steps, loss):
    """A training with a small release before it: epsilon by the filter against epsilon of a fixed sequence."""
    budget, blocks = Budget(3.0, 1e-6), [(1e-3, 1.0, 1), (1 / noise, rate, steps)]
    fixed, adaptive = together(*blocks).epsilon(1e-6), charged(*blocks, budget=budget).epsilon("add/remove")
    assert fixed < adaptive < (1 + loss) * fixed


def test_what_may_be_revealed_stays_within_its_share_of_delta():
    spent, kept = Spent(BUDGET, several=False), RESERVE_ALONE * BUDGET.delta
    shares = [spent._share(number) for number in range(1000)]
    assert sum(shares) <= 0.9 * kept * (1 + 1e-9)
    block = {use(0.1, 0.1): 2}
    for share in shares[:3]:
        found = spent.charge(block, "add/remove")
        assert found.delta == share
        spent.add(block, found, "add/remove")
    mu, k = astuple(spent._total("add/remove"))
    assert k == pytest.approx(sum(shares[:3]))
    assert spent.epsilon("add/remove") == pytest.approx(float(gaussian.epsilon(mu, BUDGET.delta - kept)))
    assert spent.fits("add/remove")
    spent.add({use(0.01): 1}, Charge(0.01, kept - k), "add/remove")  # a sampler with a large error
    assert not spent.fits("add/remove")
    assert (spent.epsilon("add/remove"), spent.remaining("add/remove")) == (math.inf, 0.0)


# --- choices in view of earlier answers ---


def adaptive_delta(mu, options, epsilon):
    """delta of a Gaussian release and then, for each of its answers, the worst of the options; a record more first."""
    loss = np.linspace(mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, 100001)
    weights = np.exp(-(((loss - mu**2 / 2) / mu) ** 2) / 2)
    curves = [
        Pair(GaussianProfile(then), rate, True if rate < 1 else None).curve(epsilon - loss) for then, rate in options
    ]
    return float(weights @ np.max(curves, axis=0) / weights.sum())


ATTACKS = [(0.3, 1.0, 0.01, 5.0), (1.0, 3.0, 0.1, 3.0), (0.5, 2.0, 0.02, 5.0)]


@pytest.mark.parametrize(("mu", "epsilon", "rate", "sampled_mu"), ATTACKS)
def test_the_old_rule_admitted_an_attack_that_the_ledger_now_refuses(tmp_path, mu, epsilon, rate, sampled_mu):
    """After one answer, take a sampled release if the answer points one way and a Gaussian one if it points the other.

    Each of the two sequences keeps the budget when it is fixed beforehand. Chosen by the answer, they do not.
    """
    delta = together((mu, 1.0, 1), (sampled_mu, rate, 1)).delta(epsilon)
    plain_mu = math.sqrt(float(gaussian.mu(epsilon, delta)) ** 2 - mu**2) * (1 - 1e-9)
    options = [(plain_mu, 1.0), (sampled_mu, rate)]
    assert all(together((mu, 1.0, 1), (*option, 1)).delta(epsilon) <= delta for option in options)
    assert adaptive_delta(mu, options, epsilon) > 1.3 * delta

    admitted = []
    for number, (then, sampling_rate) in enumerate(options):
        ledger = Ledger(tmp_path / f"{number}.db", Budget(epsilon, delta))
        ledger.spend(certificate(mu))
        try:
            ledger.spend(certificate(then), sampling_rate=sampling_rate)
            admitted.append((then, sampling_rate))
        except BudgetExceeded:
            pass
    assert len(admitted) < 2


def test_mu_and_what_may_be_revealed_are_held_apart():
    """Traded against each other along each path they would pass the budget: here, after one Gaussian answer, either
    all that is left of mu, or less of it and everything revealed with probability k."""
    mu, epsilon, delta, k = 0.3, 1.0, 0.01, RESERVE * 0.01
    loss = np.linspace(mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, 100001)
    weights = np.exp(-(((loss - mu**2 / 2) / mu) ** 2) / 2)
    whole, less = (math.sqrt(float(gaussian.mu(epsilon, share)) ** 2 - mu**2) for share in (delta, delta - k))

    def total(*options):
        curves = [
            (1 - leak) * Pair(GaussianProfile(then), 1.0, None).curve(epsilon - loss) + leak for then, leak in options
        ]
        return float(weights @ np.max(curves, axis=0) / weights.sum())

    assert max(total((whole, 0.0)), total((less, k))) <= delta * (1 + 1e-9)
    assert total((whole, 0.0), (less, k)) > 1.015 * delta
    assert total((less, 0.0), (less, k)) <= delta * (1 + 1e-9)
    for then, fits in ((less * (1 - 1e-9), True), (less * (1 + 1e-6), False), (whole, False)):
        assert charged((mu, 1.0, 1), (then, 1.0, 1), budget=Budget(epsilon, delta)).fits("add/remove") == fits


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 1.0), (1.0, 3.0)])
def test_the_most_that_the_filter_admits_keeps_the_budget_whatever_is_chosen(mu, epsilon):
    budget = Budget(epsilon, 0.01)
    first = charged((mu, 1.0, 1), budget=budget)
    options = [(first.remaining("add/remove"), 1.0)]
    for rate in (0.3, 0.03, 0.003):
        low, high = 0.0, 10.0
        for _ in range(12):
            middle = (low + high) / 2
            more, block = first.copy(), {use(middle, rate): 1}
            more.add(block, more.charge(block, "add/remove"), "add/remove")
            low, high = (middle, high) if more.fits("add/remove") else (low, middle)
        options.append((low, rate))
    assert all(then > 0.1 for then, _ in options)
    assert 0.8 * budget.delta < adaptive_delta(mu, options, epsilon) <= budget.delta


# --- one block alone ---


def test_a_planned_training_fits_into_a_ledger_of_its_budget_and_nothing_after_it(tmp_path):
    rate, steps = 0.01, 500
    budget = Budget(1.002 * together((1.0, rate, steps)).epsilon(1e-5), 1e-5)
    ledger = Ledger(tmp_path / "budget.db", budget)
    for _ in range(5):
        ledger.spend(certificate(1.0), count=100, sampling_rate=rate, series="training", planned=steps)
    assert 0.99 * budget.epsilon <= ledger.spent() <= budget.epsilon
    assert (ledger.remaining().mu, ledger.remaining().epsilon) == (0.0, 0.0)
    with pytest.raises(BudgetExceeded):  # the charge of the training is above the budget already
        ledger.spend(certificate(1e-6))
    other = Ledger(tmp_path / "other.db", budget)
    other.spend(certificate(1e-6))
    with pytest.raises(BudgetExceeded):  # it is not the first, so it pays its charge
        other.spend(certificate(1.0), count=steps, sampling_rate=rate)


def test_laws_of_losses_are_added_up_once_per_block(tmp_path, monkeypatch):
    calls, curves = [], losses.curves
    monkeypatch.setattr(privacy_filter, "curves", lambda *arguments: calls.append(1) or curves(*arguments))
    privacy_filter._dominating_mu.cache_clear()
    path = tmp_path / "budget.db"
    ledger = Ledger(path, Budget(8.0, 1e-5))
    ledger.spend(certificate(0.7), count=50, sampling_rate=0.02)
    ledger.spend(certificate(0.1))
    assert (ledger.spent(), ledger.remaining()) == (Ledger(path).spent(), Ledger(path).remaining())
    ledger.spend(certificate(0.1))
    assert len(calls) == 1
    assert [entry.charged_delta > 0 for entry in ledger.history()] == [True, False, False]

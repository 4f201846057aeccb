"""Several filters at once: pure noise, pure and Gaussian noise, and Rényi divergences, beside Gaussian noise."""

import math

import numpy as np
import pytest

from matrixdp import Budget, Counts, Ledger, release
from matrixdp.accounting import limits
from matrixdp.accounting.filter import RESERVE, REVEALED, SAMPLERS, Spent
from matrixdp.accounting.limits import limits_for, orders_for
from matrixdp.accounting.methods import Use
from matrixdp.accounting.pairs import Pair
from matrixdp.accounting.renyi import divergences, largest_divergence
from matrixdp.errors import BudgetExceeded
from matrixdp.privacy import gaussian
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

BUDGET = Budget(1.0, 1e-6)
QUARTER = Guarantee(DiscreteProfile(1.0, 4.0), "add/remove")


def spent(*profiles, budget=BUDGET):
    """One block per profile."""
    found = Spent(budget)
    for profile in profiles:
        block = {Use(profile): 1}
        found.add(block, found.charge(block, "add/remove"), "add/remove")
    return found


def test_the_shares_of_delta_add_up_to_one():
    others = [limit.delta for limit in limits_for(BUDGET)]
    assert (1 - RESERVE + REVEALED + SAMPLERS) * BUDGET.delta + sum(others) <= BUDGET.delta * (1 + 1e-12)


def test_four_pure_releases_of_a_quarter_fit_and_no_fifth(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    for _ in range(4):
        ledger.spend(QUARTER)
    assert 1 - 1e-9 <= ledger.spent() <= 1 + 1e-9
    for more in (QUARTER, Guarantee(GaussianProfile(0.01), "add/remove")):
        with pytest.raises(BudgetExceeded):
            ledger.spend(more)


def test_released_one_by_one(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    for _ in range(4):
        release(np.zeros(10), Counts(1), Budget(0.25, 1e-10), "laplace", ledger=ledger)
    assert len(ledger.history()) == 4


@pytest.mark.parametrize("before", ["nothing", "laplace", "laplace and gaussian", "gaussian"])
def test_what_is_left_for_a_pure_release_fits_and_no_more(tmp_path, before):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    if "laplace" in before:
        release(np.zeros(10), Counts(1), Budget(0.5, 1e-8), "laplace", ledger=ledger)
    if "gaussian" in before:
        ledger.spend(Guarantee(GaussianProfile(0.02), "add/remove"))
    left = ledger.remaining().pure
    expected = {"nothing": 1.0, "laplace": 0.5, "laplace and gaussian": 0.25, "gaussian": 0.75}[before]
    assert expected * (1 - 1e-6) <= left <= expected + 2e-3
    assert ledger.left()[0].pure == left
    refused = {"laplace": 1e-6, "nothing": 1e-5}.get(before)
    if refused is not None:
        with pytest.raises(BudgetExceeded):
            release(np.zeros(10), Counts(1), Budget(left + refused, 0), ledger=ledger)
    release(np.zeros(10), Counts(1), Budget(left, 0), ledger=ledger)
    assert ledger.remaining().pure < 1e-6


def test_three_pure_releases_leave_room_for_gaussian_ones(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    for _ in range(3):
        ledger.spend(QUARTER)
    left = ledger.remaining().mu
    assert left >= 0.95 * float(gaussian.mu(0.249, 1e-8))
    ledger.spend(Guarantee(GaussianProfile(left * (1 - 1e-9)), "add/remove"))
    assert ledger.remaining().mu < 1e-3 * left


def test_gaussian_noise_alone_loses_little_by_the_others():
    before = float(gaussian.mu(1.0, 0.95e-6))
    assert spent(GaussianProfile(1e-6)).remaining("add/remove") >= 0.99 * before


def test_many_small_releases_are_charged_by_renyi():
    each, count = DiscreteProfile(1.0, 29.0), 32  # pure epsilon 32/29 in all
    found = Spent(BUDGET)
    for _ in range(count):
        found.add({Use(each): 1}, found.charge({Use(each): 1}, "add/remove"), "add/remove")
    cost = limits.total(found.costs)
    assert not limits_for(BUDGET)[0].holds(cost)
    assert found.fits("add/remove")
    assert found.epsilon("add/remove") <= 1.0


def test_a_sampler_with_a_large_error_is_refused_by_all():
    block = {Use(DiscreteProfile(1.0, 40.0), 1e-8): 1}
    found = Spent(BUDGET)
    for _ in range(2):
        found.add(block, found.charge(block, "add/remove"), "add/remove")
    assert not found.fits("add/remove")
    assert found.epsilon("add/remove") == math.inf
    assert found.remaining("add/remove") == 0.0


def test_samplers_have_a_share_of_their_own():
    """Two samplers that may reveal 1.6 % of delta: within the k of the Gaussian filter, above the share of samplers."""
    found, block = Spent(BUDGET), {Use(GaussianProfile(1e-3), 4e-9): 1}
    for number in range(2):
        found.add(block, found.charge(block, "add/remove"), "add/remove")
        assert found.fits("add/remove") == (number == 0)


def worst_after(first, options, epsilon):
    """delta of discrete noise and then, for each of its answers, the worst of the options."""
    places = np.arange(-300, 301)
    masses = np.exp(-np.abs(places) / first.scale_in_steps)
    losses = (np.abs(places - first.shift) - np.abs(places)) / first.scale_in_steps
    curves = [_curve(option, epsilon - losses) for option in options]
    return float(masses @ np.max(curves, axis=0) / masses.sum())


def _curve(profile, epsilon):
    if isinstance(profile, GaussianProfile):
        return Pair(profile, 1.0, None).curve(epsilon)
    deltas = np.array([profile.delta(abs(value)) for value in epsilon])
    return np.where(epsilon < 0, -np.expm1(-np.abs(epsilon)) + np.exp(-np.abs(epsilon)) * deltas, deltas)


def test_pure_releases_that_are_drawn_exactly_use_up_the_whole_budget(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    for _ in range(4):
        release(np.zeros(10), Counts(1), Budget(0.25, 0), ledger=ledger)
    assert ledger.spent() <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, 4.0, 8.0])
def test_the_most_that_the_filters_admit_keeps_the_budget_whatever_is_chosen(scale):
    """After one answer, the largest release of each kind that the ledger still takes, chosen by the answer."""
    budget, first = Budget(1.0, 0.01), DiscreteProfile(1.0, scale)
    begun = spent(first, budget=budget)

    def largest(make, low, high):
        for _ in range(30):
            middle = math.sqrt(low * high)
            block = {Use(make(middle)): 1}
            after = begun.copy()
            after.add(block, after.charge(block, "add/remove"), "add/remove")
            low, high = (low, middle) if after.fits("add/remove") else (middle, high)
        return make(high)

    options = [
        GaussianProfile(begun.remaining("add/remove")),
        largest(lambda size: DiscreteProfile(1.0, size), 1.0, 100.0),
        largest(lambda size: DiscreteProfile(1.5, size), 1.0, 100.0),
    ]
    assert 1e-3 * budget.delta < worst_after(first, options, budget.epsilon) <= budget.delta


# --- Rényi divergences ---


@pytest.mark.parametrize(
    "profile",
    [
        DiscreteProfile(1.0, 4.0, 3),
        DiscreteProfile(1.01, 3.0),
        DiscreteProfile(1.3, 4.0, 2),
        DiscreteProfile(2.0, 9.0, 3),
    ],
)
@pytest.mark.parametrize("order", [1.5, 8.0, 40.0])
def test_divergences_are_exact_from_above(profile, order):
    places = np.arange(-6000, 6001)
    sizes = (np.abs(places) / profile.scale_in_steps) ** profile.exponent
    losses = (np.abs(places - profile.shift) / profile.scale_in_steps) ** profile.exponent - sizes
    logs = -sizes - np.logaddexp.reduce(-sizes)
    truth = float(np.logaddexp.reduce(logs + (order - 1) * losses)) / (order - 1)
    found = float(divergences({(profile, 1.0): 3}, "add/remove", (order,))[0])
    assert 3 * truth * (1 - 1e-12) <= found <= 3 * truth * (1 + 1e-9)


def test_divergences_of_gaussian_and_of_unknown_noise():
    steps = {(GaussianProfile(0.5), 1.0): 4}
    assert divergences(steps, "add/remove", (3.0,))[0] == pytest.approx(1.5)
    sampled = divergences({(GaussianProfile(0.5), 0.1): 4}, "add/remove", (3.0,))[0]
    assert 0 < sampled < 0.1
    assert divergences({(GaussianProfile(0.5), 0.1): 4}, "replace", (3.0,))[0] == pytest.approx(1.5)


@pytest.mark.parametrize("order", [2.0, 20.0])
def test_a_divergence_gives_the_delta_of_gaussian_noise_from_above(order):
    most = largest_divergence(order, 1.0, 1e-3)
    mu = math.sqrt(max(2 * most / order, 0.0))
    assert float(gaussian.delta(mu, 1.0)) <= 1e-3


def test_orders_are_whole_and_follow_the_budget():
    assert all(order.is_integer() for order in orders_for(BUDGET))
    assert orders_for(Budget(0.1, 1e-6))[0] > orders_for(BUDGET)[0]

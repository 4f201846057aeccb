"""Profiles from outside the package: a discrete Laplace law, whose compositions are known as binomial sums."""

import math
from dataclasses import dataclass

import mpmath
import numpy as np
import pytest

from matrixdp import Accountant, Budget
from matrixdp.accounting.filter import Spent, charge
from matrixdp.accounting.methods import Use, merged
from matrixdp.accounting.pairs import curve_points
from matrixdp.errors import NotCertifiable
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee

UP = 1 + 1e-12


@dataclass(frozen=True)
class DiscreteLaplace:
    """Noise on the integers, prop. to e^(-pure |x|), for counts that differ by one: the loss is pure or -pure.

    With probability `broken` it reveals everything instead, and delta never falls below that.
    """

    pure: float
    broken: float = 0.0

    @property
    def likely(self):
        """The probability of the loss +pure under the first of two neighbours."""
        return 1 / (1 + math.exp(-self.pure))

    def delta(self, epsilon):
        inside = max(self.likely * -math.expm1(epsilon - self.pure), 0.0)
        return (self.broken + (1 - self.broken) * inside) * UP

    def epsilon(self, delta):
        if not delta >= self.broken * UP:
            return math.inf
        share = (delta / UP - self.broken) / (1 - self.broken) / self.likely
        return max(self.pure + math.log1p(-share), 0.0) * UP if share < 1 else 0.0


def curve(mu, epsilon):
    """H of Gaussian noise at any real epsilon; of none if mu is 0."""
    if mu == 0:
        return max(1 - mpmath.exp(epsilon), mpmath.mpf(0))
    return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def truth(noise, count, epsilon, mu=0.0, rate=1.0):
    """delta of `count` releases and a Gaussian one: a sum over how often the likely outcome came; both directions."""
    with mpmath.workdps(40):
        r = mpmath.exp(-mpmath.mpf(noise.pure))
        first, second = 1 / (1 + r), r / (1 + r)
        mixed = (1 - mpmath.mpf(rate)) * second + mpmath.mpf(rate) * first
        whole, found = (1 - mpmath.mpf(noise.broken)) ** count, []
        for one, other in ((mixed, second), (second, mixed)):
            total = mpmath.mpf(0)
            for hits in range(count + 1):
                weight = mpmath.binomial(count, hits) * one**hits * (1 - one) ** (count - hits)
                loss = hits * mpmath.log(one / other) + (count - hits) * mpmath.log((1 - one) / (1 - other))
                total += weight * curve(mpmath.mpf(mu), mpmath.mpf(epsilon) - loss)
            found.append(1 - whole + whole * total)
        return max(found)


def accountant(noise, count, mu=0.0, rate=1.0, variation=0.0):
    result = Accountant()
    result.add(Guarantee(noise, "add/remove", variation), count, rate)
    if mu:
        result.add(Guarantee(GaussianProfile(mu), "add/remove"))
    return result


LAPLACE = DiscreteLaplace(0.5)
CASES = [
    (LAPLACE, 7, 0.0, 1.0),
    (LAPLACE, 7, 0.7, 1.0),
    (DiscreteLaplace(0.05), 200, 0.3, 1.0),
    (DiscreteLaplace(2.0), 3, 0.5, 0.1),
    (LAPLACE, 40, 0.0, 0.05),
    (DiscreteLaplace(0.5, broken=1e-7), 5, 0.7, 1.0),
]


@pytest.mark.parametrize(("noise", "count", "mu", "rate"), CASES)
def test_compositions_with_gaussian_noise_are_met_from_above(noise, count, mu, rate):
    total = accountant(noise, count, mu, rate)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        true = truth(noise, count, epsilon, mu, rate)
        got = total.delta(epsilon)
        assert true <= got <= true * (1.01 + 2e-3 * abs(mpmath.log(true + mpmath.mpf("1e-300")))) + mpmath.mpf("1e-28")
    for delta in (1e-2, 1e-5):
        epsilon = total.epsilon(delta)
        assert truth(noise, count, epsilon, mu, rate) <= delta
        assert epsilon == 0.0 or truth(noise, count, 0.985 * epsilon - 1e-9, mu, rate) > delta


def test_a_sum_that_is_too_small_would_be_seen():
    """The comparisons above reject noise whose pure epsilon is half a percent smaller."""
    weaker = DiscreteLaplace(0.5 * 0.995)
    assert accountant(weaker, 7, 0.7).delta(1.0) < truth(LAPLACE, 7, 1.0, 0.7)


def test_one_release_is_answered_by_its_own_profile_and_equal_ones_are_counted():
    assert accountant(LAPLACE, 1).epsilon(1e-3) == LAPLACE.epsilon(1e-3)
    assert accountant(LAPLACE, 1).delta(0.2, method="exact") == LAPLACE.delta(0.2)
    assert list(merged({Use(LAPLACE): 1, Use(DiscreteLaplace(0.5), 1e-9): 2}).values()) == [3]
    twice = Accountant()
    for _ in range(2):
        twice.add(Guarantee(DiscreteLaplace(0.5), "add/remove"))
    assert twice.epsilon(1e-4) == accountant(LAPLACE, 2).epsilon(1e-4)
    with pytest.raises(NotCertifiable, match="renyi"):
        twice.epsilon(1e-6, method="renyi")
    with pytest.raises(NotCertifiable, match="pld"):
        twice.epsilon(1e-6, method="exact")


def test_no_more_than_the_sum_of_pure_epsilons():
    assert 3.4 < accountant(LAPLACE, 7).epsilon(1e-12) <= 3.5 * 1.001


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_what_a_sampler_may_reveal_covers_the_worst_one(rate):
    """A sampler that, with probability t, gives a value which the neighbour never gives."""
    t = 1e-6
    use = Use(LAPLACE, t, rate)
    assert rate * t < use.revealed() < 20 * rate * t
    worst = DiscreteLaplace(0.5, broken=t)
    total = accountant(LAPLACE, 6, 0.4, rate, variation=t)
    for epsilon in (0.2, 1.0):
        assert total.delta(epsilon) > accountant(LAPLACE, 6, 0.4, rate).delta(epsilon)
        if rate == 1.0:
            assert truth(worst, 6, epsilon, 0.4) <= total.delta(epsilon)
    assert Use(Curve((0.0, 1.0), (1.0, 1.0)), t).revealed() == math.inf


@pytest.mark.parametrize(
    ("noise", "count", "rate", "k"),
    [
        (LAPLACE, 3, 1.0, 1e-9),
        (DiscreteLaplace(0.1), 50, 1.0, 1.5e-6),
        (DiscreteLaplace(2.0), 20, 0.05, 1e-7),
        (DiscreteLaplace(0.5, broken=1e-9), 3, 1.0, 1e-7),
    ],
)
def test_a_charge_dominates_the_block_at_every_epsilon(noise, count, rate, k):
    found = charge({Use(noise, 0.0, rate): count}, k, "add/remove")
    assert found.mu < math.inf
    for epsilon in np.linspace(0.0, count * noise.pure * 1.01, 60):
        bound = (1 - found.delta) * gaussian.delta(found.mu, float(epsilon)) + found.delta
        assert truth(noise, count, float(epsilon), rate=rate) <= bound * UP
    # and a mu that is a few percent smaller would not do
    smaller = [
        truth(noise, count, float(e), rate=rate) > (1 - k) * gaussian.delta(0.95 * found.mu, float(e)) + k
        for e in np.linspace(0.0, count * noise.pure, 60)
    ]
    assert any(smaller)


def test_a_filter_adds_it_to_gaussian_noise():
    spent = Spent(Budget(6.0, 1e-6))
    for use, count in ((Use(GaussianProfile(0.3)), 1), (Use(LAPLACE), 3)):
        spent.add({use: count}, spent.charge({use: count}, "add/remove"), "add/remove")
    assert spent.fits("add/remove")
    epsilon = spent.epsilon("add/remove")
    assert truth(LAPLACE, 3, epsilon, 0.3) <= 1e-6 < truth(LAPLACE, 3, 0.4 * epsilon, 0.3)
    assert 0 < spent.remaining("add/remove") < spent.budget.epsilon
    plan = Spent(Budget(6.0, 1e-6), adaptive=False)
    plan.fixed.update({Use(LAPLACE): 3, Use(GaussianProfile(0.3)): 1})
    assert truth(LAPLACE, 3, plan.epsilon("add/remove"), 0.3) <= 1e-6
    assert plan.epsilon("add/remove") < epsilon


def test_delta_that_never_falls_to_zero_is_composed():
    noise = DiscreteLaplace(0.5, broken=1e-4)
    assert noise.epsilon(1e-30) == math.inf
    epsilons, deltas = curve_points(noise)
    assert 0.5 <= epsilons[-1] <= 1.0
    assert 1e-4 <= deltas[-1] <= 1.001e-4
    assert accountant(noise, 5).delta(10.0) == pytest.approx(1 - (1 - 1e-4) ** 5, rel=2e-3)
    assert accountant(noise, 5).epsilon(1e-4) == math.inf


@pytest.mark.parametrize("nothing", [DiscreteLaplace(0.5, broken=1.0), Curve((0.0, 3.0), (1.0, 1.0))])
def test_noise_that_hides_nothing_is_refused(nothing):
    with pytest.raises(NotCertifiable, match="hides nothing"):
        accountant(nothing, 2).epsilon(1e-6)

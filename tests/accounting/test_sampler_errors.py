"""The total-variation error of samplers, as an accountant adds it up."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ledgers import robbed
from matrixdp import Budget, certify, release
from matrixdp.accounting.accountant import Accountant
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.sensitivity import Counts


def test_what_the_samplers_were_off_is_added():
    """Releases on a grid carry the error of their tables; an accountant adds them up."""
    out = release(np.zeros(50), Counts(1), Budget(0.5, 1e-6), "analytic")
    assert out.certificate.total_variation > 0.0
    # as it is, it does not show; a thousandth of delta does
    off = replace(out.certificate, total_variation=1e-9)
    exact, drawn = Accountant(), Accountant()
    exact.add(certify(out.noise, Counts(1)), 4)
    drawn.add(off, 4)
    laws = Accountant()
    laws.add(replace(out.certificate, total_variation=0.0), 4)
    assert drawn.delta(1.0) <= laws.delta(1.0) + 4 * (1 + math.e) * 1e-9 * (1 + 1e-9)
    assert drawn.delta(1.0) > laws.delta(1.0) > exact.delta(1.0)
    assert drawn.epsilon(1e-6) > laws.epsilon(1e-6)
    assert drawn.delta(drawn.epsilon(1e-6)) <= 1e-6 * (1 + 1e-9)


def hockey_stick(pairs, epsilon):
    """sup P - e^epsilon Q of a product of discrete pairs."""
    p, q = (np.ravel(np.outer(first, second)) for first, second in zip(*pairs, strict=True))
    return float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0.0)))


@pytest.mark.parametrize("rate", [1.0, 0.05])
@pytest.mark.parametrize("sampled_first", [True, False])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_a_sampler_that_hides_worst_where_it_hurts_most_is_paid_for(mu, sampled_first, rate):
    """The drawn laws lose t of their mass where the other is likely, so that events turn up that give all away."""
    t, cells = 1e-7, np.linspace(-9.0, 9.0 + mu, 1500)
    density = np.exp(-(cells**2) / 2), np.exp(-((cells - mu) ** 2) / 2)
    without, having = (d / d.sum() for d in density)

    def pair(first, second):
        mixed = (1 - rate) * first + rate * second
        return (mixed, first) if sampled_first else (first, mixed)

    ideal, drawn = pair(without, having), pair(robbed(without, having, t), robbed(having, without, t))
    accountant = Accountant()
    accountant.add(Guarantee(GaussianProfile(mu), "add/remove", t), 2, rate)
    gaps = []
    for epsilon in (0.1, 1.0, 3.0, 6.0):
        true, law = hockey_stick((drawn, drawn), epsilon), hockey_stick((ideal, ideal), epsilon)
        assert true <= accountant.delta(epsilon) * (1 + 1e-3)
        gaps.append((true - law) / (rate * t))
    if sampled_first or rate == 1.0:  # in the other direction sampling hides it
        assert max(gaps) > 1.0  # the loss is real, above what a mere sum of total variations would say

"""Compositions with discrete noise, held against sums over all atoms."""

import math

import numpy as np
import pytest

from matrixdp import Accountant
from matrixdp.accounting import methods
from matrixdp.accounting.losses import DeltaAt, EpsilonAt, by_losses
from matrixdp.accounting.methods import Use
from matrixdp.privacy import gaussian
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

LAPLACE, FINER = DiscreteProfile(1.0, 4.0), DiscreteProfile(1.0, 8.0, 2, 1)
BETWEEN = DiscreteProfile(1.5, 9.0, 1, 1)


def atoms(profile):
    """Masses and losses of one entry, straight from the definition."""
    t, scale, shift = profile.exponent, profile.scale_in_steps, profile.shift
    places = np.arange(-400, 401)
    masses = np.exp(-((np.abs(places) / scale) ** t))
    return masses / masses.sum(), (np.abs(places - shift) / scale) ** t - (np.abs(places) / scale) ** t


def true_delta(counts, epsilon, mu=0.0):
    """delta of a product of discrete pairs and one Gaussian pair: a sum over the atoms of the Gaussian's curve."""
    masses, losses = np.ones(1), np.zeros(1)
    for profile, count in counts.items():
        for _ in range(count * profile.cells):
            mass, loss = atoms(profile)
            found, where = np.unique(np.round(np.add.outer(losses, loss).ravel(), 12), return_inverse=True)
            masses, losses = np.bincount(where, np.multiply.outer(masses, mass).ravel()), found
    rest = epsilon - losses
    if mu == 0.0:
        return float(np.sum(masses * np.maximum(-np.expm1(rest), 0.0)))
    size = np.abs(rest)
    above = np.asarray(gaussian.delta(mu, np.maximum(size, 1e-12)))
    return float(np.sum(masses * np.where(rest >= 0, above, -np.expm1(-size) + np.exp(-size) * above)))


MIXED = [
    ({LAPLACE: 3}, 0.1),
    ({LAPLACE: 4, FINER: 2}, 0.0),
    ({LAPLACE: 1, BETWEEN: 1}, 0.0),
    ({LAPLACE: 2, BETWEEN: 1}, 0.3),
]


@pytest.mark.parametrize(("counts", "mu"), MIXED)
@pytest.mark.parametrize("epsilon", [0.2, 0.7, 1.3])
def test_mixtures_are_exact_from_above(counts, mu, epsilon):
    uses = {Use(profile): count for profile, count in counts.items()}
    if mu:
        uses[Use(GaussianProfile(mu))] = 1
    truth, found = true_delta(counts, epsilon, mu), methods.delta(uses, "add/remove", epsilon)
    assert truth * (1 - 1e-9) <= found <= truth**0.998 + 1e-300  # epsilon counts, and so log delta
    if truth > 0:
        spent = methods.epsilon(uses, "add/remove", truth)
        assert epsilon * (1 - 1e-6) <= spent <= epsilon * 1.005


def test_equal_scales_are_one_release_with_more_entries():
    uses = {Use(DiscreteProfile(1.2, 6.0, 1, 2)): 3, Use(DiscreteProfile(1.2, 6.0, 2, 1)): 1}
    together = DiscreteProfile(1.2, 6.0, 1, 6, ((2, 1),))
    assert methods.merged(uses) == {(together, 1.0): 1}
    assert methods.delta(uses, "add/remove", 0.8) == together.delta(0.8)


def test_many_releases_do_not_need_one_profile():
    steps = methods.merged({Use(DiscreteProfile(1.0, 100.0)): 10**4})
    assert list(steps.values()) == [10**4]
    found, settled = by_losses(steps, "add/remove", EpsilonAt(1e-6))
    like = float(gaussian.epsilon(math.sqrt(10**4 / 100.0**2), 1e-6))  # a central limit
    assert settled
    assert like * 0.98 <= found <= like * 1.02


def test_two_ways_to_one_answer():
    together = DiscreteProfile(1.5, 12.0, 1, 20)
    found, _ = by_losses({(DiscreteProfile(1.5, 12.0, 1, 4), 1.0): 5}, "add/remove", DeltaAt(1.0))
    assert together.delta(1.0) * (1 - 1e-4) <= found <= together.delta(1.0) * 1.001


def test_pure_releases_stay_pure_together():
    accountant = Accountant()
    accountant.add(Guarantee(LAPLACE, "add/remove"), 3)
    accountant.add(Guarantee(DiscreteProfile(1.0, 5.0), "add/remove"))
    assert accountant.delta(0.95 * (1 + 1e-12)) == 0.0
    assert accountant.epsilon(1e-300) <= 0.95 * (1 + 1e-12)
    assert accountant.delta(0.949) > 0.0


def test_deltas_far_below_those_of_points_on_a_curve():
    uses = {Use(BETWEEN): 2, Use(GaussianProfile(0.2)): 1}
    truth = true_delta({BETWEEN: 2}, 3.0, 0.2)
    assert 1e-60 < truth < 1e-30
    assert truth * (1 - 1e-6) <= methods.delta(uses, "add/remove", 3.0) <= truth * 1.05

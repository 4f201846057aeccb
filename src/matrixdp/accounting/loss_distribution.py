"""The privacy-loss distribution of a certificate on a grid, for other accountants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.accounting.losses import on_grid
from matrixdp.accounting.methods import Use
from matrixdp.accounting.pairs import Pair
from matrixdp.errors import InvalidInput, NotCertifiable
from matrixdp.privacy.cells import UNIT
from matrixdp.privacy.guarantee import Guarantee

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_FLOOR = 1e-15  # the delta that losses above the grid may add
_MOST_CELLS = 10**7


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """The privacy losses log(P/Q) and their probabilities under P; the same in both directions.

    Attributes:
        step: the distance of neighbouring losses.
        losses: increasing multiples of the step.
        masses: their probabilities, each rounded up.
        infinite: the probability of an infinite loss.
    """

    step: float
    losses: Array
    masses: Array
    infinite: float

    def delta(self, epsilon: float) -> float:
        """The delta at this epsilon, 0 or above, rounded up."""
        excess = np.maximum(self.losses - _check.at_least_zero("epsilon", epsilon), 0.0)
        finite = float(self.masses @ -np.expm1(-excess)) * (1.0 + UNIT * (self.masses.size + 8))
        return min(1.0, self.infinite + finite)

    def to_dp_accounting(self) -> PrivacyLossDistribution:
        """This distribution as a pessimistic privacy-loss distribution of dp-accounting."""
        from dp_accounting.pld import privacy_loss_distribution as pld

        places = np.rint(self.losses / self.step).astype(int)
        masses = {int(place): float(mass) for place, mass in zip(places, self.masses, strict=True)}
        return pld.PrivacyLossDistribution.create_from_rounded_probability(masses, self.infinite, self.step)


def loss_distribution(certificate: Guarantee, step: float = 1e-3) -> LossDistribution:
    """The privacy-loss distribution of one release, on a grid.

    Guarantee: at every epsilon its delta is at least that of the release, also in compositions. At epsilons on the
        grid it exceeds the certificate's only by 1e-15, rounding, and what the sampler's error adds (`Use.revealed`).
    Source: doroshenko2022connect. Deviates: none.

    Args:
        certificate: the certificate of one release, or of a law.
        step: the step of the grid; a smaller step is tighter.
    """
    if not isinstance(certificate, Guarantee):
        raise InvalidInput(f"certificate must be a Certificate or a Guarantee, got {_check.kind(certificate)}")
    step, use = _check.positive("step", step), Use(certificate.profile, certificate.total_variation)
    pair, revealed = Pair(certificate.profile, 1.0, None), use.revealed()
    if not revealed < 1.0:
        raise NotCertifiable("the total-variation error of the sampler leaves no finite privacy loss")
    window = pair.window(_FLOOR)
    if not (window[1] - window[0]) / step <= _MOST_CELLS:
        least = (window[1] - window[0]) / _MOST_CELLS
        raise InvalidInput(f"step must be at least {least:.2g} for losses up to {window[1]:.3g}, got {step:g}")
    found = on_grid(pair, window, step, 1)
    losses = step * np.arange(found.start, found.start + found.masses.size, dtype=np.float64)
    infinite = revealed + (1.0 - revealed) * found.infinite
    return LossDistribution(step, losses, found.masses * (1.0 - revealed), math.nextafter(infinite, 1.0))

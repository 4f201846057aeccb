"""How noise is drawn, and what that costs in privacy.

A value is whitened (the noise becomes standard normal), put on a grid, and noise on the grid is added; colouring it
again is post-processing. Drawing has two costs, which `Drawing` states. Putting values on the grid, and rounding while
whitening, can lengthen a difference (`enlargement`, in units of mu); and the tables have a total-variation error. The
enlargement is limited relative to the mu that the budget allows, so noise with room to spare needs no finer grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from matrixdp import _check
from matrixdp.distributions import Gaussian, NoiseLaw, Product, QuantileSearch, generator
from matrixdp.distributions.covariance import Covariance, FullCovariance, OverTime
from matrixdp.errors import NumericalFailure
from matrixdp.privacy.laws import added_law
from matrixdp.secure import discrete
from matrixdp.secure.grid import FINEST, Grid, plan
from matrixdp.sensitivity import Participation, Sensitivity

# The share of the allowed mu that the grid, and rounding in the whitening, may each add.
TOLERANCE = 2.0**-10
# The largest norm of whitened values; it is lower where rounding requires it.
LARGEST_NORM = 2.0**40
# If the whitening of a law is so inexact that not even this norm is safe, the law is not floating-point-safe.
LEAST_NORM = 2.0**20


@dataclass(frozen=True)
class Drawing:
    """How a release is drawn.

    Attributes:
        grid: the grid of its noise, in units of the noise; None for noise that is not drawn on one.
        step: the step of the grid of discrete noise, in the units of the value, which is floored to it; None otherwise.
        exact: True for discrete Laplace noise and quantile searches that are drawn without any error, as delta = 0
            needs; None otherwise. At most one draw in 2^48 takes longer (`secure.discrete`); no guarantee covers that.
        largest_norm: the norm that the whitened value must stay below; None for no limit. It depends on the law and the
            budget, not on the value.
        enlargement: what drawing adds to mu.
        total_variation: the total-variation error of the sampler, over the entries that a neighbour can change.
        float_safe: whether the guarantee covers the floating-point numbers that are released.
        reproducible: whether the noise was drawn from a generator that the caller gave, so that it is not secret.
        third_party: the kind of a law from outside the package, whose sampler matrixdp does not vouch for.
    """

    grid: Grid | None = None
    step: float | None = None
    exact: bool | None = None
    largest_norm: float | None = None
    enlargement: float = 0.0
    total_variation: float = 0.0
    float_safe: bool = False
    reproducible: bool = False
    third_party: str | None = None

    def __post_init__(self) -> None:
        _check.at_least_zero("enlargement", self.enlargement)
        _check.at_least_zero("total_variation", self.total_variation)
        if self.largest_norm is not None:
            _check.positive("largest_norm", self.largest_norm)

    @property
    def variance_factor(self) -> float:
        """The variance of the noise as drawn over that of its law: rounding to a grid of step h adds h^2/12."""
        return 1.0 if self.grid is None else 1 + self.grid.step**2 / 12

    def __str__(self) -> str:
        if self.reproducible:
            return "REPRODUCIBLE: from a generator given by the caller, for tests and studies only"
        if self.third_party is not None:
            safe = "floating-point-safe by its author's word" if self.float_safe else "not floating-point-safe"
            return f"the sampler of {self.third_party}, {safe}; matrixdp does not vouch for it"
        if self.exact:
            return f"secure entropy, exactly, whole multiples of {self.step:g}; one draw in 2^48 takes longer"
        if self.step is not None:
            return f"secure entropy, tables of whole multiples of {self.step:g}"
        if self.grid is None:
            return "secure entropy, in floating point: the guarantee is that of the law, not of these floats"
        where = f"secure entropy, grid of 2^{round(math.log2(self.grid.step))} std"
        return where if self.float_safe else f"{where}, whitened in floating point: no proof about these floats"


def drawing_for(law: NoiseLaw, sensitivity: Sensitivity, mu: float | None, *, pure: bool = False) -> Drawing:
    """How to draw a law, so that the grid adds at most a thousandth of mu.

    Args:
        law: the noise law.
        sensitivity: what a neighbour can change.
        mu: the mu that the budget allows; None for noise that is not Gaussian.
        pure: whether the budget has delta = 0: discrete Laplace noise is then drawn exactly.
    """
    if not isinstance(law, Gaussian) or mu is None:
        exact = True if pure and isinstance(law, Product) and law.exponent == 1.0 else None
        return costed(Drawing(exact=exact), law, sensitivity)
    grid = _grid_for(mu * TOLERANCE / (math.sqrt(_changed(law, sensitivity)) * _feedback(law.covariance)))
    return costed(Drawing(grid=grid, largest_norm=_largest_norm(law.covariance, mu)), law, sensitivity)


def costed(drawing: Drawing, law: NoiseLaw, sensitivity: Sensitivity) -> Drawing:
    """The drawing with its costs, recomputed from its choices: grid, largest norm, and whether it is exact."""
    added = added_law(law)
    if drawing.reproducible:
        return Drawing(reproducible=True)
    if added is not None:
        return Drawing(float_safe=added.float_safe, third_party=added.kind)
    if isinstance(law, Product):
        exact = True if drawing.exact else None
        error = discrete.Sampler(law.exponent, law.scale_in_steps, exact=bool(exact)).total_variation
        changed = sensitivity.changed_entries(law.shape)
        return Drawing(step=law.step, exact=exact, total_variation=changed * error, float_safe=True)
    if isinstance(law, QuantileSearch):
        return Drawing(step=1.0, exact=True, float_safe=True)
    if drawing.grid is None or not isinstance(law, Gaussian):
        return Drawing()
    changed, error = _changed(law, sensitivity), whitening_error(law.covariance)
    norm = drawing.largest_norm if error else None
    return Drawing(
        grid=drawing.grid,
        largest_norm=norm,
        enlargement=drawing.grid.displacement * math.sqrt(changed) * _feedback(law.covariance) + error * (norm or 0.0),
        # an independent entry that does not change is drawn from the same table under both neighbours
        total_variation=changed * drawing.grid.total_variation,
        float_safe=not error or (norm is not None and norm >= LEAST_NORM),  # without a limit the error has none
    )


def seeded(rng: np.random.Generator) -> Drawing:
    """The drawing of a release whose noise comes from the caller's generator."""
    generator(rng)
    return Drawing(reproducible=True)


def has_safe_sampler(law: NoiseLaw, mu: float | None) -> bool:
    """Whether the guarantee of a law can cover the floating-point numbers released, if the budget allows this mu."""
    added = added_law(law)
    if added is not None:
        return added.float_safe
    if isinstance(law, (Product, QuantileSearch)):
        return True
    return (
        isinstance(law, Gaussian) and mu is not None and (_largest_norm(law.covariance, mu) or math.inf) >= LEAST_NORM
    )


def _changed(law: Gaussian, sensitivity: Sensitivity) -> int:
    """The most coordinates of the noise that a neighbour changes."""
    if isinstance(law.covariance, OverTime) and isinstance(sensitivity, Participation):
        # (C x)_t is computed only from the rows of the last steps: where those are equal, so are its floats
        steps, columns = law.shape
        return min(steps, sensitivity.most_times(steps) * law.covariance.bands) * columns
    return sensitivity.changed_entries(law.shape) if independent(law.covariance) else law.covariance.rank()


def _feedback(covariance: Covariance) -> float:
    """How much the rounding of one row to the grid grows in later rows that are computed from it."""
    return covariance.rounding_feedback if isinstance(covariance, OverTime) else 1.0


def independent(covariance: Covariance) -> bool:
    """Whether the entries of the noise are independent, so that whitening divides each by its standard deviation."""
    return isinstance(covariance, FullCovariance) and covariance.independent


def whitening_error(covariance: Covariance) -> float:
    """How far rounding while whitening two values can move their difference, relative to the larger norm."""
    return 0.0 if independent(covariance) else 2 * covariance.whitening_error()


def _largest_norm(covariance: Covariance, mu: float) -> float | None:
    """The norm of whitened values up to which the whitening error adds at most a thousandth of mu."""
    inexact = whitening_error(covariance)
    return min(LARGEST_NORM, mu * TOLERANCE / inexact) if inexact else None


def _grid_for(displacement: float) -> Grid:
    """The coarsest grid that displaces an entry by at most this much."""
    fineness = displacement / (Grid(1).displacement / Grid(1).step)
    if not fineness >= Grid(FINEST).step:
        raise NumericalFailure(
            "the budget is so small, for so many entries, that no grid is fine enough; use a larger epsilon or delta"
        )
    return plan(fineness)

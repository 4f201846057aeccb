"""Drawing a release: which grid, what it costs, and the noisy value.

A value is whitened (the noise becomes standard normal), put on a grid and given grid noise; colouring it again is
post-processing. Two things have to be paid for, and `Sampling` says how much: putting values on the grid, and rounding
while whitening, can lengthen a difference (`enlargement`, in units of mu); and the tables are off by a total variation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.covariance import Covariance, FullCovariance, Isotropic
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.noise.grid import FINEST, LIMIT, Grid, plan
from matrixdp.noise.laws import Gaussian, NoiseLaw, generator
from matrixdp.sensitivity import Sensitivity

# The share of mu that the grid, and rounding in the whitening, may each add.
TOLERANCE = 2.0**-10
# Whitened values must stay below this norm, or below less where rounding asks for it.
LARGEST_NORM = 2.0**40
# A law whose whitening is so inexact that not even this norm is safe makes no claim about floating point.
LEAST_NORM = 2.0**20

TOO_LARGE = (
    "value is too large for its noise: it would not fit the grid on which the noise is drawn; check its units, the "
    "clipping and the sensitivity"
)


@dataclass(frozen=True)
class Sampling:
    """How a release is drawn.

    Attributes:
        grid: the grid of its noise, in units of the noise; None for noise drawn in floating point.
        enlargement: what has to be added to mu.
        total_variation: the distance of the drawn noise from its law, over the entries that a neighbour can change.
        largest_norm: the norm that the whitened value must stay below; it depends on the law alone.
        float_safe: whether the guarantee covers the floating-point numbers that are released.
        reproducible: drawn from a generator that the caller gave, and so no secret.
    """

    grid: Grid | None = None
    enlargement: float = 0.0
    total_variation: float = 0.0
    largest_norm: float = math.inf
    float_safe: bool = False
    reproducible: bool = False

    def __str__(self) -> str:
        if self.reproducible:
            return "REPRODUCIBLE: from a generator given by the caller, for tests and studies only"
        if self.grid is None:
            return "secure entropy, in floating point: the guarantee is that of the law, not of these floats"
        where = f"secure entropy, grid of 2^{round(math.log2(self.grid.step))} std"
        return where if self.float_safe else f"{where}, whitened in floating point: no proof about these floats"

    def __post_init__(self) -> None:
        _check.at_least_zero("enlargement", self.enlargement)
        _check.at_least_zero("total_variation", self.total_variation)


def sampling_for(law: NoiseLaw, sensitivity: Sensitivity, mu: float | None) -> Sampling:
    """How to draw a law, so that the grid adds at most a thousandth to mu."""
    if not isinstance(law, Gaussian) or mu is None:
        return Sampling()
    covariance = law.covariance
    independent = isinstance(covariance, FullCovariance) and covariance.independent
    changed = sensitivity.changed_entries(law.shape) if independent else covariance.rank()
    grid = _grid_for(mu * TOLERANCE / math.sqrt(changed))
    displacement = grid.displacement * math.sqrt(changed)
    inexact = 0.0 if independent else 2 * covariance.whitening_error()
    norm = min(LARGEST_NORM, mu * TOLERANCE / inexact) if inexact else math.inf
    return Sampling(
        grid=grid,
        enlargement=displacement + (inexact * norm if inexact else 0.0),
        # an independent entry that does not change has one law under both neighbours, tables and all
        total_variation=changed * grid.total_variation,
        largest_norm=norm,
        float_safe=norm >= LEAST_NORM,
    )


def _grid_for(displacement: float) -> Grid:
    """The coarsest grid with at most this displacement of an entry."""
    fineness = displacement / (Grid(1).displacement / Grid(1).step)
    if not fineness >= Grid(FINEST).step:
        raise NumericalFailure(
            "the budget is so small, for so many entries, that no grid is fine enough; use a larger epsilon or delta"
        )
    return plan(fineness)


def check_fits(value: Array, law: NoiseLaw, sampling: Sampling) -> None:
    """Raises InvalidInput if the value is too large for the grid; to be called before anything is spent."""
    if sampling.grid is None or not isinstance(law, Gaussian):
        return
    covariance = law.covariance
    if isinstance(covariance, Isotropic):
        largest, too_long = float(max(np.max(value), -np.min(value))) / covariance.std, False
    else:
        white = covariance.coordinates(_white(value, covariance))
        largest = float(np.max(np.abs(white)))
        too_long = sampling.float_safe and not float(np.linalg.norm(white)) <= sampling.largest_norm
    if too_long or not largest / sampling.grid.step < LIMIT:
        raise InvalidInput(TOO_LARGE)


def draw(value: Array, law: NoiseLaw, sampling: Sampling, rng: np.random.Generator | None = None) -> Array:
    """The value with one draw of the noise."""
    if sampling.grid is None or not isinstance(law, Gaussian):
        return value + law.sample(rng)
    from matrixdp.noise import kernels  # numba, when it is needed

    covariance = law.covariance
    if isinstance(covariance, Isotropic):
        return np.asarray(kernels.add_noise(value, covariance.std, sampling.grid), dtype=np.float64)
    coordinates = covariance.coordinates(_white(value, covariance))
    noisy = np.asarray(kernels.add_noise(coordinates, 1.0, sampling.grid), dtype=np.float64)
    return covariance.color(covariance.assemble(noisy))


def seeded(rng: np.random.Generator) -> Sampling:
    """The sampling of a release whose noise comes from the caller's generator."""
    generator(rng)
    return Sampling(reproducible=True)


def _white(value: Array, covariance: Covariance) -> Array:
    symmetric = not isinstance(covariance, FullCovariance)
    return covariance.whiten(value if not symmetric else (value + value.T) / 2)

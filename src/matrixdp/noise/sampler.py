"""Drawing a release: which grid, what it costs, and the noisy value.

A value is whitened (the noise becomes standard normal), put on a grid and given grid noise; colouring it again is
post-processing. Two things have to be paid for, and `Sampling` says how much: putting values on the grid, and rounding
while whitening, can lengthen a difference (`enlargement`, in units of mu); and the tables are off by a total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.covariance import Covariance, FullCovariance, Isotropic
from matrixdp.errors import InvalidInput, NumericalFailure
from matrixdp.noise.grid import FINEST, Grid, plan
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
    independent = _independent(covariance)
    changed = sensitivity.changed_entries(law.shape) if independent else covariance.rank()
    grid = _grid_for(mu * TOLERANCE / math.sqrt(changed))
    displacement = grid.displacement * math.sqrt(changed)
    norm = _largest_norm(covariance, mu)
    return Sampling(
        grid=grid,
        enlargement=displacement + (_whitening_error(covariance) * norm if norm < math.inf else 0.0),
        # an independent entry that does not change has one law under both neighbours, tables and all
        total_variation=changed * grid.total_variation,
        largest_norm=norm,
        float_safe=norm >= LEAST_NORM,
    )


def has_safe_sampler(law: NoiseLaw, mu: float | None) -> bool:
    """Whether the guarantee of a law with this mu can cover the floating-point numbers that are released."""
    return isinstance(law, Gaussian) and mu is not None and _largest_norm(law.covariance, mu) >= LEAST_NORM


def _independent(covariance: Covariance) -> bool:
    return isinstance(covariance, FullCovariance) and covariance.independent


def _whitening_error(covariance: Covariance) -> float:
    """How far rounding while whitening two values can move their difference, relative to the larger norm."""
    return 0.0 if _independent(covariance) else 2 * covariance.whitening_error()


def _largest_norm(covariance: Covariance, mu: float) -> float:
    """The norm of whitened values up to which that error adds at most a thousandth to mu."""
    inexact = _whitening_error(covariance)
    return min(LARGEST_NORM, mu * TOLERANCE / inexact) if inexact else math.inf


def _grid_for(displacement: float) -> Grid:
    """The coarsest grid with at most this displacement of an entry."""
    fineness = displacement / (Grid(1).displacement / Grid(1).step)
    if not fineness >= Grid(FINEST).step:
        raise NumericalFailure(
            "the budget is so small, for so many entries, that no grid is fine enough; use a larger epsilon or delta"
        )
    return plan(fineness)


def prepare(law: NoiseLaw, sampling: Sampling, dtype: npt.DTypeLike = np.float64) -> None:
    """Imports, compiles and builds all that drawing on this machine's processors needs.

    To be called before anything is spent: whatever of this fails then fails in time.

    Args:
        law: the noise.
        sampling: how it will be drawn.
        dtype: the type of the values, if they are drawn in place.
    """
    if sampling.grid is not None and isinstance(law, Gaussian):
        from matrixdp.noise import kernels  # numba, when it is needed

        std = law.covariance.std if isinstance(law.covariance, Isotropic) else 1.0
        kernels.prepare(std, sampling.grid, dtype)


def prepared(
    value: Array, law: NoiseLaw, sampling: Sampling, rng: np.random.Generator | None = None
) -> Callable[[], Array]:
    """Does all of a draw that can fail, and gives the one call that draws; to be called before anything is spent.

    Raises:
        InvalidInput: if the value is too large for the grid.
        MatrixDPError: if what draws the noise cannot be loaded.
    """
    grid = sampling.grid
    if grid is None or not isinstance(law, Gaussian):
        return lambda: value + law.sample(rng)
    from matrixdp.noise import kernels  # numba, when it is needed

    prepare(law, sampling)
    covariance = law.covariance
    std, white = _whitened(value, covariance)
    bounded = sampling.float_safe and sampling.largest_norm < math.inf
    too_long = bounded and not float(np.linalg.norm(white)) <= sampling.largest_norm
    if too_long or not float(max(np.max(white), -np.min(white))) < kernels.limit(std, grid, white.dtype):
        raise InvalidInput(TOO_LARGE)
    noisy = np.empty(white.shape)
    return lambda: _noisy(white, std, covariance, grid, noisy)


def draw(value: Array, law: NoiseLaw, sampling: Sampling, rng: np.random.Generator | None = None) -> Array:
    """The value with one draw of the noise; the caller has made sure that it fits the grid."""
    if sampling.grid is None or not isinstance(law, Gaussian):
        return value + law.sample(rng)
    std, white = _whitened(value, law.covariance)
    return _noisy(white, std, law.covariance, sampling.grid, np.empty(white.shape))


def _whitened(value: Array, covariance: Covariance) -> tuple[float, Array]:
    """The standard deviation of the noise on the grid, and the coordinates that it is added to."""
    if isinstance(covariance, Isotropic):
        return covariance.std, value
    symmetric = not isinstance(covariance, FullCovariance)
    return 1.0, covariance.coordinates(covariance.whiten((value + value.T) / 2 if symmetric else value))


def _noisy(white: Array, std: float, covariance: Covariance, grid: Grid, noisy: Array) -> Array:
    """Grid noise on the coordinates, written to `noisy`, and coloured again."""
    from matrixdp.noise import kernels  # numba, when it is needed

    kernels.add_noise(white, std, grid, None, noisy)
    return noisy if isinstance(covariance, Isotropic) else covariance.color(covariance.assemble(noisy))


def seeded(rng: np.random.Generator) -> Sampling:
    """The sampling of a release whose noise comes from the caller's generator."""
    generator(rng)
    return Sampling(reproducible=True)

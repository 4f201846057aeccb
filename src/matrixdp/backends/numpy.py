"""The backend for arrays in main memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.distributions import Gaussian, NoiseLaw, Product, QuantileSearch
from matrixdp.distributions.covariance import Covariance, FullCovariance, Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.privacy.drawing import Drawing
from matrixdp.privacy.laws import added_law
from matrixdp.secure.grid import Grid
from matrixdp.sensitivity import RankOne, Sensitivity

if TYPE_CHECKING:
    from matrixdp.secure.discrete import Sampler

# How far a value for a RankOne set may be from symmetric: the rounding of a sum of x x^T in single precision.
SYMMETRY = 1e-5

TOO_LARGE = (
    "value is too large for its noise: it would not fit the grid on which the noise is drawn; check its units, the "
    "clipping and the sensitivity"
)


def checked(value: Any, sensitivity: Sensitivity) -> Array:
    """A finite array; for RankOne symmetric, since symmetric noise hides only symmetric changes."""
    array = _check.finite("value", value, ndim=None, copy=False)
    if isinstance(sensitivity, RankOne):
        sensitivity.fits(array.shape)
        return symmetric(array)
    return array


def symmetric(array: Array) -> Array:
    """The symmetric part of a matrix that is symmetric up to rounding.

    In double precision: averaging in single precision would move entries by more than the grid accounts for.
    """
    if not np.max(np.abs(array - array.T)) <= SYMMETRY * np.max(np.abs(array)):
        raise InvalidInput(
            "value must be symmetric for a RankOne set, which is for sums of x x^T; use Frobenius for x y^T"
        )
    return (array + array.T) / 2


def prepare(law: NoiseLaw, drawing: Drawing, dtype: npt.DTypeLike = np.float64) -> None:
    """Imports, compiles and builds all that drawing on the CPU needs, before anything is spent."""
    if drawing.grid is not None and isinstance(law, Gaussian):
        from matrixdp.secure import kernels  # numba, when it is needed

        std = law.covariance.std if isinstance(law.covariance, Isotropic) else 1.0
        kernels.prepare(std, drawing.grid, dtype)


def prepared(
    value: Array, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None = None, original: Any = None
) -> Callable[[], Array]:
    """Does everything that can fail, and returns the call that draws; see `Backend`."""
    grid, added = drawing.grid, added_law(law)
    if added is not None and rng is None:
        return lambda: added.add_noise(law, value)
    if isinstance(law, QuantileSearch):
        from matrixdp.secure import quantile_search

        return quantile_search.prepared(value, law.probabilities, law.rate, law.scale, rng)
    if isinstance(law, Product) and rng is None:
        return _prepared_discrete(value, law, drawing, _output(value, original))
    if grid is None or not isinstance(law, Gaussian):
        return lambda: np.asarray(value + law.sample(rng))
    from matrixdp.secure import kernels  # numba, when it is needed

    prepare(law, drawing)
    covariance = law.covariance
    std, white = _whitened(value, covariance)
    longest = drawing.largest_norm if drawing.float_safe else None
    too_long = longest is not None and not float(np.linalg.norm(white)) <= longest
    if too_long or not kernels.largest(white) < kernels.limit(std, grid, white.dtype):
        raise InvalidInput(TOO_LARGE)
    noisy = _output(white, original) if isinstance(covariance, Isotropic) else white
    return lambda: _noisy(white, std, covariance, grid, noisy).reshape(value.shape)


def _output(value: Array, original: Any) -> Array:
    """The array for the result: the value itself if it is a copy made for this release, else a new array."""
    copied = isinstance(original, np.ndarray) and not np.may_share_memory(value, original)
    return value if copied else np.empty(value.shape)


def _prepared_discrete(value: Array, law: Product, drawing: Drawing, noisy: Array) -> Callable[[], Array]:
    """As `prepared`, for discrete noise."""
    from matrixdp.secure import discrete, kernels

    source = discrete_sampler(law, drawing)
    if not kernels.largest(value) < discrete.LIMIT * law.step:
        raise InvalidInput(TOO_LARGE)
    return lambda: discrete.add_noise(value, law.step, source, out=noisy)


def discrete_sampler(law: Product, drawing: Drawing) -> Sampler:
    """The sampler of a law of independent discrete noise, with its tables built and its kernels compiled."""
    from matrixdp.secure import discrete  # numba, when it is needed

    source = discrete.Sampler(law.exponent, law.scale_in_steps, exact=bool(drawing.exact))
    discrete.add_noise(np.zeros(1), law.step, source, out=np.empty(1))
    return source


def draw(value: Array, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None = None) -> Array:
    """The value with one draw of the noise; the caller has checked that it fits the grid."""
    if isinstance(law, Product) or added_law(law) is not None:
        return prepared(value, law, drawing, rng)()
    if drawing.grid is None or not isinstance(law, Gaussian):
        return value + law.sample(rng)
    std, white = _whitened(value, law.covariance)
    return _noisy(white, std, law.covariance, drawing.grid, np.empty(white.shape)).reshape(value.shape)


def _whitened(value: Array, covariance: Covariance) -> tuple[float, Array]:
    """The standard deviation of the grid noise, and the coordinates to which it is added."""
    value = value.reshape(covariance.shape)
    if isinstance(covariance, Isotropic):
        return covariance.std, value
    symmetric_only = not isinstance(covariance, FullCovariance)
    return 1.0, covariance.coordinates(covariance.whiten((value + value.T) / 2 if symmetric_only else value))


def _noisy(white: Array, std: float, covariance: Covariance, grid: Grid, noisy: Array) -> Array:
    """Grid noise on the coordinates, written to `noisy`, and coloured again."""
    from matrixdp.secure import kernels  # numba, when it is needed

    kernels.add_noise(white, std, grid, None, noisy)
    return noisy if isinstance(covariance, Isotropic) else covariance.color(covariance.assemble(noisy))

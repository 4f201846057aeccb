"""One row of a stream, rounded to the grid, with noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.backends.numpy import TOO_LARGE
from matrixdp.errors import InvalidInput
from matrixdp.privacy.certificate import Certificate
from matrixdp.secure import kernels
from matrixdp.secure.entropy import Key
from matrixdp.streams import noise


def released(
    certificate: Certificate, place: int, row: Array, before: Array, key_for: Callable[[Array], Key]
) -> tuple[Array, Array]:
    """A row with noise, in units of the noise's standard deviation, and what later rows need of it.

    Args:
        certificate: of the part that the row belongs to.
        place: the number of the row in its part, from 0.
        row: the private row.
        before: what this row needs of earlier rows of the part, the latest first.
        key_for: gives the key of the noise for the row that it is added to.
    """
    covariance, drawing = noise.over_time(certificate), certificate.drawing
    assert drawing is not None
    assert drawing.grid is not None
    kernels.prepare(1.0, drawing.grid)
    encoded = covariance.encode_next(place, row, before)
    white = encoded / covariance.std
    limit = kernels.limit(1.0, drawing.grid, white.dtype)
    if not _check.norm(white) <= noise.longest_row(certificate) or not kernels.largest(white) < limit:
        raise InvalidInput(TOO_LARGE)
    noisy = kernels.add_noise(white, 1.0, drawing.grid, key_for(white))
    return np.asarray(noisy), encoded if covariance.inverse else row

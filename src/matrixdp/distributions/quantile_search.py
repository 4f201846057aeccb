"""Private quantiles of a histogram: cuts picked by the exponential mechanism, and noisy counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.distributions.base import NoiseLaw
from matrixdp.distributions.product import steps_variance
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.secure.quantile_search import MOST_BINS
from matrixdp.secure.tables import checked_scale


@dataclass(frozen=True, eq=False)
class QuantileSearch(NoiseLaw):
    """A private search for quantiles in a histogram; see `matrixdp.secure.quantile_search`. It is not additive noise.

    Attributes:
        shape: of one histogram, with one axis; or of several, one per row, each with the same search.
        probabilities: which quantiles, increasing.
        rate: of each level: a cut with one more record of error is e^-rate as likely, for the median.
        scale: of the discrete Laplace noise on the counts around the cuts.
        source: where the law comes from.
        note: a further remark for the certificate.

    Example:
        >>> from matrixdp.distributions import QuantileSearch
        >>> QuantileSearch((64,), probabilities=(0.25, 0.5, 0.75), rate=0.1, scale=5.0).shape
        (64,)
    """

    shape: Shape
    probabilities: tuple[float, ...]
    rate: float
    scale: float
    source: str = "parameters given by the caller"
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check.any_shape(self.shape))
        if len(self.shape) not in (1, 2) or not self.shape[-1] <= MOST_BINS:
            raise InvalidInput(f"quantiles are searched in rows of at most {MOST_BINS} bins, got {self.shape}")
        wanted = _check.finite("probabilities", self.probabilities, ndim=1)
        if not (wanted.size and np.all(np.diff(wanted) > 0) and wanted[0] >= 0 and wanted[-1] <= 1):
            raise InvalidInput("probabilities must be increasing numbers between 0 and 1")
        object.__setattr__(self, "probabilities", tuple(wanted.tolist()))
        object.__setattr__(self, "rate", _check.positive("rate", self.rate))
        object.__setattr__(self, "scale", checked_scale(1.0, self.scale))

    @property
    def levels(self) -> int:
        """How many searches one record affects, per histogram."""
        return len(self.probabilities).bit_length()

    def expected_squared_error(self, weights: Any = None) -> float:
        """The variance of each noisy count; the error of a cut depends on the records."""
        return steps_variance(1.0, self.scale)

    def sample(self, rng: np.random.Generator | None = None) -> Array:
        """There is no noise without a histogram."""
        raise NotApplicable("a search for quantiles has no noise that could be drawn without a histogram")

    def describe(self) -> str:
        many = f"{len(self.probabilities)} quantile{'s' if len(self.probabilities) > 1 else ''}"
        levels = f"{self.levels} level{'s' if self.levels > 1 else ''}"
        many += f" in each of {self.shape[0]} histograms" if len(self.shape) == 2 else ""
        return (
            f"exponential mechanism for {many}, {levels} of {self.rate:.6g}, and counts with discrete Laplace noise, "
            f"scale {self.scale:.6g}"
        )

"""Backends for numpy, PyTorch and Dask: each checks a value, rounds it to the grid and adds noise.

Each backend module has the functions of `Backend`; the pipeline picks the one for the type of the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from matrixdp.distributions import NoiseLaw
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Sensitivity


class Backend(Protocol):
    """The functions that the pipeline needs from a backend."""

    def checked(self, value: Any, sensitivity: Sensitivity) -> Any:
        """The value in the form to which noise is added; finite where it is in memory, and symmetric for RankOne."""

    def prepared(
        self, value: Any, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None, original: Any
    ) -> Callable[[], Any]:
        """Does everything that can fail, and returns the call that draws; used before anything is spent.

        Args:
            value: as `checked` gave it.
            law: the noise.
            drawing: how to draw it.
            rng: the caller's generator, for reproducible studies.
            original: the value as the caller gave it; the result has its type.

        Raises:
            InvalidInput: if the value is too large for the grid, or the law cannot be drawn there.
            MatrixDPError: if the code that draws the noise cannot be loaded.
        """

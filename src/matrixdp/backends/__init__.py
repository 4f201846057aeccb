"""Backends for numpy, PyTorch and Dask: each checks a value, puts it on the grid and adds noise; it decides nothing.

Each backend module has the functions of `Backend`; the pipeline takes the one for the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from matrixdp.distributions import NoiseLaw
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Sensitivity


class Backend(Protocol):
    """What the pipeline asks of a backend."""

    def checked(self, value: Any, sensitivity: Sensitivity) -> Any:
        """The value in the form that is drawn on; finite, and symmetric where the set says so."""

    def prepared(
        self, value: Any, law: NoiseLaw, drawing: Drawing, rng: np.random.Generator | None, original: Any
    ) -> Callable[[], Any]:
        """Does all of a draw that can fail, and gives the one call that draws; called before anything is spent.

        Args:
            value: as `checked` gave it.
            law: the noise.
            drawing: how to draw it.
            rng: the caller's generator, for reproducible studies.
            original: the value as the caller gave it; the result has its type.

        Raises:
            InvalidInput: if the value is too large for the grid, or the law cannot be drawn there.
            MatrixDPError: if what draws the noise cannot be loaded.
        """

"""Noise on the features of a batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matrixdp.backends.torch import draw
from matrixdp.distributions import NoiseLaw
from matrixdp.learn.noise import check_room
from matrixdp.privacy.certificate import certify
from matrixdp.privacy.drawing import Drawing
from matrixdp.sensitivity import Sensitivity


class FeatureNoise:
    """A noise law for the features of a batch, ready to be drawn.

    Guarantee: `certificate`, for features between -1 and 1 that differ by a member of the sensitivity set.

    Args:
        law: the noise, on a matrix with one row per record.
        sensitivity: what a neighbour can change.
        drawing: how the noise is drawn.
    """

    def __init__(self, law: NoiseLaw, sensitivity: Sensitivity, drawing: Drawing) -> None:
        self.law, self.drawing = law, drawing
        self.certificate = certify(law, sensitivity, drawing=drawing)
        check_room(law, drawing, math.sqrt(math.prod(law.shape)))

    def added(self, features: Tensor) -> Tensor:
        """Features with one draw of the noise; a batch with fewer records is padded, and the padding removed again."""
        padded = torch.zeros(self.law.shape, dtype=features.dtype, device=features.device)
        padded[: len(features)] = torch.nan_to_num(features, nan=0.0).clamp(-1.0, 1.0)
        return draw(padded, self.law, self.drawing)[: len(features)]

"""The bound on what one record adds to the sum of gradients, and a clip that follows the gradients' norms.

A step with `QuantileClip` sums the vectors (s g w, k C (b - 1/2)) of its records. Here C is the first clip, c the
current clip, s = C / c, and g the record's gradient, scaled by w so that |s g w| <= C; b is 1 if the record's norm is
at most c, else 0; and k is `weight`. One record changes the sum by a vector of norm at most C sqrt(1 + k^2 / 4),
whatever c is. So one law on all parameters and one more entry, certified like any other, covers both gradients and
count. The steps compose although c depends on earlier ones: it is computed from their noisy counts alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.rounding import sum_error

# The clip stays within this factor of its start, on both sides.
_FARTHEST = 1e6


@dataclass(frozen=True, kw_only=True)
class QuantileClip:
    """A clip that follows a quantile of the norms of the records' gradients, by a noisy count in each step.

    After a step the clip is multiplied by exp(-learning_rate (share - quantile)), where share is the noisy share of
    the batch whose norm was at most the clip.

    Guarantee: the certificate of a step covers gradients and count together. The count takes k^2 / (4 + k^2) of its
    squared mu, k = weight; by default 1 %, which makes the noise on gradients 0.5 % larger.

    Args:
        start: the first clip.
        quantile: the share of records that should not be clipped.
        learning_rate: how fast the clip follows.
        weight: of the count relative to the gradients: its noise is 1 / weight times a step's noise multiplier.

    Source: andrew2021differentially, Algorithm 1.
    Deviates: 1. records, not users; 2. count and gradients are one vector with one noise law, split by the weight,
        where the paper sets the standard deviation of the count; 3. the noisy share is clamped to [0, 1].

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import PrivateSGD, QuantileClip
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")
        >>> optimizer, budget = torch.optim.SGD(model.parameters(), lr=0.1), Budget(3.0, 1e-5)
        >>> clip = QuantileClip(start=0.5, quantile=0.7)
        >>> trainer = PrivateSGD(model, optimizer, data, loss, budget=budget, batch_size=20, clip=clip, epochs=1)
        >>> trainer.train(1)
    """

    start: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    weight: float = 0.2

    def __post_init__(self) -> None:
        _check.length("start", self.start)
        _check.positive("learning_rate", self.learning_rate)
        _check.positive("weight", self.weight)
        if not 0 < _check.number("quantile", self.quantile) < 1:
            raise InvalidInput(f"quantile must be above 0 and below 1, got {self.quantile!r}")

    @property
    def radius(self) -> float:
        """The largest norm of what one record adds to the sum, before rounding."""
        return self.start * math.hypot(1.0, self.weight / 2)

    def following(self, clip: float, count: float) -> float:
        """The next clip, from the current one and the last entry of the noisy average."""
        share = min(1.0, max(0.0, count / (self.weight * self.start) + 0.5))
        moved = clip * math.exp(-self.learning_rate * (share - self.quantile))
        return min(self.start * _FARTHEST, max(self.start / _FARTHEST, moved))


def largest_change(radius: float, records: int) -> float:
    """A bound on the change by one record in the computed sum, if each adds at most `radius`; see `layers.rounding`."""
    return radius * (1 + 2 * sum_error(records + 1))  # a neighbour may have one record more

"""Linear layers: the gradient of the weight is a sum of outer products over a record's tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matrixdp.learn.layers.base import WIDE_CHUNK, ExplicitGradients, RecordGradients, in_parts, masked, weighted
from matrixdp.learn.layers.registry import register
from matrixdp.learn.layers.rounding import TERMS, factor_roundoff, gram_norm, roundoff, slow_products, squared_norm


@register(nn.Linear)
def linear(layer: nn.Linear, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
    """The rule; all dimensions between the first and the last count as tokens."""
    inputs, outputs = (t.reshape(t.shape[0], math.prod(t.shape[1:-1]), t.shape[-1]) for t in (inputs, outputs))
    found: dict[str, RecordGradients] = {}
    if "weight" in names:
        found["weight"] = LinearGradients(inputs, outputs)
    if "bias" in names:
        found["bias"] = ExplicitGradients(outputs.squeeze(1) if outputs.shape[1] == 1 else outputs.sum(1))
    return found


@dataclass(frozen=True)
class LinearGradients(RecordGradients):
    """The weight: inputs (batch, tokens, in) and gradients of outputs (batch, tokens, out)."""

    inputs: Tensor
    outputs: Tensor

    def explicit(self) -> Tensor:
        """(batch, out, in)."""
        return torch.bmm(self.outputs.transpose(1, 2), self.inputs)

    def smaller(self) -> RecordGradients:
        """Explicit, if in x out is at most tokens x (in + out)."""
        tokens, width, height = *self.inputs.shape[1:], self.outputs.shape[2]
        smaller = width * height <= tokens * (width + height) and tokens > 1
        return ExplicitGradients(self.explicit()) if smaller else self

    def merged(self, others: Sequence[RecordGradients]) -> RecordGradients:
        """One with more tokens, if the others are factored too."""
        linear = [other for other in others if isinstance(other, LinearGradients)]
        if len(linear) < len(others):
            return super().merged(others)
        return LinearGradients(
            torch.cat([self.inputs, *(other.inputs for other in linear)], 1),
            torch.cat([self.outputs, *(other.outputs for other in linear)], 1),
        )

    def squared_norm(self) -> Tensor:
        """|a|^2 |g|^2 for one token, the product of two Gram matrices for several."""
        if self.inputs.shape[1] == 1:
            # For the rounding of this product, and of the factors in the sum later.
            slack = 1 + 2 * factor_roundoff(self.inputs) + 16 * roundoff(self.inputs)
            return squared_norm(self.inputs).mul_(squared_norm(self.outputs)).mul_(slack)
        gram = torch.bmm(self.inputs, self.inputs.transpose(1, 2))
        return gram_norm(gram, self.outputs, terms=self.inputs.shape[2])

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Matrix products; explicit gradients if products in float64 are slow and a record has many tokens."""
        tokens, width, height = *self.inputs.shape[1:], self.outputs.shape[2]
        if tokens > 16 and slow_products(self.inputs):
            for weight, inputs, outputs in in_parts(WIDE_CHUNK // (width * height), weights, self.inputs, self.outputs):
                ExplicitGradients(LinearGradients(inputs, outputs).explicit()).add(weight, total)
            return
        step = min(TERMS, WIDE_CHUNK // (width + height)) // max(1, tokens)
        for weight, inputs, outputs in in_parts(step, weights, self.inputs, self.outputs):
            left, right = weighted(weight, outputs).flatten(0, 1).t(), inputs.double().flatten(0, 1)
            if tokens == 1:
                total.addmm_(left, right)
            else:  # summed separately: its terms may be much larger and cancel
                total += left @ right

    def masked(self, kept: Tensor) -> LinearGradients:
        """Zeros in both factors."""
        return LinearGradients(masked(self.inputs, kept), masked(self.outputs, kept))

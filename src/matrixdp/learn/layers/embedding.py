"""Embeddings: the gradient of the table has a row for each index that a record looks up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from matrixdp.learn.layers.base import WIDE_CHUNK, ExplicitGradients, RecordGradients, in_parts, masked, weighted
from matrixdp.learn.layers.registry import register
from matrixdp.learn.layers.rounding import gram_norm


@register(nn.Embedding)
def lookup(layer: nn.Embedding, inputs: Tensor, outputs: Tensor, names: frozenset[str]) -> dict[str, RecordGradients]:
    """The rule; the row of the padding index is not trained."""
    indices = inputs.reshape(inputs.shape[0], -1).long()
    outputs = outputs.reshape(*indices.shape, -1)
    if layer.padding_idx is not None:
        outputs = outputs.masked_fill((indices == layer.padding_idx).unsqueeze(-1), 0.0)
    return {"weight": EmbeddingGradients(indices, outputs, layer.num_embeddings)} if "weight" in names else {}


@dataclass(frozen=True)
class EmbeddingGradients(RecordGradients):
    """The table: indices (batch, tokens) and gradients of outputs (batch, tokens, dimension)."""

    indices: Tensor
    outputs: Tensor
    rows: int

    def explicit(self) -> Tensor:
        """(batch, rows, dimension)."""
        batch, _, dimension = self.outputs.shape
        index = self.indices.unsqueeze(-1).expand(-1, -1, dimension)
        return self.outputs.new_zeros(batch, self.rows, dimension).scatter_add_(1, index, self.outputs)

    def smaller(self) -> RecordGradients:
        """Explicit, if the table has no more rows than the record has tokens."""
        return ExplicitGradients(self.explicit()) if self.rows <= self.indices.shape[1] else self

    def squared_norm(self) -> Tensor:
        """From a Gram matrix: tokens with the same index add up, others are orthogonal."""
        same = self.indices.unsqueeze(1) == self.indices.unsqueeze(2)
        return gram_norm(same.to(self.outputs.dtype), self.outputs, terms=1)

    def add(self, weights: Tensor, total: Tensor) -> None:
        """Scattered sums: over the tokens of a record that have the same index, then over the records."""
        tokens, width = self.outputs.shape[1:]
        step = WIDE_CHUNK // max(1, tokens * (tokens + width))
        for weight, indices, outputs in in_parts(step, weights, self.indices, self.outputs):
            values = weighted(weight, outputs)
            if tokens > 1:
                first = (indices.unsqueeze(1) == indices.unsqueeze(2)).byte().argmax(2)
                values = torch.zeros_like(values).scatter_add_(1, first.unsqueeze(2).expand_as(values), values)
            total.index_add_(0, indices.flatten(), values.flatten(0, 1))

    def masked(self, kept: Tensor) -> EmbeddingGradients:
        """Zero gradients; the indices are integers and stay."""
        return EmbeddingGradients(self.indices, masked(self.outputs, kept), self.rows)

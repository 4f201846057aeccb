"""The graph convolutional network on a fixed public graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import nn

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp_papers.networks.parts import Activation


class GCN(nn.Module):
    """Two layers of graph convolution, S activation(S X W1) W2, whose outputs can be computed node by node.

    S is the adjacency matrix with a loop at every node, divided by the roots of the degrees of both ends. The inputs
    are indices of nodes. For each, the rows of S X at its neighbours go through the first layer, and their sum weighted
    by S through the second: the same outputs as for the whole graph at once. But one record is one node, and no layer
    combines two records, so the gradient of a record is that of two linear layers.

    Args:
        features: X, one row per node; usually scaled so that each row sums to 1.
        edges: the two ends of each edge, in either order; an edge that is given twice counts once.
        hidden: the width of the first layer.
        classes: the number of classes.
        activation: what follows the first layer.

    Guarantee: protected are the label of each training node, and whether it is trained on. The graph and the features
        of all nodes count as public: an output uses the features of neighbours and of their neighbours.
    Source: yang2021improved, table 1 (Cora).
    Deviates: 1. The table has a gradient of 1,436 x 16, but Cora has 1,433 features. 2. What is mixed in the paper's
        GCN-Mixed is not stated; this is the plain network, without dropout.
    """

    features: torch.Tensor
    neighbours: torch.Tensor
    weights: torch.Tensor
    degrees: torch.Tensor

    def __init__(
        self,
        features: npt.NDArray[Any],
        edges: npt.NDArray[Any],
        *,
        hidden: int = 16,
        classes: int = 7,
        activation: Activation = nn.ReLU,
    ) -> None:
        super().__init__()
        X = _check.finite("features", features, ndim=2)
        S = _normalised_adjacency(len(X), edges)
        degrees = np.diff(S.indptr)
        # One row per node: its neighbours, then node 0 with weight 0 up to the largest degree.
        row = np.repeat(np.arange(len(X)), degrees)
        place = np.arange(S.nnz) - np.repeat(S.indptr[:-1], degrees)
        neighbours, weights = np.zeros((len(X), degrees.max()), dtype=np.int64), np.zeros((len(X), degrees.max()))
        neighbours[row, place], weights[row, place] = S.indices, S.data
        # All of this is public and fixed, hence not part of the saved state.
        self.register_buffer("features", torch.tensor(S @ X, dtype=torch.float32), persistent=False)
        self.register_buffer("neighbours", torch.tensor(neighbours), persistent=False)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32), persistent=False)
        self.first = nn.Linear(X.shape[1], _check.count("hidden", hidden), bias=False)
        self.activation = activation()
        self.second = nn.Linear(hidden, _check.count("classes", classes), bias=False)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        """The scores of the classes of each node."""
        near = self.activation(self.first(self.features[self.neighbours[nodes]]))
        scores: torch.Tensor = self.second((self.weights[nodes, :, None] * near).sum(dim=1))
        return scores


def _normalised_adjacency(nodes: int, edges: npt.NDArray[Any]) -> sparse.csr_array[np.float64]:
    """S = D^(-1/2) (A + I) D^(-1/2), where D has the degrees of A + I."""
    ends = np.asarray(edges)
    if ends.ndim != 2 or ends.shape[1] != 2 or ends.dtype.kind not in "iu":
        raise InvalidInput(f"edges must be pairs of node indices, one pair per row, got {ends.dtype} of {ends.shape}")
    if not np.all((ends >= 0) & (ends < nodes)):
        raise InvalidInput(
            f"edges must join nodes 0 to {nodes - 1}, one for each row of features; they go from {ends.min()} to "
            f"{ends.max()}"
        )
    loops = np.repeat(np.arange(nodes), 2).reshape(-1, 2)
    pairs = np.unique(np.concatenate([ends, ends[:, ::-1], loops]), axis=0)
    degrees = np.bincount(pairs[:, 0], minlength=nodes)
    weights = 1 / np.sqrt(degrees[pairs[:, 0]] * degrees[pairs[:, 1]])
    return sparse.csr_array((weights, (pairs[:, 0], pairs[:, 1])), shape=(nodes, nodes))

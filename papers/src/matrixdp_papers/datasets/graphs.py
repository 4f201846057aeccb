"""Graphs: papers that cite each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from matrixdp._check import Array
from matrixdp_papers.datasets.source import Folder, Source, arrays

CORA = Source(
    "cora.npz",
    "https://linqs.org/datasets/",
    "save the words of each paper in compressed rows (feature_indptr, feature_indices, n_features), label, edges, "
    "edge_multiplicity, and the public split of Planetoid (train_index, val_index, test_index)",
    "710b4d6cb875a9c9a6911cd8633ff840a68bd90c661d430e4ac6b6a74ab14a72",
)


class Graph(NamedTuple):
    """An undirected graph: features and class of each node, the edges, and the split into training and test nodes.

    Attributes:
        features: one row per node.
        label: the class of each node.
        edges: the two ends of each edge, once each, and no node with itself.
        train: the nodes to train on.
        validation: the nodes to choose models by.
        test: the nodes to test on.
    """

    features: Array
    label: npt.NDArray[np.int64]
    edges: npt.NDArray[np.int64]
    train: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


def load_cora(folder: Folder = None) -> Graph:
    """2,708 papers of seven fields, which of 1,433 words each has (0 or 1), and 5,278 citations, whichever way.

    The split is that of Planetoid: 140 nodes to train on, 500 to validate and 1,000 to test on.
    """
    found = arrays(CORA, folder)
    starts = found["feature_indptr"]
    features = np.zeros((len(starts) - 1, int(found["n_features"])))
    features[np.repeat(np.arange(len(features)), np.diff(starts)), found["feature_indices"]] = 1
    names = ("label", "edges", "train_index", "val_index", "test_index")
    return Graph(features, *(found[name].astype(np.int64) for name in names))

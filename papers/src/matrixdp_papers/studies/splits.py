"""Training and test data in the form that the networks take: pictures channels first, nodes of a graph."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matrixdp_papers import datasets
from matrixdp_papers.datasets import Folder, Graph, Labelled

# The published mean and standard deviation of red, green and blue in the training pictures of CIFAR-10.
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CENTRED = (
    "- CIFAR-10 is centred and scaled by the published mean and deviation of each colour. They were computed from its "
    "training pictures, and are taken as public here."
)
# As many as IMGM has to train on; the rest of the graph has 1,000 to test and 500 that are not used.
CORA_TRAIN = 1140


class Split(NamedTuple):
    """Training and test records; where there is a graph, they are indices of its nodes."""

    train: Labelled
    test: Labelled
    graph: Graph | None = None

    @property
    def most_frequent(self) -> float:
        """The share of the most frequent class among the test records: the accuracy of a constant answer."""
        return float(np.max(np.bincount(self.test.label)) / len(self.test.label))

    def some(self, train: int, test: int, rng: np.random.Generator) -> Split:
        """A few records of each."""
        return self._replace(train=_some(self.train, train, rng), test=_some(self.test, test, rng))


def _some(data: Labelled, most: int, rng: np.random.Generator) -> Labelled:
    chosen = rng.permutation(len(data.label))[:most]
    return Labelled(data.records[chosen], data.label[chosen])


def adult(folder: Folder) -> Split:
    """The census records of Adult."""
    return Split(datasets.load_adult(folder), datasets.load_adult(folder, test=True))


def imdb(folder: Folder) -> Split:
    """The film reviews of IMDB."""
    return Split(datasets.load_imdb(folder), datasets.load_imdb(folder, test=True))


def pictures(folder: Folder) -> dict[str, Split]:
    """MNIST, a fifth of CIFAR-10, and SVHN if its files are there."""
    splits = {
        "MNIST": Split(digits(datasets.load_mnist(folder)), digits(datasets.load_mnist(folder, test=True))),
        "CIFAR-10": cifar10(folder),
    }
    if all(datasets.has(source, folder) for source in datasets.SVHN):
        splits["SVHN"] = Split(datasets.load_svhn(folder), datasets.load_svhn(folder, test=True))
    return splits


def digits(rows: Labelled) -> Labelled:
    """MNIST as pictures of one colour."""
    return Labelled(rows.records.reshape(-1, 1, 28, 28).astype(np.float32), rows.label)


def cifar10(folder: Folder) -> Split:
    """A fifth of CIFAR-10, every colour centred and scaled."""
    return Split(_centred(datasets.load_cifar10(folder)), _centred(datasets.load_cifar10(folder, test=True)))


def _centred(data: Labelled) -> Labelled:
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (CIFAR10_MEAN, CIFAR10_STD))
    return Labelled((data.records - mean) / std, data.label)


def cora(graph: Graph) -> Split:
    """1,140 training nodes, the public ones and others outside validation and test, and the public test nodes."""
    taken = np.concatenate([graph.train, graph.validation, graph.test])
    train = np.concatenate([graph.train, np.setdiff1d(np.arange(len(graph.label)), taken)])[:CORA_TRAIN]
    features = graph.features / np.maximum(graph.features.sum(axis=1, keepdims=True), 1)
    train_part, test_part = (Labelled(nodes, graph.label[nodes]) for nodes in (train, graph.test))
    return Split(train_part, test_part, graph._replace(features=features))

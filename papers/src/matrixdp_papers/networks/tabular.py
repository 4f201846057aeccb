"""The papers' networks for tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from matrixdp import _check
from matrixdp_papers.networks.parts import Activation, network


def MLP(
    inputs: int = 105, hidden: Sequence[int] = (12,), classes: int = 2, *, activation: Activation = nn.ReLU
) -> nn.Sequential:
    """Layers of the hidden widths make the features, one more classifies them; the defaults are for Adult.

    Args:
        inputs: the columns of the table.
        hidden: the width of each hidden layer; none for a linear model.
        classes: the number of classes.
        activation: what follows each hidden layer.

    Source: yang2021improved, table 1, and yang2023matrix, table 2 (Adult: a gradient of 105 x 12); of the networks in
        yang2023matrix, table 3, only the last hidden width is stated.
    """
    widths = [_check.count("inputs", inputs), *(_check.count("hidden", width) for width in hidden)]
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), activation())]
    return network(features=layers, top=[nn.Linear(widths[-1], _check.count("classes", classes))])

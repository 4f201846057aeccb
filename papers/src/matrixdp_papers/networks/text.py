"""The papers' networks for sequences of word codes, padded in front."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from matrixdp.errors import InvalidInput
from matrixdp_papers.networks.parts import network


def LSTM(
    *, codes: int = 20_002, embedding: int = 128, hidden: int = 128, classes: int = 2, per_sample: bool = False
) -> nn.Sequential:
    """Reads the words in order: the state after the last one makes `hidden` features, one layer classifies them.

    Args:
        codes: the number of word codes.
        embedding: the dimension of the embedding of a word.
        hidden: the width of the state.
        classes: the number of classes.
        per_sample: whether the recurrent layer is Opacus's, made of linear layers, which gives gradients of single
            records; it is slower. `network.features[1].layer` takes the state of either kind.

    Source: yang2023matrix, table 2 (a gradient of 20,002 x 128, that of the embedding).
    Deviates: 1. The paper does not state the width of the state.
    """
    return _recurrent(codes, embedding, hidden, classes, per_sample=per_sample, bidirectional=False)


def BiLSTM(
    *, codes: int = 20_002, embedding: int = 128, hidden: int = 75, classes: int = 2, per_sample: bool = False
) -> nn.Sequential:
    """Reads the words both ways: the two last states make 2 x `hidden` features, one layer classifies them.

    The features lie between -1 and 1. The arguments are those of `LSTM`.

    Source: yang2021improved, table 1 (150 features).
    Deviates: 1. The paper does not state the size of the embedding; it is that of the LSTM in yang2023matrix.
    """
    return _recurrent(codes, embedding, hidden, classes, per_sample=per_sample, bidirectional=True)


class LastState(nn.Module):
    """The last state of a recurrent layer, both ways side by side if it reads both ways."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """One row of features per record."""
        _, (state, _) = self.layer(words)
        rows: torch.Tensor = state.transpose(0, 1).flatten(1)
        return rows


def _recurrent(
    codes: int, embedding: int, hidden: int, classes: int, *, per_sample: bool, bidirectional: bool
) -> nn.Sequential:
    """An embedding, a recurrent layer and a linear one."""
    kind = _opacus_lstm() if per_sample else nn.LSTM
    layer = kind(embedding, hidden, batch_first=True, bidirectional=bidirectional)
    return network(
        features=[nn.Embedding(codes, embedding), LastState(layer)],
        top=[nn.Linear(hidden * (1 + bidirectional), classes)],
    )


def _opacus_lstm() -> Any:
    """Opacus's layer, imported only by those who ask for it."""
    try:
        from opacus.layers import DPLSTM
    except ImportError:
        raise InvalidInput("per_sample=True needs Opacus: pip install 'matrixdp[learn]'") from None
    return DPLSTM

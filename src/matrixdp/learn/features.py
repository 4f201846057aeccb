"""Features that are released once, with noise, and then trained on like any other data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn.layers.normalization import refuse_batch_statistics
from matrixdp.learn.record_independence import outputs
from matrixdp.pipeline import Release, Spends, release
from matrixdp.sensitivity import OneRow

# The most records that pass through the front at a time.
CHUNK = 1024


class PrivateFeatures(nn.Module):
    """An `nn.Sequential` split in two: a fixed front that computes features, and a top that is trained on noisy ones.

    The front's features are bounded by tanh, so each is in [-1, 1] whatever the record; a NaN, where the front
    overflows, counts as 0. `release` computes the features of all records once and adds noise; training on them is
    post-processing, for any number of epochs.

    Guarantee: the certificate of the release, for one record replaced by another; the number of records is public. It
    covers the features alone, so the front must not have been trained on these records. The front cannot mix records,
    by construction (`record_independence`). Labels get no noise: they must be public or released by other means.

    Args:
        model: the network; its modules before `split` become the front, the rest the top.
        split: where the top begins.

    Source: yang2021improved, section 5, type II.
    Deviates: 1. one record changes one row of the features, not all rows; 2. the front is frozen; the paper does not
        say how it was trained.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import PrivateFeatures
        >>> features = PrivateFeatures(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), split=1)
        >>> features.release(torch.randn(50, 4), Budget(3.0, 1e-5)).value.shape
        torch.Size([50, 3])
    """

    def __init__(self, model: nn.Sequential, split: int) -> None:
        if not isinstance(model, nn.Sequential):
            raise InvalidInput(f"model must be an nn.Sequential, got {type(model).__name__}; wrap its two parts in one")
        if not _check.count("split", split) < len(model):
            raise InvalidInput(f"split must leave a module for the top: below {len(model)}, got {split}")
        super().__init__()
        modules = list(model)
        self.front = nn.Sequential(*modules[:split], nn.Flatten(), nn.Tanh()).requires_grad_(False)
        refuse_batch_statistics(self.front, "evaluation")
        self.top = nn.Sequential(*modules[split:])

    @_check.withheld("model")
    def features(self, inputs: Tensor) -> Tensor:
        """The features without noise, one row per record; private."""
        self.front.eval()  # train() applies to it too, and batch normalization would mix the records
        return _features(self.front, inputs)

    def release(
        self,
        inputs: Tensor,
        budget: Budget,
        mechanism: str = "auto",
        *,
        ledger: Spends | None = None,
        note: str = "features",
        **options: Any,
    ) -> Release:
        """The features of all records with noise, one row per record.

        Args:
            inputs: all records, on the device of the front; a record that is not finite is refused.
            budget: for this release.
            mechanism: as for `matrixdp.release`.
            ledger: charged before the noise is drawn.
            note: stored in the ledger with this release; never data.
            **options: further arguments of `matrixdp.release`, and options of the mechanism.
        """
        if not isinstance(inputs, Tensor):
            raise InvalidInput(f"inputs must be a tensor with one row per record, got {_check.kind(inputs)}")
        if not bool(torch.isfinite(inputs).all()):
            raise InvalidInput(
                "inputs must be finite; drop or fill the records that are not before you release features"
            )
        self.front.eval()
        with _check.withheld("model"):
            rows = _features(self.front, inputs)
        change = OneRow(low=-1.0, high=1.0)
        return release(rows, change, budget, mechanism, ledger=ledger, note=note, **options)

    def dataset(self, released: Release, targets: Tensor) -> TensorDataset:
        """Released features with their targets, to train the top on."""
        with _check.withheld("targets"):
            return TensorDataset(released.value, targets)

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's output for new records: their features without noise, then the top."""
        with _check.withheld("model"):
            answers: Tensor = self.top(self.features(inputs))
        return answers


def _features(front: nn.Module, inputs: Tensor) -> Tensor:
    parts = [outputs(front, (inputs[first : first + CHUNK],)) for first in range(0, len(inputs), CHUNK)]
    return torch.cat(parts).nan_to_num(nan=0.0)  # a refusal would reveal that a record made the front overflow

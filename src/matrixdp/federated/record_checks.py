"""Checks of model and loss on a client's own records, before the first request."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from matrixdp.errors import InvalidInput
from matrixdp.federated.tensors import flat, load
from matrixdp.learn.gradients import ClippedGradients


def check_never_raises(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, labels: Tensor
) -> None:
    """Raises InvalidInput if model or loss raise an error on these records, or for parameters that are not usual.

    The server chooses the parameters, so it could look for parameters at which certain records lead to an error. Noise
    does not hide that a batch failed, nor can one record's effect on a failure be bounded, so there must be no errors.

    Records pass through `ClippedGradients`, so that model and loss can keep nothing of them for later rounds.
    """
    tried, loss = copy.deepcopy((model, loss))  # together: a loss may use layers of the model
    for part in (tried, loss):
        if isinstance(part, nn.Module):
            part.cpu()  # after an error, a process may not be able to use its GPU any more
    gradients = ClippedGradients(tried, loss, clip=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="records run one at a time")  # which was said before
        gradients.accumulate(inputs.cpu(), labels.cpu())
    for value in (math.nan, math.inf, 1e38):
        load(tried, torch.full_like(flat(tried), value))
        try:
            gradients.accumulate(inputs[:1].cpu(), labels[:1].cpu())
        except Exception:
            raise InvalidInput(
                f"model and loss must work with any parameters, and with {value:g} for all of them they raise an "
                "error, which would reveal something about the records. Use a loss without checks, such as "
                "binary_cross_entropy_with_logits instead of binary_cross_entropy"
            ) from None

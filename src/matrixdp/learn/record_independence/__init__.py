"""Models that cannot mix records: a traced graph with a rule for every operation, or one record at a time by `vmap`."""

from typing import Any

import torch
from torch import Tensor, nn

from matrixdp.learn.record_independence.one_record import record_outputs
from matrixdp.learn.record_independence.rules import NoRule
from matrixdp.learn.record_independence.traced import TracedModel


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """What a model gives for each record of a batch, without gradients.

    Guarantee: row i follows from record i, parameters, buffers and random numbers alone.
    """
    try:
        traced = TracedModel(model, None, inputs, None)
    except NoRule:
        return record_outputs(model, inputs)
    with torch.no_grad():
        return traced(inputs)

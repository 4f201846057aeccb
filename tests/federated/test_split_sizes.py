"""The sizes of batches that a plan fixes are those that a network is tried with."""

import pytest
import torch
from torch import nn

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.federated import Half, SplitPlan


class AtSize(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.linear = size, nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x + x.mean(0) if len(x) == self.size else x)


@pytest.mark.parametrize("size", [30, 20])
def test_a_network_is_tried_with_the_batches_of_the_plan(tmp_path, size):
    plan = SplitPlan(records=50, epochs=1, batch_size=30, budget=Budget(2.0, 1e-5), update_share=0.0)
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).numpy()
    Half(AtSize(40), inputs, plan=plan, folder=tmp_path / "sound")  # no batch has this size
    with pytest.raises(InvalidInput, match="mixes the records"):
        Half(AtSize(size), inputs, plan=plan, folder=tmp_path / "mixing")

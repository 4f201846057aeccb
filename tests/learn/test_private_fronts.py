"""Fronts of private features that would mix or keep records are harmless."""

import pytest
import torch
from torch import nn

from independence_cases import WIDTH
from matrixdp.learn import PrivateFeatures

pytestmark = pytest.mark.usefixtures("one_thread")


class First(nn.Module):
    """Centres by the first batch that it sees."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return x - self.mean


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


FRONTS = {
    "first pass": First,
    "cumulative sum": lambda: Apply(lambda x: x.cumsum(0)),
    "last record": lambda: Apply(lambda x: x - 1e-4 * x[-1:]),
    "median": lambda: Apply(lambda x: x - x.median(0).values),
    "size": lambda: Apply(lambda x: x / len(x)),
    "position": lambda: Apply(lambda x: x * torch.arange(len(x))[:, None]),
    "large batches alone": lambda: Apply(lambda x: x - x.mean(0) if len(x) > 500 else x),
}


@pytest.mark.parametrize("name", FRONTS)
def test_fronts_that_would_mix_or_keep_records_are_harmless(name):
    private = PrivateFeatures(nn.Sequential(FRONTS[name](), nn.Linear(WIDTH, 3), nn.Linear(3, 2)), 2)
    inputs = torch.randn(1500, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = private.features(inputs)
    changed = inputs.clone()
    changed[7] = 100.0
    others = torch.arange(1500) != 7
    torch.testing.assert_close(private.features(changed)[others], rows[others], rtol=0, atol=1e-6)
    torch.testing.assert_close(private.features(inputs[:3]), rows[:3], rtol=0, atol=1e-6)
    assert getattr(private.front[0], "mean", None) is None

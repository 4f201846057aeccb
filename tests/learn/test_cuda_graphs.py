"""Padded batches and CUDA graphs: the same sum as a plain pass."""

import pytest
import torch
from torch import nn

from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients
from matrixdp.learn.cuda_graphs import CapturedGradients, _padded_size
from matrixdp_papers.networks import LeNet


def gradients(device="cpu", norm="l2"):
    torch.manual_seed(0)
    model = LeNet().to(device)
    return ClippedGradients(model, nn.CrossEntropyLoss(reduction="none"), clip=0.05, norm=norm)


def batch(size, device="cpu", bad=()):
    torch.manual_seed(size)
    inputs, targets = torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,))
    inputs[list(bad)] = float("nan")
    return inputs.to(device), targets.to(device)


def plain(summed, inputs, targets):
    summed.zero()
    dropped = summed.accumulate(inputs, targets)
    return summed.flat.clone(), dropped


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("bad", [(), (1, 4)])
def test_records_that_are_not_present_add_exactly_nothing(norm, bad):
    summed = gradients(norm=norm)
    inputs, targets = batch(6, bad=bad)
    expected, dropped = plain(summed, inputs, targets)
    others = batch(3)[0] * 1e3
    others[0] = float("inf")
    padded = torch.cat([inputs, others]), torch.cat([targets, torch.zeros(3, dtype=torch.int64)])
    summed.zero()
    found = summed.add_present((padded[0],), padded[1], torch.arange(9) < 6)
    assert int(found) == dropped == len(bad)
    torch.testing.assert_close(summed.flat, expected, rtol=1e-4, atol=1e-7)
    summed.zero()
    assert int(summed.add_present((padded[0],), padded[1], torch.zeros(9, dtype=torch.bool))) == 0
    assert torch.count_nonzero(summed.flat) == 0


def test_padded_sizes_are_large_enough_and_few():
    sizes = [_padded_size(records) for records in range(1, 5000)]
    assert all(records <= size < records + max(32, records / 4) for records, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len({_padded_size(records) for records in range(192, 321)}) <= 5  # five standard deviations about 256


def test_a_processor_has_no_graphs():
    with pytest.raises(InvalidInput, match="CUDA"):
        CapturedGradients(gradients())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_a_graph_gives_the_plain_sum_for_batches_of_any_size(norm):
    summed = gradients("cuda", norm)
    captured = CapturedGradients(summed)
    for size in (1, 7, 200, 256, 257, 0, 200):
        inputs, targets = batch(size, "cuda", bad=(3,) if size > 5 else ())
        expected, dropped = plain(summed, inputs, targets)
        summed.zero()
        assert int(captured.accumulate(inputs, targets)) == dropped
        assert float((summed.flat - expected).norm()) <= 1e-3 * float(expected.norm())

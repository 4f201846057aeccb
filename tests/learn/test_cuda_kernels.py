"""The kernels for gradients per record on a CUDA device, against a loop over the records in float64."""

import copy

import pytest
import torch
from torch import nn

from matrixdp.learn.layers import convolution, normalization

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from matrixdp.learn.layers import cuda_kernels

LAYERS = {
    "few channels": (nn.Conv2d(3, 20, 3, padding=1), (7, 9)),
    "stride": (nn.Conv2d(70, 33, 3, stride=2, padding=1), (15, 16)),
    "dilation": (nn.Conv2d(4, 130, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), (9, 8)),
    "one pixel": (nn.Conv2d(200, 8, 1, stride=2, bias=False), (6, 6)),
    "no padding": (nn.Conv2d(64, 128, 3), (6, 6)),
}
RECORDS = 133


def case(name):
    layer, size = LAYERS[name]
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).cuda()
    inputs = cuda_kernels.shortened(torch.randn(RECORDS, layer.in_channels, *size, device="cuda"))
    outputs = cuda_kernels.shortened(torch.randn_like(layer(inputs)))
    wide = copy.deepcopy(layer).double()
    pairs = zip(inputs.double().split(1), outputs.double().split(1), strict=True)
    each = torch.stack([torch.autograd.grad(wide(x), wide.weight, g)[0] for x, g in pairs])
    return layer, inputs, outputs, each


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_sums_and_norms_of_convolutions(name):
    layer, inputs, outputs, each = case(name)
    weights = torch.rand(RECORDS, dtype=torch.float64, device="cuda")
    total = torch.einsum("b,bfchw->fchw", weights, each)
    formed = convolution.form_gradients(layer, inputs, outputs)
    short = convolution.ShortenedGradients(layer, inputs, outputs)
    torch.testing.assert_close(formed.explicit().double(), each, rtol=1e-4, atol=1e-4 * float(each.abs().max()))
    for gradients in (formed, short):
        found = torch.zeros_like(total)
        gradients.add(weights, found)
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4 * float(total.abs().max()))
    for gradients in (formed, short):
        ratio = gradients.squared_norm().double() / each.flatten(1).square().sum(1)
        assert float(ratio.min()) >= 1
        assert float(ratio.max()) < 1.01


def test_a_record_has_the_same_numbers_in_every_batch():
    layer, inputs, outputs, _ = case("stride")
    whole = cuda_kernels.convolution_gradients(layer, inputs, outputs)
    assert torch.equal(whole[5:90], cuda_kernels.convolution_gradients(layer, inputs[5:90], outputs[5:90]))
    norms = cuda_kernels.convolution_norms(layer, inputs, outputs)
    assert torch.equal(norms[5:90], cuda_kernels.convolution_norms(layer, inputs[5:90], outputs[5:90]))


def test_sums_over_records_are_in_float64():
    """A large record and its negative leave what the others add; in float32 they would swallow it."""
    values = torch.full((RECORDS, 1500), 1.0, device="cuda")
    values[0], values[-1] = 2.0**30, -(2.0**30)
    weights = torch.ones(RECORDS, dtype=torch.float64, device="cuda")
    assert torch.equal(
        cuda_kernels.weighted_sum(values, weights), torch.full_like(weights[:1], RECORDS - 2).expand(1500)
    )
    layer = nn.Conv2d(16, 16, 1).cuda()
    outputs = torch.ones(RECORDS, 16, 4, 4, device="cuda")
    inputs = values[:, :16, None, None].expand(-1, -1, 4, 4).contiguous()
    found = cuda_kernels.convolution_sum(layer, inputs, outputs, weights)
    assert torch.equal(found, torch.full_like(found, 16 * (RECORDS - 2)))


@pytest.mark.parametrize(("groups", "shape"), [(3, (9, 5, 6)), (32, (64, 32, 32)), (1, (7, 11)), (1, (64, 32, 32))])
def test_group_norms(groups, shape, monkeypatch):
    layer = nn.GroupNorm(groups, shape[0]).cuda()
    inputs, outputs = 3 + torch.randn(RECORDS, *shape, device="cuda"), torch.randn(RECORDS, *shape, device="cuda")
    found = normalization.channels(layer, inputs, outputs, frozenset({"weight", "bias"}))
    monkeypatch.setattr(normalization, "cuda_kernels", lambda _: None)
    usual = normalization.channels(layer, inputs, outputs, frozenset({"weight", "bias"}))
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[name].values, usual[name].values, rtol=1e-4, atol=1e-3)


def test_a_not_finite_factor_stays_so():
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], device="cuda")
    assert torch.isfinite(cuda_kernels.shortened(bad)).tolist() == [False, False, False, True]

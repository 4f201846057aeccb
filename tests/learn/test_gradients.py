"""ClippedGradients against a loop over single records, and against attempts to break its bound."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradient_cases import (
    BATCH,
    CASES,
    CONVOLUTIONS,
    clipped_sum,
    convolution,
    frozen,
    integers,
    numbers,
    record_gradients,
    squares,
)
from matrixdp.errors import InvalidInput
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.layers import base, normalization, rounding
from matrixdp.learn.layers import convolution as convolutions

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("case", CASES)
def test_sum_matches_a_loop_over_records(case, norm, monkeypatch):
    monkeypatch.setattr(rounding, "CANCELLATION", 0.0)  # it counts a little more than the norm, of which none is left
    model, inputs = CASES[case]()
    model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    targets = torch.randn(BATCH, dtype=torch.float64)
    rows = record_gradients(model, inputs, targets)
    clip = float(rows.norm(dim=1).median()) if norm == "l2" else float(rows.abs().quantile(0.9)) + 1e-3
    gradients = ClippedGradients(model, squares, clip=clip, norm=norm)
    assert gradients.accumulate(inputs, targets) == 0
    torch.testing.assert_close(gradients.flat, clipped_sum(rows, clip, norm), rtol=1e-9, atol=1e-9 * clip)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert not any(p.grad.any() for p in trainable)  # no noise yet
    gradients.attach()
    assert torch.equal(torch.cat([p.grad.flatten() for p in trainable]), gradients.flat)
    gradients.flat.add_(1.0)  # no .grad is a view of it
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in trainable]), gradients.flat - 1.0)


@pytest.mark.parametrize("case", CASES)
def test_float32_contribution_of_a_record_is_within_the_clip(case):
    model, inputs = CASES[case]()
    targets = torch.randn(BATCH)
    rows = record_gradients(model, inputs, targets)
    clip = float(rows.norm(dim=1).min()) / 2
    gradients = ClippedGradients(model, squares, clip=clip)
    for i in range(BATCH):
        gradients.zero()
        gradients.accumulate(inputs[i : i + 1], targets[i : i + 1])
        size = float(gradients.flat.double().norm())
        assert clip * 0.995 < size <= clip
    gradients.zero()
    gradients.accumulate(inputs, targets)
    expected = clipped_sum(rows, clip, "l2").double()
    torch.testing.assert_close(gradients.flat, expected, rtol=0, atol=5e-3 * clip)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_both_ways_through_a_convolution_agree(dimensions, name, monkeypatch):
    for name_of_limit, limit in {"CHUNK": 3000, "TERMS": 20, "WIDE_CHUNK": 2000, "CANCELLATION": 0.0}.items():
        for module in (base, convolutions, rounding):  # several parts
            if hasattr(module, name_of_limit):
                monkeypatch.setattr(module, name_of_limit, limit)
    layer = convolution(dimensions, **CONVOLUTIONS[name]).double()
    inputs = torch.randn(BATCH, 4, *[7] * dimensions, dtype=torch.float64)
    outputs = torch.randn_like(layer(inputs))
    gradients = convolutions.convolution(layer, inputs, outputs, frozenset(["weight"]))["weight"]
    samples, weights = gradients.explicit(), torch.rand(BATCH, dtype=torch.float64)
    torch.testing.assert_close(gradients.squared_norm(), samples.flatten(1).norm(dim=1) ** 2, rtol=1e-9, atol=0)
    expected = 1 + torch.einsum("b,b...->...", weights, samples)
    for slow in (False, True):
        monkeypatch.setattr(convolutions, "slow_products", lambda tensor, slow=slow: slow)
        total = torch.ones_like(layer.weight.detach())
        gradients.add(weights, total)
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("layer", [nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)], ids=str)
def test_norms_of_inputs_far_from_zero(layer, one_pass, monkeypatch):
    """A mean of a hundred standard deviations, in float32 against float64."""
    if one_pass:
        monkeypatch.setattr(normalization, "_moments", normalization._moments_in_one_pass)
    inputs, outputs = 100 + numbers(8, 6, 6), numbers(8, 6, 6)
    found = normalization.channels(layer, inputs, outputs, frozenset(["weight", "bias"]))
    normal = functional.group_norm(inputs.double(), 4 if isinstance(layer, nn.GroupNorm) else 8, eps=layer.eps)
    expected = {"weight": (normal * outputs).sum((2, 3)), "bias": outputs.double().sum((2, 3))}
    for name, gradients in found.items():
        error = (gradients.explicit() - expected[name]).norm(dim=1) / expected[name].norm(dim=1)
        assert error.max() < 1e-4


@pytest.mark.parametrize("entries", [1 << 14, 1 << 15, 36_864, 147_456, 3 * 16_411, 65_537])
def test_norms_of_long_rows(entries):
    """65537 is a prime, which has no blocks."""
    values = torch.randn(2, entries)
    true = values.double().square().sum(1)
    ratio = rounding.squared_norm(values).double() / true
    assert (ratio >= 1).all()
    assert (ratio < 1.002).all()


@pytest.mark.parametrize(
    ("shape", "explicit"),
    [
        ((64, 64, 3, 32), True),  # in channels, out channels, kernel, side
        ((128, 128, 3, 16), True),  # twice the size of its input and output, but no Gram matrices of 256 x 256
        ((256, 256, 3, 8), False),
        ((512, 512, 3, 4), False),
        ((256, 512, 1, 4), False),
    ],
)
def test_which_convolutions_are_explicit(shape, explicit):
    width, height, kernel, side = shape
    layer = nn.Conv2d(width, height, kernel, padding=kernel // 2)
    inputs, outputs = torch.randn(1, width, side, side), torch.randn(1, height, side, side)
    gradients = convolutions.ConvolutionGradients(layer, inputs, outputs)
    assert isinstance(gradients.smaller(), base.ExplicitGradients) == explicit


@pytest.mark.parametrize(
    "layer", [nn.Linear(64, 64, bias=False), nn.Conv1d(64, 64, 1, bias=False), nn.Embedding(64, 64)], ids=str
)
def test_bound_survives_cancellation(layer):
    """Two tokens with opposite gradients, up to the last digits: the norm that float32 sees is 0, the true one not."""

    class Cancelling(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.signs = layer, torch.tensor([1e4, -1e4])

        def forward(self, x):
            if isinstance(layer, nn.Conv1d):
                return self.layer(x.transpose(1, 2)).transpose(1, 2) * self.signs.view(1, 2, 1)
            return self.layer(x) * self.signs.view(1, 2, 1)

    if isinstance(layer, nn.Embedding):
        inputs = torch.zeros(1, 2, dtype=torch.long)
        coefficients = torch.ones(2, 64)
        coefficients[1] += 2**-20
    else:
        inputs = torch.rand(1, 1, 64).repeat(1, 2, 1)
        inputs[:, 1] *= 1 + 2**-20
        coefficients = torch.ones(2, 64)

    def loss(outputs, targets):
        return (outputs * coefficients).sum((1, 2))

    model = Cancelling()
    exact = (inputs.double() if inputs.is_floating_point() else functional.one_hot(inputs, 64).double())[0]
    by_output = (coefficients * model.signs.view(2, 1)).double()
    true_norm = float((by_output.T @ exact).norm())
    a, g = exact.float(), by_output.float()
    naive = float(((a @ a.T) * (g @ g.T)).sum().clamp(min=0).sqrt())
    clip = true_norm / 8
    assert not clip < naive < 4 * true_norm  # else this input shows nothing
    gradients = ClippedGradients(model, loss, clip=clip)
    gradients.accumulate(inputs, torch.zeros(1))
    assert float(gradients.flat.double().norm()) <= clip


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("case", ["linear", "linear, few tokens", "lenet"])
def test_shortened_factors_leave_room(case, precision):
    """No processor must use them, so this can only see that the bound makes room for them, and not too much."""
    usual = torch.get_float32_matmul_precision()
    model, inputs = CASES[case]()
    gradients = ClippedGradients(model, squares, clip=1e-3)
    torch.set_float32_matmul_precision(precision)
    try:
        gradients.accumulate(inputs[:1], torch.ones(1))
    finally:
        torch.set_float32_matmul_precision(usual)
    assert 0.8e-3 < float(gradients.flat.double().norm()) < (1 - rounding._SHORT_FACTORS[precision]) * 1e-3


def test_bound_survives_underflow():
    """Inputs whose squares vanish in float32, and gradients so large that the product is not small."""
    model = nn.Linear(4, 4, bias=False)
    inputs = torch.full((1, 4), 1e-25)
    gradients = ClippedGradients(model, lambda outputs, targets: outputs.sum(1) * 1e18, clip=1e-9)
    gradients.accumulate(inputs, torch.zeros(1))
    assert float(gradients.flat.double().norm()) <= 1e-9


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("case", ["lenet", "linear", "linear, few tokens", "block", "convolution 1d, plain"])
def test_records_that_are_not_finite_add_exactly_zero(case, bad, norm):
    model, inputs = CASES[case]()
    targets = torch.randn(BATCH)
    good = [0, 2, 3]
    inputs[[1, 4]] = bad
    gradients = ClippedGradients(model, squares, clip=0.1, norm=norm)
    dropped = gradients.accumulate(inputs, targets)
    assert dropped == 2 or bad == 1e30
    if dropped == 2:
        together = gradients.flat.clone()
        assert torch.isfinite(together).all()
        gradients.zero()
        assert gradients.accumulate(inputs[good], targets[good]) == 0
        torch.testing.assert_close(together.float(), gradients.flat.float())  # three records may round otherwise


def test_a_loss_that_is_not_finite_drops_the_record():
    model, inputs = CASES["linear"]()
    targets = torch.randn(BATCH)
    bad = targets[1].clone()
    gradients = ClippedGradients(model, lambda o, t: squares(o, t) + torch.where(t == bad, math.inf, 0.0), clip=1.0)
    assert gradients.accumulate(inputs, targets) == 1
    together = gradients.flat.clone()
    others = [0, 2, 3, 4]
    gradients = ClippedGradients(model, squares, clip=1.0)
    gradients.accumulate(inputs[others], targets[others])
    torch.testing.assert_close(together.float(), gradients.flat.float())  # the ways may round otherwise


def test_zero_gradients_stay_zero():
    model = nn.Linear(3, 2)
    gradients = ClippedGradients(model, lambda o, t: 0 * o.sum(1), clip=1.0)
    assert gradients.accumulate(torch.randn(4, 3), torch.zeros(4)) == 0
    assert torch.equal(gradients.flat, torch.zeros_like(gradients.flat))


def test_parts_of_a_batch_add_up_and_an_empty_part_adds_nothing():
    model, inputs = CASES["lenet"]()
    targets = torch.randn(BATCH)
    gradients = ClippedGradients(model, squares, clip=1.0)
    gradients.accumulate(inputs, targets)
    together = gradients.flat.clone()
    gradients.zero()
    assert not gradients.flat.any()
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=True)
    for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
        assert gradients.accumulate(inputs[part], targets[part]) == 0
    torch.testing.assert_close(gradients.flat, together)
    gradients.attach()
    assert torch.equal(model[0].weight.grad.flatten(), gradients.flat[:150].float())


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(7, 3), nn.Linear(4, 3)

        def forward(self, index, x):
            return self.embed(index) + self.linear(x)

    model, targets = Two(), torch.randn(BATCH)
    inputs = integers(), numbers(4)
    gradients = ClippedGradients(model, squares, clip=1e6)
    gradients.accumulate(inputs, targets)
    squares(model(*inputs), targets).sum().backward(inputs=list(model.parameters()))
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradients.flat.float(), expected)


def test_the_model_is_left_as_it_was():
    model, inputs = CASES["lenet"]()
    model.eval()
    frozen(model, "0.weight")
    before = [p.detach().clone() for p in model.parameters()]
    gradients = ClippedGradients(model, squares, clip=1.0)

    def failing(outputs, targets):
        raise KeyError("planted")

    gradients.accumulate(inputs, torch.zeros(BATCH))
    kept = gradients.flat.clone()
    for loss in (failing, lambda o, t: o, lambda o, t: o.sum(1).long()):
        with pytest.raises(InvalidInput):
            ClippedGradients(model, loss, clip=1.0).accumulate(inputs, torch.zeros(BATCH))
    assert torch.equal(gradients.flat, kept)
    assert not model.training
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 9
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model[0].weight.grad is None
    with torch.no_grad():  # also where gradients are off
        gradients.accumulate(inputs, torch.zeros(BATCH))
    torch.testing.assert_close(gradients.flat, 2 * kept)

"""ClippedGradients against a loop over single records, and against attempts to break its bound."""

import math

import opacus.layers
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from matrixdp.errors import InvalidInput
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.layers import base, normalization, rounding
from matrixdp.learn.layers import convolution as convolutions

BATCH = 5

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def squares(outputs, targets):
    """A loss for any output; the weights keep the gradients of tokens from being alike."""
    return ((outputs.flatten(1) - targets.unsqueeze(1)) ** 2).sum(1)


def record_gradients(model, inputs, targets, loss=squares):
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def clipped_sum(rows, clip, norm):
    if norm == "linf":
        return rows.clamp(-clip, clip).sum(0)
    return (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


class Block(nn.Module):
    """One ReLU used twice in place, one convolution used twice, and a residual added in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.twice, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.norm1(self.first(x)))
        y = self.relu(self.norm2(self.twice(x)))
        y = self.twice(y)
        y += x
        return self.relu(y)


class InPlaceFirst(nn.Module):
    """The first layers' outputs are changed in place at once, also through a view."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        y = self.one(x).relu_()
        z = self.two(x)
        z.view(-1)[::2].mul_(2.0)
        return z.add_(y)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(7, 4), kind(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.cell(self.embed(x))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embed(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.norm = opacus.layers.DPMultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])


def lenet():
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def integers(*shape):
    return torch.randint(0, 7, (BATCH, *shape))


def numbers(*shape):
    return torch.randn(BATCH, *shape)


CONVOLUTIONS = {
    "plain": {},
    "same": {"padding": "same", "dilation": 2},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2, "stride": 2, "bias": False},
    "groups": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4, "stride": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
}


def convolution(dimensions, **options):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    return kind(4, 8, **{"kernel_size": 3, **options})


CASES = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), numbers(6)),
    "linear, tokens": lambda: (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), numbers(7, 3)),
    "linear, few tokens": lambda: (nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 20)), numbers(3, 30)),
    "linear, four dimensions": lambda: (nn.Linear(20, 20), numbers(2, 2, 20)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), integers(4)),
    "embedding, many tokens": lambda: (nn.Embedding(7, 3, padding_idx=2), integers(3, 5)),
    "embedding, one token": lambda: (nn.Embedding(7, 3), integers()),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(3), nn.Tanh(), nn.LayerNorm((4, 3))), numbers(4, 3)),
    "layer norm, no bias": lambda: (nn.LayerNorm(3, bias=False), numbers(3)),
    "rms norm": lambda: (nn.RMSNorm(3), numbers(4, 3)),
    "group norm": lambda: (nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.GroupNorm(3, 12)), numbers(4, 3)),
    "instance norm": lambda: (nn.InstanceNorm2d(3, affine=True), numbers(3, 4, 4)),
    "block": lambda: (Block(), numbers(2, 6, 6)),
    "in place": lambda: (InPlaceFirst(), numbers(6)),
    "in place, tokens": lambda: (InPlaceFirst(), numbers(3, 6)),
    "DPLSTM": lambda: (Recurrent(opacus.layers.DPLSTM), integers(4)),
    "DPGRU": lambda: (Recurrent(opacus.layers.DPGRU), integers(4)),
    "attention": lambda: (Attention(), numbers(3, 4)),
    "tied": lambda: (Tied(), integers(4)),
    "lenet": lambda: (lenet(), numbers(1, 28, 28)),
    "frozen": lambda: (frozen(lenet(), "0.weight", "3.bias", "7.weight"), numbers(1, 28, 28)),
    "frozen first layer": lambda: (frozen(lenet(), "0.weight", "0.bias"), numbers(1, 28, 28)),
} | {
    f"convolution {d}d, {name}": lambda d=d, options=options: (convolution(d, **options), numbers(4, *[7] * d))
    for d in (1, 2, 3)
    for name, options in CONVOLUTIONS.items()
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Starting threads takes longer than these small products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x * self.scale)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"layer 1 \(BatchNorm1d\).*GroupNorm"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), "GroupNorm"),
        (nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True)), "GroupNorm"),
        (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double()), "one type"),
        (nn.Linear(3, 2).requires_grad_(False), "none"),
        (nn.ReLU(), "none"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_models_that_are_refused(model, words):
    with pytest.raises(InvalidInput, match=words):
        ClippedGradients(model, squares, clip=1.0)


@pytest.mark.parametrize("clip", [0, -1, math.nan, math.inf, "1", None, True])
def test_bad_clip(clip):
    with pytest.raises(InvalidInput, match="clip"):
        ClippedGradients(nn.Linear(3, 2), squares, clip=clip)


def test_bad_norm():
    with pytest.raises(InvalidInput, match="norm"):
        ClippedGradients(nn.Linear(3, 2), squares, clip=1.0, norm="l1")


@pytest.mark.parametrize("loss", [lambda o, t: o, lambda o, t: 3.0, lambda o, t: o.sum(1).long()])
def test_losses_that_do_not_have_one_value_per_record(loss):
    with pytest.raises(InvalidInput, match="loss"):
        ClippedGradients(nn.Linear(3, 2), loss, clip=1.0).accumulate(torch.randn(4, 3), None)


@pytest.mark.parametrize(
    "inputs", [None, [[1.0]], torch.tensor(1.0), (), (torch.ones(2, 3), torch.ones(3, 3))], ids=lambda v: str(type(v))
)
def test_inputs_that_are_no_batch(inputs):
    with pytest.raises(InvalidInput, match="inputs"):
        ClippedGradients(nn.Linear(3, 2), squares, clip=1.0).accumulate(inputs, None)


class Made(nn.Module):
    """A model from a function of its layer and the input."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.function(self, x)


SLOW = {
    "the weight of a layer": Made(nn.Linear(3, 2, bias=False), lambda m, x: functional.linear(x, m.layer.weight)),
    "a layer and its weight": Made(nn.Linear(3, 2), lambda m, x: m.layer(x) + functional.linear(x, m.layer.weight)),
    "the forward of a layer": Made(nn.Linear(3, 2), lambda m, x: m.layer.forward(x)),
    "the bias of a layer": Made(nn.Linear(3, 2), lambda m, x: m.layer(x) + m.layer.bias),
    "a layer on other rows": Made(nn.Linear(3, 2), lambda m, x: m.layer(x.repeat(2, 1))[: len(x)]),
    "a layer on constants": Made(nn.Linear(3, 2), lambda m, x: x[:, :2] + m.layer(torch.ones(4, 3)).sum(0)),
    "an own parameter": Own(),
    "a layer of an own kind": Doubled(3, 2),
    "PReLU": nn.Sequential(nn.Linear(3, 2), nn.PReLU()),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "a transformer": nn.Sequential(*(nn.Unflatten(1, (1, 3)), nn.TransformerEncoderLayer(3, 1, 4, 0.0), nn.Flatten())),
}


@pytest.mark.parametrize("name", SLOW)
def test_records_run_one_at_a_time_where_there_is_no_rule(name):
    model, inputs, targets = SLOW[name], torch.randn(BATCH, 3), torch.zeros(BATCH)
    gradients = ClippedGradients(model, squares, clip=0.5)
    gradients.accumulate(inputs, targets)
    assert gradients.slow_because is not None
    trained = list(model.parameters())
    alone = [torch.autograd.grad(squares(model(x[None]), targets[:1]).sum(), trained) for x in inputs]
    rows = torch.stack([torch.cat([g.flatten() for g in record]) for record in alone])
    expected = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)
    torch.testing.assert_close(gradients.flat.float(), expected, rtol=1e-3, atol=1e-3)


def test_a_counter_of_passes_runs_and_counts_nothing():
    """How many passes a batch takes depends on its size, which is private."""
    model = Made(nn.Linear(3, 2), lambda m, x: m.layer(x + 0 * m.seen.add_(1)))
    gradients = ClippedGradients(model, squares, clip=0.5)
    for _ in range(2):
        gradients.accumulate(torch.randn(BATCH, 3), torch.zeros(BATCH))
    assert gradients.slow_because is not None
    assert model.seen.tolist() == [0.0, 0.0, 0.0]


def test_a_frozen_batch_norm_is_a_constant():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval().requires_grad_(False), nn.Linear(3, 2))
    gradients = ClippedGradients(model, squares, clip=0.5)
    inputs, targets = torch.randn(BATCH, 3), torch.zeros(BATCH)
    gradients.accumulate(inputs, targets)
    assert gradients.slow_because is None
    expected = clipped_sum(record_gradients(model, inputs, targets), 0.5, "l2")
    torch.testing.assert_close(gradients.flat.float(), expected, rtol=1e-3, atol=1e-3)
    model.train()
    with pytest.raises(InvalidInput, match="GroupNorm"):
        gradients.accumulate(inputs, targets)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings_that_are_written_into_are_refused_or_harmless(options):
    model = nn.Sequential(nn.Embedding(5, 2, **options), nn.Flatten())
    gradients = ClippedGradients(model, squares, clip=1.0)
    inputs = torch.tensor([[1, 2], [1, 1], [3, 1]])
    if "max_norm" in options:
        with pytest.raises(InvalidInput, match="one record at a time"):
            gradients.accumulate(inputs, torch.zeros(3))
        return
    sums = []
    for rows in ([0], [0, 1, 2], [1, 2]):
        gradients.zero()
        gradients.accumulate(inputs[rows], torch.zeros(len(rows)))
        sums.append(gradients.flat.clone())
    torch.testing.assert_close(sums[0], sums[1] - sums[2])


def test_layers_called_by_keyword_or_under_no_grad():
    model = Made(nn.Linear(3, 2), lambda m, x: m.layer(input=x))
    with torch.no_grad():
        still = Made(nn.Linear(3, 2), None)

    def function(m, x):
        with torch.no_grad():
            shift = m.layer(x)
        return m.layer(x) + shift

    still.function = function
    for made in (model, still):
        inputs, targets = torch.randn(BATCH, 3), torch.zeros(BATCH)
        gradients = ClippedGradients(made, squares, clip=1.0)
        gradients.accumulate(inputs, targets)
        expected = clipped_sum(record_gradients(made, inputs, targets), 1.0, "l2")
        torch.testing.assert_close(gradients.flat.float(), expected, rtol=1e-3, atol=1e-3)


def test_changes_to_the_model_after_construction_are_refused():
    model = lenet()
    gradients = ClippedGradients(model, squares, clip=1.0)
    frozen(model, "0.weight")
    with pytest.raises(InvalidInput, match="changed"):
        gradients.accumulate(numbers(1, 28, 28), torch.zeros(BATCH))
    model[0].weight.requires_grad_(True)
    model.double()
    with pytest.raises(InvalidInput, match="another device or type"):
        gradients.accumulate(numbers(1, 28, 28).double(), torch.zeros(BATCH))


def test_checkpoints_give_the_right_sum():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = checkpoint(lambda v: self.layer(torch.tanh(self.head(v))), x, use_reentrant=False)
            return checkpoint(lambda v: torch.tanh(self.layer(v)), y, use_reentrant=False)

    model, inputs, targets = Checkpointed(), torch.randn(BATCH, 3), torch.zeros(BATCH)
    gradients = ClippedGradients(model, squares, clip=0.5)
    gradients.accumulate(inputs, targets)
    expected = clipped_sum(record_gradients(model, inputs, targets), 0.5, "l2")
    torch.testing.assert_close(gradients.flat.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("short", ["autocast", "bfloat16"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_gradients_in_short_types_are_clipped_as_they_are(short, norm):
    """Whatever rounding made of them: their norm is that of what is added, in float64."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    inputs, targets = 9 * torch.randn(64, 3), torch.zeros(64)
    if short == "bfloat16":
        model, inputs, targets = model.bfloat16(), inputs.bfloat16(), targets.bfloat16()
    gradients = ClippedGradients(model, squares, clip=0.1, norm=norm)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=short == "autocast"):
        with pytest.warns(UserWarning, match="one at a time.*(autocast|bfloat16)"):
            gradients.prepare(inputs, targets)
        for place in range(64):
            gradients.zero()
            gradients.accumulate(inputs[place : place + 1], targets[place : place + 1])
            size = gradients.flat.norm() if norm == "l2" else gradients.flat.abs().max()
            assert 0.099 < float(size) <= 0.1
    assert all(p.grad.dtype == p.dtype for p in model.parameters())

"""Models of every kind: on the fast way, one record at a time, or refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradient_cases import (
    BATCH,
    clipped_sum,
    frozen,
    lenet,
    numbers,
    record_gradients,
    squares,
)
from matrixdp.errors import InvalidInput
from matrixdp.learn.gradients import ClippedGradients

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


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
    if "max_norm" in options:
        with pytest.raises(InvalidInput, match="changes its table"):
            ClippedGradients(model, squares, clip=1.0)
        return
    gradients = ClippedGradients(model, squares, clip=1.0)
    inputs = torch.tensor([[1, 2], [1, 1], [3, 1]])
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


def short_case(short, fast=True):
    torch.manual_seed(3)
    layers = [nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)]
    model = nn.Sequential(*(layers if fast else [nn.Flatten(), nn.Linear(3, 3), nn.Tanh()]), nn.Linear(3, 2))
    if not fast:
        model.register_forward_hook(lambda *_: None)  # records then run one at a time
    inputs, targets = 9 * torch.randn(64, 1, 3), torch.zeros(64)
    if short == "bfloat16":
        model, inputs, targets = model.bfloat16(), inputs.bfloat16(), targets.bfloat16()
    return model, inputs, targets, torch.autocast("cpu", dtype=torch.bfloat16, enabled=short == "autocast")


@pytest.mark.parametrize("short", ["autocast", "bfloat16"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("fast", [True, False])
def test_gradients_in_short_types_are_clipped_as_they_are(short, norm, fast):
    """Whatever rounding made of them: their norm is that of what is added, in float64."""
    model, inputs, targets, autocast = short_case(short, fast)
    gradients = ClippedGradients(model, squares, clip=0.1, norm=norm)
    with autocast:
        assert gradients.prepare(inputs, targets) == fast
        for place in range(64):
            gradients.zero()
            gradients.accumulate(inputs[place : place + 1], targets[place : place + 1])
            size = gradients.flat.norm() if norm == "l2" else gradients.flat.abs().max()
            assert 0.0985 < float(size) <= 0.1
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("short", ["autocast", "bfloat16"])
def test_gradients_in_short_types_are_those_of_autograd_up_to_their_digits(short):
    model, inputs, targets, autocast = short_case(short)
    gradients = ClippedGradients(model, squares, clip=1e6)
    with autocast:
        gradients.accumulate(inputs, targets)
        losses = squares(model(inputs), targets).sum()
    losses.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    gradients.zero()
    with autocast:
        gradients.accumulate(inputs, targets)
    assert float((gradients.flat - expected).norm()) < 0.03 * float(expected.norm())


def test_a_model_with_an_autocast_of_its_own_runs_one_record_at_a_time():
    """The graph would not have it."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x).float()

    gradients = ClippedGradients(Mixed(), squares, clip=0.5)
    assert not gradients.prepare(torch.randn(4, 3), torch.zeros(4))
    assert "autocast of its own" in gradients.slow_because
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradients.prepare(torch.randn(4, 3), torch.zeros(4))
    with torch.autocast("cpu", dtype=torch.float16):  # another type is another way
        assert not gradients.prepare(torch.randn(4, 3), torch.zeros(4))


class Compared(nn.Module):
    """Outputs and targets are compared by a layer, as perceptual losses do; that layer is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, outputs, targets):
        return (self.layer(outputs) - self.layer(targets)).square().mean(1)


@pytest.mark.parametrize(
    "form", [lambda loss: loss, lambda loss: lambda *given: loss(*given)], ids=["module", "closure"]
)
def test_layers_of_the_loss_are_constants(form):
    model, compared = nn.Linear(3, 2), Compared()
    gradients = ClippedGradients(model, form(compared), clip=1e6)
    inputs, targets = torch.randn(BATCH, 3), torch.randn(BATCH, 2)
    gradients.accumulate(inputs, targets)
    assert gradients.slow_because is None
    expected = torch.autograd.grad(compared(model(inputs), targets).sum(), list(model.parameters()))
    torch.testing.assert_close(gradients.flat.float(), torch.cat([part.flatten() for part in expected]))

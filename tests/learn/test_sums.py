"""The sum over a batch: one record moves it, as computed, by no more than the certificate says, for every batch.

The batches are made to be rounded badly: most records carry the sum to just below a power of two, one carries it over,
and thousands of tiny ones of the other sign are then rounded to nothing above it and to a whole unit below.
"""

import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.learn import ClippedGradients, PrivateSGD
from matrixdp.learn.layers import convolution, cpu_kernels, linear, rounding
from matrixdp.learn.layers.base import ExplicitGradients
from matrixdp.learn.layers.convolution import ConvolutionGradients
from matrixdp.learn.layers.embedding import EmbeddingGradients
from matrixdp.learn.layers.linear import LinearGradients
from matrixdp.learn.layers.rounding import sum_error
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Entrywise, Frobenius

CLIP, CANCELLED, STD = 1.0, 10.0, 1.0


def badly_rounded(power):
    """The size of each record's gradient, with its sign, and which of them carries the sum over 2^power."""
    first = np.full(int(2**power / 0.9375), 0.9375)
    last = 2.0**power - first.sum() - 0.25
    tiny = np.full(2**power, -0.3 * 2.0 ** (power - 23))
    return np.concatenate([first, [last, 0.9], tiny]).astype(np.float32), len(first) + 1


class Cancelling(nn.Module):
    """A layer with three tokens a record; the gradients of the last two cancel."""

    def __init__(self, layer, *, channels_last=True):
        super().__init__()
        self.layer, self.channels_last = layer, channels_last

    def forward(self, x):
        return self.layer(x) if self.channels_last else self.layer(x.transpose(1, 2)).transpose(1, 2)


def by_token(outputs, targets):
    sizes = torch.stack([targets, torch.full_like(targets, CANCELLED), torch.full_like(targets, -CANCELLED)], 1)
    return (outputs * sizes.unsqueeze(2)).sum((1, 2)) / outputs.shape[2] ** 0.5


def alike(outputs, targets):
    return outputs.flatten(1).sum(1) * targets / outputs.flatten(1).shape[1] ** 0.5


def one_output(outputs, targets):
    return outputs.flatten(1)[:, 3] * targets


def one_pixel(outputs, targets):
    return outputs[:, :, 0, 0].sum(1) * targets / 4


# model, input of a record, loss; the gradient of a record has the norm of its target, in entries of equal size
LAYERS = {
    "linear, one number": lambda: (nn.Linear(1, 1, bias=False), torch.ones(1), alike),
    "linear, an input of zeros": lambda: (nn.Linear(20, 10), torch.zeros(20), one_output),
    "linear, factored": lambda: (nn.Linear(16, 16, bias=False), torch.full((16,), 0.25), alike),
    "linear, tokens that cancel": lambda: (
        Cancelling(nn.Linear(16, 16, bias=False)),
        torch.full((3, 16), 0.25),
        by_token,
    ),
    "convolution, explicit": lambda: (nn.Conv2d(1, 4, 2, bias=False), torch.ones(1, 3, 3), one_pixel),
    "convolution, factored": lambda: (
        Cancelling(nn.Conv1d(16, 16, 1, bias=False), channels_last=False),
        torch.full((3, 16), 0.25),
        by_token,
    ),
    "embedding": lambda: (Cancelling(nn.Embedding(50, 16)), torch.full((3,), 7), by_token),
    "layer norm": lambda: (nn.LayerNorm(16), torch.zeros(16), alike),
    "group norm": lambda: (nn.GroupNorm(4, 16), torch.zeros(16, 2), lambda o, t: o[:, :, 0].sum(1) * t / 4),
}


@pytest.fixture
def summed_in_float32(monkeypatch):
    """The fault that this file is about: contributions are added up one after the other in float32."""

    def add(gradients, weights, total):
        values = gradients.explicit() * weights.float().view(-1, *[1] * total.ndim)
        total.copy_(torch.from_numpy(np.cumsum(torch.cat([total.float().unsqueeze(0), values]).numpy(), axis=0)[-1]))

    for kind in (ExplicitGradients, LinearGradients, EmbeddingGradients, ConvolutionGradients):
        monkeypatch.setattr(kind, "add", add)


def moved(model, record, loss, norm, power):
    """By how much the record moves the sum, and how far that is from what it contributes."""
    sizes, index = badly_rounded(power)
    gradients, found = ClippedGradients(model, loss, clip=CLIP, norm=norm), []
    others = np.delete(np.arange(len(sizes)), index)
    for kept in (np.arange(len(sizes)), others, [index]):
        gradients.zero()
        targets = torch.from_numpy(sizes[kept])
        for part in torch.split(targets, 4000):
            gradients.accumulate(record.expand(len(part), *record.shape), part)
        found.append(gradients.flat.clone())
    everything, without, alone = found
    assert alone.norm() == pytest.approx(0.9, abs=1e-3)
    order = 2 if norm == "l2" else float("inf")
    return [float(torch.linalg.vector_norm(d, order)) for d in (everything - without, everything - without - alone)]


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_record_moves_the_sum_by_what_is_certified(layer, norm):
    change, error = moved(*LAYERS[layer](), norm, 12)
    allowed = 2 * sum_error(len(badly_rounded(12)[0]))
    assert change <= CLIP * (1 + allowed)
    assert error <= CLIP * allowed


@pytest.mark.parametrize("layer", LAYERS)
def test_a_sum_in_float32_is_seen(layer, summed_in_float32):
    change, _ = moved(*LAYERS[layer](), "l2", 12)
    assert change > 1.8 * CLIP


def test_many_records():
    """33,862 records; 16.9 x clip in float32."""
    change, error = moved(nn.Linear(784, 10), torch.zeros(784), one_output, "l2", 14)
    assert change <= CLIP * (1 + 2 * sum_error(33_862))
    assert error <= 2 * CLIP * sum_error(33_862)


def exact_sum(weights, factors):
    """Of w_i g_t a_t over all records and tokens, for a layer with one weight."""
    total = Fraction(0)
    for weight, outputs, inputs in zip(weights.tolist(), *(f.flatten(1).tolist() for f in factors), strict=True):
        total += Fraction(weight) * sum((Fraction(g) * Fraction(a) for g, a in zip(outputs, inputs, strict=True)))
    return total


def cancelling_records(records, tokens, dtype, scale):
    """Products of tokens that add up to nearly nothing, for a layer with one weight."""
    outputs = torch.randn(records, tokens, 1, dtype=torch.float64) * scale
    inputs = torch.randn(records, tokens, 1, dtype=torch.float64)
    outputs, inputs = outputs.to(dtype), inputs.to(dtype)
    inputs[:, -1], outputs[:, -1] = 1.0, 0.0
    outputs[:, -1] = -(outputs.double() * inputs.double()).sum(1).to(dtype)
    return inputs, outputs


KINDS = {
    "tokens": lambda inputs, outputs: LinearGradients(inputs, outputs),
    "patches": lambda inputs, outputs: ConvolutionGradients(
        nn.Conv1d(1, 1, 1), inputs.transpose(1, 2), outputs.transpose(1, 2)
    ),
    "lookup": lambda inputs, outputs: EmbeddingGradients(
        torch.zeros(inputs.shape[:2], dtype=torch.long), inputs * outputs, 1
    ),
}


def error_of_sum(kind, dtype, tokens, scale, records=200):
    inputs, outputs = cancelling_records(records, tokens, dtype, scale)
    gradients = KINDS[kind](inputs, outputs)
    factors = (inputs * outputs, torch.ones_like(inputs)) if kind == "lookup" else (outputs, inputs)
    weights = (CLIP / gradients.squared_norm().sqrt()).clamp(max=1).double()
    total = torch.zeros({"tokens": (1, 1), "patches": (1, 1, 1), "lookup": (1, 1)}[kind], dtype=torch.float64)
    gradients.add(weights, total)
    return float(abs(Fraction(float(total)) - exact_sum(weights, factors)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "scale"), [(1, 1.0), (3, 1e3), (64, 1e8), (64, 1e15), (2500, 1e8)])
def test_products_that_cancel_within_a_record(kind, dtype, tokens, scale):
    torch.manual_seed(tokens)
    records = 200 if tokens < 100 else 10
    assert error_of_sum(kind, dtype, tokens, scale, records) <= CLIP * sum_error(records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2047, 2048, 2049, 5000])
def test_the_loop_adds_every_number_of_every_row(width, dtype):
    """Against exact sums; rows that are longer than a part, and not contiguous."""
    torch.manual_seed(width)
    weights, values = torch.rand(7, dtype=torch.float64), torch.randn(width, 7, dtype=dtype).t()
    total = torch.randn(width, dtype=torch.float64)
    exact = [
        Fraction(start) + sum(map(operator.mul, map(Fraction, weights.tolist()), map(Fraction, column)))
        for start, column in zip(total.tolist(), values.t().tolist(), strict=True)
    ]
    assert not values.is_contiguous() or width == 1
    cpu_kernels.add_weighted(values, weights, total)
    error = max(abs(Fraction(found) - true) for found, true in zip(total.tolist(), exact, strict=True))
    assert error <= 20 * 2.0**-53 * float(1 + 7 * values.abs().max() + total.abs().max())


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [2, 64, 5000])
def test_norms_count_what_cancels(kind, dtype, tokens, planted, monkeypatch):
    """The bound on the error of a sum rests on this; float32 counts as much anyway, unless there are many tokens."""
    least = rounding.CANCELLATION * max(1, tokens / rounding.TERMS)
    if planted:
        monkeypatch.setattr(rounding, "CANCELLATION", 0.0)
    torch.manual_seed(tokens)
    inputs, outputs = cancelling_records(10 if tokens < 100 else 1, tokens, dtype, 1e3)
    sizes = (inputs.double() * outputs.double()).abs().sum((1, 2))
    counted = KINDS[kind](inputs, outputs).squared_norm().double().sqrt()
    assert bool((counted >= least * sizes).all()) == (not planted or (dtype == torch.float32 and tokens <= 64))


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("kind", ["tokens", "patches"])
def test_gradients_formed_one_by_one_are_within_the_norm(kind, slow, monkeypatch):
    """Where float64 is slow; they round in float32, which the norm must count."""
    for module in (linear, convolution):
        monkeypatch.setattr(module, "slow_products", lambda tensor: slow)
    torch.manual_seed(0)
    inputs, outputs = cancelling_records(50, 64, torch.float32, 1e8)
    for i in range(50):
        gradients = KINDS[kind](inputs[i : i + 1], outputs[i : i + 1])
        total = torch.zeros((1, 1, 1) if kind == "patches" else (1, 1), dtype=torch.float64)
        gradients.add((CLIP / gradients.squared_norm().sqrt()).double() * (1 - 1e-6), total)
        assert float(total.abs()) <= CLIP


def test_the_error_of_the_sum_is_small_and_grows():
    assert 0 < 2 * sum_error(256) < 2e-7
    assert 2 * sum_error(60_000) < 5e-5
    assert 2 * sum_error(1_000_000) < 1e-3
    assert all(sum_error(n) < sum_error(n + 1) for n in (1, 1000, 10**6))


def trainer(sizes, norm="l2"):
    torch.manual_seed(0)
    model = nn.Linear(8, 10)
    return PrivateSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        TensorDataset(torch.zeros(1, 8).expand(len(sizes), 8), torch.from_numpy(sizes)),
        one_output,
        budget=Budget(1e5, 1e-2),
        batch_size=len(sizes),
        clip=CLIP,
        clipping=norm,
        steps=25,
        noise=Gaussian(Isotropic((90,), STD)),
        accept_violation=True,
    )


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_certificate_holds_the_error_of_the_sum(norm):
    sizes = badly_rounded(10)[0]
    run = trainer(sizes, norm)
    certificate = run.certificate
    least = CLIP * (1 + 2 * sum_error(len(sizes)))
    kind, radius = (Frobenius, "radius") if norm == "l2" else (Entrywise, "bound")
    assert least <= getattr(run.sensitivity, radius) <= CLIP * (1 + 3 * sum_error(len(sizes)))
    assert certificate.mu >= certify(Gaussian(Isotropic((90,), STD)), kind(least)).mu
    assert certify(Gaussian(Isotropic((90,), STD)), kind(CLIP)).mu < certificate.mu


def mean_of_steps(sizes):
    run = trainer(sizes)
    found = []
    for batch in run.batches(25):
        run.step(batch)
        found.append(float(run.model.bias.grad[3]) * run.batch_size)
    return np.mean(found)


@pytest.mark.parametrize("planted", [False, True])
def test_steps_of_neighbours_lie_as_far_apart_as_the_record(planted, request):
    """25 noisy gradients each, in units of clip: the means lie 0.9 apart, with an error of 0.28; in float32 4.9."""
    if planted:
        request.getfixturevalue("summed_in_float32")
    sizes, index = badly_rounded(13)
    apart = mean_of_steps(sizes) - mean_of_steps(np.delete(sizes, index))
    assert (abs(apart - 0.9) < 1.7) != planted

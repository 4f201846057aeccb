"""Recurrent and attention layers rebuilt from linear ones: the same outputs and gradients per record, by both paths."""

import pytest
import torch
from torch import nn

from matrixdp.learn import ClippedGradients
from matrixdp.learn.record_independence.rebuilt import rebuilt

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "LSTM": lambda: nn.LSTM(3, 4, batch_first=True),
    "GRU": lambda: nn.GRU(3, 4, batch_first=True),
    "RNN": lambda: nn.RNN(3, 4, batch_first=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
    "two layers, both ways": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "without bias": lambda: nn.GRU(3, 4, bias=False, batch_first=True),
    "time first": lambda: nn.GRU(3, 4, num_layers=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_layer_does(kind):
    torch.manual_seed(0)
    layer, x = KINDS[kind](), torch.randn(5, 6, 3)
    outputs, last = layer(x)
    found, states = rebuilt(layer, stacked=True)(x)
    torch.testing.assert_close(found, outputs)
    torch.testing.assert_close(states, last)
    again, states = layer(x, last)
    torch.testing.assert_close(rebuilt(layer, stacked=True)(x, last), (again, states))


class Reader(nn.Module):
    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.last, self.cells = layer, last, isinstance(layer, nn.LSTM)
        self.head = nn.Linear(4 * (2 if layer.bidirectional else 1), 2)

    def forward(self, x):
        outputs, states = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        if self.last:
            return self.head(states[0][-1] if self.cells else states[-1])
        return self.head(outputs[:, -1] if self.layer.batch_first else outputs[-1])


def plain_sum(model, loss, x, y, clip):
    """Each record's gradient by PyTorch itself, clipped and summed."""
    total = 0.0
    for one, target in zip(x, y, strict=True):
        model.zero_grad()
        loss(model(one[None]), target[None]).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        total = total + gradient * min(1.0, clip / float(gradient.norm()))
    return total


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_gradients_are_those_of_the_layer(kind, last):
    torch.manual_seed(1)
    model, loss = Reader(KINDS[kind](), last and "two" not in kind), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(7, 5, 3), torch.arange(7) % 2
    expected = plain_sum(model, loss, x, y, 0.05)
    gradients = ClippedGradients(model, loss, clip=0.05)
    fast = kind != "time first"
    if not fast:
        with pytest.warns(UserWarning, match="one at a time"):
            gradients.prepare(x, y)
    gradients.accumulate(x, y)
    assert gradients.prepare(x, y) == fast
    torch.testing.assert_close(gradients.flat, expected, rtol=1e-3, atol=1e-6)


def transformer(**options):
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **options)


class Attends(nn.Module):
    def __init__(self, *, other=False):
        super().__init__()
        self.attention, self.other = nn.MultiheadAttention(4, 2, batch_first=True), other

    def forward(self, x):
        outputs, _ = self.attention(x, x.flip(1) if self.other else x, x)
        return outputs


def stack(norm=None):
    return nn.TransformerEncoder(transformer(), 2, norm, enable_nested_tensor=False)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = stack()

    def forward(self, x):
        return self.stack(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


ATTENTION = {
    "layer": lambda: (transformer(), True),
    "norm first, gelu": lambda: (transformer(norm_first=True, activation="gelu"), True),
    "attention": lambda: (Attends(), True),
    "attention to something else": lambda: (Attends(other=True), False),
    "time first": lambda: (nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0), False),
    "two layers": lambda: (nn.Sequential(transformer(), transformer()), True),
    "a stack": lambda: (stack(), True),
    "a stack with a norm": lambda: (stack(nn.LayerNorm(4)), True),
    "a stack with a mask": lambda: (Masked(), False),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_clipped_gradients_of_attention(kind):
    torch.manual_seed(2)
    layer, fast = ATTENTION[kind]()
    model, loss = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(7, 3, 4), torch.arange(7) % 2
    expected = plain_sum(model, loss, x, y, 0.05)
    gradients = ClippedGradients(model, loss, clip=0.05)
    if not fast:
        with pytest.warns(UserWarning, match="one at a time"):
            gradients.prepare(x, y)
    gradients.accumulate(x, y)
    assert gradients.prepare(x, y) == fast
    torch.testing.assert_close(gradients.flat, expected, rtol=1e-3, atol=1e-6)


class Steps(nn.Module):
    def __init__(self, cell, start):
        super().__init__()
        self.cell, self.head, self.start = cell, nn.Linear(4, 2), start

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 4) if self.start else None
        for now in range(5):
            state = self.cell(x[:, now], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


CELLS = {
    "LSTM": lambda: nn.LSTMCell(3, 4),
    "GRU": lambda: nn.GRUCell(3, 4),
    "RNN": lambda: nn.RNNCell(3, 4, bias=False),
    "relu": lambda: nn.RNNCell(3, 4, nonlinearity="relu"),
}


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_clipped_gradients_of_cells(kind, start):
    torch.manual_seed(3)
    model, loss = Steps(CELLS[kind](), start and kind != "LSTM"), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(7, 5, 3), torch.arange(7) % 2
    expected = plain_sum(model, loss, x, y, 0.05)
    fast, slow = ClippedGradients(model, loss, clip=0.05), ClippedGradients(model, loss, clip=0.05)
    fast.accumulate(x, y)
    assert fast.prepare(x, y)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="one at a time"):
        slow.accumulate(x, y)
    handle.remove()
    for gradients in (fast, slow):
        torch.testing.assert_close(gradients.flat, expected, rtol=1e-3, atol=1e-6)


def test_parts_in_evaluation_mode_stay_there():
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.9, batch_first=True)
    for part in (layer.dropout, layer.dropout1, layer.dropout2, layer.self_attn):
        part.eval()
    model, loss = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)), nn.CrossEntropyLoss(reduction="none")
    x, y = torch.randn(7, 3, 4), torch.arange(7) % 2
    gradients = ClippedGradients(model, loss, clip=0.05)
    gradients.accumulate(x, y)
    assert gradients.slow_because is None
    torch.testing.assert_close(gradients.flat, plain_sum(model, loss, x, y, 0.05), rtol=1e-3, atol=1e-6)

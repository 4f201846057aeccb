"""PyTorch's recurrent and attention layers, rebuilt from linear layers that share their parameters.

PyTorch runs an `nn.LSTM`, `nn.GRU` or `nn.RNN`, and a cell of one, as one operation that `vmap` does not support, and
that gives no gradients per record. In copies of a model they are replaced by loops over time, which compute the same.
Their linear layers have rules for gradients per record, so such models are fast too, if the layer has batch_first=True
and starts from zeros. So is self-attention without masks. Models that call these layers otherwise run one record at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixdp.learn.record_independence.rules import Batched, module, require

State = tuple[Tensor, ...]
Step = Callable[[Tensor, nn.Module, State], State]


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda given, hidden, state: (activation(given + hidden(state[0])),)


def _lstm(given: Tensor, hidden: nn.Module, state: State) -> State:
    enter, forget, new, leave = (given + hidden(state[0])).chunk(4, dim=-1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, hidden: nn.Module, state: State) -> State:
    reset, update, new = given.chunk(3, dim=-1)
    kept_reset, kept_update, kept_new = hidden(state[0]).chunk(3, dim=-1)
    update = (update + kept_update).sigmoid()
    new = (new + (reset + kept_reset).sigmoid() * kept_new).tanh()
    return ((1 - update) * new + update * state[0],)


_STEPS: dict[str, Step] = {
    "LSTM": _lstm, "GRU": _gru, "RNN_TANH": _rnn(torch.tanh), "RNN_RELU": _rnn(torch.relu)
}  # fmt: skip


class Recurrent(nn.Module):
    """An nn.LSTM, nn.GRU or nn.RNN as a loop over time, with the parameters of the layer.

    With `stacked`, the last states have PyTorch's shape, (layers, batch, width); without, they are a tuple of
    (batch, width), with one row per record.
    """

    mode: str

    def __init__(self, layer: Any, *, stacked: bool) -> None:
        super().__init__()
        self.training = layer.training
        self.__dict__.update({name: getattr(layer, name) for name in layer.__constants__})  # models may read them
        self.hidden_size, self.dropout, self.batch_first = layer.hidden_size, layer.dropout, layer.batch_first
        self.stacked, self.ways, self.parts = stacked, 2 if layer.bidirectional else 1, 2 if layer.mode == "LSTM" else 1
        names = [f"l{n}{way}" for n in range(layer.num_layers) for way in ("", "_reverse")[: self.ways]]
        self.inputs = nn.ModuleList(_linear(layer, f"weight_ih_{name}", f"bias_ih_{name}") for name in names)
        self.hidden = nn.ModuleList(_linear(layer, f"weight_hh_{name}", f"bias_hh_{name}") for name in names)

    def forward(self, x: Tensor, start: Any = None) -> tuple[Tensor, Any]:
        """Outputs at all times, and the last states."""
        x = x if self.batch_first else x.transpose(0, 1)
        zeros = x.new_zeros(x.shape[0], self.hidden_size)
        last: list[State] = []
        for place in range(0, len(self.inputs), self.ways):
            if place:
                x = functional.dropout(x, self.dropout, self.training)
            found = []
            for way in range(self.ways):
                given = start if self.parts == 2 or start is None else (start,)
                state = (zeros,) * self.parts if given is None else tuple(part[place + way] for part in given)
                outputs, state = self._over_time(place + way, x, state)
                found.append(outputs)
                last.append(state)
            x = torch.cat(found, -1)
        kept = [torch.stack(part) if self.stacked else part for part in zip(*last, strict=True)]
        return x if self.batch_first else x.transpose(0, 1), kept[0] if self.parts == 1 else tuple(kept)

    def _over_time(self, place: int, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One layer in one direction: if bidirectional, every second one runs backwards in time."""
        back = place % self.ways
        outputs, hidden, step = [], self.hidden[place], _STEPS[self.mode]
        for now in self.inputs[place](x).unbind(dim=1)[:: -1 if back else 1]:
            state = step(now, hidden, state)
            outputs.append(state[0])
        return torch.stack(outputs[:: -1 if back else 1], 1), state


@module(Recurrent)
def recurrent(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Records first, then time; starting from zeros, as given states have another dimension first."""
    require(len(args) == 1 and isinstance(args[0], Batched) and not kwargs, "starts from given states")
    require(layer.batch_first and not layer.stacked and args[0].meta.ndim == 3, "needs batch_first=True")


class Cell(nn.Module):
    """An nn.LSTMCell, nn.GRUCell or nn.RNNCell, with the parameters of the layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.hidden_size = layer.hidden_size
        self.mode = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(type(layer)) or f"RNN_{layer.nonlinearity.upper()}"
        self.input, self.hidden = _linear(layer, "weight_ih", "bias_ih"), _linear(layer, "weight_hh", "bias_hh")

    def forward(self, x: Tensor, start: Any = None) -> Any:
        """The next state: one tensor, or two for an LSTM."""
        parts = 2 if self.mode == "LSTM" else 1
        if start is None:
            start = (x.new_zeros(x.shape[0], self.hidden_size),) * parts
        state = _STEPS[self.mode](self.input(x), self.hidden, start if isinstance(start, tuple) else (start,))
        return state if parts == 2 else state[0]


class SelfAttention(nn.Module):
    """An nn.MultiheadAttention with batch_first=True, for a sequence that attends to itself without masks."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.heads, self.dropout, self.training = layer.num_heads, layer.dropout, layer.training
        self.project = _linear(layer, "in_proj_weight", "in_proj_bias")
        self.out = _linear(layer.out_proj, "weight", "bias")

    def forward(self, x: Tensor, *_: Any, need_weights: bool = True) -> tuple[Tensor, None]:
        """The outputs, without attention weights: a graph that uses those is refused."""
        batch, tokens, width = x.shape
        parts = self.project(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], dropout_p=dropout)
        return self.out(found.transpose(1, 2).reshape(batch, tokens, width)), None


@module(SelfAttention)
def self_attention(_: Any, *args: Any, need_weights: bool = True) -> None:
    """Query, key and value are the same, with a dimension for records and one for tokens."""
    require(len(args) == 3 and args[0] is args[1] is args[2], "attends to something else than itself")
    require(isinstance(args[0], Batched) and args[0].meta.ndim == 3, "has no dimension for tokens")


class EncoderLayer(nn.Module):
    """An nn.TransformerEncoderLayer without masks: its own layers, with rebuilt attention."""

    norm1: nn.Module
    norm2: nn.Module
    dropout: nn.Module
    dropout1: nn.Module
    dropout2: nn.Module
    linear1: nn.Module
    linear2: nn.Module

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._modules = dict(layer._modules)
        self.self_attn = SelfAttention(layer.self_attn)
        self.norm_first, self.activation, self.training = layer.norm_first, layer.activation, layer.training

    def forward(self, x: Tensor) -> Tensor:
        """Attention and two linear layers, each with a residual connection, normalized before or after."""
        if self.norm_first:
            x = x + self._attend(self.norm1(x))
            return x + self._feed(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        found: Tensor = self.norm2(x + self._feed(x))
        return found

    def _attend(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout1(self.self_attn(x, x, x, need_weights=False)[0])
        return found

    def _feed(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return found


class Encoder(nn.Module):
    """An nn.TransformerEncoder without masks."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.layers: Any = stack.layers
        self.norm: Any = stack.norm

    def forward(self, x: Tensor) -> Tensor:
        """All layers, and the last normalization if there is one."""
        for layer in self.layers:
            x = layer(x)
        found: Tensor = x if self.norm is None else self.norm(x)
        return found


def rebuilt(model: Any, *, stacked: bool) -> Any:
    """The model with its recurrent layers replaced and, without `stacked`, those of attention too.

    It changes the model in place, so it is for copies.
    """
    kind = type(model)
    if not isinstance(model, nn.Module) or "forward" in vars(model):
        return model
    if kind in (nn.LSTM, nn.GRU, nn.RNN) and not model.proj_size:
        return Recurrent(model, stacked=stacked)
    if kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        return Cell(model)
    if kind is nn.MultiheadAttention and not stacked and _is_plain(model):
        return SelfAttention(model)
    if kind is nn.TransformerEncoderLayer and not stacked and _is_plain(model.self_attn):
        return EncoderLayer(model)
    for name, child in model._modules.items():
        model._modules[name] = rebuilt(child, stacked=stacked)
    layers: Any = getattr(model, "layers", ())
    if kind is nn.TransformerEncoder and all(type(layer) is EncoderLayer for layer in layers):
        return Encoder(model)
    return model


def _is_plain(layer: Any) -> bool:
    extras = (layer.bias_k, layer.bias_v, layer.add_zero_attn or None)
    return (
        type(layer) is nn.MultiheadAttention
        and layer.batch_first
        and layer._qkv_same_embed_dim
        and not any(extra is not None for extra in extras)
    )


def _linear(layer: nn.Module, weight: str, bias: str) -> nn.Linear:
    """A linear layer with these parameters of a layer."""
    found = nn.Linear.__new__(nn.Linear)  # without new parameters
    nn.Module.__init__(found)
    found._parameters = {"weight": layer._parameters[weight], "bias": layer._parameters.get(bias)}
    found.out_features, found.in_features = found.weight.shape
    return found

"""PyTorch's recurrent layers, rebuilt from linear layers that share their parameters.

PyTorch runs an `nn.LSTM`, `nn.GRU` or `nn.RNN` as one operation that `vmap` does not know, and that shows nothing of its
gradients per record. In copies of a model they are replaced by loops over time, which compute the same. Their linear
layers have rules for gradients per record, so such models are fast too, if the layer has batch_first=True and starts
from zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixdp.learn.independence.rules import Batched, module, require

State = tuple[Tensor, ...]
Step = Callable[[Tensor, nn.Linear, State], State]


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda given, hidden, state: (activation(given + hidden(state[0])),)


def _lstm(given: Tensor, hidden: nn.Linear, state: State) -> State:
    enter, forget, new, leave = (given + hidden(state[0])).chunk(4, dim=-1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, hidden: nn.Linear, state: State) -> State:
    reset, update, new = given.chunk(3, dim=-1)
    kept_reset, kept_update, kept_new = hidden(state[0]).chunk(3, dim=-1)
    update = (update + kept_update).sigmoid()
    new = (new + (reset + kept_reset).sigmoid() * kept_new).tanh()
    return ((1 - update) * new + update * state[0],)


class Recurrent(nn.Module):
    """What an nn.LSTM, nn.GRU or nn.RNN computes, as a loop over time; it has the parameters of the layer.

    With `stacked` the last states are given as PyTorch does, (layers, batch, width); without, as a tuple of
    (batch, width), which has one row per record.
    """

    def __init__(self, layer: nn.RNNBase, *, stacked: bool) -> None:
        super().__init__()
        for name in layer.__constants__:  # hidden_size and the like, which models ask for
            setattr(self, name, getattr(layer, name))
        self.stacked, self.ways = stacked, 2 if layer.bidirectional else 1
        steps = {nn.LSTM: _lstm, nn.GRU: _gru}
        activation = torch.relu if layer.mode == "RNN_RELU" else torch.tanh
        self.step: Step = steps.get(type(layer)) or _rnn(activation)
        names = [f"l{n}{way}" for n in range(layer.num_layers) for way in ("", "_reverse")[: self.ways]]
        self.inputs = nn.ModuleList(_linear(layer, f"weight_ih_{name}", f"bias_ih_{name}") for name in names)
        self.hidden = nn.ModuleList(_linear(layer, f"weight_hh_{name}", f"bias_hh_{name}") for name in names)

    def forward(self, x: Tensor, start: Any = None) -> tuple[Tensor, Any]:
        """Outputs at all times, and the last states."""
        x = x if self.batch_first else x.transpose(0, 1)
        parts = 2 if self.step is _lstm else 1
        starts = None if start is None else (start if parts == 2 else (start,))
        last: list[State] = []
        for place, (inputs, hidden) in enumerate(zip(self.inputs, self.hidden, strict=True)):
            if place % self.ways == 0 and place:
                x = functional.dropout(torch.cat(found, -1), self.dropout, self.training)
            if place % self.ways == 0:
                found: list[Tensor] = []
            state = x.new_zeros(x.shape[0], self.hidden_size)
            states = (state,) * parts if starts is None else tuple(part[place] for part in starts)
            given = inputs(x).unbind(dim=1)
            over_time = []
            for now in reversed(given) if place % self.ways else given:
                states = self.step(now, hidden, states)
                over_time.append(states[0])
            found.append(torch.stack(over_time[::-1] if place % self.ways else over_time, 1))
            last.append(states)
        outputs = torch.cat(found, -1)
        kept = [torch.stack(part) if self.stacked else part for part in zip(*last, strict=True)]
        return outputs if self.batch_first else outputs.transpose(0, 1), kept[0] if parts == 1 else tuple(kept)


@module(Recurrent)
def recurrent(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Records first, then time; from zeros, as states that are given have another dimension first."""
    require(len(args) == 1 and isinstance(args[0], Batched) and not kwargs, "starts from given states")
    require(layer.batch_first and not layer.stacked and args[0].meta.ndim == 3, "needs batch_first=True")


def rebuilt(model: Any, *, stacked: bool) -> Any:
    """The model, whose recurrent layers are replaced; for copies, since it changes the model itself."""
    if type(model) in (nn.LSTM, nn.GRU, nn.RNN) and not model.proj_size and "forward" not in vars(model):
        return Recurrent(model, stacked=stacked).train(model.training)
    if isinstance(model, nn.Module):
        for name, child in model._modules.items():
            model._modules[name] = rebuilt(child, stacked=stacked)
    return model


def _linear(layer: nn.Module, weight: str, bias: str) -> nn.Linear:
    """A linear layer with these parameters of a layer."""
    found = nn.Linear.__new__(nn.Linear)  # without new parameters
    nn.Module.__init__(found)
    found._parameters = {"weight": layer._parameters[weight], "bias": layer._parameters.get(bias)}
    found.out_features, found.in_features = found.weight.shape
    return found

"""PyTorch's recurrent layers, rebuilt from linear layers that share their parameters.

PyTorch runs an `nn.LSTM`, `nn.GRU` or `nn.RNN` as one operation that `vmap` does not know, and that shows nothing of
its gradients per record. In copies of a model they are replaced by loops over time, which compute the same. Their
linear layers have rules for gradients per record, so such models are fast too, if the layer has batch_first=True and
starts from zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from matrixdp.learn.independence.rules import Batched, module, require

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


class Recurrent(nn.Module):
    """What an nn.LSTM, nn.GRU or nn.RNN computes, as a loop over time; it has the parameters of the layer.

    With `stacked` the last states are given as PyTorch does, (layers, batch, width); without, as a tuple of
    (batch, width), which has one row per record.
    """

    def __init__(self, layer: nn.RNNBase, *, stacked: bool) -> None:
        super().__init__()
        self.__dict__.update({name: getattr(layer, name) for name in layer.__constants__})  # as models ask for them
        self.hidden_size, self.dropout, self.batch_first = layer.hidden_size, layer.dropout, layer.batch_first
        self.stacked, self.ways, self.parts = stacked, 2 if layer.bidirectional else 1, 2 if layer.mode == "LSTM" else 1
        steps = {nn.LSTM: _lstm, nn.GRU: _gru}
        activation = torch.relu if layer.mode == "RNN_RELU" else torch.tanh
        self.step: Step = steps.get(type(layer)) or _rnn(activation)
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
        """One layer, one way: every second one goes back in time if there are two ways."""
        back = place % self.ways
        outputs, hidden = [], self.hidden[place]
        for now in self.inputs[place](x).unbind(dim=1)[:: -1 if back else 1]:
            state = self.step(now, hidden, state)
            outputs.append(state[0])
        return torch.stack(outputs[:: -1 if back else 1], 1), state


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

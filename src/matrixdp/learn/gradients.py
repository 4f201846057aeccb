"""The sum of clipped gradients per record, from one forward and one backward pass.

`backward` runs the pass, `layers` has the rule of each layer; here norms become weights, and the gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.backward import BackwardPass
from matrixdp.learn.layers.base import ExplicitGradients
from matrixdp.learn.layers.rounding import factor_roundoff, roundoff
from matrixdp.learn.layers.trainable import TrainableModel
from matrixdp.learn.probe.independence import check_independent
from matrixdp.learn.probe.records import LARGE
from matrixdp.learn.probe.state import check_unchanged, configuration, snapshot
from matrixdp.learn.probe.trials import Found, Run

Loss = Callable[[Any, Any], Tensor]

# The largest batch of a probe, and the most numbers that its per-record gradients of a parameter may have.
_LARGEST_PROBE, _LARGEST_GRADIENTS = 256, 1 << 22


class ClippedGradients:
    """The sum over a batch of gradients per record, each clipped.

    Args:
        model: A module whose trainable parameters lie in layers with a rule: Linear, Conv1d to 3d, Embedding,
            LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and the layers that Opacus adds or that are registered with it.
            In each of them the first dimension of input and output must be the record, in the order of the batch.
        loss: `loss(outputs, targets)` gives one value per record, as with reduction="none", from that record alone.
        clip: The bound on one record's gradient.
        norm: "l2": the whole gradient is scaled by min(1, clip / its Euclidean norm). "linf": every entry is clamped to
            [-clip, clip]; this holds the gradients of all records in memory at once.

    Guarantee:
        Among n records, leaving one out changes `flat`, as computed, by a vector whose Euclidean norm ("l2") or largest
        entry ("linf") is at most clip (1 + 2 e), e = `sum_error(n)`; 2 e is 3e-5 for 60,000 records. Proved: a record's
        contribution is within clip, as norms count their own rounding error, and the sum in float64 of any n of them
        has an error of at most e clip; see `layers.rounding`. A record whose loss, gradient or squared norm is not
        finite adds exactly zero. Assumed: model and loss treat each record on its own (probed), and the numbers that
        kernels compute for a record before the sum (losses, layer inputs, gradients of outputs, norms) do not change
        with the other records of the batch, not even in their last digits.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, clip: float, norm: str = "l2") -> None:
        self._loss = loss
        self._clip = _check.length("clip", clip)
        self._norm = _check.choice("norm", norm, ("l2", "linf"))
        self._trained = TrainableModel(model)
        self._handed = self._trained.zeros(self._trained.dtype)
        self.flat = self._trained.zeros(torch.float64)  # its own memory also if the type is the same
        """The sum, in float64 whatever the parameters' type; private until noise is added."""
        self._totals = dict(self._trained.split(self.flat))
        self._probed: set[tuple[Any, ...]] = set()
        self._passes = 0
        self.attach()

    @property
    def model(self) -> nn.Module:
        """The module whose gradients are taken."""
        return self._trained.model

    @property
    def loss(self) -> Loss:
        """What is minimized, one value per record."""
        return self._loss

    @property
    def clip(self) -> float:
        """The bound on one record's gradient."""
        return self._clip

    @property
    def norm(self) -> str:
        """What is bounded: "l2" or "linf"."""
        return self._norm

    def zero(self) -> None:
        """Sets the sum to zero, and the gradients of the parameters."""
        self.flat.zero_()
        self._trained.check_unchanged()
        self.attach()

    def attach(self) -> None:
        """Makes `flat`, in the parameters' type, the gradient of the parameters; until then they have the former one.

        Every .grad is a new view each time: an optimizer may have set it to None, and a model that is converted or
        moved takes the data of its .grad with it.
        """
        self._handed.copy_(self.flat)
        for parameter, part in self._trained.split(self._handed):
            parameter.grad = part

    @_check.withheld("model or loss")
    def accumulate(self, inputs: Tensor | tuple[Tensor, ...], targets: Any) -> int:
        """Adds the clipped gradients of a batch, or of a part of one, to `flat`.

        Args:
            inputs: What the model takes, one record per row; a tuple stands for several arguments.
            targets: What the loss takes beside the model's output.

        Returns:
            How many records were dropped because their loss or gradient was not finite.
        """
        arguments = _tensors(inputs)
        if arguments[0].shape[0] == 0:
            return 0
        self._trained.check_unchanged()
        self.probe(inputs, targets)
        found, finite = self._checked_pass(arguments, targets)
        with torch.no_grad():
            dropped = int((~finite).sum())  # the one wait for the device
            self._add(found, finite if dropped else None)
        return dropped

    def add_present(self, arguments: tuple[Tensor, ...], targets: Any, present: Tensor) -> Tensor:
        """`accumulate` for the records marked as present, without waiting for the device or checking the arguments."""
        found, finite = self._pass(arguments, targets)
        with torch.no_grad():
            self._add(found, finite & present)
            return (present & ~finite).sum()

    def _checked_pass(self, arguments: tuple[Tensor, ...], targets: Any) -> tuple[BackwardPass, Tensor]:
        """A pass; at the 1st, 2nd, 4th, 8th and so on, all state of model and loss is compared before and after it."""
        self._passes += 1
        if self._passes & (self._passes - 1):
            return self._pass(arguments, targets)
        before = snapshot(model=self.model, loss=self.loss)
        found = self._pass(arguments, targets)
        check_unchanged(before, model=self.model, loss=self.loss)
        return found

    def _pass(self, arguments: tuple[Tensor, ...], targets: Any) -> tuple[BackwardPass, Tensor]:
        """Gradients and norms of a batch, and which records have a finite gradient."""
        explicit = self.norm == "linf"
        with torch.enable_grad(), BackwardPass(self._trained, arguments[0].shape[0], explicit=explicit) as found:
            losses = self.loss(self.model(*arguments), targets)
            found.backward(losses)
        return found, torch.isfinite(found.squared_norm) & torch.isfinite(losses.detach())

    def _add(self, found: BackwardPass, kept: Tensor | None) -> None:
        """Adds the clipped gradients of the records that are kept; of all when None is given."""
        squared_norm = found.squared_norm
        if self.norm == "l2":
            # Covers the sum over the parameters, the division, and the product of weight and gradient.
            slack = (len(found.gradients) + 16) * roundoff(squared_norm) + 2 * factor_roundoff(squared_norm)
            weights = (self.clip * (1 - slack) / squared_norm.sqrt()).clamp_(max=1).double()
            if kept is not None:
                weights = weights.masked_fill_(~kept, 0.0)
        else:
            weights = torch.ones_like(squared_norm, dtype=torch.float64)
            bound = _rounded_down(self.clip, self._trained.dtype)
        for parameter, gradients in found.gradients.items():
            usable = gradients if kept is None else gradients.masked(kept)
            if self.norm == "linf":
                usable = ExplicitGradients(usable.explicit().clamp(-bound, bound))
            usable.add(weights, self._totals[parameter])

    @property
    def probed(self) -> bool:
        """Whether a probe of model and loss, in their present configuration, found no dependence between records."""
        return configuration(self.model, self.loss) in self._probed

    @_check.withheld("model or loss")
    def probe(self, inputs: Tensor | tuple[Tensor, ...], targets: Any, *, largest: int | None = None) -> None:
        """Raises InvalidInput if these records show that the model mixes or stores records; runs until it is clear.

        Nothing is added to `flat`. See `probe.independence` for what is tried.

        Args:
            inputs: records to try it with, as for `accumulate`.
            targets: their targets.
            largest: the size of the largest batch that is tried; as many as there are records, up to 256, if left out.
        """
        arguments = _tensors(inputs)
        if arguments[0].shape[0] == 0 or self.probed:
            return
        self._trained.check_unchanged()
        size = max(LARGE, min(arguments[0].shape[0] if largest is None else largest, _LARGEST_PROBE))
        if check_independent(
            self.model, arguments, loss=self.loss, targets=targets, prepare=self._probe_pass, largest=size
        ):
            self._probed.add(configuration(self.model, self.loss))

    def _probe_pass(self, model: nn.Module, loss: Loss) -> Run:
        """For a copy of the model: what each record adds to the sum, and the numbers that it is computed from."""
        trained = TrainableModel(model)

        def run(arguments: tuple[Tensor, ...], targets: Any) -> Found:
            batch = arguments[0].shape[0]
            current = BackwardPass(trained, batch, explicit=self.norm == "linf", remember=True)
            with torch.enable_grad(), current:
                losses = loss(model(*arguments), targets)
                current.backward(losses)
            found = {"losses": losses.detach(), "norms": current.squared_norm, **(current.seen or {})}
            for parameter, name in trained.names.items():
                if batch * parameter.numel() > _LARGEST_GRADIENTS:  # their factors are compared all the same
                    continue
                gradients = current.gradients.get(parameter)
                found[f"gradient of {name}"] = (
                    parameter.new_zeros(batch, *parameter.shape) if gradients is None else gradients.explicit()
                )
            return found

        return run


def _tensors(inputs: Any) -> tuple[Tensor, ...]:
    given = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
    if not given or not all(isinstance(t, Tensor) and t.ndim > 0 for t in given):
        raise InvalidInput(f"inputs must be a tensor with one row per record, or a tuple of them, got {type(inputs)}")
    if len({t.shape[0] for t in given}) > 1:
        raise InvalidInput(f"inputs must have equally many rows, got {[t.shape[0] for t in given]}")
    return tuple(t.detach() for t in given)


def _rounded_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of that type that is not above the value."""
    nearest = torch.tensor(value, dtype=dtype)
    return float(nearest if float(nearest) <= value else torch.nextafter(nearest, torch.zeros_like(nearest)))

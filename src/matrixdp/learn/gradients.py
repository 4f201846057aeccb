"""The sum of clipped per-sample gradients, from one forward and one backward pass.

PyTorch's own parameter gradients mix the records of a batch. Here they are not computed at all: while a layer runs, its
parameters do not ask for gradients; its input is kept, and the gradient of its output is taken as the backward pass
comes by. From these two, `pieces` gives every record's norm, and then the sum of the clipped gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks
from torch.nn.utils.rnn import PackedSequence

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.independence import Found, Run, check_independent, check_kept, refuse_batch_statistics
from matrixdp.learn.kept import picture
from matrixdp.learn.layers import rule_for
from matrixdp.learn.pieces import Piece, Samples, factor_roundoff, merged, roundoff
from matrixdp.learn.probe_records import LARGE

Loss = Callable[[Any, Any], Tensor]

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")

# The largest batch of a probe, and the most numbers that its per-record gradients of a parameter may have.
_LARGEST_PROBE, _LARGEST_SAMPLES = 256, 1 << 22

_REPLACEMENTS: dict[type[nn.Module], str] = {
    nn.LSTM: "opacus.layers.DPLSTM",
    nn.GRU: "opacus.layers.DPGRU",
    nn.RNN: "opacus.layers.DPRNN",
    nn.MultiheadAttention: "opacus.layers.DPMultiheadAttention(..., batch_first=True)",
    nn.EmbeddingBag: "nn.Embedding and a sum over the tokens",
}


class ClippedGradients:
    """The sum over a batch of per-sample gradients, each clipped.

    Args:
        model: A module whose trainable parameters lie in layers with a rule: Linear, Conv1d to 3d, Embedding,
            LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and the layers that Opacus adds or that are registered with it.
            In each of them the first dimension of input and output must be the record, in the order of the batch.
        loss: `loss(outputs, targets)` gives one value a record, as with reduction="none", from that record alone.
        clip: The bound on one record's gradient.
        norm: "l2": the whole gradient is scaled by min(1, clip / its Euclidean norm). "linf": every entry is clamped to
            [-clip, clip]; this holds all per-sample gradients in memory at once.

    Guarantee:
        Among n records, leaving one out changes `flat`, as computed, by a vector whose Euclidean norm ("l2") or largest
        entry ("linf") is at most clip (1 + 2 e), e = `sum_error(n)`; 2 e is 3e-5 for 60,000 records. Proved: a record's
        contribution is within clip, as norms count their own rounding error, and the sum in float64 of any n of them
        has an error of at most e clip; see `pieces`. A record whose loss, gradient or squared norm is not finite adds
        exactly zero. Assumed: model and loss treat each record on its own (probed), and the numbers that kernels
        compute for a record before the sum (losses, layer inputs, gradients of outputs, norms) do not change with the
        other records of the batch, not even in their last digits.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, clip: float, norm: str = "l2") -> None:
        self._model, self._loss = model, loss
        self._clip = _check.length("clip", clip)
        self._norm = _check.choice("norm", norm, ("l2", "linf"))
        self._layers = _trainable_layers(model)
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._handed = _flat_like(self._names)
        self.flat = torch.zeros_like(self._handed, dtype=torch.float64)  # its own memory also if the type is the same
        """The sum, in float64 whatever the parameters' type; private until noise is added."""
        self._totals = dict(self._parts_of(self.flat))
        self._recurrent = [module for module in model.modules() if hasattr(module, "cells")]  # Opacus's
        self._probed: set[tuple[Any, ...]] = set()
        self._passes = 0
        self.attach()

    @property
    def probed(self) -> bool:
        """Whether model and loss, as they are made up and switched now, were seen to treat records on their own."""
        return self._make_up() in self._probed

    def _make_up(self) -> tuple[Any, ...]:
        owner = getattr(self.loss, "__self__", self.loss)
        parts = [*self.model.modules(), *(owner.modules() if isinstance(owner, nn.Module) else [owner])]
        everywhere = tuple(tuple(getattr(_hooks, f"_global_{kind}")) for kind in _HOOKS)
        return everywhere, *(
            (
                id(part),
                type(part),
                id(vars(part).get("forward")) if isinstance(part, nn.Module) else None,
                tuple((k, v) for k, v in getattr(part, "__dict__", {}).items() if isinstance(v, (bool, str))),
                *(tuple(getattr(part, f"_{kind}", ())) for kind in _HOOKS),
            )
            for part in parts
        )

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type."""
        return self._handed.dtype

    @property
    def model(self) -> nn.Module:
        """The module whose gradients are taken."""
        return self._model

    @property
    def loss(self) -> Loss:
        """What is minimised, one value a record."""
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
        self._check_unchanged()
        self.attach()

    def attach(self) -> None:
        """Makes `flat`, in the parameters' type, the gradient of the parameters; until then they have that of before.

        Every .grad is a new view each time: an optimizer may have set it to None, and a model that is converted or
        moved takes the data of its .grad with it.
        """
        self._handed.copy_(self.flat)
        for parameter, part in self._parts_of(self._handed):
            parameter.grad = part

    def _parts_of(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter, and its place in the flat vector."""
        for parameter, part in zip(self._names, torch.split(flat, [p.numel() for p in self._names]), strict=True):
            yield parameter, part.view(parameter.shape)

    @_check.withheld("model or loss")
    def accumulate(self, inputs: Tensor | tuple[Tensor, ...], targets: Any) -> int:
        """Adds the clipped gradients of a batch, or of a part of one, to `flat`.

        Args:
            inputs: What the model takes, one record per row; a tuple stands for several arguments.
            targets: What the loss takes beside the model's output.

        Returns:
            How many records were dropped because their loss or gradient was not finite.
        """
        arguments = tuple(t.detach() for t in _tensors(inputs))
        if arguments[0].shape[0] == 0:
            return 0
        self._check_unchanged()
        self.probe(inputs, targets)
        pieces, squared_norm, finite = self._watched(arguments, targets)
        with torch.no_grad():
            dropped = int((~finite).sum())  # the one wait for the device
            self._add(pieces, squared_norm, finite if dropped else None)
        return dropped

    @_check.withheld("model or loss")
    def probe(self, inputs: Tensor | tuple[Tensor, ...], targets: Any, *, largest: int | None = None) -> None:
        """Raises InvalidInput if these records show that the model mixes or keeps records; once it is clear, no more.

        Nothing is added to `flat`. See `independence` for what is tried.

        Args:
            inputs: records to try it with, as for `accumulate`.
            targets: their targets.
            largest: the size of the largest batch that is tried; as many as there are records, up to 256, if left out.
        """
        arguments = tuple(t.detach() for t in _tensors(inputs))
        if arguments[0].shape[0] == 0 or self.probed:
            return
        self._check_unchanged()
        size = arguments[0].shape[0] if largest is None else largest
        different = check_independent(
            self.model,
            arguments,
            loss=self.loss,
            targets=targets,
            prepare=self._contributions,
            largest=max(LARGE, min(size, _LARGEST_PROBE)),
        )
        if different:
            self._probed.add(self._make_up())

    def _contributions(self, model: nn.Module, loss: Loss) -> Run:
        """What each record adds to the sum, and what that is made from, for a copy of the model."""
        copied = ClippedGradients(model, loss, clip=self.clip, norm=self.norm)

        def run(arguments: tuple[Tensor, ...], targets: Any) -> Found:
            batch = arguments[0].shape[0]
            with torch.enable_grad(), _Pass(copied, batch) as current:
                current.seen = {}
                losses = copied.loss(copied.model(*arguments), targets)
                current.backward(losses)
            found = {"losses": losses.detach(), "norms": current.squared_norm, **current.seen}
            for parameter, name in copied._names.items():
                if batch * parameter.numel() > _LARGEST_SAMPLES:  # what they are made from is compared all the same
                    continue
                piece = current.pieces.get(parameter)
                shape = (batch, *parameter.shape)
                found[f"gradient of {name}"] = parameter.new_zeros(shape) if piece is None else piece.samples()
            return found

        return run

    def add_present(self, arguments: tuple[Tensor, ...], targets: Any, present: Tensor) -> Tensor:
        """`accumulate` for the records marked as present, without waiting for the device or checking what it gets."""
        pieces, squared_norm, finite = self._pass(arguments, targets)
        with torch.no_grad():
            self._add(pieces, squared_norm, finite & present)
            return (present & ~finite).sum()

    def _watched(self, arguments: tuple[Tensor, ...], targets: Any) -> tuple[dict[nn.Parameter, Piece], Tensor, Tensor]:
        """A pass; at the first, and ever more rarely, everything that is kept is compared before and after it."""
        self._passes += 1
        if self._passes & (self._passes - 1):
            return self._pass(arguments, targets)
        before = picture(model=self.model, loss=self.loss)
        found = self._pass(arguments, targets)
        check_kept(before, model=self.model, loss=self.loss)
        return found

    def _pass(self, arguments: tuple[Tensor, ...], targets: Any) -> tuple[dict[nn.Parameter, Piece], Tensor, Tensor]:
        """Pieces and squared norms of a batch, and which records have a finite gradient."""
        with torch.enable_grad(), _Pass(self, arguments[0].shape[0]) as current:
            losses = self.loss(self.model(*arguments), targets)
            current.backward(losses)
        finite = torch.isfinite(current.squared_norm) & torch.isfinite(losses.detach())
        return current.pieces, current.squared_norm, finite

    def _add(self, pieces: dict[nn.Parameter, Piece], squared_norm: Tensor, kept: Tensor | None) -> None:
        """Adds the clipped gradients of the records that are kept; of all when None is given."""
        if self.norm == "l2":
            # Covers the sum over the pieces, the division, and the product of weight and gradient.
            slack = (len(pieces) + 16) * roundoff(squared_norm) + 2 * factor_roundoff(squared_norm)
            weights = (self.clip * (1 - slack) / squared_norm.sqrt()).clamp_(max=1).double()
            if kept is not None:
                weights = weights.masked_fill_(~kept, 0.0)
        else:
            weights = torch.ones_like(squared_norm, dtype=torch.float64)
            bound = _rounded_down(self.clip, self.dtype)
        for parameter, piece in pieces.items():
            usable = piece if kept is None else piece.masked(kept)
            if self.norm == "linf":
                usable = Samples(usable.samples().clamp(-bound, bound))
            usable.add(weights, self._totals[parameter])

    def _check_unchanged(self) -> None:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if len(trainable) != len(self._names) or not all(p in self._names for p in trainable):
            raise InvalidInput("the model's trainable parameters have changed; make a new ClippedGradients for it")
        if not all(p.device == self.flat.device and p.dtype == self.dtype for p in trainable):
            raise InvalidInput("the model has moved to another device or type; make a new ClippedGradients for it")
        refuse_batch_statistics(self.model)


class _Pass:
    """One forward and backward pass: watches the layers while it is entered, then holds pieces and norms."""

    def __init__(self, gradients: ClippedGradients, batch: int) -> None:
        self.gradients, self.batch = gradients, batch
        self.pieces: dict[nn.Parameter, Piece] = {}
        # What underflows in a parameter's squared norm is below the smallest normal number.
        underflow = len(gradients._names) * torch.finfo(gradients.dtype).tiny
        self.squared_norm = torch.full((batch,), underflow, dtype=gradients.dtype, device=gradients.flat.device)
        self._anchor = torch.zeros((), device=gradients.flat.device, requires_grad=True)
        self._going_back = False
        self.seen: Found | None = None
        """Inputs and outputs of layers and the gradients that come back, by name, for a probe."""
        self._counts: dict[str, int] = defaultdict(int)
        self._waiting: dict[Layer, int] = defaultdict(int)
        self._parts: dict[nn.Parameter, list[Piece]] = defaultdict(list)
        self._users: dict[nn.Parameter, set[Layer]] = defaultdict(set)

    def __enter__(self) -> _Pass:
        model = self.gradients.model
        self._tensors = _state(model)  # kept alive, so that no other tensor takes their places
        self._versions = [(id(t), t._version) for t in self._tensors]
        self._handles = []
        for layer in self.gradients._layers:
            self._handles.append(layer.module.register_forward_pre_hook(layer.rest))
            hook = self._watch(layer)
            self._handles.append(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        for module in self.gradients._recurrent:
            self._handles.append(module.register_forward_pre_hook(_refuse_packed))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self.gradients._layers:
            layer.wake()
        if kind is None and [(id(t), t._version) for t in _state(self.gradients.model)] != self._versions:
            raise InvalidInput(
                "the model writes into its parameters or buffers as it runs, which stores records without noise; "
                "use layers that keep no running statistics, such as GroupNorm"
            )

    def _watch(self, layer: Layer) -> Callable[..., Any]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            layer.wake()
            inputs = args[0] if args else next(iter(kwargs.values()))
            layer.check(inputs, output, self.batch, self.gradients.dtype)
            if not torch.is_grad_enabled():
                return None
            if any(p in self.pieces for p in layer.parameters.values()):
                raise InvalidInput(
                    f"{layer} ran again during the backward pass; use checkpoints with use_reentrant=False"
                )
            if self._going_back:  # a checkpoint runs the layer again; its gradient comes to the first run
                return output if output.requires_grad else _join(self._anchor, output.detach(), lambda gradient: None)
            held = [inputs.detach()]
            version = inputs._version
            self._remember(f"input of {layer.name}", inputs)
            self._remember(f"output of {layer.name}", output)
            self._waiting[layer] += 1
            for parameter in layer.parameters.values():
                self._users[parameter].add(layer)

            def take(gradient: Tensor | None) -> None:
                if gradient is None or not held:
                    return
                given = held.pop()
                if given._version != version:
                    raise InvalidInput(f"the input of {layer} was changed in place after it ran; change a copy instead")
                self._remember(f"gradient at {layer.name}", gradient)
                self._take(layer, given, gradient.detach())

            if output.requires_grad:
                output.register_hook(take)
                return None
            return _join(self._anchor, output.detach(), take)

        return after

    def _remember(self, name: str, values: Tensor) -> None:
        if self.seen is not None:
            self._counts[name] += 1
            self.seen[f"{name} {self._counts[name]}"] = values.detach().clone()

    def backward(self, losses: Tensor) -> None:
        """Runs the backward pass, in which the layers hand over their pieces."""
        if not isinstance(losses, Tensor) or losses.shape != (self.batch,) or not losses.is_floating_point():
            shown = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise InvalidInput(
                f"loss must give one number a record, shape ({self.batch},), got {shown}; "
                'use reduction="none" and average over all dimensions but the first'
            )
        if not losses.requires_grad:
            raise InvalidInput("loss does not depend on any trainable parameter; check the model for no_grad or detach")
        self._going_back = True
        names = self.gradients._names
        found = torch.autograd.grad(losses, [self._anchor, *names], torch.ones_like(losses), allow_unused=True)
        for name, gradient in zip(names.values(), found[1:], strict=True):
            if gradient is not None:
                raise InvalidInput(
                    f"parameter {name} is used outside a call of its layer, where its per-sample gradients cannot be "
                    "seen; call the layer itself, leave weight decay to the optimizer, or freeze the parameter"
                )
        for parameter in list(self._parts):
            self._settle(parameter)

    def _take(self, layer: Layer, inputs: Tensor, gradient: Tensor) -> None:
        for name, piece in layer.pieces(inputs, gradient).items():
            self._parts[layer.parameters[name]].append(piece)
        self._waiting[layer] -= 1
        for parameter in layer.parameters.values():
            if not any(self._waiting[user] for user in self._users[parameter]):
                self._settle(parameter)

    def _settle(self, parameter: nn.Parameter) -> None:
        """Once all its gradients have come, a parameter has one piece and its norm; what it came from is let go."""
        piece = merged(self._parts.pop(parameter))
        if self.gradients.norm == "linf":
            piece = Samples(piece.samples())
        self.pieces[parameter] = piece = piece.smaller()
        self.squared_norm += piece.squared_norm()


class _Leaf(torch.autograd.Function):
    """Makes a layer's output part of the graph where nothing before it is; its gradient goes to the layer alone."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        """The output itself; as it counts as changed in place, it is no view, and the model may go on in place."""
        ctx.take = take
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        """Ends here."""
        ctx.take(gradients[0])
        return None, None, None


_join: Callable[..., Any] = _Leaf.apply


@dataclass(eq=False, frozen=True)
class Layer:
    """A layer with parameters to train."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    def __str__(self) -> str:
        return f"layer {self.name or '(the model)'} ({type(self.module).__name__})"

    def has_rule(self) -> bool:
        """Whether a rule covers all its parameters; a weight that PyTorch reparametrises has another name."""
        names = {"weight", "bias"} if type(self.module).__module__.startswith("torch.") else set(self.parameters)
        return rule_for(self.module) is not None and set(self.parameters) <= names

    def rest(self, *_: object) -> None:
        """While the layer runs, its parameters ask for no gradients."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)

    def wake(self) -> None:
        """Afterwards they do again, so that any other use of them shows."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)

    def pieces(self, inputs: Tensor, gradient: Tensor) -> dict[str, Piece]:
        """What one call of the layer adds to the gradients of its parameters."""
        rule = rule_for(self.module)
        if rule is None:
            raise InvalidInput(f"{self} has changed since it was looked at; make a new ClippedGradients for the model")
        return rule(self.module, inputs, gradient, frozenset(self.parameters))

    def check(self, inputs: Tensor, output: Tensor, batch: int, dtype: torch.dtype) -> None:
        """Raises InvalidInput unless both tensors have a row for each record, in the parameters' type."""
        for word, tensor in (("input", inputs), ("output", output)):
            if not isinstance(tensor, Tensor) or tensor.ndim < 1 or tensor.shape[0] != batch:
                shown = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InvalidInput(
                    f"the {word} of {self} must have a row for each of the {batch} records, got {shown}; keep the "
                    "records in the first dimension (batch_first=True; do not merge other dimensions into it)"
                )
            if tensor.is_floating_point() and tensor.dtype != dtype:
                raise InvalidInput(f"the {word} of {self} is {tensor.dtype}, its parameters {dtype}; turn off autocast")


def _state(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    own = (t for module in model.modules() for t in (*module._parameters.values(), *module._buffers.values()))
    return [t for t in own if t is not None]


def _tensors(inputs: Any) -> tuple[Tensor, ...]:
    given = inputs if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence) else (inputs,)
    if not given or not all(isinstance(t, Tensor) and t.ndim > 0 for t in given):
        raise InvalidInput(
            f"inputs must be a tensor with a row for each record, or a tuple of them, got {type(inputs)}"
        )
    if len({t.shape[0] for t in given}) > 1:
        raise InvalidInput(f"inputs must have equally many rows, got {[t.shape[0] for t in given]}")
    return given


def _refuse_packed(module: nn.Module, args: tuple[Any, ...]) -> None:
    if any(isinstance(a, PackedSequence) for a in args):
        raise InvalidInput(
            f"{type(module).__name__} sorts the records of a PackedSequence; pass a padded tensor instead"
        )


def _trainable_layers(model: nn.Module) -> list[Layer]:
    """The layers that hold trainable parameters; refuses what mixes records and what has no rule."""
    refuse_batch_statistics(model)
    layers: list[Layer] = []
    others: list[Layer] = []
    for name, module in model.named_modules():
        layer = Layer(name, module, {k: p for k, p in module._parameters.items() if p is not None and p.requires_grad})
        if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm is not None):
            raise InvalidInput(f"{layer} mixes the records of a batch; leave out scale_grad_by_freq and max_norm")
        if layer.parameters:
            (layers if layer.has_rule() else others).append(layer)
    # A module may also list the parameters of the layers in it, as Opacus's DPLSTM does.
    covered = {p for layer in layers for p in layer.parameters.values()}
    for layer in others:
        missing = sorted(key for key, p in layer.parameters.items() if p not in covered)
        if type(layer.module) in _REPLACEMENTS:
            remedy = f"use {_REPLACEMENTS[type(layer.module)]} instead"
        else:
            remedy = (
                "build it from layers such as nn.Linear, register a rule with "
                "opacus.grad_sample.register_grad_sampler, or freeze it with requires_grad_(False)"
            )
        if missing:
            raise InvalidInput(f"{layer} holds {', '.join(missing)} without a rule for per-sample gradients; {remedy}")
    return layers


def _flat_like(parameters: dict[nn.Parameter, str]) -> Tensor:
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1:
        raise InvalidInput(f"model must have trainable parameters of one type on one device, got {kinds or 'none'}")
    ((dtype, device),) = kinds
    if dtype not in (torch.float32, torch.float64):
        raise InvalidInput(f"model must have float32 or float64 parameters, got {dtype}; call model.float() first")
    return torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=device)


def _rounded_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of that type that is not above the value."""
    nearest = torch.tensor(value, dtype=dtype)
    return float(nearest if float(nearest) <= value else torch.nextafter(nearest, torch.zeros_like(nearest)))

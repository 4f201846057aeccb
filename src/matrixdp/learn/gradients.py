"""The sum of clipped gradients per record, of a model and a loss that cannot mix records.

Two ways lead to gradients per record. Where the traced graph of model and loss has a rule for every operation
(`independence.traced`), one forward and one backward pass over the batch give them (`backward`), by a rule for each
layer (`layers`). Everything else runs one record at a time (`independence.one_record`). Here norms become weights, and
the gradients are summed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.backward import BackwardPass, Gradients
from matrixdp.learn.clipping import QuantileClip
from matrixdp.learn.independence.one_record import each_record, one_each, record_gradients
from matrixdp.learn.independence.rules import NoRule, require
from matrixdp.learn.independence.traced import TracedModel, autocast
from matrixdp.learn.layers.base import ExplicitGradients
from matrixdp.learn.layers.rounding import factor_roundoff, rounded_down, roundoff
from matrixdp.learn.layers.trainable import Layer, TrainableModel

Loss = Callable[[Any, Any], Tensor]
Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

# How many numbers gradients may have, all records and parameters together, where each is formed; on a GPU more.
_MOST_NUMBERS = 1 << 27


@dataclass(frozen=True)
class _Fast:
    """A traced graph, and its layers with trained parameters, each of which has a rule for gradients per record."""

    graph: TracedModel
    layers: Sequence[Layer]
    records: list[Any]  # what the graph was checked for: shapes and types of the tensors of a record


class ClippedGradients:
    """The sum over a batch of gradients per record, each clipped.

    Args:
        model: Any module; it takes tensors with one row per record. Those that PyTorch can trace, whose operations have
            rules (`independence.rules`) and whose trained parameters lie in layers with a rule (Linear, Conv1d to 3d,
            Embedding, LayerNorm, RMSNorm, GroupNorm, InstanceNorm) are fast; all others run one record at a time.
        loss: `loss(outputs, targets)` gives one value per record, as with reduction="none".
        clip: The bound on one record's gradient; or a QuantileClip, which follows their norms.
        norm: "l2": the whole gradient is scaled by min(1, clip / its Euclidean norm). "linf": every entry is clamped to
            [-clip, clip]; this holds the gradients of all records in memory at once.
        augment: Changes one record's input at random: a function of what the model takes for one record, without the
            batch dimension. It runs one record at a time (`independence.one_record`), so it uses torch functions alone.
        views: How many times each record is augmented. Its gradient is the average over these views, which is clipped
            as one: several views count as one record.

    Guarantee:
        Among n records, leaving one out changes `flat`, as computed, by a vector whose Euclidean norm ("l2") or largest
        entry ("linf") is at most clip (1 + 2 e), e = `sum_error(n)`; 2 e is 3e-5 for 60,000 records. Proved: a record's
        gradient is computed from that record alone (`independence`); its contribution is within clip, as norms count
        their own rounding error; and the sum in float64 of any n of them has an error of at most e clip; see
        `layers.rounding`. A record whose loss, gradient or squared norm is not finite adds exactly zero. Assumed: the
        numbers that kernels compute for a record before the sum (losses, layer inputs, gradients of outputs, norms) do
        not change with the other records of the batch. This fails in last digits: measured in float32 on a CPU, others
        moved by up to 3.3e-6 clip ("l2"; 1.7e-5 in "linf"). The whole change stayed below clip there, but no bound is
        proved. With a QuantileClip, `flat` has one entry more, and its `radius` takes the place of clip (`clipping`).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp.learn import ClippedGradients
        >>> gradients = ClippedGradients(nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none"), clip=1.0)
        >>> dropped = gradients.accumulate(torch.randn(8, 4), torch.randint(2, (8,)))
        >>> bool(gradients.flat.norm() <= 8.001)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        clip: float | QuantileClip,
        norm: str = "l2",
        augment: Callable[[Any], Any] | None = None,
        views: int = 1,
    ) -> None:
        self._loss = loss
        self._quantile = clip if isinstance(clip, QuantileClip) else None
        self._clip = _check.length("clip", clip.start if isinstance(clip, QuantileClip) else clip)
        self._norm = _check.choice("norm", norm, ("l2", "linf"))
        if self._quantile is not None and norm != "l2":
            raise InvalidInput(f"clip can be a QuantileClip for the l2 norm alone, got norm {norm!r}; give a number")
        self._augment, self._views = augment, _check.count("views", views)
        if augment is None and views > 1:
            raise InvalidInput(f"augment must be given for several views, got views={views}; equal views add nothing")
        self._trained = TrainableModel(getattr(model, "_orig_mod", model))  # what torch.compile was given
        self._handed = self._trained.zeros(self._trained.dtype)
        size = len(self._handed)
        counts = 0 if self._quantile is None else 1
        self.flat = torch.zeros(size + counts, dtype=torch.float64, device=self._trained.device)
        """The sum, in float64 whatever the parameters' type; private until noise is added."""
        self._sum, self._count = self.flat[:size], self.flat[size:]
        self._totals = dict(self._trained.split(self._sum))
        # Gradients are multiplied by it before they are clipped; on the device, for recorded passes.
        self._scale = torch.ones((), dtype=self._trained.wide, device=self._trained.device)
        self._threshold = self._clip
        self._ways: dict[Any, _Fast | None] = {}
        self._refused = False
        self.slow_because: str | None = None
        """Why records run one at a time, if they do."""
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
        """The bound on one record's gradient; of a QuantileClip, the first."""
        return self._clip

    @property
    def threshold(self) -> float:
        """The clip at present: another than `clip` after steps with a QuantileClip. Computed from what was released."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        self._threshold = _check.length("threshold", value)
        self._scale.fill_(self._clip / value)

    @property
    def radius(self) -> float:
        """The largest norm (or entry) of what one record adds to `flat`, before rounding."""
        return self._clip if self._quantile is None else self._quantile.radius

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parts of `flat`, one after the other."""
        return [tuple(p.shape) for p in self._trained.names] + [(1,)] * len(self._count)

    @property
    def augmented(self) -> bool:
        """Whether records are changed at random before the model sees them."""
        return self._augment is not None

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
        self._handed.copy_(self._sum)
        for parameter, part in self._trained.split(self._handed):
            parameter.grad = part

    def adapt(self) -> None:
        """With a QuantileClip, once `flat` is a noisy average: undoes the scale, and moves the clip by the count."""
        if self._quantile is None:
            return
        self._sum.div_(self._clip / self._threshold)
        self.threshold = self._quantile.following(self._threshold, float(self._count))

    def accumulate(self, inputs: Inputs, targets: Any) -> int:
        """Adds the clipped gradients of a batch, or of a part of one, to `flat`.

        Args:
            inputs: What the model takes, one record per row; a tuple stands for several arguments, a dictionary for
                arguments by name.
            targets: What the loss takes beside the model's output: tensors in tuples, lists and dictionaries.

        Returns:
            How many records were dropped because their loss or gradient was not finite.
        """
        arguments = _tensors(inputs)
        if _rows(arguments) == 0:
            return 0
        self.prepare(inputs, targets)
        with _check.withheld("model or loss"):
            return sum(self._accumulate(*part) for part in self._parts(arguments, targets))

    def _accumulate(self, arguments: Any, targets: Any) -> int:
        found, finite = self._pass(arguments, targets)
        with torch.no_grad():
            if finite.is_cuda:  # which goes on while the sum is prepared
                self._add(found, finite)
                return int((~finite).sum())
            dropped = int((~finite).sum())
            self._add(found, finite if dropped else None)
        return dropped

    def add_present(self, arguments: Any, targets: Any, present: Tensor) -> Tensor:
        """`accumulate` for the records marked as present, without waiting for the device or checking the arguments."""
        found, finite = self._pass(arguments, targets)
        with torch.no_grad():
            self._add(found, finite & present)
            return (present & ~finite).sum()

    def add_pass(self, found: BackwardPass) -> int:
        """`accumulate` for a pass over a batch that was made elsewhere."""
        finite = torch.isfinite(found.squared_norm)
        with torch.no_grad():
            self._add(found, finite)
        return int((~finite).sum())

    def prepare(self, inputs: Inputs, targets: Any) -> bool:
        """Finds the way for records of this shape; of the records, only shapes and types are used.

        Returns:
            Whether it is the fast one. If not, that is said once, as a warning.

        Raises:
            InvalidInput: if not even one record at a time can be computed.
        """
        arguments = _tensors(inputs)
        self._trained.check_unchanged()
        key = self._key(arguments, targets)
        if key not in self._ways:
            self._ways[key] = self._fast_way(arguments, targets)
            if self._ways[key] is None:
                warnings.warn(
                    "records run one at a time, under torch.func.vmap, which takes several times as long: "
                    f"{self.slow_because}",
                    stacklevel=2,
                )
        return self._ways[key] is not None

    @_check.withheld("model or loss")
    def _fast_way(self, arguments: Any, targets: Any) -> _Fast | None:
        """The traced graph; None, after a trial on zeros, where records run one at a time."""
        try:
            view = self._seen(trees.tree_map_only(Tensor, torch.zeros_like, arguments))[0]
            graph = TracedModel(self.model, self.loss, view, targets)
            require(graph.row.numel() == 1, "loss gives several numbers per record")
            layers = TrainableModel(graph.model).layers()
            require(layers is not None, "a layer with trained parameters has no rule for gradients per record")
            return _Fast(graph, layers or (), _kinds(view))
        except NoRule as reason:
            zeros = trees.tree_map_only(Tensor, lambda t: t.new_zeros(1, *t.shape[1:]), (arguments, targets))
            self._one_by_one(*zeros)
            self.slow_because = str(reason)
            return None

    def _key(self, arguments: Any, targets: Any) -> Any:
        """What the way depends on: shapes and types of records, which modules are in training mode, and autocast."""
        leaves, structure = trees.tree_flatten((arguments, targets))
        shapes = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        parts = [part for part in (self.model, self.loss) if isinstance(part, nn.Module)]
        modes = tuple(module.training for part in parts for module in part.modules())
        return shapes, str(structure), modes, autocast()

    def _parts(self, arguments: Any, targets: Any) -> Iterator[tuple[Any, Any]]:
        """The whole batch, or so much of it at a time as memory allows where all gradients are formed."""
        batch = _rows(arguments)
        slow = self._ways[self._key(arguments, targets)] is None
        stride = max(1, _most_numbers(self.flat.device) // len(self.flat)) if slow else batch
        for first in range(0, batch, stride):
            rows = slice(first, first + stride)
            yield trees.tree_map_only(Tensor, operator.itemgetter(rows), (arguments, targets))

    def _pass(self, arguments: Any, targets: Any) -> tuple[Gradients, Tensor]:
        """Gradients and norms of a batch, and which records have a finite gradient.

        What was refused once may have kept records, and could use them in a later batch: so it never runs again.
        """
        if self._refused:
            raise InvalidInput(
                "a batch was refused here before, and model, loss or augment may have kept records of it; mend what "
                "was refused, and begin anew"
            )
        try:
            return self._found(arguments, targets)
        except InvalidInput:
            self._refused = True
            raise

    def _found(self, arguments: Any, targets: Any) -> tuple[Gradients, Tensor]:
        fast = self._ways[self._key(arguments, targets)]
        if fast is None:
            return self._one_by_one(arguments, targets)
        explicit = self.norm == "linf"
        batch, views = _rows(arguments), self._seen(arguments)
        if any(_kinds(view) != fast.records for view in views):
            raise InvalidInput("augment must give records of the same shapes and types each time")
        with torch.enable_grad(), BackwardPass(self._trained, fast.layers, batch, explicit=explicit) as found:
            each = [one_each(fast.graph(view, targets), batch) for view in views]
            losses = each[0] if len(each) == 1 else torch.stack(each).mean(0)
            with torch.autocast(self._trained.device.type, enabled=False):
                found.backward(losses)
        return found, torch.isfinite(found.squared_norm) & torch.isfinite(losses.detach())

    def _one_by_one(self, arguments: Any, targets: Any) -> tuple[Gradients, Tensor]:
        found = Gradients(self._trained, _rows(arguments))
        named = {name: parameter for parameter, name in self._trained.names.items()}
        views = self._seen(arguments)
        gradients, losses = record_gradients(self.model, self.loss, named, views, targets)
        with torch.autocast(self._trained.device.type, enabled=False):
            for name, values in gradients.items():
                found.add(named[name], ExplicitGradients(values.to(self._trained.wide)))
        return found, torch.isfinite(found.squared_norm) & torch.isfinite(losses)

    def _seen(self, arguments: Any) -> list[Any]:
        """What the model gets in place of these arguments: as many sets of them as there are views."""
        augment = self._augment
        if augment is None:
            return [arguments]
        single = isinstance(arguments, tuple) and len(arguments) == 1
        with torch.no_grad():
            if single:
                return [(each_record(augment, arguments[0]),) for _ in range(self._views)]
            return [each_record(augment, arguments) for _ in range(self._views)]

    def _add(self, found: Gradients, kept: Tensor | None) -> None:
        """Adds the clipped gradients of the records that are kept; of all when None is given."""
        with torch.autocast(self._trained.device.type, enabled=False):
            self._add_in_full(found, kept)

    def _add_in_full(self, found: Gradients, kept: Tensor | None) -> None:
        squared_norm = found.squared_norm
        if self.norm == "l2":
            # Covers the sum over the parameters, the division, and the product of weight and gradient.
            slack = (len(found.gradients) + 16) * roundoff(squared_norm) + 2 * factor_roundoff(squared_norm)
            weights = torch.minimum(self.clip * (1 - slack) / squared_norm.sqrt(), self._scale)
            if self._quantile is not None:
                below = (weights == self._scale).double() - 0.5
                below = below if kept is None else below.masked_fill_(~kept, 0.0)
                self._count.add_(below.sum() * (self._quantile.weight * self.clip))
            weights = weights.double()
        else:
            weights = torch.ones_like(squared_norm, dtype=torch.float64)
            bound = rounded_down(self.clip, self._trained.wide)
        if kept is not None:
            weights = weights.masked_fill_(~kept, 0.0)
        for parameter, gradients in found.gradients.items():
            usable = gradients if kept is None else gradients.masked(kept)
            if self.norm == "linf":
                usable = ExplicitGradients(usable.explicit().clamp(-bound, bound))
            usable.add(weights, self._totals[parameter])


def _tensors(inputs: Any) -> tuple[Any, ...] | dict[str, Any]:
    """The model's arguments by place or by name, as plain tensors, however nested, with equally many rows."""
    several = isinstance(inputs, dict) or (isinstance(inputs, tuple) and not hasattr(inputs, "_fields"))
    given = inputs if several else (inputs,)
    leaves = trees.tree_leaves(given)
    if not leaves or not all(isinstance(t, Tensor) and t.ndim > 0 for t in leaves):
        raise InvalidInput(
            f"inputs must be a tensor with one row per record, or a tuple or dictionary of them, got {type(inputs)}"
        )
    if len({t.shape[0] for t in leaves}) > 1:
        raise InvalidInput(f"inputs must have equally many rows, got {[t.shape[0] for t in leaves]}")
    found: tuple[Any, ...] | dict[str, Any] = trees.tree_map(lambda t: t.detach().as_subclass(Tensor), given)
    return found


def _rows(arguments: Any) -> int:
    return int(trees.tree_leaves(arguments)[0].shape[0])


def _kinds(arguments: Any) -> list[Any]:
    """Shapes and types of the tensors of a record."""
    return [(t.shape[1:], t.dtype) for t in trees.tree_leaves(arguments)]


def _most_numbers(device: torch.device) -> int:
    """Half of a GPU's free memory holds so many in float32; passes are few then."""
    if device.type != "cuda":
        return _MOST_NUMBERS
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(_MOST_NUMBERS, (torch.cuda.mem_get_info(device)[0] + cached) // 8)

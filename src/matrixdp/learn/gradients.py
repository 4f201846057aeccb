"""The sum of clipped gradients per record, of a model and a loss that cannot mix records.

Gradients per record are computed in one of two ways. If the traced graph of model and loss has a rule for every
operation (`record_independence.traced`), one forward and one backward pass over the batch give them (`backward`), by a
rule for each layer (`layers`). Everything else runs one record at a time (`record_independence.one_record`). This
module turns norms into weights, and sums the weighted gradients.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.learn.backward import BackwardPass, Gradients
from matrixdp.learn.clipping import QuantileClip
from matrixdp.learn.inputs import Inputs, as_tensors, count_rows, kinds_of
from matrixdp.learn.layers.base import ExplicitGradients
from matrixdp.learn.layers.rounding import factor_roundoff, rounded_down, roundoff
from matrixdp.learn.layers.trainable import Layer, TrainableModel, trained_layers
from matrixdp.learn.randomness import forked
from matrixdp.learn.record_independence.modes import refuse_modes_of_users
from matrixdp.learn.record_independence.one_record import each_record, one_each
from matrixdp.learn.record_independence.recorded import RecordedGradients
from matrixdp.learn.record_independence.rules import NoRule, require
from matrixdp.learn.record_independence.traced import TracedModel, autocast, has_global_hooks

Loss = Callable[[Any, Any], Tensor]

# The most numbers in explicit gradients of all records and parameters together; a GPU may hold more.
_MOST_NUMBERS = 1 << 27


@dataclass(frozen=True)
class _Fast:
    """A traced graph, and its layers with trained parameters, which all have a rule for gradients per record."""

    graph: TracedModel
    layers: Sequence[Layer]
    records: list[Any]  # shapes and types of a record's tensors, which the graph was checked for


class ClippedGradients:
    """The sum over a batch of gradients per record, each clipped.

    Args:
        model: Any module that takes tensors with one row per record. It is fast if PyTorch can trace it, its operations
            have rules (`record_independence.rules`) and its trained parameters are in layers with a rule (Linear,
            Conv1d to 3d, Embedding, LayerNorm, RMSNorm, GroupNorm, InstanceNorm); others run one record at a time.
        loss: `loss(outputs, targets)` gives one value per record, as with reduction="none".
        clip: The bound on one record's gradient; or a QuantileClip, which follows their norms.
        norm: "l2": the whole gradient is scaled by min(1, clip / its Euclidean norm). "linf": every entry is clamped to
            [-clip, clip]; this holds the gradients of all records in memory at once.
        augment: Changes one record's input at random: a function of the model's arguments for one record, without the
            batch dimension. It must use torch functions only.
        views: How many times each record is augmented. The average gradient over these views is clipped as one: several
            views count as one record.
        batch_size: A public size that few batches exceed. Passes that run one record at a time are recorded for it
            (`record_independence.recorded`); larger batches take several passes. None: no pass is recorded.

    Guarantee:
        Among n records, leaving one out changes `flat`, as computed, by a vector whose Euclidean norm ("l2") or largest
        entry ("linf") is at most clip (1 + 2 e), e = `sum_error(n)`; 2 e is 3e-5 for 60,000 records. Proved: a record's
        gradient is computed from that record alone (`record_independence`); its contribution is within clip, as norms
        count their own rounding error; and the sum in float64 of any n of them has an error of at most e clip; see
        `layers.rounding`. A record whose loss, gradient or squared norm is not finite adds exactly zero. Assumed: the
        numbers that kernels compute for a record before the sum (losses, layer inputs, gradients of outputs, norms) do
        not depend on the other records of the batch. This fails in the last digits: measured in float32 on a CPU, other
        records' contributions changed by up to 3.3e-6 clip ("l2"; 1.7e-5 in "linf"). The whole change stayed below clip
        there, but no bound is proved. With a QuantileClip, `flat` has one more entry, and its `radius` replaces clip.

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
        batch_size: int | None = None,
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
        # A factor on gradients before they are clipped; on the device, for CUDA graphs.
        self._scale = torch.ones((), dtype=self._trained.wide, device=self._trained.device)
        self._threshold = self._clip
        self._ways: dict[Any, _Fast | None] = {}
        self._batch_size = None if batch_size is None else _check.count("batch_size", batch_size)
        self._one_at_a_time = RecordedGradients()
        # One record of zeros: the arguments of model and loss, and, if records run one at a time, its views.
        self._example: tuple[Any, Any] | None = None
        self._example_views: list[Any] = []
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
        """The bound on one record's gradient; the first one of a QuantileClip."""
        return self._clip

    @property
    def threshold(self) -> float:
        """The current clip: after steps with a QuantileClip not `clip`, but computed from released values."""
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
        """The shapes of the parts of `flat`, in order."""
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
        """Sets the sum and the gradients of the parameters to zero, at the start of a step.

        Changes of the model are noticed here, and not at the first record: some batches are empty.
        """
        refuse_modes_of_users()
        self.flat.zero_()
        if self._example is None:
            self._trained.check_unchanged()
        elif self._way(*self._example) is None:
            targets = self._example[1]
            self._one_at_a_time.begin(self.model, self.loss, self._named(), self._example_views, targets)
        self.attach()

    def attach(self) -> None:
        """Makes `flat`, in the parameters' type, the gradient of the parameters; until then they have the former one.

        Every .grad is a new view each time: an optimizer may set it to None, and converting or moving a model replaces
        the data of its .grad.
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
            inputs: The model's input, one record per row; a tuple gives several positional arguments, a dictionary
                keyword arguments.
            targets: What the loss takes besides the model's output: tensors in tuples, lists and dictionaries.

        Returns:
            How many records were dropped because their loss or gradient was not finite.
        """
        arguments = as_tensors(inputs)
        if count_rows(arguments) == 0:
            return 0
        fast = self._way(arguments, targets)
        with _check.withheld("model or loss"):
            parts = self._parts(arguments, targets, whole=fast is not None)
            return sum(self._accumulate(*part, fast) for part in parts)

    def _accumulate(self, arguments: Any, targets: Any, fast: _Fast | None) -> int:
        found, finite = self._pass(arguments, targets, fast)
        with torch.no_grad():
            if finite.is_cuda:  # add before waiting for the count
                self._add(found, finite)
                return int((~finite).sum())
            dropped = int((~finite).sum())
            self._add(found, finite if dropped else None)
        return dropped

    def add_present(self, arguments: Any, targets: Any, present: Tensor) -> Tensor:
        """`accumulate` for the records marked as present, without waiting for the device or checking the arguments."""
        found, finite = self._pass(arguments, targets, self._ways[self._key(arguments, targets)])
        with torch.no_grad():
            self._add(found, finite & present)
            return (present & ~finite).sum()

    def add_pass(self, found: BackwardPass) -> int:
        """`accumulate` for a pass that ran elsewhere."""
        finite = torch.isfinite(found.squared_norm)
        with torch.no_grad():
            self._add(found, finite)
        return int((~finite).sum())

    def prepare(self, inputs: Inputs, targets: Any) -> bool:
        """Chooses how to compute records of this shape; of the records, only shapes and types are used.

        Returns:
            Whether the fast way works. If not, a warning says so once.

        Raises:
            InvalidInput: if not even one record at a time can be computed.
        """
        return self._way(as_tensors(inputs), targets) is not None

    def _way(self, arguments: Any, targets: Any) -> _Fast | None:
        self._trained.check_unchanged()
        key = self._key(arguments, targets)
        if key not in self._ways:
            given = " (the loss gets the outputs and the whole dictionary)" if isinstance(targets, Mapping) else ""
            # a model may seed while it is traced
            with forked(self.flat.device), _check.withheld(f"model or loss{given}"):
                self._ways[key] = self._fast_way(arguments, targets)
            if self._ways[key] is None:
                warnings.warn(
                    "records run one at a time, under torch.func.vmap, which takes several times as long: "
                    f"{self.slow_because}",
                    stacklevel=3,
                )
        return self._ways[key]

    def _fast_way(self, arguments: Any, targets: Any) -> _Fast | None:
        """The traced graph; None, after a trial on zeros, if records run one at a time."""
        zeros = trees.tree_map_only(Tensor, lambda t: t.new_zeros(1, *t.shape[1:]), (arguments, targets))
        self._example = zeros
        try:
            view = self._seen(trees.tree_map_only(Tensor, torch.zeros_like, arguments))[0]
            graph = TracedModel(self.model, self.loss, view, targets)
            require(graph.row.numel() == 1, "loss gives several numbers per record")
            layers = trained_layers(graph.module, self._trained.names)
            require(layers is not None, "a layer with trained parameters has no rule for gradients per record")
            return _Fast(graph, layers or (), kinds_of(view))
        except NoRule as reason:
            self._one_by_one(*zeros)
            self.slow_because = str(reason)
            if self._batch_size is not None and self._one_at_a_time.size is None:
                most = max(1, _most_numbers(self.flat.device) // len(self.flat))
                self._one_at_a_time.size = min(self._batch_size, most)
            self._example_views = self._seen(zeros[0])
            return None

    def _key(self, arguments: Any, targets: Any) -> Any:
        """What the choice depends on: shapes and types of records, modes of modules, autocast, and global hooks."""
        leaves, structure = trees.tree_flatten((arguments, targets))
        shapes = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        parts = [part for part in (self.model, self.loss) if isinstance(part, nn.Module)]
        modes = tuple(module.training for part in parts for module in part.modules())
        return shapes, str(structure), modes, autocast(), has_global_hooks()

    def _parts(self, arguments: Any, targets: Any, *, whole: bool) -> Iterator[tuple[Any, Any]]:
        """The whole batch, or parts of it that fit into memory if all gradients are formed."""
        batch, recorded = count_rows(arguments), self._one_at_a_time.size
        whole = whole or (recorded is None and batch * len(self.flat) <= _MOST_NUMBERS)
        stride = batch if whole else recorded or max(1, _most_numbers(self.flat.device) // len(self.flat))
        for first in range(0, batch, stride):
            rows = slice(first, first + stride)
            yield trees.tree_map_only(Tensor, operator.itemgetter(rows), (arguments, targets))

    def _pass(self, arguments: Any, targets: Any, fast: _Fast | None) -> tuple[Gradients, Tensor]:
        """Gradients and norms of a batch, and which records have a finite gradient.

        Code that failed once may have kept something of the records for a later batch, so it never runs again.
        """
        if self._refused:
            raise InvalidInput(
                "a batch failed or was refused here before, and model, loss or augment may have kept something of it; "
                "correct what went wrong, and make a new trainer, which can continue from the state_dict() of this one"
            )
        refuse_modes_of_users()  # which the model may have entered while it was traced
        try:
            return self._found(arguments, targets, fast)
        except BaseException:
            self._refused = fast is None or self.augmented  # a checked graph has no code that could keep anything
            raise

    def _found(self, arguments: Any, targets: Any, fast: _Fast | None) -> tuple[Gradients, Tensor]:
        if fast is None:
            return self._one_by_one(arguments, targets)
        explicit = self.norm == "linf"
        batch, views = count_rows(arguments), self._seen(arguments)
        if any(kinds_of(view) != fast.records for view in views):
            raise InvalidInput("augment must give records of the same shapes and types each time")
        passing = BackwardPass(self._trained, fast.layers, batch, explicit=explicit)
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), passing as found:
            each = [one_each(fast.graph(view, targets), batch) for view in views]
            losses = each[0] if len(each) == 1 else torch.stack(each).mean(0)
            with torch.autocast(self._trained.device.type, enabled=False):
                found.backward(losses)
        return found, torch.isfinite(found.squared_norm) & torch.isfinite(losses.detach())

    def _one_by_one(self, arguments: Any, targets: Any) -> tuple[Gradients, Tensor]:
        found = Gradients(self._trained, count_rows(arguments))
        named, views = self._named(), self._seen(arguments)
        gradients, losses = self._one_at_a_time(self.model, self.loss, named, views, targets)
        with torch.autocast(self._trained.device.type, enabled=False):
            for name, values in gradients.items():
                found.add(named[name], ExplicitGradients(values.to(self._trained.wide)))
        return found, torch.isfinite(found.squared_norm) & torch.isfinite(losses)

    def _named(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, name in self._trained.names.items()}

    def _seen(self, arguments: Any) -> list[Any]:
        """The arguments that the model gets, augmented once per view."""
        augment = self._augment
        if augment is None:
            return [arguments]
        single = isinstance(arguments, tuple) and len(arguments) == 1
        with torch.no_grad():
            if single:
                return [(each_record(augment, arguments[0]),) for _ in range(self._views)]
            return [each_record(augment, arguments) for _ in range(self._views)]

    def _add(self, found: Gradients, kept: Tensor | None) -> None:
        """Adds the clipped gradients of the records that are kept; None keeps all."""
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


def _most_numbers(device: torch.device) -> int:
    """How many numbers in float32 fit into half of a GPU's free memory, so that passes are few; slow to ask for."""
    if device.type != "cuda":
        return _MOST_NUMBERS
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(_MOST_NUMBERS, (torch.cuda.mem_get_info(device)[0] + cached) // 8)

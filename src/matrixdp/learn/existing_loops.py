"""Private training in existing loops: `make_private` takes a model, an optimizer and a DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as trees
from torch.utils.data import DataLoader

from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn.backward import BackwardPass
from matrixdp.learn.clipping import QuantileClip
from matrixdp.learn.layers.trainable import TrainableModel, trained_layers
from matrixdp.learn.sampling import Turn, example
from matrixdp.learn.training import PrivateSGD

ASSUMED = "independence of the loss assumed"
_SAID = "make_private takes data set and collation of the DataLoader; sampler, shuffling and workers are replaced by "
_BATCHES = {
    "sampled": "Poisson sampling, so that batches vary in size and may be empty",
    "fixed": "the same batches in every epoch, in an order drawn at random",
}


@overload
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    loss: Callable[[Any, Any], Tensor],
    budget: Budget,
    clip: float | QuantileClip,
    trust_loop: Literal[False] = False,
    **options: Any,
) -> PrivateSGD: ...


@overload
def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    budget: Budget,
    clip: float | QuantileClip,
    trust_loop: Literal[True],
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, TrustedLoader]: ...


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    budget: Budget,
    clip: float | QuantileClip,
    trust_loop: bool = False,
    **options: Any,
) -> Any:
    """A trainer for an existing loop: `for batch in private: private.step(batch)`, once per epoch.

    Args:
        model: as for PrivateSGD.
        optimizer: any optimizer of torch but LBFGS, over the model's parameters; schedulers work as before.
        loader: its data set, batch size and collation are used. A collate_fn of your own is called with one record at a
            time, so records must have equal shapes: pad in the data set.
        loss: (outputs, targets) -> one value per record. Of a tuple, the last part is the target. Of a dictionary, the
            model gets the entries that its `forward` names, and the loss the whole dictionary.
        budget: the guarantee for the whole training.
        clip: the largest norm of a record's gradient, or a QuantileClip.
        trust_loop: returns (model, optimizer, loader) for a loop that calls backward() itself; see `TrustedLoader`.
        **options: further arguments of PrivateSGD: epochs or steps, ledger, noise, largest_batch, ...

    Example:
        >>> import torch, warnings
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import make_private
        >>> loader = DataLoader(TensorDataset(torch.randn(200, 4), torch.randint(2, (200,))), batch_size=20)
        >>> model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")
        >>> optimizer, budget = torch.optim.SGD(model.parameters(), lr=0.1), Budget(3.0, 1e-5)
        >>> with warnings.catch_warnings(action="ignore"):  # it says that batches are sampled anew
        ...     private = make_private(model, optimizer, loader, loss=loss, budget=budget, clip=1.0, epochs=1)
        ...
        >>> for batch in private:
        ...     private.step(batch)
        ...
    """
    if not isinstance(loader, DataLoader):
        raise InvalidInput(f"loader must be a DataLoader, got {type(loader).__name__}; PrivateSGD takes a data set")
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise InvalidInput("loader must have a batch_size, which is the expected size of a batch")
    if trust_loop and loss is not None:
        raise InvalidInput("loss and trust_loop exclude each other: the loop computes its loss itself")
    if trust_loop and options.get("augment") is not None:
        raise InvalidInput(
            "augment and trust_loop exclude each other: augment records in the data set, or leave one out"
        )
    if not trust_loop and loss is None:
        raise InvalidInput(
            'loss must be given, such as nn.CrossEntropyLoss(reduction="none"); or trust_loop=True, for a loop that '
            "calls backward() itself"
        )
    default = loader.collate_fn is torch.utils.data.default_collate
    collate = None if default else loader.collate_fn
    warnings.warn(_SAID + _BATCHES.get(options.get("order", "sampled"), "others"), stacklevel=2)
    trainer = (_TrustedSGD if trust_loop else PrivateSGD)(
        model,
        optimizer,
        loader.dataset,
        _no_loss if loss is None else loss,
        budget=budget,
        batch_size=size,
        clip=clip,
        collate=collate,
        **options,
    )
    if not trust_loop:
        return trainer
    return model, optimizer, TrustedLoader(trainer)


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise InvalidInput("the loop computes its loss itself")


class _TrustedSGD(PrivateSGD):
    _remark = ASSUMED


class TrustedLoader:
    """Poisson batches for a loop that runs model, loss, backward() and optimizer.step() itself.

    Layers of the model collect gradients per record in the loop's backward pass. Before the optimizer's step they are
    clipped and summed, and noise is added; the result replaces what the loop left in .grad.

    Guarantee: as PrivateSGD, provided that each batch goes through the model once, unchanged; the loss is the mean over
    the batch of a loss of each record's own outputs and targets; model and loop keep nothing of the records; and
    torch's seed is secret if there is dropout. The certificate says so: "independence of the loss assumed".

    Violations that can be detected are refused: a second pass in one step, another number of records, a batch without a
    step. An empty batch is given as one record of zeros, whose gradient is dropped.
    """

    def __init__(self, trainer: PrivateSGD) -> None:
        self.trainer = trainer
        """The trainer, with epsilon(), certificate and composition() of the steps so far."""
        self._trained = TrainableModel(trainer.gradients.model)
        layers = trained_layers(self._trained.model, self._trained.names)
        if layers is None:
            raise InvalidInput(
                "a layer with trained parameters has no rule for gradients per record, which trust_loop needs; leave "
                "trust_loop out"
            )
        self._layers = layers
        self._turn: Turn | None = None
        self._pass: BackwardPass | None = None
        self._records = 0
        self._trained.model.register_forward_pre_hook(self._before_pass)
        self._trained.model.register_forward_hook(self._after_pass, always_call=True)
        trainer.optimizer.register_step_pre_hook(self._before_step)

    def __len__(self) -> int:
        return len(self.trainer)

    def __iter__(self) -> Iterator[Any]:
        for batch, turn in self.trainer.draw():
            self._turn, self._pass, self._records = turn, None, len(trees.tree_leaves(batch)[0])
            yield batch if self._records else example(self.trainer.data, self._trained.device, self.trainer.collate)

    def _before_pass(self, model: nn.Module, _: Any) -> None:
        """Makes the layers collect gradients per record, in a training pass."""
        if not (model.training and torch.is_grad_enabled()) or self._turn is None or self._turn.used:
            return
        if self._pass is not None:
            raise InvalidInput("a batch goes through the model once per step; a second pass would count records twice")
        for parameter in self._trained.names:
            parameter.grad = None
        batch = max(self._records, 1)
        explicit = self.trainer.gradients.norm == "linf"
        self._pass = BackwardPass(self._trained, self._layers, batch, explicit=explicit, scale=batch).__enter__()
        for layer in self._layers:
            if layer.module is model:  # its call has begun already, so its own new hook will not run
                layer.freeze()

    def _after_pass(self, *_: Any) -> None:
        if self._pass is not None:
            self._pass.__exit__()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Puts the noisy average where the optimizer looks for gradients.

        A closure runs here, once: in the optimizer's step it would replace the noisy average by a plain gradient.
        """
        trainer, turn = self.trainer, self._turn
        trainer.check_process()
        if turn is None or turn.used:
            raise InvalidInput("optimizer.step() needs a new batch of the private loader; draw the next batch first")
        trainer.check_turn(turn)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self._turn is not turn:
                raise InvalidInput("a closure must not draw a batch; draw it before optimizer.step(closure)")
        found = self._pass
        if found is None or not found.came:
            raise InvalidInput("before optimizer.step(), run the model on the batch in training mode, and backward()")
        used = [name for parameter, name in self._trained.names.items() if parameter.grad is not None]
        if used:
            raise InvalidInput(
                f"parameter {used[0]} is used outside a call of its layer, where its gradients per record cannot be "
                "seen; call the layer itself, or freeze the parameter"
            )
        trainer.take(turn, self._add)
        return None if closure is None else ((optimizer,), {"closure": lambda: loss})

    def _add(self) -> None:
        """Clips and sums; an empty batch has nothing to add."""
        found, self._pass = self._pass, None
        if self._records and found is not None:
            found.finish()
            self.trainer.dropped = self.trainer.dropped + self.trainer.gradients.add_pass(found)

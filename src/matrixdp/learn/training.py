"""Private SGD: Poisson batches, clipped gradients, noise from any law, and a budget that no step exceeds."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from rich.progress import Progress
from torch import nn

from matrixdp import _check
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.budget import Budget, checked_budget
from matrixdp.distributions import NoiseLaw
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn.batches import BatchSource, checked_sizes, in_parts, likely_size
from matrixdp.learn.checkpoints import Charges
from matrixdp.learn.clipping import QuantileClip
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.cuda_graphs import CapturedGradients
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.optimizers import check_optimizer
from matrixdp.learn.record_independence.modes import refuse_modes_of_users
from matrixdp.learn.released_steps import content_of
from matrixdp.learn.sampling import Collate, PoissonBatch, Turn, check_batch, count_records, example, split
from matrixdp.learn.step_costs import StepCosts, planned_steps
from matrixdp.learn.step_noise import noise_of_steps
from matrixdp.learn.time_plan import is_over_time
from matrixdp.learn.units import Units
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats

# Attributes that the guarantee rests on, which cannot be changed.
FIXED = frozenset(
    {"data", "model", "optimizer", "budget", "ledger", "generator", "batch_size", "rate", "epoch_steps", "gradients",
     "sensitivity", "noise", "affordable", "_process", "_records", "_stepping", "_charges", "_source",
     "_costs", "_units", "collate"}
)  # fmt: skip


class PrivateSGD:
    """Trains a model on records, with noise, under a budget.

    A step takes a Poisson batch, clips the gradient of each record, adds them up, adds noise from the secure engine,
    divides by the expected batch size (a public constant) and calls the optimizer. An empty batch gets noise too; a
    record whose gradient is not finite counts as zero.

    Guarantee: all steps together keep `budget` when one record (with `ids`, one unit) is added or removed (zeroed out
    with order="fixed"), even if every intermediate model is published. The number of records is public, and each must
    be in the data once. Model and loss cannot mix records, under the assumptions of `ClippedGradients` and
    `record_independence.one_record`. A step beyond the budget raises BudgetExceeded before its gradients are computed,
    and a forked process takes none. Not covered, so private, are losses and accuracies on the records, and `dropped`.

    Args:
        model: any module that ClippedGradients accepts.
        optimizer: any optimizer of torch but LBFGS, over the model's parameters.
        data: a data set, whose items are (input, target), (several inputs, target) or dictionaries (see
            `sampling.split`); a TensorDataset is fastest. For a DataLoader, use `make_private`.
        loss: (outputs, targets) -> one value per record, such as `nn.CrossEntropyLoss(reduction="none")`.
        budget: the guarantee for the whole training.
        batch_size: the expected size of a batch; each record joins with probability batch_size / len(data).
        clip: the largest norm of a record's gradient, or its largest entry (clipping="linf"); it must be public. A
            `QuantileClip` follows the norms by a noisy count in each step.
        epochs: how many passes the budget is planned for; or give `steps`.
        steps: how many steps the budget is planned for.
        clipping: "l2" (the norm of the whole gradient) or "linf" (every entry).
        noise: a mechanism's name, which gives the noise its shape while budget and steps give it its size; or a
            NoiseLaw on the vector of all parameters, which is used as it is, and then steps may be left out.
            "banded", "toeplitz" and "inverse-banded" are correlated over the steps (docs/over-time.md); their options
            are bands= (a number or "auto", the default), workload= (by default that of the optimizer's momentum) and
            memory= ("kept", or "redrawn" for "inverse-banded": old noise is drawn again instead of kept).
        order: "sampled" (Poisson sampling), or "fixed" for noise over time: the same batches in every epoch, nothing is
            sampled, and the adjacency is zero-out.
        groups: for noise over time with sampling: the number of groups, to which records are assigned at random and
            which take turns; by default as many as bands.
        by_layer: calls the mechanism for each parameter as a matrix.
        ids: the unit of each record, if units have several; the guarantee is then for units, whose number is
            public. Records without an id are left out. `batch_size` counts units.
        contributions: the most records of a unit that count, chosen at random in secret. A batch has all or none of
            them. Each is clipped, so noise grows with this number: choose it small, or make a unit's records one item.
        ledger: charged for all planned steps as one block before the first step, which is refused if they do not fit.
            Then each epoch is marked as used before its first step; steps of it that are not taken are lost.
        state: for noise over time, a file with the key and the released steps, which must stay secret and on this
            machine. It is needed to resume checkpoints with a ledger (`learn.released_steps`). Data must come back in
            the same order: a TensorDataset and `ids` are compared with those of the first run, others are assumed.
        moved: the state was moved here on purpose, and the original no longer exists.
        capture: replays steps as CUDA graphs: faster for small networks; the model must not synchronize the device.
        largest_batch: batches above this size go through the network in parts, to save memory; no other effect.
        collate: makes a batch of a list of records; it is called with one record at a time.
        augment: changes one record's input at random, by torch functions; it is called with one record at a time.
        views: how many times a record is augmented; the average gradient of its views is clipped as one.
        generator: a seeded generator of batches and noise, for reproducible studies; the certificate says so.
        accept_violation: take all planned steps although the law given does not keep the budget (epsilon() says what
            they cost), or is not floating-point-safe (the released numbers are not covered; not with a ledger).
        **options: options of the mechanism.

    Source: abadi2016deep, Algorithm 1.
    Deviates: 1. any noise law; 2. the exact privacy profile of each step in place of moments; 3. grid noise; 4. sums
        are divided by the expected size of a batch, not by the size of the batch that was drawn.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import PrivateSGD
        >>> data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
        >>> model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")
        >>> optimizer, budget = torch.optim.SGD(model.parameters(), lr=0.1), Budget(3.0, 1e-5)
        >>> trainer = PrivateSGD(model, optimizer, data, loss, budget=budget, batch_size=20, clip=1.0, epochs=2)
        >>> trainer.train(2)
        >>> trainer.epsilon() <= 3.0
        True
    """

    _remark = ""  # for the certificate

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        budget: Budget,
        batch_size: int,
        clip: float | QuantileClip,
        epochs: int | None = None,
        steps: int | None = None,
        clipping: str = "l2",
        noise: str | NoiseLaw = "analytic",
        order: str = "sampled",
        groups: int | None = None,
        by_layer: bool = False,
        ids: Sequence[Any] | None = None,
        contributions: int = 1,
        ledger: Ledger | None = None,
        state: Any = None,
        moved: bool = False,
        capture: bool = False,
        largest_batch: int | None = None,
        collate: Collate | None = None,
        augment: Callable[[Any], Any] | None = None,
        views: int = 1,
        generator: torch.Generator | None = None,
        accept_violation: bool = False,
        **options: Any,
    ) -> None:
        self._process, self._stepping = os.getpid(), threading.Lock()
        self.model, self.optimizer, self.budget = model, optimizer, budget
        self.ledger, self.generator = ledger, generator
        checked_budget(budget).with_delta("a training")
        if ledger is not None:
            _check.spend_of(ledger)
        if generator is not None:
            if ledger is not None:
                raise InvalidInput("generator and ledger exclude each other: seeded noise is not private")
            warnings.warn("training with a generator of your own: whoever knows it can remove the noise", stacklevel=2)
        # batches
        self.data, self._records, self.collate = data, count_records(data), collate
        self._units = Units.of(ids, contributions, self._records)
        count, self.batch_size = checked_sizes(self._records, self._units, batch_size)
        self.largest_batch = None if largest_batch is None else _check.count("largest_batch", largest_batch)
        self.epoch_steps = math.ceil(count / batch_size)
        planned = planned_steps(epochs, steps, self.epoch_steps)
        # gradients
        size = likely_size(self.batch_size * contributions, self.largest_batch)
        self.gradients = ClippedGradients(
            model, loss, clip=clip, norm=clipping, augment=augment, views=views, batch_size=size
        )
        self._captured = CapturedGradients(self.gradients) if capture else None
        check_optimizer(optimizer, model)
        # noise, and how many steps it allows
        if state is not None and (generator is not None or not is_over_time(noise)):
            raise InvalidInput("state is for noise over time, without a generator; other noise needs no such file")
        self.noise, self.sensitivity, self.rate = noise_of_steps(
            noise,
            self.gradients,
            optimizer,
            units=count,
            contributions=contributions,
            batch_size=batch_size,
            steps=planned,
            budget=budget,
            clip=clip,
            order=order,
            groups=groups,
            by_layer=by_layer,
            generator=generator,
            **options,
        )
        if accept_violation is not True or ledger is not None:
            how = "without accept_violation=True" if ledger is None else "on a ledger's account"
            refuse_unsafe_floats(self.certificate, f"training {how}")
        self._costs = StepCosts(
            certificate=self.certificate, noise=self.noise, rate=self.rate, budget=budget, seeded=generator is not None
        )
        self.affordable = self._costs.affordable(planned, accept_violation=accept_violation is True)
        # steps so far
        content = b"" if state is None else content_of(data, self._units)
        self._charges = Charges.of(ledger, self._costs, self.affordable, self.epoch_steps, state, content, moved=moved)
        self._source = BatchSource(
            data=data,
            collate=collate,
            records=self._records,
            units=self._units,
            rate=self.rate,
            noise=self.noise,
            device=self.gradients.flat.device,
            generator=generator,
        )
        self._ready = False
        self.steps = 0
        """Steps taken."""
        self.dropped: Any = 0
        """Records that were dropped because their gradient was not finite; private, like the data."""

    @property
    def certificate(self) -> Certificate:
        """The guarantee of one step for the records in its batch; the accountant adds sampling and composition.

        For noise over time: of all steps in a fixed order, or of one turn of a record with sampling.
        """
        units = "" if self._units is None else self._units.remark
        remark = "; ".join(part for part in (self._remark, units) if part)
        return replace(self.noise.certificate, remark=remark) if remark else self.noise.certificate

    def epsilon(self, delta: float | None = None) -> float:
        """The epsilon of all steps so far, at this delta, or at the budget's."""
        return self._costs.after(self.steps).epsilon(self.budget.delta if delta is None else delta)

    def composition(self) -> Composition:
        """The steps so far as a verifiable record; before the first step, all planned steps."""
        return self._costs.after(self.steps or self.affordable).composition(self.budget)

    def batches(self, epochs: int = 1) -> Iterator[PoissonBatch]:
        """The batches of some epochs, on the model's device; an epoch has records / batch_size steps, rounded up."""
        for drawn, turn in self.draw(epochs):
            yield PoissonBatch(*split(drawn, self.gradients.model), turn=turn)

    def draw(self, epochs: int = 1) -> Iterator[tuple[Any, Turn]]:
        """As `batches`, in the structure of the data, with the turn of each batch."""
        return self._source.draw(self, epochs * self.epoch_steps)

    def __iter__(self) -> Iterator[PoissonBatch]:
        """The batches of one epoch, each for one step."""
        return self.batches()

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self.epoch_steps

    def train(
        self, epochs: int = 1, *, progress: bool = False, callbacks: Sequence[Callable[[PrivateSGD, int], None]] = ()
    ) -> None:
        """Takes the steps of some epochs.

        Args:
            epochs: how many.
            progress: shows a progress bar.
            callbacks: each is called as `callback(trainer, epoch)` after each epoch, counted from 1, to measure on
                public records, save a checkpoint or step a scheduler. What they raise ends the training.
        """
        epochs = _check.count("epochs", epochs)
        if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):  # before anything is spent
            raise InvalidInput(f"callbacks must be a list of functions (trainer, epoch), got {_check.kind(callbacks)}")
        with Progress(disable=not progress) as bar:
            task = bar.add_task("private SGD", total=epochs * self.epoch_steps)
            for epoch in range(1, epochs + 1):
                for batch in self:
                    self.step(batch)
                    bar.advance(task)
                for callback in callbacks:
                    callback(self, epoch)

    def step(self, batch: PoissonBatch) -> None:
        """Takes one step.

        Raises:
            BudgetExceeded: if it would exceed the budget, or the ledger's; nothing is computed or spent then.
        """
        self.check_process()
        if not self._stepping.acquire(blocking=False):  # two sums would get the noise of one
            raise InvalidInput("another step of this trainer is under way; take one after the other")
        try:
            check_batch(batch, self)
            self.check_turn(batch.turn)
            self._prepare(batch)
            self.take(batch.turn, lambda: self._sum(batch))
            self.optimizer.step()
        finally:
            self._stepping.release()

    def _sum(self, batch: PoissonBatch) -> None:
        with self._source.secret_dropout(batch.turn.step):
            for inputs, targets in in_parts(batch.drawn, self.largest_batch):
                self.dropped = self.dropped + (self._captured or self.gradients).accumulate(inputs, targets)

    def check_turn(self, turn: Turn) -> None:
        """Raises BudgetExceeded or InvalidInput if no step may be taken with this batch."""
        if not self.steps < self.affordable:
            raise BudgetExceeded(
                f"all {self.affordable} steps planned for the budget ({self.budget}) are taken; this one was refused"
            )
        self._source.check_turn(turn)
        refuse_modes_of_users()
        check_optimizer(self.optimizer, self.model)

    def take(self, turn: Turn, add_gradients: Callable[[], None]) -> None:
        """Pays for a step, and makes the noisy average of clipped gradients the gradient of the parameters."""
        self._charges.pay(self._charged)
        turn.take()
        flat = self.gradients.flat
        try:
            self.gradients.zero()  # an empty batch moves the model too
            add_gradients()
            self.steps += 1  # before the noise: a step that fails half way counts
            self.noise.add_(flat)
        except BaseException:
            flat.zero_()  # or the sum would stay there without noise
            raise
        flat.div_(self.batch_size)
        self.gradients.adapt()
        self.gradients.attach()  # only now, so that the optimizer sees noisy sums, whatever was in .grad

    def prepare(self) -> None:
        """What the first step does: traces the model, or tries one record of zeros; InvalidInput if neither works."""
        with _check.withheld("data"):
            found = example(self.data, self.gradients.flat.device, self.collate)
        with self._source.secret_dropout(None):
            self.gradients.prepare(*split(found, self.gradients.model))

    def check_process(self) -> None:
        """Raises InvalidInput in a forked process: it would take paid steps a second time."""
        if os.getpid() != self._process:
            raise InvalidInput(
                f"the trainer belongs to process {self._process} and was inherited by process {os.getpid()} through a "
                "fork, where the steps that it has paid for would be taken again; make a new PrivateSGD here"
            )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and what was spent, to continue later; for torch.save.

        For noise over time it also has, under "over_time", the noise of the last steps and, unless a `state` has it,
        the key of all draws. With these the noise can be removed: keep such a checkpoint as secret as the records.
        """
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if isinstance(self.noise, CorrelatedNoise):
            states["over_time"] = self.noise.state_dict()
        return states | {"clip": self.gradients.threshold} | self._charges.state(self._charged)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint; what it had spent stays spent, and so does what this trainer has spent.

        A checkpoint has the steps before it; a ledger, also those after it, which a crash may have lost. Steps before
        it that this ledger was not charged for are charged before the next. Repeated steps count as planned steps.

        Noise over time is charged as a whole, for one run. A repeated step has the same batch and dropout, and the same
        noise if the sum of gradients is the same in every bit; on a CUDA device without a `state`, its noise is always
        new. With other noise it is a second release, which the charge does not cover. A `state` has fingerprints of the
        sums and refuses other ones, so with a ledger, checkpoints need a `state`. With neither, a second release is not
        counted: do not publish models of steps that will be repeated. From a checkpoint without a step, the training
        starts again with new coins, or those of its `state`. The steps of a record follow from its position: data and
        `ids` must come back in the same order, which is assumed unless a `state` compares them.
        """
        self.check_process()
        # Charges come first: if loading the model fails half way, they count already.
        if isinstance(self.noise, CorrelatedNoise):
            self.steps = self._charges.load_over_time(state, self._charged, self.noise)
        else:
            self.steps = self._charges.load(state, self.steps)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.gradients.threshold = state.get("clip", self.gradients.threshold)

    def __setattr__(self, name: str, value: Any) -> None:
        fixed = name in FIXED and name in vars(self)
        if fixed or name == "clip" or (name == "steps" and value < getattr(self, "steps", 0)):
            raise InvalidInput(f"{name} is part of the guarantee and cannot be changed; make a new PrivateSGD")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a PrivateSGD cannot be copied or pickled: its steps are paid for once; use state_dict()")

    def __str__(self) -> str:
        return self._costs.summary(self.steps, self.affordable, self._source.sampling)

    @property
    def _charged(self) -> int:
        return self._costs.charged(self.steps, self.affordable)

    def _prepare(self, batch: PoissonBatch) -> None:
        """Does everything that can fail for reasons other than the budget, before anything is spent."""
        if not self._ready:
            self.prepare()
            if self.generator is None:
                self.noise.warm_up(self.gradients.flat)
            self._ready = True
        if self._captured is not None:
            with self._source.secret_dropout(None):
                for inputs, targets in in_parts(batch.drawn, self.largest_batch):
                    self._captured.prepare(inputs, targets)

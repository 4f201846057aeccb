"""Private SGD: Poisson batches, clipped gradients, noise from any law, and a budget that no step exceeds."""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from rich.progress import Progress
from torch import nn
from torch.utils import _pytree as trees
from torch.utils.data import TensorDataset

from matrixdp import _check
from matrixdp._rounding import rounded_up
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput
from matrixdp.learn.checkpoints import Charges
from matrixdp.learn.clipping import QuantileClip, largest_change
from matrixdp.learn.correlated_noise import (
    CorrelatedNoise,
    Training,
    is_over_time,
    momentum_workload,
    noise_over_time,
)
from matrixdp.learn.cuda_graphs import CapturedGradients
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.noise import ParameterNoise, balanced, propose
from matrixdp.learn.randomness import secret_randomness
from matrixdp.learn.sampling import (
    Collate,
    PoissonBatch,
    StepSampler,
    Turn,
    count_records,
    example,
    loader,
    loader_of,
    split,
)
from matrixdp.mechanisms import RECIPES
from matrixdp.pipeline import sized_together
from matrixdp.privacy.certificate import Certificate, refuse_unsafe_floats
from matrixdp.sensitivity import Entrywise, Frobenius, Sensitivity

# Attributes that the guarantee rests on, which cannot be changed.
FIXED = frozenset(
    {"data", "model", "optimizer", "budget", "ledger", "generator", "batch_size", "rate", "epoch_steps", "gradients",
     "sensitivity", "noise", "affordable", "_process", "_records", "_stepping", "_charges", "collate"}
)  # fmt: skip

RESUMED = "steps count once: one that is taken twice with another sum is a second release, same coins, not counted"
"""What the guarantee of noise over time leaves out."""


class PrivateSGD:
    """Trains a model on records, with noise, under a budget.

    A step takes a Poisson batch, clips the gradient of each record, adds them up, adds noise from the secure engine,
    divides by the expected batch size (a public constant) and calls the optimizer. An empty batch gets noise all the
    same; a record whose gradient is not finite counts as zero.

    Guarantee: all steps together keep `budget` when one record is added to the data or removed from them, even if every
    intermediate model is published; the number of records is public. Provided that each record is in the data once.
    Model and loss cannot mix records, by construction (`independence`). A step that would exceed the budget raises
    BudgetExceeded before its gradients are computed; a forked process takes none. Losses, accuracies
    on the training records and the attribute `dropped` are not covered: they are private.

    Args:
        model: any module that ClippedGradients knows.
        optimizer: any optimizer of torch over the model's parameters.
        data: a data set, whose items are (input, target), (several inputs, target) or dictionaries (see
            `sampling.split`); a TensorDataset is fastest. For a DataLoader there is `make_private`.
        loss: (outputs, targets) -> one value per record, such as `nn.CrossEntropyLoss(reduction="none")`.
        budget: the guarantee for the whole training.
        batch_size: the expected size of a batch; each record joins with probability batch_size / len(data).
        clip: the largest norm of a record's gradient, or its largest entry (clipping="linf"); it must be public. A
            `QuantileClip` follows the norms by a noisy count in each step.
        epochs: how many passes the budget is planned for; or
        steps: how many steps.
        clipping: "l2" (the norm of the whole gradient) or "linf" (every entry).
        noise: a mechanism's name, which gives the noise its shape while budget and steps give it its size; or a
            NoiseLaw on the vector of all parameters, which stays as it is, and then steps may be left out.
            "banded", "toeplitz" and "inverse-banded" are correlated over the steps (docs/over-time.md); their options
            are bands= (a number or "auto", the default) and workload= (by default that of the optimizer's momentum).
        order: "sampled" (Poisson sampling), or "fixed" for noise over time: the same batches in every epoch, nothing is
            sampled, and the adjacency is zero-out.
        groups: for noise over time with sampling: records are put into so many groups at random, which take turns; as
            many as bands by default.
        by_layer: calls the mechanism for each parameter as a matrix.
        ledger: charged for all planned steps as one block before the first, which is refused if they do not fit; an
            epoch at a time is then marked as used, before its first step, and what is not taken of it is lost.
        capture: on a CUDA device, records the kernels of a step as CUDA graphs and replays them: much faster for small
            networks; the model must not wait for the device as it runs.
        largest_batch: batches above this size go through the network in parts, to save memory; no other effect.
        collate: makes a batch of a list of records; it is called with one record at a time.
        augment: changes one record's input at random, by torch functions; it is called with one record at a time.
        views: how many times a record is augmented; the average gradient of its views is clipped as one.
        generator: a seeded generator of batches and noise, for reproducible studies; the certificate says so.
        accept_violation: take the steps that are planned even if the law given does not keep the budget over them
            (epsilon() says what they cost), or is not floating-point-safe (then the guarantee does not cover the
            released numbers, and no ledger can be charged).
        **options: options of the mechanism.

    Source: abadi2016deep, Algorithm 1.
    Deviates: 1. any noise law; 2. the exact privacy profile of each step in place of moments; 3. grid noise; 4. sums
        are divided by the expected size of a batch, not by the size of the batch that was drawn.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from matrixdp import Budget
        >>> from matrixdp.learn import PrivateSGD
        >>> data = TensorDataset(torch.randn(200, 4), torch.randint(2, (200,)))
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
        ledger: Ledger | None = None,
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
        if not isinstance(budget, Budget):
            raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(budget).__name__}")
        budget.with_delta("a training")
        if generator is not None:
            if ledger is not None:
                raise InvalidInput("generator and ledger exclude each other: seeded noise is not private")
            warnings.warn("training with a generator of your own: whoever knows it can remove the noise", stacklevel=2)
        # batches
        self.data, self._records, self.collate = data, count_records(data), collate
        if not _check.count("batch_size", batch_size) <= self._records:
            raise InvalidInput(f"batch_size must be at most the number of records, {self._records}, got {batch_size}")
        self.batch_size = batch_size
        self.largest_batch = None if largest_batch is None else _check.count("largest_batch", largest_batch)
        self.epoch_steps = math.ceil(self._records / batch_size)
        planned = _planned(epochs, steps, self.epoch_steps)
        # gradients
        self.gradients = ClippedGradients(model, loss, clip=clip, norm=clipping, augment=augment, views=views)
        self._captured = CapturedGradients(self.gradients) if capture else None
        self._accumulate = self._captured.accumulate if self._captured else self.gradients.accumulate
        check_optimizer(optimizer, model)
        change = largest_change(self.gradients.radius, self._records)
        # noise, and how many steps it allows
        self.sensitivity: Sensitivity
        self.noise: ParameterNoise | CorrelatedNoise
        if is_over_time(noise):
            if by_layer or clipping != "l2" or planned is None or isinstance(clip, QuantileClip):
                raise InvalidInput(
                    "noise over time needs epochs or steps, clipping='l2', a fixed clip, and by_layer left out"
                )
            public = Training(
                records=self._records,
                batch_size=batch_size,
                steps=planned,
                size=len(self.gradients.flat),
                change=change,
                order=order,
                groups=groups,
            )
            options = {"workload": momentum_workload(optimizer), **options}
            self.noise = noise_over_time(public, noise, budget, generator, **options)
            self.sensitivity, self.rate = public.sensitivity, self.noise.rate
        else:
            if order != "sampled" or groups is not None:
                raise InvalidInput("order and groups are for noise over time; noise='banded', bands=1 is independent")
            self.sensitivity = Frobenius(change) if clipping == "l2" else Entrywise(change)
            self.rate = batch_size / self._records
            self.noise = self._noise(noise, planned, by_layer, options)
        if accept_violation is not True or ledger is not None:
            how = "without accept_violation=True" if ledger is None else "on a ledger's account"
            refuse_unsafe_floats(self.certificate, f"training {how}")
        self.affordable = self._affordable(planned, accept_violation is True)
        # steps so far
        charged, _ = self._releases(self.affordable)
        block = charged if isinstance(self.noise, CorrelatedNoise) else self.epoch_steps
        self._charges = Charges(ledger, self.certificate, budget, self.rate, charged, block)
        self._ready = False
        self.steps = 0
        """Steps taken."""
        self.dropped: Any = 0
        """Records that were dropped because their gradient was not finite; private, like the data."""

    @property
    def certificate(self) -> Certificate:
        """What one step guarantees to the records in its batch; sampling and composition are the accountant's.

        Of noise over time: what all steps guarantee in a fixed order, or one turn of a record where it is sampled.
        """
        found = self.noise.certificate
        return replace(found, remark=self._remark) if self._remark else found

    def epsilon(self, delta: float | None = None) -> float:
        """What the steps so far guarantee together, at this delta, or at the budget's."""
        return self._accounts(self.steps).epsilon(self.budget.delta if delta is None else delta)

    def composition(self) -> Composition:
        """The steps so far, as a record that verifies; before the first step, all that are planned."""
        return self._accounts(self.steps or self.affordable).composition(self.budget)

    def batches(self, epochs: int = 1) -> Iterator[PoissonBatch]:
        """Poisson batches for so many epochs, on the model's device; an epoch has records / batch_size steps."""
        for drawn, turn in self.draw(epochs):
            yield PoissonBatch(*split(drawn, self.gradients.model), turn=turn)

    def draw(self, epochs: int = 1) -> Iterator[tuple[Any, Turn]]:
        """The same in the structure of the data, with the turn of each."""
        self.check_process()
        if count_records(self.data) != self._records:
            raise InvalidInput("data has another number of records than when the trainer was made; make a new one")
        device, turn, steps = self.gradients.flat.device, None, epochs * self.epoch_steps
        step, run = (self.noise.step, self.noise.run) if isinstance(self.noise, CorrelatedNoise) else (None, None)
        with self._masks(None), _check.withheld("data"):
            if isinstance(self.noise, CorrelatedNoise):
                drawn = iter(loader_of(self.data, StepSampler(self.noise.batch, self.noise.step, steps), self.collate))
            else:
                drawn = iter(loader(self.data, self.rate, steps, self.generator, self.collate))
        while True:
            self.check_process()
            with self._masks(step), _check.withheld("data"):
                found = next(drawn, None)
            if found is None:
                return
            turn = Turn(self, turn, step, run)
            step = None if step is None else step + 1
            yield trees.tree_map_only(torch.Tensor, lambda part: part.to(device, non_blocking=True), found), turn

    def _masks(self, step: int | None) -> AbstractContextManager[None]:
        """Secret random numbers for data sets that may change their records at random."""
        return nullcontext() if type(self.data) is TensorDataset else self._secret_dropout(step, use=1)

    def __iter__(self) -> Iterator[PoissonBatch]:
        """The batches of one epoch, each for one step."""
        return self.batches()

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self.epoch_steps

    def train(
        self, epochs: int = 1, *, progress: bool = False, callbacks: Sequence[Callable[[PrivateSGD, int], None]] = ()
    ) -> None:
        """Takes the steps of so many epochs.

        Args:
            epochs: how many.
            progress: shows a progress bar.
            callbacks: each is called as `callback(trainer, epoch)` after each epoch, counted from 1, to measure on
                public records, save a checkpoint or step a scheduler. What they raise ends the training.
        """
        epochs = _check.count("epochs", epochs)
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
            BudgetExceeded: if it would exceed the budget, or the ledger's; nothing has happened then.
        """
        self.check_process()
        if not self._stepping.acquire(blocking=False):  # two sums would get the noise of one
            raise InvalidInput("another step of this trainer is under way; take one after the other")
        try:
            self._step(batch)
        finally:
            self._stepping.release()

    def _step(self, batch: PoissonBatch) -> None:
        if not isinstance(batch, PoissonBatch) or batch.turn.used or batch.turn.trainer is not self:
            raise InvalidInput(
                "batch must come from this trainer's batches(), and serves one step: a sampler that shuffles, or gives "
                "batches of a fixed size, is not Poisson sampling, and the guarantee would not hold. Write `for batch "
                "in trainer.batches(): trainer.step(batch)`"
            )
        if not batch.unchanged:
            raise InvalidInput(
                "the batch was changed after it was drawn; change records in the data set, one at a time, or in the "
                "model: what is done to a batch as a whole is not covered by the guarantee"
            )
        self.check_turn(batch.turn)
        self._prepare(batch)
        self.take(batch.turn, functools.partial(self._sum, batch))
        self.optimizer.step()

    def _sum(self, batch: PoissonBatch) -> None:
        """Adds the gradients of a batch."""
        with self._secret_dropout(batch.turn.step):
            for inputs, targets in self._parts(batch):
                self.dropped = self.dropped + self._accumulate(inputs, targets)

    def check_turn(self, turn: Turn) -> None:
        """Raises BudgetExceeded or InvalidInput if this batch must not have a step."""
        if not self.steps < self.affordable:
            raise BudgetExceeded(
                f"all {self.affordable} steps planned for the budget ({self.budget}) are taken; this one was refused"
            )
        if turn.before is not None and not turn.before.used:
            raise InvalidInput(
                "the batch before this one was left out. Take a step with each batch, also with an empty one: whether "
                "there is a step must not depend on the records. To stop early, leave the loop"
            )
        if isinstance(self.noise, CorrelatedNoise) and (turn.step, turn.run) != (self.noise.step, self.noise.run):
            raise InvalidInput(
                f"the batch was drawn for another step than the next one, {self.noise.step + 1}, or before a "
                "checkpoint was loaded: where noise is correlated over time, a record takes part at its own steps "
                "alone. Draw batches anew"
            )
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
        self.gradients.attach()  # only now, and whatever became of .grad in the meantime: the optimizer sees noisy sums

    def prepare(self) -> None:
        """Traces the model, or tries one record at a time; raises InvalidInput if neither can be done. Spends nothing.

        The first step does this by itself. Of the records, only shapes and types are used.
        """
        with _check.withheld("data"):
            found = example(self.data, self.gradients.flat.device, self.collate)
        self.gradients.prepare(*split(found, self.gradients.model))

    def check_process(self) -> None:
        """Raises InvalidInput in a forked process: it would take the steps that are paid for once more."""
        if os.getpid() != self._process:
            raise InvalidInput(
                f"the trainer belongs to process {self._process} and was inherited by process {os.getpid()} through a "
                "fork, where the steps that it has paid for would be taken again; make a new PrivateSGD here"
            )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and what was spent, to continue later; for torch.save.

        Of noise over time it also has the noise of the last steps, and the key of what is drawn later, under
        "over_time". With these the noise can be removed: keep such a checkpoint as secret as the records.
        """
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if isinstance(self.noise, CorrelatedNoise):
            states["over_time"] = self.noise.state_dict()
        return states | {"clip": self.gradients.threshold} | self._charges.state(self._charged)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint; what it had spent stays spent, and so does what this trainer has spent.

        A checkpoint knows of the steps before it. To count those after it too, which a crash may have lost, keep a
        ledger. Steps before the checkpoint that this trainer's ledger was not charged for are charged before the next
        step. Steps that are taken again use up what was planned.

        Noise over time is charged as a whole, for one run. With a ledger, a checkpoint of its steps is refused: steps
        after it may have been released, and would be so once more for the same charge. Without one, a step that is
        taken again is the same step: its batch, dropout and, if the sum of gradients is the same in every bit, its
        noise. With another sum, as on CUDA devices, it is a second release of the same records, with the same coins,
        which nobody counts; so do not publish models of steps that will be taken again.
        """
        self.check_process()
        if isinstance(self.noise, CorrelatedNoise):
            over_time = state.get("over_time")
            if not isinstance(over_time, Mapping) or bool(over_time["step"]) != bool(state["steps"]):
                raise InvalidInput("the checkpoint is not of a training with noise over time, or is damaged")
            if self.ledger is not None and over_time["step"]:
                raise InvalidInput(
                    "with a ledger, a checkpoint of noise over time cannot be continued: the steps after it may have "
                    "been released already, and the charge was for one run. Keep the process that trains, or start a "
                    "new training, which has a charge of its own"
                )
            self.noise.check_state(over_time)  # all that can be refused comes before anything counts as charged
            self._charges.load(state, self._charged)
            self.noise.load_state_dict(over_time)
            self.steps = self.noise.step
        else:
            self.steps = self._charges.load(state, self.steps)  # first: a model loaded only in part has spent as much
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
        epsilon = rounded_up(self.epsilon())
        spent = f"epsilon {epsilon} at delta {self.budget.delta:g}" if self.steps else "nothing spent"
        lines = [
            f"Private SGD: {spent} after {self.steps} of {self.affordable} steps",
            f"  adjacency  {self.certificate.adjacency} ({self.certificate.adjacency.neighbours})",
            f"  change     {self.certificate.sensitivity}, in each gradient",
            f"  budget     {self.budget}",
            f"  sampling   {self._sampling()}",
            f"  noise      {self.certificate.law.describe()}",
            f"  source     {self.certificate.source}",
            f"  drawn with {self.noise.drawing}",
        ]
        if isinstance(self.noise, CorrelatedNoise):
            lines.append(f"  resumed    {RESUMED}")
        return "\n".join(lines)

    def _sampling(self) -> str:
        if not isinstance(self.noise, CorrelatedNoise):
            return f"Poisson, each record with probability {self.rate:.4g}"
        return self.noise.sampling

    def _noise(
        self, noise: str | NoiseLaw, planned: int | None, by_layer: bool, options: dict[str, Any]
    ) -> ParameterNoise:
        """The noise of a step: as it was given, or in the size that budget and steps ask for."""
        size = len(self.gradients.flat)
        largest = len(self.data) * self.sensitivity.frobenius_radius((size,))
        if not isinstance(noise, str):
            if by_layer or options:
                raise InvalidInput("by_layer and options of a mechanism go with its name; a NoiseLaw is used as it is")
            if not isinstance(noise, NoiseLaw) or noise.shape != (size,):
                raise InvalidInput(
                    f"noise must be a mechanism's name, or a law on all {size} parameters, got {_check.kind(noise)}"
                )
            return ParameterNoise(noise, self.sensitivity, largest, generator=self.generator)
        if RECIPES[_check.choice("noise", noise, RECIPES)].refuted:
            raise GuaranteeViolated(
                f"{noise} rests on a theorem that is false, so no size of it is known to be enough; use "
                "noise='analytic', or pass the law that calibrate() gives, with accept_violation=True"
            )
        if planned is None:
            raise InvalidInput("epochs or steps must be given: they decide how much noise a step needs")
        law = propose(noise, self.gradients.shapes, self.sensitivity, by_layer=by_layer, **options)
        if isinstance(law, Gaussian):
            law = balanced(law, self.sensitivity)
        sized = sized_together(law, self.sensitivity, self.budget, planned, self.rate)
        return ParameterNoise(sized.law, self.sensitivity, largest, drawing=sized.drawing, generator=self.generator)

    def _affordable(self, planned: int | None, accept: bool) -> int:
        """How many steps fit into the budget; never more than were planned."""
        if planned is not None and (accept or self._fits(planned)):
            return planned
        if not self._fits(1):
            one = self._accounts(1).epsilon(self.budget.delta)
            raise BudgetExceeded(
                f"budget ({self.budget}) is too small to take one step: it would cost epsilon {one:.4g} with the noise "
                f"given ({self.certificate.law.describe()}); use more noise, a larger budget or smaller batches"
            )
        low, high = 1, 2
        while self._fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        if planned is not None:
            raise BudgetExceeded(
                f"budget ({self.budget}) allows {low} steps with the noise given, not the {planned} that are planned; "
                "use more noise, or name a mechanism to get the size that it takes"
            )
        return low

    def _fits(self, steps: int) -> bool:
        return self._accounts(steps).delta(self.budget.epsilon) <= self.budget.delta

    def _accounts(self, steps: int) -> Accountant:
        accountant = Accountant(self.certificate.adjacency, reproducible=self.generator is not None)
        if steps:
            accountant.add(self.certificate, *self._releases(steps))
        return accountant

    def _releases(self, steps: int) -> tuple[int, float]:
        """As how many releases with the certificate so many steps count, and at which sampling rate."""
        return self.noise.releases(steps) if isinstance(self.noise, CorrelatedNoise) else (steps, self.rate)

    @property
    def _charged(self) -> int:
        """How many of those were charged before the steps so far; noise over time is charged as a whole."""
        if isinstance(self.noise, CorrelatedNoise) and self.steps:
            return self._releases(self.affordable)[0]
        return self.steps

    def _prepare(self, batch: PoissonBatch) -> None:
        """Everything that can fail for other reasons than the budget, before anything is spent."""
        if not self._ready:
            self.prepare()
        if not self._ready and self.generator is None:
            self.noise.warm_up(self.gradients.flat)
        self._ready = True
        if self._captured is not None:
            with self._secret_dropout(None):
                for inputs, targets in self._parts(batch):
                    self._captured.prepare(inputs, targets)

    def _secret_dropout(self, step: int | None, use: int = 0) -> AbstractContextManager[None]:
        """Secret dropout masks: leaving a record out moves the masks of the others, so they must not be known."""
        if self.generator is not None:
            return nullcontext()
        key = None
        if isinstance(self.noise, CorrelatedNoise) and step is not None:
            key = self.noise.dropout_key(step, use)
        return secret_randomness(self.gradients.flat.device, key)

    def _parts(self, batch: PoissonBatch) -> Iterator[tuple[Any, Any]]:
        records = len(trees.tree_leaves(batch.drawn)[0])
        stride = self.largest_batch or max(records, 1)
        for first in range(0, records, stride):
            rows = operator.itemgetter(slice(first, first + stride))
            yield trees.tree_map_only(torch.Tensor, rows, batch.drawn)


def _planned(epochs: int | None, steps: int | None, epoch_steps: int) -> int | None:
    if epochs is not None and steps is not None:
        raise InvalidInput(f"epochs and steps exclude each other, got {epochs!r} and {steps!r}")
    if epochs is not None:
        return _check.count("epochs", epochs) * epoch_steps
    return None if steps is None else _check.count("steps", steps)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Every parameter that the optimizer changes must get its gradient here, with noise."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput(
            "optimizer must take one gradient per step; LBFGS asks for several, each of which would cost"
        )
    private = {id(p) for p in model.parameters() if p.requires_grad}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in private]
    if others:
        raise InvalidInput(
            f"optimizer must have trainable parameters of the model alone, {len(others)} of its parameters are not: "
            "their gradients would carry no noise"
        )
    for group in optimizer.param_groups:
        if group.get("fused") and not all(p.is_contiguous() for p in group["params"]):
            raise InvalidInput("a fused optimizer needs parameters in the usual memory format; leave fused out")

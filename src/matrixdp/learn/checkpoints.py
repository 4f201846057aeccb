"""Checkpoints of a training, and its charges to a ledger: each step is charged once, also across checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from matrixdp import _check
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.learn.step_costs import StepCosts
from matrixdp.privacy.certificate import Certificate


class Charges:
    """Charges the steps of a training to a ledger, if there is one, and notes in checkpoints what was charged.

    The first charge covers all planned steps as one block; each epoch is then marked as used before its first step.
    Steps before a checkpoint that were taken without a ledger, or with another one, are charged before the next step. A
    `run` with a file (`released_steps`) is charged once for all of its processes.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        certificate: Certificate,
        budget: Budget,
        rate: float,
        planned: int,
        epoch: int,
        run: str | None = None,
    ) -> None:
        self._ledger, self._certificate, self._rate = ledger, certificate, rate
        self._planned, self._epoch = planned, epoch
        self._what = "private SGD" if certificate.remark == "" else f"private SGD ({certificate.remark})"
        # What must not change between checkpoints.
        self._setting: dict[str, Any] = {
            "budget": (budget.epsilon, budget.delta),
            "rate": rate,
            "steps": planned,
            "sensitivity": str(certificate.sensitivity),
            "noise": certificate.law.describe(),
            "mu": certificate.mu,
        }
        # Nor may a weaker guarantee be dropped: neighbours that are units, a trusted loop, seeded noise.
        if certificate.remark:
            self._setting["remark"] = certificate.remark
        if certificate.drawing is not None and certificate.drawing.reproducible:
            self._setting["reproducible"] = True
        self._run, self._series = run, secrets.token_hex(8) if run is None else run
        self._paid = 0
        self._owed: dict[str, int] = {}  # steps that are not charged yet, by the name of their checkpoint
        self._origin = None if ledger is None else str(ledger.origin)
        # Without a ledger: which ledger a checkpoint had charged, and for how many steps.
        self._charged: tuple[str | None, int] = (self._origin, 0)

    @classmethod
    def of(
        cls,
        ledger: Ledger | None,
        costs: StepCosts,
        planned: int,
        epoch: int,
        state: Any,
        content: bytes,
        *,
        moved: bool,
    ) -> Charges:
        """The charges of the planned steps; noise over time is charged as a whole, and its run may have a file."""
        releases, _ = costs.releases(planned)
        run = None
        if isinstance(costs.noise, CorrelatedNoise):
            epoch = releases
            if state is not None:
                origin = None if ledger is None else str(ledger.origin)
                run = costs.noise.record_in(state, origin, content, moved=moved)
        return cls(ledger, costs.certificate, costs.budget, costs.rate, releases, epoch, run)

    def pay(self, taken: int) -> None:
        """Makes sure that one more step than those taken is paid for, or raises BudgetExceeded."""
        if self._ledger is None or taken < self._paid:
            return
        for name, steps in list(self._owed.items()):
            self._spend(self._ledger, steps, f"{self._what}, {steps} steps before the checkpoint {name}")
            del self._owed[name]
        count = min(self._epoch, self._planned - taken)
        if not count:  # noise over time is charged as a whole
            return
        self._spend(self._ledger, count, f"{self._what}, steps {taken + 1} to {taken + count}")
        self._paid = taken + count

    def _spend(self, ledger: Ledger, count: int, note: str) -> None:
        key = None if self._run is None else f"training-{self._run}"
        rate, series, planned = self._rate, self._series, self._planned
        ledger.spend(self._certificate, note, count=count, sampling_rate=rate, series=series, planned=planned, key=key)

    def state(self, taken: int) -> dict[str, Any]:
        """What a checkpoint after `taken` steps says about them."""
        ledger, charged = self._charged
        if self._ledger is not None:
            charged = max(0, taken - sum(self._owed.values()))
        steps = {"steps": taken, "setting": dict(self._setting), "checkpoint": secrets.token_hex(8)}
        return steps | {"series": self._series, "ledger": ledger, "charged": charged}

    def load(self, state: Mapping[str, Any], taken: int) -> int:
        """Continues from a checkpoint, when the trainer itself has taken `taken` steps; returns all steps taken."""
        if state["setting"] != self._setting:
            raise InvalidInput(
                f"the checkpoint was made with {state['setting']}, this trainer has {self._setting}: budget, noise, "
                "sampling and what is assumed must be the same, or the steps do not add up"
            )
        before = _check.count("steps", state["steps"] + 1) - 1
        charged = min(before, _check.count("charged", state.get("charged", 0) + 1) - 1)
        name, origin = str(state.get("checkpoint", "")), state.get("ledger")
        series = str(state.get("series", self._series))
        # Steps of the same series are the same steps; those of another training are added.
        self._paid = max(before, taken) if series == self._series else before + taken
        self._series = series
        if self._ledger is None:
            self._charged = origin, charged
            return self._paid
        owed = before - charged * (origin == self._origin)
        paid = name and any(entry.note.endswith(f"before the checkpoint {name}") for entry in self._ledger.history())
        if owed and not paid:
            self._owed[name] = owed
        return self._paid

    def load_over_time(self, state: Mapping[str, Any], taken: int, noise: CorrelatedNoise) -> int:
        """As `load`, for noise over time: a run is charged as a whole, and `noise` continues it.

        A checkpoint without a step has nothing to continue. Its coins are not used: two trainings with the same coins,
        under two ledgers, would be charged as if their batches were independent.
        """
        over_time = state.get("over_time")
        if not isinstance(over_time, Mapping) or bool(over_time["step"]) != bool(state["steps"]):
            raise InvalidInput("the checkpoint is not of a training with noise over time, or is damaged")
        if self._ledger is not None and over_time["step"] and not noise.recorded:
            raise InvalidInput(
                "with a ledger, a checkpoint of noise over time needs state=, the file of its released steps: those "
                "after it may have been released already, and the charge was for one run. Without that file, "
                "start a new training, which is charged separately"
            )
        noise.check_state(over_time)  # refuses before anything counts as charged
        series = self._series
        self.load(state, taken)
        if over_time["step"]:
            noise.load_state_dict(over_time)
        else:
            self._series = series
        return noise.step

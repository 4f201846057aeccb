"""The order of spending, ledgers and checkpoints of a training."""

import math
import os

import pytest
import torch

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from training_cases import BUDGET, in_a_child, parameters, saved, seeded, seeds, silent, step, trainer

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the order of spending ---


def test_a_step_past_the_plan_does_nothing():
    run = trainer(steps=2)
    run.train(2)
    before, spent = parameters(run), run.epsilon()
    with pytest.raises(BudgetExceeded, match="all 2 steps"):
        step(run)
    assert torch.equal(parameters(run), before)
    assert (run.steps, run.epsilon()) == (2, spent)
    with pytest.raises(BudgetExceeded):
        run.train()


def test_a_crash_in_the_optimizer_counts_the_step(monkeypatch):
    run = trainer()
    monkeypatch.setattr(run.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(run)
    assert run.steps == 1
    assert run.epsilon() > 0


@pytest.mark.parametrize("place", ["loss", "noise"])
def test_a_crash_leaves_no_gradient_without_noise(monkeypatch, place):
    """The gradients of the parameters are there for everyone to take, or for another step of the optimizer."""
    run = silent(largest_batch=10)
    step(run)
    working = iter([run.gradients._pass] * 2)  # for two pieces of four
    if place == "loss":
        monkeypatch.setattr(run.gradients, "_pass", lambda *given: next(working)(*given))
    else:
        monkeypatch.setattr(run.noise, "add_", lambda flat: next(iter([])))
    with pytest.raises((StopIteration, InvalidInput), match=r"^$|StopIteration|RuntimeError"):
        step(run)
    assert run.steps == 1 + (place == "noise")
    assert all(not p.grad.any() for p in run.model.parameters())


def on_ledger(ledger, **changes):
    """Four steps an epoch, three epochs."""
    return trainer(
        **{"batch_size": 10, "noise": 0.8, "budget": Budget(4.0, 1e-5), "steps": 12, **changes}, ledger=ledger
    )


def test_the_ledger_is_charged_for_all_steps_before_the_first_and_knows_of_each_epoch(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = on_ledger(ledger)
    assert ledger.history() == []
    seen, real = [], run.gradients.zero
    monkeypatch.setattr(run.gradients, "zero", lambda: (seen.append(sum(e.count for e in ledger.history())), real()))
    run.train(1)
    assert seen == [4, 4, 4, 4]
    assert ledger.spent() >= run._costs.after(12).epsilon(1e-5)
    step(run, 0, 3)
    assert seen[4] == 8
    assert [(e.count, e.planned, e.sampling_rate) for e in ledger.history()] == [(4, 12, 0.25), (4, 12, 0.25)]
    assert ledger.history()[1].note == "private SGD, steps 5 to 8"


def test_a_training_that_does_not_fit_the_ledger_takes_no_step(tmp_path):
    ledger = Ledger(tmp_path / "ledger", BUDGET)
    run = on_ledger(ledger)
    before = parameters(run)
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        run.train(1)
    assert torch.equal(parameters(run), before)
    assert run.steps == 0
    assert ledger.history() == []


def test_noise_that_cannot_be_drawn_costs_nothing(tmp_path, monkeypatch):
    from matrixdp.secure import kernels

    def fails(*given, **options):
        raise ImportError("no compiler")

    monkeypatch.setattr(kernels, "add_noise", fails)
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    with pytest.raises(ImportError):
        on_ledger(ledger).train(1)
    assert ledger.history() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trainer_belongs_to_the_process_that_made_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = on_ledger(ledger)
    batches = run.batches(1)
    run.step(next(batches))
    drawn, state = next(batches), run.state_dict()
    before = [entry.note for entry in ledger.history()]
    for attempt in (
        lambda: run.train(1),
        lambda: run.step(drawn),
        lambda: next(batches),
        lambda: next(run.batches()),
        lambda: run.load_state_dict(state),
    ):
        said = in_a_child(attempt)
        assert said.startswith("InvalidInput: the trainer belongs to process")
        assert "make a new PrivateSGD" in said
    assert [entry.note for entry in ledger.history()] == before
    run.step(drawn)
    assert run.steps == 2


def test_a_checkpoint_keeps_what_was_spent():
    first, second = trainer(), trainer()
    first.train(3)
    state = saved(first)
    second.load_state_dict(state)
    assert torch.equal(parameters(first), parameters(second))
    assert (second.steps, second.epsilon()) == (3, first.epsilon())
    second.train(7)
    with pytest.raises(BudgetExceeded):
        second.train()
    second.load_state_dict(state)  # an older model comes back, what was spent does not
    assert torch.equal(parameters(first), parameters(second))
    assert second.steps == 10
    with pytest.raises(BudgetExceeded):
        second.train()


def test_steps_of_another_training_come_on_top():
    first, second = trainer(), trainer()
    first.train(4)
    second.train(5)
    own = first.state_dict()
    first.load_state_dict(second.state_dict())
    assert (first.steps, first.epsilon()) == (9, trainer()._costs.after(9).epsilon(BUDGET.delta))
    first.load_state_dict(own)  # nothing is forgotten on the way back
    assert first.steps >= 9


@pytest.mark.parametrize(
    "changes",
    [{"budget": Budget(2.0, 1e-5)}, {"budget": Budget(3.0, 1e-6)}, {"batch_size": 20}, {"steps": 11}, {"clip": 0.6},
     {"clipping": "linf"}, {"noise": 3.0}],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_of_another_setting_is_refused(changes):
    run = trainer()
    before = parameters(run)
    with pytest.raises(InvalidInput, match="checkpoint"):
        run.load_state_dict(trainer(**changes).state_dict())
    assert torch.equal(parameters(run), before)


@seeds
def test_a_seeded_checkpoint_is_no_private_one():
    with pytest.raises(InvalidInput, match="checkpoint"):
        trainer().load_state_dict(seeded(0).state_dict())
    with pytest.raises(InvalidInput, match="checkpoint"):
        trainer(noise=3.0).load_state_dict(seeded(0, noise=3.0).state_dict())


@pytest.mark.parametrize("steps", [-1, 2.5, None, math.nan])
def test_a_damaged_checkpoint_is_refused(steps):
    run = trainer()
    with pytest.raises((InvalidInput, TypeError)):
        run.load_state_dict({**run.state_dict(), "steps": steps})


def test_a_checkpoint_that_fails_half_way_has_spent_all_the_same():
    run = trainer()
    with pytest.raises(ValueError, match="parameter group"):
        run.load_state_dict({**run.state_dict(), "steps": 6, "optimizer": {"param_groups": [], "state": {}}})
    assert run.steps == 6


def uses(ledger):
    return [entry.count for entry in ledger.history()]


def test_steps_after_a_checkpoint_use_up_what_was_planned(tmp_path):
    """A checkpoint in the middle of an epoch: what was marked as used and not taken is lost, and never taken twice."""
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = on_ledger(ledger)
    step(run, 0, 3)
    state, spent = saved(run), ledger.spent()
    run.load_state_dict(state)
    step(run, 0, 3)
    assert uses(ledger) == [4, 4]
    assert ledger.history()[1].note == "private SGD, steps 2 to 5"
    resumed = [on_ledger(ledger) for _ in range(2)]
    for other in resumed:
        other.load_state_dict(state)
    resumed[0].train(1)
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        resumed[1].train(1)
    assert uses(ledger) == [4, 4, 4]
    assert resumed[1].steps == 1
    assert ledger.spent() == spent


def test_a_checkpoint_without_a_ledger_owes_its_steps_to_the_next_one(tmp_path):
    free = on_ledger(None)
    free.train(2)
    state = saved(free)
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = on_ledger(ledger)
    run.load_state_dict(state)
    assert uses(ledger) == []  # a model may be looked at
    run.train(1)
    assert uses(ledger) == [8, 4]
    assert "8 steps before the checkpoint" in ledger.history()[0].note
    assert {entry.planned for entry in ledger.history()} == {12}
    assert len({entry.series for entry in ledger.history()}) == 1
    assert run.epsilon() <= ledger.spent() <= 4.0
    with pytest.raises(BudgetExceeded):
        run.train(1)
    again = on_ledger(ledger)  # the debt is paid once, and there are no steps left
    again.load_state_dict(state)
    with pytest.raises(BudgetExceeded):
        again.train(1)
    assert (uses(ledger), again.steps) == ([8, 4], 8)


def test_a_ledger_without_room_for_earlier_steps_allows_none(tmp_path):
    free = on_ledger(None)
    free.train(2)
    ledger = Ledger(tmp_path / "ledger", Budget(3.0, 1e-5))
    run = on_ledger(ledger)
    run.load_state_dict(saved(free))
    before = parameters(run)
    with pytest.raises(BudgetExceeded, match="nothing was spent"):
        run.train(1)
    assert torch.equal(parameters(run), before)
    assert (uses(ledger), run.steps) == ([], 8)


def test_each_ledger_gets_what_it_was_not_charged_for(tmp_path):
    """4 steps under one ledger, 4 under none, 4 under the first again; and the same under a second ledger."""
    ledgers = [Ledger(tmp_path / name, Budget(4.0, 1e-5)) for name in ("one", "two")]
    first = on_ledger(ledgers[0])
    first.train(1)
    second = on_ledger(None)
    second.load_state_dict(saved(first))
    second.train(1)
    for ledger, expected in zip(ledgers, ([4, 4, 4], [8, 4]), strict=True):
        run = on_ledger(ledger)
        run.load_state_dict(saved(second))
        debt = saved(run)
        run = on_ledger(ledger)  # a checkpoint of what is not paid yet
        run.load_state_dict(debt)
        run.train(1)
        assert uses(ledger) == expected
        assert run.steps == 12

"""Trainings with noise over time that are resumed: each step is one release, by checkpoint, ledger and state."""

import contextlib
import itertools
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput, StreamError
from matrixdp.learn import correlated_noise
from matrixdp.learn.correlated_noise import CorrelatedNoise
from matrixdp.sensitivity import Participation
from matrixdp.streams import Stream
from time_cases import correlated, over_time, public
from training_cases import BUDGET, DATA, RECORDS, SIZE, parameters, saved, seeds, trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def dropout():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 2))


@pytest.mark.parametrize("order", ["sampled", "fixed"])
def test_a_training_that_is_resumed_is_the_same_training(order):
    """A process that is killed after a checkpoint loses steps; taken again, they have the same noise, not a second."""
    first = correlated(order, model=dropout())
    batches = first.batches(3)
    for batch in itertools.islice(batches, 4):
        first.step(batch)
    state, grads = saved(first), []
    for batch in itertools.islice(batches, 8):
        first.step(batch)
        grads.append(first.gradients.flat.clone())
    again = correlated(order, model=dropout())
    again.load_state_dict(state)
    assert (again.steps, again.epsilon()) == (4, again._costs.after(4).epsilon(BUDGET.delta))
    taken = []
    for batch in itertools.islice(again.batches(3), 8):
        again.step(batch)
        taken.append(again.gradients.flat.clone())
    assert all(map(torch.equal, grads, taken))
    assert torch.equal(parameters(first), parameters(again))
    with pytest.raises(BudgetExceeded):
        again.train()


def test_another_sum_at_the_same_step_has_other_noise():
    first, second = correlated("fixed"), correlated("fixed")
    second.noise.load_state_dict(first.noise.state_dict())
    zeros, ones = torch.zeros(SIZE, dtype=torch.float64), torch.full((SIZE,), 2.0**-9, dtype=torch.float64)
    first.noise.add_(zeros)
    second.noise.add_(ones)
    # the same noise would leave the rounding alone in all 40 entries; by chance it is as little in 6 with 1e-13
    near = (ones - 2.0**-9 - zeros).abs() < 1e-3 * first.noise.law.covariance.std
    assert int(near.sum()) < 6


@pytest.mark.parametrize("charged", [True, False])
def test_a_ledger_allows_no_second_run_from_a_checkpoint(tmp_path, charged):
    """Each would release the same steps with another sum, and the charge is for one run."""
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = correlated(ledger=ledger if charged else None)
    run.step(next(iter(run)))
    state, history, again = saved(run), ledger.history(), correlated(ledger=ledger)
    before = parameters(again)
    with pytest.raises(InvalidInput, match=r"with a ledger, .* needs state=.* start a new training"):
        again.load_state_dict(state)
    assert (again.steps, again.noise.step, ledger.history()) == (0, 0, history)
    assert torch.equal(parameters(again), before)
    with pytest.raises(BudgetExceeded) if charged else contextlib.nullcontext():
        again.train(1)  # a training of its own, with a charge of its own
    assert "second release" in str(again)


def test_batches_drawn_before_a_checkpoint_was_loaded_are_refused():
    """It brings other coins: a record of a batch drawn before could be in the next one too."""
    other, run = correlated("fixed"), correlated("fixed")
    other.step(next(iter(other)))
    state, batches = saved(other), run.batches()
    batch = next(batches)
    run.load_state_dict(state)
    for old in (batch, next(batches)):
        with pytest.raises(InvalidInput, match=r"Draw new batches|left out"):
            run.step(old)
    assert (run.steps, run.noise.step) == (1, 1)
    run.train(1)
    assert run.steps == 6


def test_trainings_from_one_checkpoint_without_a_step_share_no_coins(tmp_path):
    """Each has a ledger of its own, which takes its batches for independent of all others."""
    state, runs = saved(correlated()), []
    for name in ("one", "two"):
        run = correlated(ledger=Ledger(tmp_path / name, Budget(4.0, 1e-5)))
        run.load_state_dict(state)
        runs.append(run)
    assert runs[0].noise._key.expose() != runs[1].noise._key.expose()
    assert [runs[0].noise.batch(t) for t in range(8)] != [runs[1].noise.batch(t) for t in range(8)]
    runs[0].train(1)
    assert len(runs[0].ledger.history()) == 1


def test_checkpoints_of_other_trainings_are_refused():
    run = correlated()
    run.train(1)
    state = saved(run)
    for other in (trainer(batch_size=8, steps=12), correlated(bands=2), correlated("fixed"), correlated(steps=13)):
        with pytest.raises(InvalidInput):
            other.load_state_dict(state)
        assert other.steps == 0
    with pytest.raises(InvalidInput, match="before the first step"):
        run.load_state_dict(state)
    with pytest.raises(InvalidInput, match="not of a training with noise over time"):
        correlated().load_state_dict(saved(trainer(batch_size=8, steps=12)))
    with pytest.raises(InvalidInput, match="part of the guarantee"):
        run.noise.groups = 2


def test_a_checkpoint_fits_one_strategy_and_one_number_of_records():
    """The rest of what is public can agree: with the same size of noise, mu is the same for many strategies."""
    law = over_time([1.0, 0.5], 12, SIZE, 9.0)
    run = CorrelatedNoise(public(size=SIZE, steps=12), law, 4)
    run.add_(torch.zeros(SIZE, dtype=torch.float64))
    state = run.state_dict()
    CorrelatedNoise(run.training, law, 4).load_state_dict(state)
    others = (
        (public(size=SIZE, steps=12), over_time([0.5, 1.0], 12, SIZE, 9.0), 4),
        (public(size=SIZE, steps=12), over_time([1.0, 0.5], 12, SIZE, 9.0, inverse=True), 4),
        (public(size=SIZE, steps=12), over_time([1.0, 0.5], 12, SIZE, 9.5), 4),
        (public(size=SIZE, steps=12), law, 2),
        (public(size=SIZE, steps=12, records=39), law, 4),
        (public(size=SIZE, steps=12, batch_size=6), law, 4),
    )
    for training, noise, groups in others:
        other = CorrelatedNoise(training, noise, groups)
        with pytest.raises(InvalidInput, match="another training"):
            other.load_state_dict(state)
        assert other.step == 0
    with pytest.raises(InvalidInput, match="another training"):
        CorrelatedNoise(run.training, law, 4).load_state_dict({k: v for k, v in state.items() if k != "law"})


def test_a_damaged_checkpoint_is_refused_and_changes_nothing():
    run = correlated("fixed")
    run.train(1)
    damages = ({"step": 0}, {"step": 13}, {"history": None}, {"history": torch.zeros(2, SIZE)}, {"key": "00"})
    for damage in damages:
        other, state = correlated("fixed"), saved(run)
        state["over_time"].update(damage)
        with pytest.raises(InvalidInput):
            other.load_state_dict(state)
        assert (other.steps, other.noise.step) == (0, 0)
        assert other.state_dict()["charged"] == 0


# --- a state: the file of the steps that were released ---


def recorded(folder, **changes):
    """A trainer with a ledger that has room for one run, and a state."""
    ledger = Ledger(folder / "ledger", Budget(4.0, 1e-5))
    usual = {"order": "fixed", "ledger": ledger, "state": folder / "run.state", "model": dropout()}
    return correlated(**usual | changes)


def taken(run, steps):
    """The next steps: what each of them releases."""
    found = []
    for batch in itertools.islice(run.batches(3), steps):
        run.step(batch)
        found.append(run.gradients.flat.clone())
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"noise": "inverse-banded", "memory": "redrawn"}, {"order": "sampled"}],
    ids=["kept", "redrawn", "sampled"],
)
def test_with_a_state_a_charged_training_goes_on_after_every_crash(tmp_path, changes):
    """Any number of processes, from any checkpoint or from none, release one run, which is charged once."""

    def run():
        return recorded(tmp_path, **changes)

    first = run()
    released = taken(first, 3)
    state = saved(first)
    released += taken(first, 5)
    lost = run()  # with no checkpoint at all
    assert all(map(torch.equal, released, taken(lost, 8)))
    for again in (run(), run()):
        again.load_state_dict(state)
        assert again.steps == 3
        assert all(map(torch.equal, released[3:], taken(again, 5)))
    released += taken(again, 4)
    assert all(map(torch.equal, released, taken(run(), 12)))
    (entry,) = Ledger(tmp_path / "ledger").history()
    assert entry.count == entry.planned
    with pytest.raises(BudgetExceeded):
        again.train()
    assert "second release" not in str(again)
    assert state["over_time"]["key"] == ""
    assert (tmp_path / "run.state").stat().st_mode & 0o777 == 0o600


def test_a_step_that_was_released_is_not_released_with_another_sum(tmp_path):
    """A second continuation of a checkpoint, with another learning rate: its second step would be a second release."""
    first = recorded(tmp_path)
    taken(first, 2)
    state = saved(first)
    taken(first, 3)
    other = recorded(tmp_path, learning_rate=0.1)
    other.load_state_dict(state)
    other.optimizer.param_groups[0]["lr"] = 0.1  # which the checkpoint has brought back
    taken(other, 1)
    with pytest.raises(InvalidInput, match="step 4 was released with another sum of gradients"):
        taken(other, 1)
    assert not other.gradients.flat.any()
    taken(first, 1)  # the first goes on


def test_a_step_is_on_the_disk_before_its_noise_is_drawn(tmp_path, monkeypatch):
    """A process that dies in between has released nothing, and the step can be taken again, with the same sum."""
    run = recorded(tmp_path)
    taken(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(correlated_noise, "add_grid_noise", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            taken(run, 1)
    assert len(run.noise._released) == 2
    assert len(taken(recorded(tmp_path), 3)) == 3
    other = recorded(tmp_path, state=tmp_path / "other.state", ledger=None)
    with monkeypatch.context() as patched:
        patched.setattr(other.noise._released, "admit", lambda *given: 1 / 0)
        patched.setattr(correlated_noise, "add_grid_noise", lambda *given: pytest.fail("drawn before it was written"))
        with pytest.raises(ZeroDivisionError):
            other.noise.add_(torch.zeros(other.noise.training.size, dtype=torch.float64))


def test_states_that_were_copied_or_put_back_are_refused(tmp_path):
    path, mark = tmp_path / "run.state", tmp_path / "run.state.mark"
    run = recorded(tmp_path)
    taken(run, 2)
    earlier = path.read_bytes()
    taken(run, 2)
    state = saved(run)
    shutil.copy(path, tmp_path / "copy.state")
    with pytest.raises(StreamError, match="is a copy, or was moved"):
        recorded(tmp_path, state=tmp_path / "copy.state")
    path.write_bytes(earlier)  # in place
    for attempt in (lambda: taken(run, 1), lambda: recorded(tmp_path)):
        with pytest.raises(StreamError, match="reset to an earlier state"):
            attempt()
    mark.unlink()  # so that it cannot be seen by the file alone
    again = recorded(tmp_path)
    with pytest.raises(StreamError, match="fewer steps than the checkpoint"):
        again.load_state_dict(state)
    assert (again.steps, again.noise.step) == (0, 0)
    path.chmod(0o640)
    with pytest.raises(StreamError, match="chmod 600"):
        recorded(tmp_path)


def test_a_state_is_for_one_training_and_one_ledger(tmp_path):
    run = recorded(tmp_path)
    taken(run, 2)
    for changes in ({"steps": 13}, {"bands": 2}, {"order": "sampled"}, {"noise": "inverse-banded"}, {"batch_size": 4}):
        with pytest.raises(InvalidInput, match="begun with other settings"):
            recorded(tmp_path, **changes)
    for ledger in (None, Ledger(tmp_path / "second", Budget(4.0, 1e-5))):
        with pytest.raises(InvalidInput, match="ledger must be the one"):
            recorded(tmp_path, ledger=ledger)
    with pytest.raises(InvalidInput, match="give state="):
        correlated("fixed", model=dropout()).load_state_dict(saved(run))
    free = correlated("fixed", model=dropout())
    free.train(1)
    with pytest.raises(InvalidInput, match="another run"):
        recorded(tmp_path).load_state_dict(saved(free))
    begun = Stream(steps=3, sensitivity=Participation(1.0), budget=BUDGET, state=tmp_path / "day.stream", shape=(1,))
    with pytest.raises(StreamError, match="not a training"):
        recorded(tmp_path, state=tmp_path / "day.stream")
    assert len(begun) == 0


def test_a_state_is_for_one_order_of_the_same_data(tmp_path):
    """The steps of a record follow from its place: elsewhere, it could take part again, in steps of another one."""
    run = recorded(tmp_path)
    taken(run, 1)
    inputs, targets = DATA.tensors
    others = (
        {"data": TensorDataset(inputs.flip(0), targets.flip(0))},
        {"data": TensorDataset(inputs, 1 - targets)},
        {"data": TensorDataset(inputs.double(), targets)},
        {"data": list(DATA)},
        {"ids": range(RECORDS)},
    )
    for changes in others:
        with pytest.raises(InvalidInput, match="begun with other data, another order"):
            recorded(tmp_path, **changes)
    same = recorded(tmp_path, data=TensorDataset(inputs.clone(), targets.clone()))
    assert len(taken(same, 2)) == 2
    listed = recorded(tmp_path, data=list(DATA), state=tmp_path / "listed.state")
    assert "the same records in the same order are assumed" in str(listed)
    assert "the same records in the same order are assumed" not in str(same)


def test_a_state_is_for_one_order_of_ids(tmp_path):
    ids = [i % 20 for i in range(RECORDS)]
    recorded(tmp_path, ids=ids, batch_size=4)
    recorded(tmp_path, ids=[f"p{i}" for i in ids], batch_size=4)  # other names of the same units
    with pytest.raises(InvalidInput, match="or other ids"):
        recorded(tmp_path, ids=sorted(ids), batch_size=4)


@seeds
def test_a_state_is_for_secret_noise_over_time(tmp_path):
    for changes in ({"generator": torch.Generator(), "ledger": None}, {"noise": "analytic", "bands": None}):
        with pytest.raises(InvalidInput, match="state is for noise over time"):
            recorded(tmp_path, **changes)
    assert not (tmp_path / "run.state").exists()

"""The Flower apps, with Flower's messages and a grid that hands them over in this process."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch import nn

from flower_grid import HereGrid, task  # noqa: F401
from matrixdp import Budget, Ledger
from matrixdp.errors import InvalidInput
from matrixdp.federated import ClientLevel, LocalTraining, RecordLevel, SplitPlan, horizontal, vertical
from matrixdp.federated.flower import FAILED

BUDGET = Budget(3.0, 1e-5)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def data(number):
    x = np.random.default_rng(number).normal(size=(30, 4))
    return x, (x[:, 0] > 0).astype(np.int64)


def play(server, grid):
    server(grid, Context(7, 1, {}, RecordDict(), {}))


def client_app(folder, clients=3, rounds=2, **changes):
    settings = {"training": LocalTraining(), "privacy": ClientLevel(budget=BUDGET, rounds=rounds, clip=0.1)}
    return horizontal.client_app(model, data, clients=clients, folder=folder, **{**settings, **changes})


def run_of(grid, clients=3, **settings):
    rounds = []
    play(horizontal.server_app(model, clients=clients, on_round=rounds.append, **settings), grid)
    return rounds


def notes(folder):
    return [entry.note.split(", plan ")[0] for entry in Ledger(folder / "budget.db").history()]


def test_rounds_go_on_without_clients_that_have_spent_their_budget(tmp_path):
    rounds = run_of(
        HereGrid(client_app(tmp_path), 3), rounds=3, evaluate=lambda network: {"weight": float(network.weight.sum())}
    )
    assert [done.updates for done in rounds] == [3, 3, 0]
    assert set(rounds[2].declined.values()) == {f"the budget ({BUDGET}) is spent"}
    assert rounds[2].metrics == rounds[1].metrics != rounds[0].metrics
    assert str(rounds[2]).startswith("round 3: 0 updates, 3 declined, 0 silent, weight")
    for number in range(3):
        assert notes(tmp_path / f"client-{number}") == ["run 7 round 1", "run 7 round 2"]


def test_the_model_moves_by_the_mean_of_the_updates(tmp_path):
    ends = []
    run_of(HereGrid(client_app(tmp_path), 3), rounds=1, on_end=ends.append)
    updates = [np.load(tmp_path / f"client-{n}" / "run-7.npz")["reply.update"] for n in range(3)]
    moved = np.concatenate([p.detach().numpy().ravel() for p in ends[0].parameters()])
    start = np.concatenate([p.detach().numpy().ravel() for p in model().parameters()])
    assert np.allclose(moved - start, np.mean(updates, axis=0), atol=1e-5)


def test_too_few_updates_leave_the_model_as_it_is(tmp_path):
    ends = []
    grid = HereGrid(client_app(tmp_path), 3, silent=[101])
    rounds = run_of(grid, rounds=1, min_replies=3, timeout=0.3, on_end=ends.append)
    assert (rounds[0].updates, rounds[0].silent) == (2, (101,))
    assert torch.equal(ends[0].weight, model().weight)


def test_a_silent_client_is_waited_for_once_and_asked_again(tmp_path):
    grid = HereGrid(client_app(tmp_path, rounds=3), 3, silent=[101])
    rounds, clock, begun = [], [], time.monotonic()

    def on_round(done):
        rounds.append(done)
        clock.append(time.monotonic() - begun)

    play(horizontal.server_app(model, clients=3, rounds=3, timeout=2.0, on_round=on_round), grid)
    assert [done.updates for done in rounds] == [2, 2, 2]
    assert grid.asked.count(101) == 3
    assert clock[0] >= 2.0
    assert clock[2] - clock[0] < 2.0


def test_a_client_that_comes_back_as_another_node_takes_part_again(tmp_path):
    grid = HereGrid(client_app(tmp_path, rounds=3), 3)
    ask = grid.push_messages

    def restarted(messages):
        names = ask(messages)
        grid.nodes = [100, 101, 202] if len(grid.asked) == 3 else grid.nodes
        return names

    grid.push_messages, grid.moved = restarted, {202: 102}
    assert [done.updates for done in run_of(grid, rounds=3)] == [3, 3, 3]
    assert grid.asked[3:] == [100, 101, 202] * 2
    assert len(notes(tmp_path / "client-2")) == 3


def test_an_error_on_a_client_sends_nothing_but_that_there_was_one(tmp_path):
    def secret(number):
        if number == 1:
            raise ValueError("the records are 1 2 3")
        return data(number)

    app = horizontal.client_app(
        model,
        secret,
        clients=3,
        training=LocalTraining(),
        privacy=ClientLevel(budget=BUDGET, rounds=1, clip=0.1),
        folder=tmp_path,
    )
    rounds = run_of(HereGrid(app, 3), rounds=1)
    assert rounds[0].updates == 2
    assert rounds[0].declined == {101: FAILED}


def test_records_that_are_not_finite_keep_their_client_out(tmp_path):
    def broken(number):
        x, y = data(number)
        x[0, 0] = math.nan if number == 2 else 0.0
        return x, y

    app = horizontal.client_app(
        model,
        broken,
        clients=3,
        training=LocalTraining(),
        privacy=ClientLevel(budget=BUDGET, rounds=1, clip=0.1),
        folder=tmp_path,
    )
    rounds = run_of(HereGrid(app, 3), rounds=1)
    assert rounds[0].declined == {102: FAILED}
    assert not (tmp_path / "client-2").exists()


def test_updates_that_cannot_be_used_are_left_out(tmp_path, monkeypatch):
    grid = HereGrid(client_app(tmp_path), 3)
    monkeypatch.setattr(horizontal.Client, "upload", lambda self, run, number, parameters: parameters * np.nan)
    assert run_of(grid, rounds=1)[0].updates == 0
    monkeypatch.setattr(horizontal.Client, "upload", lambda self, run, number, parameters: parameters[1:])
    assert run_of(grid, rounds=1)[0].updates == 0
    monkeypatch.setattr(horizontal.Client, "upload", lambda self, run, number, parameters: np.array(["a"] * 10))
    assert run_of(grid, rounds=1)[0].updates == 0


@pytest.mark.parametrize("records", [{}, {"arrays": ArrayRecord()}, {"refusal": ConfigRecord()}])
def test_replies_of_another_form_do_not_end_the_run(tmp_path, records):
    app = client_app(tmp_path)

    def odd(message, context):
        reply = app(message, context)
        return Message(RecordDict(records), reply_to=message) if context.node_id == 101 else reply

    (done,) = run_of(HereGrid(odd, 3), rounds=1)
    assert (done.updates, list(done.declined)) == (2, [101])


def test_the_number_of_clients_must_be_right(tmp_path):
    with pytest.raises(InvalidInput, match="4 participants were expected and 3 are connected"):
        run_of(HereGrid(client_app(tmp_path), 3), clients=4, rounds=1, wait=0.2)
    rounds = run_of(HereGrid(client_app(tmp_path, clients=2), 3, partitions=3), rounds=1)
    assert set(rounds[0].declined.values()) == {FAILED}
    with pytest.raises(InvalidInput, match="min_replies must be at most"):
        horizontal.server_app(model, clients=3, rounds=1, min_replies=4)


def test_wrong_settings_show_when_the_app_is_made(tmp_path):
    with pytest.raises(InvalidInput, match="must be one of"):
        client_app(tmp_path, privacy=ClientLevel(budget=BUDGET, rounds=1, clip=1.0, mechanism="noise"))
    by_record = RecordLevel(budget=BUDGET, rounds=1, clip=1.0)
    client_app(tmp_path, privacy=by_record)
    with pytest.raises(InvalidInput, match="no option 'colour'"):
        client_app(tmp_path, privacy=replace(by_record, options={"colour": 1}))
    with pytest.raises(InvalidInput, match="BatchNorm"):
        horizontal.client_app(
            lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False)),
            data,
            clients=3,
            training=LocalTraining(),
            privacy=by_record,
            folder=tmp_path,
        )


def split(folder, epochs=2, run=7, silent=(), **settings):
    """A vertical run of so many epochs, where the participants have agreed on two."""
    plan = SplitPlan(records=30, epochs=2, batch_size=10, budget=BUDGET)
    longer = SplitPlan(records=30, epochs=epochs, batch_size=10, budget=BUDGET)

    def network(number):
        torch.manual_seed(number)
        return nn.Linear(2, 3)

    def attributes(number):
        x, _ = data(0)
        return x[:, 2 * number : 2 * number + 2], x[:5, 2 * number : 2 * number + 2]

    made, epochs_done = vertical.client_app(network, attributes, plan=plan, folder=folder), []
    grid = HereGrid(made, 2, silent=silent, run=run)
    server = vertical.server_app(
        lambda: nn.Linear(6, 2), lambda: data(0)[1], plan=longer, on_epoch=epochs_done.append, **settings
    )
    play(server, grid)
    return epochs_done


def test_a_vertical_run(tmp_path):
    ends = []
    epochs = split(tmp_path, evaluate=lambda outputs: {"rows": float(len(outputs))}, on_end=ends.append)
    assert [(done.number, done.metrics, done.ended) for done in epochs] == [
        (1, {"rows": 5.0}, ""),
        (2, {"rows": 5.0}, ""),
    ]
    for number in (0, 1):
        expected = [f"run 7 epoch {epoch} {what}" for epoch in (0, 1) for what in ("features", "training")]
        assert notes(tmp_path / f"participant-{number}") == expected
    assert len(ends) == 1


def vertical_discriminant(folder, label=None, **settings):
    """Two classes far apart, one fixed feature from each participant, and a top network that knows nothing."""
    truth = np.arange(2000) % 2
    inputs = (4.0 * truth - 2.0)[:, None]
    plan = SplitPlan(records=2000, epochs=1, batch_size=500, budget=Budget(8.0, 1e-5), update_share=0.0)

    def constant(features, weight):
        made = nn.Linear(features, 2 if weight == 0 else 1)
        nn.init.constant_(made.weight, weight)
        return made

    app = vertical.client_app(lambda _: constant(1, 1.0), lambda _: (inputs, inputs[:50]), plan=plan, folder=folder)
    epochs, ends = [], []
    server = vertical.server_app(
        lambda: constant(2, 0),
        lambda: truth if label is None else label,
        plan=plan,
        learning_rate=0.0,
        evaluate=lambda outputs: {"right": float(np.mean(outputs.argmax(1).numpy() == truth[:50]))},
        on_epoch=epochs.append,
        on_end=ends.append,
        **settings,
    )
    play(server, HereGrid(app, 2))
    return epochs[-1].metrics["right"], ends[0]


def test_a_discriminant_decides_where_the_top_network_has_learned_nothing(tmp_path):
    # means of 1,000 features are within 0.2 of the truth but once in 1e6, and the features are about 0.96 from 0
    right, network = vertical_discriminant(tmp_path / "a")
    assert right == 1.0
    assert float(network.weight.detach().abs().sum()) > 0
    right, network = vertical_discriminant(tmp_path / "b", discriminant=False)
    assert right < 0.6
    assert float(network.weight.detach().abs().sum()) == 0


def test_a_discriminant_needs_classes_before_anything_is_spent(tmp_path):
    with pytest.raises(InvalidInput, match="labels must be classes"):
        vertical_discriminant(tmp_path, label=np.linspace(0, 1, 2000))
    assert not list(tmp_path.iterdir())


def test_a_vertical_run_ends_when_a_participant_cannot_go_on(tmp_path):
    assert split(tmp_path)[-1].ended == ""
    again = split(tmp_path, run=8)
    assert [(done.number, done.ended) for done in again] == [(0, f"node 100 declined: the budget ({BUDGET}) is spent")]
    assert Ledger(tmp_path / "participant-0" / "budget.db").spent() <= BUDGET.epsilon
    gone = split(tmp_path / "b", silent=[101], timeout=0.2, retries=1)
    assert gone[-1].ended == "no reply from node 101"
    longer = split(tmp_path / "c", epochs=3)
    assert [(done.number, done.ended) for done in longer] == [
        (1, ""),
        (2, "no features for step 6: a participant has another plan"),
    ]


@pytest.mark.parametrize("times", [1, 2])
def test_where_a_process_has_died_the_participant_is_asked_again(tmp_path, monkeypatch, times):
    deaths, push = [101] * times, HereGrid.push_messages

    def dying(self, messages):
        names = push(self, messages)
        for name, message in zip(names, messages, strict=True):
            if message.metadata.dst_node_id in deaths:
                deaths.pop()
                self.replies[name] = Message(Error(ErrorCode.CLIENT_APP_CRASHED), reply_to=message)
        return names

    monkeypatch.setattr(HereGrid, "push_messages", dying)
    last = split(tmp_path, retries=1)[-1]
    died = f"node 101 failed: an error on the way, code {ErrorCode.CLIENT_APP_CRASHED}"
    assert (last.number, last.ended) == ((2, "") if times == 1 else (0, died))
    assert len(notes(tmp_path / "participant-1")) == (4 if times == 1 else 2)


def test_evaluation_of_networks_that_are_not_private_is_refused():
    plan = SplitPlan(records=30, epochs=1, batch_size=10, budget=BUDGET, unit="participant")
    with pytest.raises(InvalidInput, match="would reveal them"):
        vertical.server_app(model, lambda: data(0)[1], plan=plan, evaluate=lambda outputs: {})

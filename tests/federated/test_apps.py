"""The Flower apps, with Flower's messages and a grid that hands them over in this process."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch import nn

from flower_grid import HereGrid, task  # noqa: F401
from horizontal_clients import BUDGET, client_app, data, model
from matrixdp import Budget, Ledger
from matrixdp.errors import InvalidInput
from matrixdp.federated import ClientLevel, RecordLevel, SplitPlan, SplitServer, flower, horizontal, vertical
from matrixdp.federated.flower import FAILED


def play(server, grid):
    server(grid, Context(7, 1, {}, RecordDict(), {}))


def run_of(grid, clients=3, **settings):
    rounds = []
    play(horizontal.server_app(model, clients=clients, on_round=rounds.append, **settings), grid)
    return rounds


def notes(folder):
    return [entry.note.split(", plan ")[0] for entry in Ledger(folder / "budget.db").history()]


def test_rounds_go_on_without_clients_that_have_spent_their_budget(tmp_path):
    def size(network):
        return {"weight": float(network.weight.double().norm())}  # a sum of noise on a grid may be 0, with 2e-6

    rounds = run_of(HereGrid(client_app(tmp_path), 3), rounds=3, evaluate=size)
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


def test_a_silent_client_is_waited_for_once_and_asked_again(tmp_path, monkeypatch):
    """By a clock that runs while the server sleeps: in the first round until the timeout, then not at all."""
    grid, clock, times = HereGrid(client_app(tmp_path, rounds=3), 3, silent=[101]), [0.0], []

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    rounds = run_of(grid, rounds=3, timeout=2.0, evaluate=lambda _: times.append(clock[0]) or {})
    assert [done.updates for done in rounds] == [2, 2, 2]
    assert grid.asked.count(101) == 3
    assert times[0] > 2.0
    assert times[0] == times[1] == times[2]


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

    rounds = run_of(HereGrid(client_app(tmp_path, data=secret), 3), rounds=1)
    assert rounds[0].updates == 2
    assert rounds[0].declined == {101: FAILED}


def test_records_that_are_not_finite_keep_their_client_out(tmp_path):
    def broken(number):
        x, y = data(number)
        x[0, 0] = math.nan if number == 2 else 0.0
        return x, y

    rounds = run_of(HereGrid(client_app(tmp_path, data=broken), 3), rounds=1)
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
    mixing = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(InvalidInput, match="BatchNorm"):
        client_app(tmp_path, model=lambda: mixing, privacy=by_record)


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
    truth = np.arange(8000) % 2
    inputs = (4.0 * truth - 2.0)[:, None]
    plan = SplitPlan(records=8000, epochs=1, batch_size=2000, budget=Budget(8.0, 1e-5), update_share=0.0)

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
    # The middle between the means has an error of 0.013 (std) per feature. The covariance here is noise alone, and its
    # floor of 1e-3 lets at most 16 times as much count, if it is turned so; classes are 2.7 apart: 1e-10 at 6 stds.
    right, network = vertical_discriminant(tmp_path / "a")
    assert right == 1.0
    assert float(network.weight.detach().abs().sum()) > 0
    right, network = vertical_discriminant(tmp_path / "b", discriminant=False)
    assert right < 0.6
    assert float(network.weight.detach().abs().sum()) == 0


@pytest.mark.parametrize("discriminant", [True, False])
def test_where_a_discriminant_decides_gradients_are_standardized(tmp_path, monkeypatch, discriminant):
    """Otherwise the offset of a feature moves until tanh is saturated, at a pace that the top network decides."""
    got, answer = [], vertical.SplitClient.answer

    def recorded(self, run, step, gradient):
        got.append(gradient)
        return answer(self, run, step, gradient)

    monkeypatch.setattr(vertical.SplitClient, "answer", recorded)
    split(tmp_path, discriminant=discriminant)
    gradients = [gradient for gradient in got if gradient is not None]
    assert len(gradients) == 12
    for gradient in gradients:
        found = (*gradient.mean(axis=0), *(np.mean(gradient**2, axis=0) - 1))
        assert np.allclose(found, 0.0, atol=1e-5) is discriminant


def test_a_gradient_of_zero_stays_zero():
    assert np.array_equal(SplitServer.standardized(np.zeros((5, 2), np.float32)), np.zeros((5, 2)))


def test_a_discriminant_needs_classes_before_anything_is_spent(tmp_path):
    with pytest.raises(InvalidInput, match="labels must be classes"):
        vertical_discriminant(tmp_path, label=np.linspace(0, 1, 8000))
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

"""Any Flower strategy with clients that add their own noise."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies

from flower_grid import HereGrid, task  # noqa: F401
from horizontal_clients import BUDGET, client_app, model
from matrixdp import Ledger
from matrixdp.errors import InvalidInput
from matrixdp.federated import Client, ClientLevel, RecordLevel, horizontal
from matrixdp.federated.tensors import flat


def arrays():
    return ArrayRecord({"parameters": Array(flat(model()).numpy())})


def run(inner, app, rounds=2):
    done = []
    wrapped = horizontal.CheckedStrategy(inner, on_round=done.append)
    return wrapped.start(HereGrid(app, 3), arrays(), num_rounds=rounds).arrays, done


@pytest.fixture
def fixed_updates(monkeypatch):
    monkeypatch.setattr(Client, "upload", lambda self, run, number, parameters: np.ones_like(parameters))


@pytest.mark.parametrize("privacy", [ClientLevel, RecordLevel])
@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedTrimmedAvg"])
def test_clients_answer_any_strategy_and_pay_for_it(tmp_path, name, privacy):
    found, done = run(
        getattr(strategies, name)(), client_app(tmp_path, privacy=privacy(budget=BUDGET, rounds=2, clip=0.1))
    )
    assert found["parameters"].numpy().shape == flat(model()).shape
    assert np.all(np.isfinite(found["parameters"].numpy()))
    assert [r.updates for r in done] == [3, 3]
    for number in range(3):
        assert len(Ledger(tmp_path / f"client-{number}" / "budget.db").history()) == 2


def test_fedavg_moves_by_the_mean(tmp_path, fixed_updates):
    found, _ = run(strategies.FedAvg(), client_app(tmp_path), rounds=1)
    assert np.allclose(found["parameters"].numpy() - flat(model()).numpy(), 1.0, atol=1e-6)


def test_clients_that_have_spent_their_budget_decline(tmp_path):
    _, done = run(strategies.FedAvg(), client_app(tmp_path), rounds=3)
    assert [r.updates for r in done] == [3, 3, 0]
    assert set(done[2].declined.values()) == {f"the budget ({BUDGET}) is spent"}


def changed(values):
    return lambda m, p: Message(
        RecordDict({"arrays": ArrayRecord({"parameters": Array(values(p))}), "metrics": MetricRecord({"loss": 0.5})}),
        reply_to=m,
    )


LIES = {
    "nan": changed(lambda p: p * np.nan),
    "infinite": changed(lambda p: p + np.float32(np.inf)),
    "shape": changed(lambda p: p[1:]),
    "type": changed(lambda p: np.arange(len(p))),
    "too large for the model": changed(lambda p: p + np.float64(1e300)),
    "empty": lambda m, p: Message(RecordDict(), reply_to=m),
    "crash": lambda m, p: Message(Error(2, "x"), reply_to=m),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["FedAvg", "FedAdam"])
def test_a_client_that_lies_is_named_and_left_out(tmp_path, fixed_updates, lie, name):
    app = client_app(tmp_path)

    def lying(message, context):
        if context.node_id == 101:
            return LIES[lie](message, message.content.array_records["arrays"]["parameters"].numpy())
        return app(message, context)

    found, done = run(getattr(strategies, name)(), lying, rounds=1)
    assert (done[0].updates, list(done[0].declined)) == (2, [101])
    assert np.all(np.isfinite(found["parameters"].numpy()))
    if name == "FedAvg":
        assert np.allclose(found["parameters"].numpy() - flat(model()).numpy(), 1.0, atol=1e-6)


def test_a_huge_update_does_not_move_the_median(tmp_path, fixed_updates):
    app = client_app(tmp_path)

    def lying(message, context):
        parameters = message.content.array_records["arrays"]["parameters"].numpy()
        return changed(lambda p: p + 1e30)(message, parameters) if context.node_id == 101 else app(message, context)

    found, _ = run(strategies.FedMedian(), lying, rounds=1)
    assert np.allclose(found["parameters"].numpy() - flat(model()).numpy(), 1.0, atol=1e-6)


def test_a_replay_costs_nothing_and_reveals_nothing_new(tmp_path):
    """A round that is asked for again gets the reply that it got; an old one is declined."""
    app, replies = client_app(tmp_path), []

    def recorded(message, context):
        replies.append(app(message, context))
        again = app(message, context)
        assert again.content == replies[-1].content
        return replies[-1]

    run(strategies.FedAvg(), recorded)
    assert len(Ledger(tmp_path / "client-0" / "budget.db").history()) == 2


def test_only_strategies_are_wrapped():
    with pytest.raises(InvalidInput, match="strategy must be one of"):
        horizontal.CheckedStrategy("FedAvg")

"""Any Flower strategy with central privacy, with Flower's messages and a grid that hands them over in this process."""

import itertools

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as strategies

from flower_grid import HereGrid, task  # noqa: F401
from matrixdp import Budget, Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.federated import CentralPrivacy, central, trusted_server

BUDGET = Budget(3.0, 1e-5)
ROUND = central.ROUND


def privacy(**changes):
    return CentralPrivacy(**{"budget": BUDGET, "rounds": 3, "clients": 4, "clip": 0.5, **changes})


def start():
    return ArrayRecord(
        {"weight": Array(np.ones((2, 3), np.float32)), "bias": Array(np.zeros(2)), "count": Array(np.array(7))}
    )


def flat(arrays):
    return np.concatenate([arrays[name].numpy().ravel() for name in ("weight", "bias")])


def moved(arrays, step):
    steps = {n: step if a.numpy().dtype.kind == "f" else 0 for n, a in arrays.items()}
    return ArrayRecord({n: Array(np.asarray(a.numpy() + a.numpy().dtype.type(steps[n]))) for n, a in arrays.items()})


def client_app(agreed=None, step=0.01, lie=None):
    """Clients that move every parameter by the same step; `lie` makes the reply of client 1 from the request."""
    app = ClientApp(mods=[central.clipping_mod(agreed or privacy())])

    @app.train()
    def train(message, context):
        arrays = message.content.array_records["arrays"]
        secret = MetricRecord({"num-examples": 12345, "loss": 0.5})
        return Message(RecordDict({"arrays": moved(arrays, step), "metrics": secret}), reply_to=message)

    def lying(message, context):
        honest = app(message, context)
        asked_to_train = "arrays" in message.content.array_records
        if lie is None or context.node_config["partition-id"] != 1 or not asked_to_train:
            return honest
        return lie(message, honest)

    return lying


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(trusted_server, "draw", lambda total, law, drawing: total)


def run(inner=None, app=None, agreed=None, rounds=1, grid=None, **settings):
    done = []
    wrapped = central.PrivateStrategy(
        inner or strategies.FedAvg(), agreed or privacy(), wait=1.0, on_round=done.append, **settings
    )
    grid = grid or HereGrid(app or client_app(agreed), 4)
    return wrapped.start(grid, start(), num_rounds=rounds), done, wrapped


def test_fedavg_moves_by_the_mean(no_noise):
    result, done, _ = run(rounds=2)
    assert np.allclose(flat(result.arrays) - flat(start()), 0.02, atol=1e-6)
    assert result.arrays["weight"].numpy().dtype == np.float32
    assert int(result.arrays["count"].numpy()) == 7
    assert [(r.updates, r.asked, dict(r.refused), r.clipped) for r in done] == [(4, (0, 1, 2, 3), {}, ())] * 2
    assert str(done[0]) == "round 1: 4 clients asked, 4 updates used, 0 refused, 0 clipped by the server"


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedAdagrad", "FedYogi", "FedMedian", "FedTrimmedAvg"])
def test_any_strategy_does_with_the_private_mean_what_it_does_with_one_reply(no_noise, name):
    result, _, _ = run(getattr(strategies, name)(), rounds=2)
    alone = getattr(strategies, name)(min_train_nodes=1, min_available_nodes=1)
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = message.content.array_records["arrays"]
        records = {n: moved(a, 0.01) for n, a in {"arrays": arrays}.items()}
        return Message(RecordDict({**records, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    alone.configure_evaluate = lambda *_: []
    expected = alone.start(HereGrid(app, 1), start(), num_rounds=2)
    assert np.allclose(flat(result.arrays), flat(expected.arrays), atol=1e-6)


def test_noise_is_in_what_the_strategy_gets():
    one, two = (run()[0].arrays for _ in range(2))
    assert not np.allclose(flat(one), flat(two))


def echoed(message, step, **changes):
    arrays = message.content.array_records["arrays"]
    token = next(c[ROUND] for c in message.content.config_records.values() if ROUND in c)
    records = {"arrays": moved(arrays, step), "config": ConfigRecord({ROUND: token}), **changes}
    return Message(RecordDict(records), reply_to=message)


def other_shape(message, honest):
    arrays = dict(honest.content.array_records["arrays"])
    arrays["weight"] = Array(np.ones((3, 2), np.float32))
    return echoed(message, 0.0, arrays=ArrayRecord(arrays))


def text_arrays(message, honest):
    return echoed(message, 0.0, arrays=ArrayRecord({n: Array(np.array("a")) for n in ("weight", "bias", "count")}))


LIES = {
    "nan": (lambda message, honest: echoed(message, np.nan), "not finite"),
    "infinite": (lambda message, honest: echoed(message, np.inf), "not finite"),
    "shape": (other_shape, "other shapes"),
    "text": (text_arrays, "other shapes or types"),
    "names": (lambda m, h: echoed(m, 0.0, arrays=ArrayRecord({"w": Array(np.ones(8))})), "other names"),
    "two records": (lambda m, h: echoed(m, 0.0, more=start()), "exactly one record"),
    "none": (lambda message, honest: Message(RecordDict(), reply_to=message), "exactly one record"),
    "error": (lambda message, honest: Message(Error(0, "x"), reply_to=message), "has failed, code 0"),
    "no mod": (lambda m, h: Message(RecordDict({"arrays": start()}), reply_to=m), "without the mod"),
}


@pytest.mark.parametrize("kind", LIES)
def test_a_client_that_lies_is_named_and_counts_as_zero(no_noise, kind):
    lie, text = LIES[kind]
    result, done, _ = run(app=client_app(lie=lie))
    assert list(done[0].refused) == [1]
    assert text in done[0].refused[1]
    assert done[0].updates == 3
    assert np.allclose(flat(result.arrays) - flat(start()), 0.0075, atol=1e-6)


def test_a_huge_update_is_clipped_and_named(no_noise):
    result, done, _ = run(app=client_app(lie=lambda message, honest: echoed(message, 1e30)))
    assert done[0].clipped == (1,)
    assert done[0].refused == {}
    others = 3 * 0.01 / 4
    assert np.linalg.norm(flat(result.arrays) - flat(start()) - others) <= 0.5 / 4 * (1 + 1e-5)


def test_a_replay_of_an_old_round_is_named_and_counts_as_zero(no_noise):
    kept = []

    def replay(message, honest):
        kept.append(honest)
        return Message(kept[0].content, reply_to=message)

    _, done, _ = run(app=client_app(lie=replay), rounds=3)
    assert [dict(r.refused) for r in done] == [{}, *[{1: "sent a reply to another round, or is without the mod"}] * 2]


def test_a_second_reply_and_one_that_nobody_asked_for_are_refused(no_noise):
    class Repeating(HereGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages)
            if len(replies) == 4 and "arrays" in replies[0].content.array_records:
                uninvited = Message(replies[3].content, reply_to=replies[3])
                uninvited.metadata.__dict__["_src_node_id"] = 999
                replies += [replies[0], uninvited]
            return replies

    result, done, _ = run(grid=Repeating(client_app(), 4))
    assert done[0].refused == {0: "has answered already", -1: "was not asked in this round"}
    assert done[0].updates == 4
    assert np.all(flat(result.arrays) - flat(start()) <= 0.01 + 1e-6)


def test_a_silent_client_leaves_the_denominator_as_it_is(no_noise):
    grid = HereGrid(client_app(), 4)
    ask = grid.push_messages

    def killed(messages):
        if messages and "arrays" in messages[0].content.array_records:
            grid.silent = {102}
        return ask(messages)

    grid.push_messages = killed
    result, done, wrapped = run(grid=grid, rounds=2)
    assert [r.updates for r in done] == [3, 3]
    assert np.allclose(flat(result.arrays) - flat(start()), 2 * 0.0075, atol=1e-6)
    assert wrapped.guarantees.epsilon <= BUDGET.epsilon


def test_clients_are_sampled(no_noise):
    agreed = privacy(clients=40, rounds=12, sampling_rate=0.25)
    grid = HereGrid(client_app(agreed), 40)
    _, done, _ = run(agreed=agreed, rounds=12, grid=grid)
    asked = [len(r.asked) for r in done]
    assert 70 < sum(asked) < 170  # 480 coins of 1/4: further off with a probability below 1e-6
    assert len(set(map(tuple, (r.asked for r in done)))) > 1
    assert len(grid.asked) == 40 + sum(asked)  # all nodes are asked once who they are


def test_a_client_on_a_new_node_is_the_same_client(no_noise):
    agreed = privacy(rounds=3, separation=3, times=1)
    grid = HereGrid(client_app(agreed), 4, partitions=4)
    ask, grid.moved = grid.push_messages, {200 + n: 100 + n for n in range(4)}

    def restarted(messages):
        names = ask(messages)
        if messages and "arrays" in messages[0].content.array_records:
            grid.nodes = range(200, 204)
        return names

    grid.push_messages = restarted
    _, done, _ = run(agreed=agreed, rounds=3, grid=grid)
    assert [r.asked for r in done] == [(0, 1), (2, 3), ()]


def test_a_client_that_joins_twice_under_one_number_is_asked_once(no_noise):
    grid = HereGrid(client_app(), 5, partitions=5)
    grid.moved = {104: 102, 103: 10**9}  # two nodes of one client, and a number that nobody has
    result, done, _ = run(grid=grid, rounds=2)
    assert [r.asked for r in done] == [(0, 1, 2)] * 2
    assert [r.updates for r in done] == [3, 3]
    assert np.allclose(flat(result.arrays) - flat(start()), 2 * 0.0075, atol=1e-6)


def test_what_a_client_sends_holds_its_update_and_nothing_else():
    app, replies = client_app(step=5.0), []
    grid = HereGrid(app, 4)
    pull = grid.pull_messages

    def pulled(names):
        replies.extend(found := pull(names))
        return found

    grid.pull_messages = pulled
    run(grid=grid)
    sent = [r.content for r in replies if "arrays" in r.content.array_records]
    assert len(sent) == 4
    for number, content in enumerate(sent):
        assert set(content) == {"arrays", "metrics", "config"}
        assert dict(content["metrics"]) == {central.CLIENT: number, "num-examples": 1}
        norm = np.linalg.norm(flat(content["arrays"]) - flat(start()))
        assert 0.499 < norm <= 0.5 * (1 + 1e-5)


def test_the_text_of_an_error_is_not_sent():
    app = ClientApp(mods=[central.clipping_mod(privacy())])

    @app.train()
    def train(message, context):
        raise ValueError("the records are 1 2 3")

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"loss": 0.5})}), reply_to=message)

    _, done, wrapped = run(app=app)
    assert set(done[0].refused.values()) == {"has failed, code 3"} or all(
        "failed" in r for r in done[0].refused.values()
    )
    assert wrapped.configure_evaluate(1, start(), ConfigRecord(), None) == []
    assert wrapped.aggregate_evaluate(1, []) is None
    grid = HereGrid(app, 1)
    question = Message(RecordDict({"arrays": start(), "config": ConfigRecord()}), 100, "evaluate")
    (reply,) = grid.send_and_receive([question])
    assert reply.has_error()
    assert "records" not in reply.error.reason


def test_all_rounds_are_charged_before_the_first(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    _, _, wrapped = run(ledger=ledger, agreed=privacy(sampling_rate=0.5))
    (entry,) = ledger.history()
    assert (entry.unit, entry.count, entry.planned) == ("client", 1, 3)
    with pytest.raises(InvalidInput, match="started before"):
        wrapped.start(HereGrid(client_app(), 4), start(), num_rounds=1)


def test_wrong_settings_cost_nothing(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    with pytest.raises(InvalidInput, match="num_rounds must be at most the 3"):
        run(ledger=ledger, rounds=4)
    with pytest.raises(InvalidInput, match=r"fraction_train=1\.0"):
        run(strategies.FedAvg(fraction_train=0.5), ledger=ledger)
    with pytest.raises(InvalidInput, match="strategy must be one of"):
        run("FedAvg", ledger=ledger)
    with pytest.raises(InvalidInput, match="known when the rounds have begun"):
        _ = central.PrivateStrategy(strategies.FedAvg(), privacy()).guarantees
    assert ledger.history() == []


def test_separated_rounds_go_on_after_a_restart(tmp_path):
    agreed = privacy(rounds=4, separation=2)
    ledger, seen = Ledger(tmp_path / "budget.db", BUDGET), []
    for _ in range(2):
        _, done, _ = run(agreed=agreed, rounds=2, ledger=ledger, state=tmp_path / "rounds")
        seen += [set(r.asked) for r in done]
    assert [a & b for a, b in itertools.pairwise(seen)] == [set()] * 3
    assert seen[0] | seen[1] == set(range(4))
    assert len(ledger.history()) == 1
    with pytest.raises(BudgetExceeded, match="at most 0, the rounds left of 4"):
        run(agreed=agreed, ledger=ledger, state=tmp_path / "rounds")


@pytest.mark.parametrize("choice", [{"separation": 1}, {"sampling_rate": 0.5}], ids=str)
def test_more_rounds_than_are_left_are_refused_before_anyone_is_asked(tmp_path, choice):
    """Otherwise the run would end in an error after the last round that is left, and its model would be lost."""
    agreed, ledger = privacy(rounds=3, **choice), Ledger(tmp_path / "budget.db", BUDGET)
    again = {"state": tmp_path / "rounds"} if "separation" in choice else {"series": "run"}
    run(agreed=agreed, ledger=ledger, **again)
    asked, spent = [], len(ledger.history())
    wrapped = central.PrivateStrategy(strategies.FedAvg(), agreed, wait=1.0, ledger=ledger, **again)
    grid = HereGrid(client_app(agreed), 4)
    real = grid.send_and_receive
    grid.send_and_receive = lambda messages, **rest: asked.append(len(messages)) or real(messages, **rest)
    with pytest.raises(BudgetExceeded, match="at most 2, the rounds left of 3, got 3"):
        wrapped.start(grid, start(), num_rounds=3)
    assert asked == []
    assert len(ledger.history()) == spent
    wrapped.start(grid, start(), num_rounds=2)
    assert asked

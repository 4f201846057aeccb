"""Central privacy with records as units: what one record can change, who samples, and what the server refuses."""

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvgM
from torch import nn
from torch.utils.data import TensorDataset

from flower_grid import HereGrid, task  # noqa: F401
from matrixdp import Budget, Ledger
from matrixdp.errors import InvalidInput
from matrixdp.federated import CentralPrivacy, GradientClient, TrustedServer, central, trusted_server
from matrixdp.federated.local_training import cross_entropy
from matrixdp.federated.tensors import flat
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.training import PrivateSGD

BUDGET = Budget(3.0, 1e-5)
SIZE = 10  # parameters of the model


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def data(number, records=30):
    x = np.random.default_rng(number).normal(size=(records, 4))
    return x, (x[:, 0] > 0).astype(np.int64)


def privacy(**changes):
    settings = {"budget": BUDGET, "rounds": 3, "clients": 3, "clip": 0.5, "unit": "record", "records": 30}
    return CentralPrivacy(**{**settings, **changes})


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(trusted_server, "draw", lambda total, law, drawing: total)


def total(agreed, *records):
    """What the server sums up from these clients in one round."""
    server, parameters = TrustedServer(agreed, SIZE), flat(model()).numpy()
    clients = [GradientClient(model(), *own, privacy=agreed) for own in records]
    asked = server.choose(range(agreed.clients))
    mean, refused = server.finish({n: clients[n].update(parameters) for n in asked if n < len(clients)})
    assert not refused
    return mean * agreed.cohort


def test_without_sampling_the_sum_is_that_of_all_records(no_noise):
    parts = [data(n) for n in range(3)]
    gradients = ClippedGradients(model(), cross_entropy, clip=0.5)
    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    gradients.accumulate(torch.from_numpy(x).float(), torch.from_numpy(y))
    assert np.allclose(total(privacy(), *parts), -gradients.flat.numpy(), atol=1e-9)


def test_one_record_changes_no_more_than_the_certificate_says(no_noise):
    agreed, norms = privacy(), []
    first, (x, y), last = (data(n) for n in range(3))
    x = x * np.geomspace(0.01, 1000, 30)[:, None]  # gradients of all lengths
    before = total(agreed, first, (x, y), last)
    for record in range(0, 30, 3):
        fewer = np.delete(x, record, 0), np.delete(y, record)
        norms.append(np.linalg.norm(total(agreed, first, fewer, last) - before))
    assert max(norms) <= agreed.radius
    assert max(norms) >= agreed.clip * 0.99
    assert agreed.radius == pytest.approx(agreed.clip, rel=1e-6)


def test_a_client_samples_each_record_by_a_coin_of_its_own():
    """Equal records have equal gradients, so the length of the sum counts them."""
    agreed = privacy(sampling_rate=0.2, records=500)
    client = GradientClient(model(), np.ones((500, 4)), np.zeros(500, np.int64), privacy=agreed)
    sums = [np.linalg.norm(client.update(flat(model()).numpy())) / agreed.clip for _ in range(200)]
    counts = np.round(sums)
    assert np.allclose(sums, counts, atol=1e-3)
    # 100,000 coins of 1/5; the variance of 200 counts is 80, with a relative std of 1/10: false alarms below 1e-6
    assert abs(counts.sum() - 20000) < 5 * math.sqrt(16000)
    assert 80 * 0.5 < counts.var() < 80 * 1.7


def test_noise_is_that_of_a_training_on_all_records():
    agreed = privacy(sampling_rate=0.2, rounds=20, records=100)
    x = torch.zeros(300, 4)
    trainer = PrivateSGD(
        net := model(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        TensorDataset(x, torch.zeros(300, dtype=torch.int64)),
        cross_entropy,
        budget=BUDGET,
        batch_size=60,
        clip=0.5,
        steps=20,
    )
    server = TrustedServer(agreed, SIZE)
    assert server.certificate.law.covariance.std == pytest.approx(trainer.noise.law.covariance.std, rel=1e-3)
    assert agreed.cohort == pytest.approx(60)
    assert 2.9 < server.guarantees.epsilon <= BUDGET.epsilon


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (np.full(SIZE, np.nan), "not finite"),
        (np.full(SIZE, 1e300), "30 clipped gradients cannot have"),
        (np.array([15.1, *np.zeros(SIZE - 1)]), "30 clipped gradients cannot have"),
        (np.zeros(SIZE + 1), "not a vector"),
    ],
)
def test_a_lie_is_refused_and_named(no_noise, lie, why):
    server = TrustedServer(privacy(), SIZE)
    assert server.choose(range(3)) == [0, 1, 2]
    mean, refused = server.finish({0: np.full(SIZE, 0.1), 1: lie})
    assert list(refused) == [1]
    assert why in refused[1]
    assert np.allclose(mean * 90, 0.1)


def test_the_longest_honest_sum_is_not_refused(no_noise):
    x, y = np.full((30, 4), 1000.0), np.zeros(30, np.int64)
    x[:, :] *= np.sign(flat(model()).numpy()[4:8] - flat(model()).numpy()[:4])  # all of them wrong
    assert np.linalg.norm(total(privacy(), (x, y))) >= 30 * 0.5 * (1 - 1e-4)


def test_the_guarantee_names_the_unit_and_who_is_trusted(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    server = TrustedServer(privacy(sampling_rate=0.5), SIZE, ledger=ledger)
    server.choose([])
    (entry,) = ledger.history()
    assert (entry.unit, entry.sampling_rate, entry.planned) == ("record", 0.5, 3)
    text = str(server.guarantees)
    assert "record-level: epsilon 2.9" in text
    assert "one record added or removed" in text
    assert "client-level: not stated" in text
    assert "each client with its own records" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"unit": "household"}, "unit must be"),
        ({"records": None}, "records, how many a client has at most"),
        ({"unit": "client"}, "records, how many a client has at most"),
        ({"records": 0}, "records must be"),
        ({"separation": 2}, "separation is for unit='client'"),
    ],
)
def test_settings_that_cannot_work_say_so(changes, text):
    with pytest.raises(InvalidInput, match=text):
        privacy(**changes)


def test_a_client_refuses_what_it_cannot_keep():
    with pytest.raises(InvalidInput, match="at most the 30 records"):
        GradientClient(model(), *data(0, 31), privacy=privacy())
    with pytest.raises(InvalidInput, match="equal length"):
        GradientClient(model(), data(0)[0], data(0)[1][1:], privacy=privacy())
    with pytest.raises(InvalidInput, match="unit='record'"):
        GradientClient(model(), *data(0), privacy=privacy(unit="client", records=None))
    with pytest.raises(InvalidInput, match="model and loss must work with any parameters"):
        GradientClient(model(), *data(0), privacy=privacy(), loss=refusing)


def refusing(outputs, labels):
    return nn.functional.binary_cross_entropy(outputs.softmax(1)[:, 0], labels.float(), reduction="none")


class Hidden(nn.Module):
    """Gives what is before its head, to which only the loss applies it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.first(x)


class Headed(nn.Module):
    def __init__(self, head, loss):
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, outputs, labels):
        return self.loss(self.head(outputs.nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0)), labels)


@pytest.mark.filterwarnings("ignore:records run one at a time")
def test_a_loss_that_uses_a_layer_of_the_model_is_tried_with_the_same_parameters():
    network = Hidden()
    GradientClient(network, *data(0), privacy=privacy(), loss=Headed(network.head, cross_entropy))
    with pytest.raises(InvalidInput, match="model and loss must work with any parameters"):
        GradientClient(network, *data(0), privacy=privacy(), loss=Headed(network.head, refusing))


def arrays():
    return ArrayRecord({"parameters": Array(flat(model()).numpy())})


def run(app, agreed, rounds, rate=1.0, **settings):
    done = []
    strategy = central.PrivateStrategy(
        FedAvgM(server_learning_rate=rate), agreed, on_round=done.append, wait=5, **settings
    )
    grid = HereGrid(app, agreed.clients)
    return strategy.start(grid, arrays(), num_rounds=rounds).arrays["parameters"].numpy(), done


def test_flower_takes_a_step_of_gradient_descent(no_noise):
    agreed, parts = privacy(clip=0.3), [data(n) for n in range(3)]
    found, done = run(central.gradient_app(model, data, privacy=agreed), agreed, 1, rate=2.0)
    step = total(agreed, *parts) / 90
    assert np.allclose(found - flat(model()).numpy(), 2.0 * step, atol=1e-5)
    assert (done[0].updates, done[0].refused, done[0].clipped) == (3, {}, ())


def test_flower_names_a_replay_and_a_huge_sum(no_noise):
    agreed, kept = privacy(), []
    app = central.gradient_app(model, data, privacy=agreed)

    def lying(message, context):
        honest = app(message, context)
        if "arrays" not in message.content.array_records or context.node_id == 100:
            return honest
        if context.node_id == 101:
            kept.append(honest)
            return Message(kept[0].content, reply_to=message)
        huge = ArrayRecord({"parameters": Array(np.full(SIZE, 1e6))})
        return Message(RecordDict({**honest.content, "arrays": huge}), reply_to=message)

    _, done = run(lying, agreed, 2)
    assert done[0].updates == 2
    assert "30 clipped gradients cannot have" in done[0].refused[2]
    assert done[1].updates == 1
    assert "another round" in done[1].refused[1]


def test_a_client_that_fails_sends_no_text():
    def broken(number):
        raise ValueError("the records are 1 2 3")

    _, done = run(central.gradient_app(model, broken, privacy=privacy()), privacy(), 1)
    assert len(done[0].refused) == 3
    assert not any("records are" in why for why in done[0].refused.values())

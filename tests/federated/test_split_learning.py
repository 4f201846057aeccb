"""Vertical learning: what one record can change in all that a participant sends."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from matrixdp import Budget
from matrixdp.errors import GuaranteeViolated, InvalidInput
from matrixdp.federated import Declined, SplitClient, SplitPlan, SplitServer
from matrixdp.federated.split_learning.noise import FeatureNoise

BUDGET = Budget(5.0, 1e-5)
RECORDS, ATTRIBUTES, FEATURES = 23, 4, 3


def plan(**changes):
    return SplitPlan(**{"records": RECORDS, "epochs": 3, "batch_size": 5, "budget": BUDGET, **changes})


def attributes(seed=0):
    return np.random.default_rng(seed).normal(size=(RECORDS, ATTRIBUTES)).astype(np.float32)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(ATTRIBUTES, 6), nn.ReLU(), nn.Linear(6, FEATURES))


def client(folder, inputs=None, **changes):
    return SplitClient(network(), attributes() if inputs is None else inputs, plan=plan(**changes), folder=folder)


def gradient(made, step):
    return np.random.default_rng([7, step]).normal(size=(len(made.plan.batch(step)), FEATURES))


def whole_run(made):
    given = None
    for step in range(made.plan.steps + 1):
        made.answer("a", step, given)
        given = gradient(made, step) if step < made.plan.steps else None


def test_every_epoch_releases_every_record_once():
    agreed = plan()
    for epoch in range(agreed.epochs):
        steps = range(epoch * agreed.batches, (epoch + 1) * agreed.batches)
        assert sorted(np.concatenate([agreed.batch(step) for step in steps])) == list(range(RECORDS))
    assert not np.array_equal(agreed.batch(0), agreed.batch(agreed.batches))


def values_before_the_noise(made, monkeypatch):
    """All that gets noise in a run, if what comes out is the same whatever went in.

    That is the view in which composition adds up: neighbours are compared at equal earlier outputs.
    """
    features, updates = [], []

    def added(self, values):
        features.append(values.numpy().astype(np.float64))
        return torch.from_numpy(np.random.default_rng([1, len(features)]).normal(size=values.shape))

    monkeypatch.setattr(FeatureNoise, "added", added)
    if made.update_noise is not None:

        def add_(vector):
            updates.append(vector.clone().double().numpy())
            vector.copy_(torch.from_numpy(np.random.default_rng([2, len(updates)]).normal(size=len(vector))))

        monkeypatch.setattr(made.update_noise, "add_", add_)
    whole_run(made)
    return features, updates


def neighbours(tmp_path, monkeypatch, changed=11, **changes):
    other = attributes()
    other[changed] = 50.0 * np.arange(1, ATTRIBUTES + 1)
    one = values_before_the_noise(client(tmp_path / "one", **changes), monkeypatch)
    two = values_before_the_noise(client(tmp_path / "two", other, **changes), monkeypatch)
    return one, two


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_record_changes_its_own_row_and_one_gradient_an_epoch(tmp_path, monkeypatch, share):
    changes = {"clip": 0.3, "learning_rate": 1.0, "update_share": share}
    (features, updates), (features_, updates_) = neighbours(tmp_path, monkeypatch, **changes)
    agreed = plan(**changes)
    assert len(features) == agreed.steps
    assert len(updates) == (agreed.steps if share else 0)
    moved = [step for step in range(agreed.steps) if not np.array_equal(features[step], features_[step])]
    assert moved == [step for step in range(agreed.steps) if 11 in agreed.batch(step)]
    for step in moved:
        assert agreed.sensitivity().contains(features[step] - features_[step])
    learned = [step for step in range(len(updates)) if not np.array_equal(updates[step], updates_[step])]
    assert learned == (moved if share else [])
    for step in learned:
        assert np.linalg.norm(updates[step] - updates_[step]) <= 2 * 0.3 * (1 + 1e-6)


def test_a_network_that_learns_in_the_clear_carries_a_record_into_the_rows_of_others(tmp_path, monkeypatch):
    """Why unit "participant" counts every entry of every batch; the same look at it finds more than one row."""
    (features, _), (features_, _) = neighbours(tmp_path, monkeypatch, unit="participant", learning_rate=1.0)
    agreed = plan(unit="participant")
    first = next(step for step in range(agreed.steps) if 11 in agreed.batch(step))
    moved = [step for step in range(agreed.steps) if not np.array_equal(features[step], features_[step])]
    assert moved == list(range(first, agreed.steps))
    assert all(agreed.sensitivity().contains(features[step] - features_[step]) for step in moved)


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, [f"run a epoch {e} {what}" for e in range(3) for what in ("features", "training")]),
        ({"update_share": 0.0}, [f"run a epoch {e} features" for e in range(3)]),
        ({"unit": "participant"}, [f"run a step {s} features" for s in range(15)]),
    ],
)
def test_a_whole_run_spends_what_the_guarantee_says(tmp_path, changes, notes):
    made = client(tmp_path, **changes)
    whole_run(made)
    ending = f", plan {made.plan.digest()}"
    assert [entry.note for entry in made.participant.ledger.history()] == [note + ending for note in notes]
    spent = made.participant.ledger.spent()
    assert 0.99 * BUDGET.epsilon <= spent <= BUDGET.epsilon
    assert spent == pytest.approx(made.guarantees.record, rel=1e-9)
    with pytest.raises(Declined, match="is spent"):
        made.answer("b", 0, None)


def test_another_division_of_the_records_is_paid_for_in_a_run_of_its_own(tmp_path):
    """A record that was released in an epoch may be released once more under another plan."""
    for number, changes in enumerate(({}, {"seed": 1}, {"batch_size": 4}), start=1):
        client(tmp_path, update_share=0.0, **changes).answer(f"run{number}", 0, None)
        assert len(client(tmp_path).participant.ledger.history()) == number


@pytest.mark.parametrize("changes", [
    {"seed": 1},
    {"batch_size": 4},
    {"update_share": 0.9},
    {"inputs": attributes()[::-1].copy()},
])  # fmt: skip
def test_what_changes_during_a_run_is_declined(tmp_path, changes):
    """The last batch is learned in a step without a charge, so it must be the batch, and the noise, that was paid."""
    made = client(tmp_path)
    last = made.plan.steps - 1
    made.answer("a", last, None)
    other = client(tmp_path, **changes)
    for ask in (
        lambda: other.answer("a", other.plan.steps, gradient(made, last)),
        lambda: other.evaluate("a", attributes(2)),
    ):
        with pytest.raises(Declined, match="changed during the run"):
            ask()
    assert client(tmp_path).answer("a", made.plan.steps, gradient(made, last)) == {}


def test_a_network_that_learned_in_the_clear_is_not_released_under_another_unit(tmp_path):
    client(tmp_path, unit="participant").answer("a", 0, None)
    with pytest.raises(Declined, match="changed during the run"):
        client(tmp_path).evaluate("a", attributes(2))


def test_both_levels_and_the_labels_are_stated_by_name(tmp_path):
    by_record, by_participant = client(tmp_path / "a").guarantees, client(tmp_path / "b", unit="participant").guarantees
    assert by_record.participant is None
    assert "participant-level: none" in str(by_record)
    assert "record-level: epsilon 4.99" in str(by_record)
    assert by_participant.participant == by_participant.record
    assert "labels: none" in str(by_record)


@pytest.mark.parametrize("mechanism", ["mgm", "idn", "mvg", "optimal"])
def test_any_mechanism(tmp_path, mechanism):
    made = client(tmp_path, mechanism=mechanism)
    assert made.answer("a", 0, None)["features"].shape == (5, FEATURES)
    assert made.guarantees.record <= BUDGET.epsilon


def test_the_last_batch_may_be_smaller(tmp_path):
    made = client(tmp_path)
    assert made.answer("a", 4, None)["features"].shape == (3, FEATURES)


def test_an_answer_is_given_once_and_training_goes_on_after_a_restart(tmp_path):
    made = client(tmp_path, update_share=0.2)
    first = made.answer("a", 0, None)["features"]
    second = made.answer("a", 1, gradient(made, 0))["features"]
    weights = made.participant.stored("a").state["weights"]
    again = client(tmp_path, update_share=0.2)
    assert np.array_equal(again.answer("a", 1, -gradient(made, 0))["features"], second)
    assert np.array_equal(again.participant.stored("a").state["weights"], weights)
    assert not np.array_equal(weights, made.initial)
    with pytest.raises(Declined, match="out of order"):
        again.answer("a", 0, None)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("changes", [{}, {"unit": "participant"}])
def test_gradients_that_are_not_finite_do_no_harm(tmp_path, changes):
    made = client(tmp_path, **changes)
    made.answer("a", 0, None)
    reply = made.answer("a", 1, np.full((5, FEATURES), math.nan))
    assert np.all(np.isfinite(reply["features"]))
    assert np.all(np.isfinite(made.participant.stored("a").state["weights"]))


def test_a_gradient_of_another_shape_is_declined_and_costs_nothing(tmp_path):
    made = client(tmp_path, unit="participant")
    made.answer("a", 0, None)
    with pytest.raises(Declined, match="the gradient has shape"):
        made.answer("a", 1, np.zeros((5, FEATURES + 1)))
    assert [entry.note[:21] for entry in made.participant.ledger.history()] == ["run a step 0 features"]


def test_public_records_need_no_noise_only_where_the_network_is_private(tmp_path):
    made = client(tmp_path / "a")
    made.answer("a", 0, None)
    assert np.array_equal(made.evaluate("a", attributes(5)), made.evaluate("a", attributes(5)))
    with pytest.raises(Declined, match="not private"):
        client(tmp_path / "b", unit="participant").evaluate("a", attributes(5))


@pytest.mark.parametrize("unit", ["participant", "record"])
def test_without_noise_clients_and_server_learn_like_one_network(tmp_path, monkeypatch, unit):
    x, y = attributes()[:20], np.random.default_rng(3).integers(0, 2, 20)
    agreed = plan(records=20, unit=unit, clip=1e6, learning_rate=0.5)
    monkeypatch.setattr(FeatureNoise, "added", lambda self, values: values)
    torch.manual_seed(0)
    locals_, upper = [nn.Linear(2, FEATURES) for _ in range(2)], nn.Linear(2 * FEATURES, 2)
    joint = [nn.Linear(2, FEATURES), nn.Linear(2, FEATURES), nn.Linear(2 * FEATURES, 2)]
    for copy, original in zip(joint, [*locals_, upper], strict=True):
        copy.load_state_dict(original.state_dict())
    clients = [SplitClient(locals_[i], x[:, 2 * i : 2 * i + 2], plan=agreed, folder=tmp_path / str(i)) for i in (0, 1)]
    for made in clients:
        if made.update_noise is not None:
            monkeypatch.setattr(made.update_noise, "add_", lambda vector: None)
    server, gradients = SplitServer(upper, y, plan=agreed, learning_rate=0.5), [None, None]
    optimizer = torch.optim.SGD([p for part in joint for p in part.parameters()], lr=0.5)
    for step in range(agreed.steps):
        blocks = [made.answer("a", step, given)["features"] for made, given in zip(clients, gradients, strict=True)]
        gradients = server.learn(step, blocks)
        batch = torch.from_numpy(agreed.batch(step))
        features = [torch.tanh(joint[i](torch.from_numpy(x)[batch, 2 * i : 2 * i + 2])) for i in (0, 1)]
        assert np.allclose(np.concatenate(blocks, axis=1), torch.cat(features, dim=1).detach(), atol=1e-5)
        optimizer.zero_grad()
        nn.functional.cross_entropy(joint[2](torch.cat(features, dim=1)), torch.from_numpy(y)[batch]).backward()
        optimizer.step()
    assert torch.allclose(upper.weight, joint[2].weight, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"unit": "client"}, "unit must be one of"),
        ({"mechanism": "noise"}, "mechanism must be one of"),
        ({"batch_size": 24}, "batch_size must be at most"),
        ({"update_share": 1.0}, "update_share must be"),
        ({"update_share": math.nan}, "update_share must be"),
        ({"budget": 5.0}, "budget must be a Budget"),
        ({"clip": 0.0}, "clip must be above 0"),
    ],
)
def test_plans_that_cannot_work_say_so(changes, text):
    with pytest.raises(InvalidInput, match=text):
        plan(**changes)


def corrected(std_factor=1.0, records=20000):
    """The discriminant of noisy features, and the accuracy of it, and of a plain one, on features without noise."""
    rng = np.random.default_rng(0)
    agreed = plan(records=records, batch_size=1000, epochs=1, update_share=0.0)
    labels = (rng.random(records) < 0.2).astype(np.int64)
    clean = np.clip(rng.normal(0.6 * labels[:, None] - 0.3, 0.3, size=(records, 2)), -1, 1)
    std = agreed.feature_noise(1).law.root_mean_square * std_factor
    noisy = clean + rng.normal(0.0, std, size=clean.shape)
    server = SplitServer(nn.Linear(2, 2), labels, plan=agreed)
    batches = {step: noisy[agreed.batch(step)] for step in range(agreed.steps)}
    top = server.discriminant({step: [rows[:, :1], rows[:, 1:]] for step, rows in batches.items()})
    with torch.no_grad():
        return float((top(torch.tensor(clean).float()).argmax(1).numpy() == labels).mean())


def test_a_server_that_knows_the_noise_learns_from_it():
    assert corrected() > 0.9  # 0.8 is the most frequent class; the best rule has 0.94
    with_another_std = corrected(std_factor=3.0)
    assert with_another_std < corrected()


def test_features_that_cannot_be_corrected_say_so():
    server = SplitServer(nn.Linear(3, 2), np.zeros(RECORDS, dtype=np.int64), plan=plan())
    with pytest.raises(InvalidInput, match="at least one step"):
        server.discriminant({})
    with pytest.raises(InvalidInput, match="all records of their steps"):
        server.discriminant({0: [np.zeros((4, 3))]})
    with pytest.raises(InvalidInput, match="network's outputs"):
        SplitServer(nn.Linear(3, 2), np.full(RECORDS, 10**9), plan=plan()).discriminant({0: [np.zeros((5, 3))]})
    other = SplitServer(nn.Linear(3, 2), np.zeros(RECORDS, dtype=np.int64), plan=plan(mechanism="mvg"))
    with pytest.raises(InvalidInput, match="same noise to all features"):
        other.discriminant({0: [np.zeros((5, 3))]})


def test_participants_that_cannot_work_say_so(tmp_path):
    broken = attributes()
    broken[2, 1] = math.nan
    for inputs, text in ((broken, "must be finite"), (attributes()[1:], "must have the 23 records")):
        with pytest.raises(InvalidInput, match=text):
            client(tmp_path, inputs)
    with pytest.raises(GuaranteeViolated, match="theorem that is false"):
        client(tmp_path, mechanism="r1smg")
    with pytest.raises(InvalidInput, match="one vector per record"):
        SplitClient(nn.Conv1d(1, 2, 1), np.zeros((RECORDS, 1, 4)), plan=plan(), folder=tmp_path)
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(InvalidInput, match="must not mix records"):
        SplitClient(mixing, attributes(), plan=plan(update_share=0.0), folder=tmp_path)
    with pytest.raises(InvalidInput, match="labels must have the 23 records"):
        SplitServer(nn.Linear(6, 2), np.zeros(5), plan=plan())
    with pytest.raises(InvalidInput, match=r"the 5 records of step 0, got \[5, 4\]"):
        SplitServer(nn.Linear(6, 2), np.zeros(RECORDS), plan=plan()).learn(0, [np.zeros((5, 3)), np.zeros((4, 3))])


class Centred(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x - 1e-5 * x.mean(0))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_network_that_would_mix_records_sees_one_at_a_time(tmp_path, share):
    one, other = torch.tensor(attributes()), torch.tensor(attributes())
    other[1:] += 3.0
    with pytest.warns(UserWarning, match="one at a time") if share else nullcontext():
        made = SplitClient(Centred(network()), attributes(), plan=plan(update_share=share), folder=tmp_path)
    assert torch.equal(made._features(one)[0], made._features(other)[0])


def test_noise_that_is_not_floating_point_safe_is_refused(tmp_path):
    with pytest.raises(GuaranteeViolated, match="not floating-point-safe"):
        client(tmp_path, mechanism="l2", epochs=1, update_share=0.0)

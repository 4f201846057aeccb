import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from matrixdp import Accountant, Budget, calibrate, certify
from matrixdp.errors import GuaranteeViolated, InvalidInput, MatrixDPError
from matrixdp.federated import (
    CentralPrivacy,
    Client,
    ClientLevel,
    Declined,
    GradientClient,
    LocalTraining,
    RecordLevel,
    average,
)
from matrixdp.federated.noise import budget_of_each, sized
from matrixdp.federated.tensors import flat, load
from matrixdp.learn.noise import ParameterNoise
from matrixdp.pipeline import mu_of_each
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import OneRow

BUDGET = Budget(3.0, 1e-5)
wild = st.floats(width=32, allow_nan=True, allow_infinity=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def some_records(count=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6))
    return x, (x[:, 0] > 0).astype(np.int64)


def client(folder, privacy, training=None, **records):
    return Client(
        network(), *some_records(**records), training=training or LocalTraining(), privacy=privacy, folder=folder
    )


@given(st.lists(wild, min_size=1, max_size=20), st.floats(1e-3, 1e3))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_whatever_the_update_two_clipped_ones_differ_by_a_member_of_the_set(norm, entries, clip):
    privacy = ClientLevel(budget=BUDGET, rounds=1, clip=clip, norm=norm)
    one = privacy.clipped(torch.tensor(entries, dtype=torch.float32)).double().numpy()
    other = privacy.clipped(-torch.tensor(entries, dtype=torch.float32)).double().numpy()
    assert np.all(np.isfinite(one))
    assert privacy.sensitivity.contains(one - other, tolerance=0.0)


def test_small_updates_are_left_alone():
    update = torch.tensor([0.1, -0.2, 0.3])
    for norm in ("linf", "l2"):
        assert torch.equal(ClientLevel(budget=BUDGET, rounds=1, clip=1.0, norm=norm).clipped(update), update)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("mechanism", ["analytic", "mgm", "idn", "mvg", "optimal"])
def test_all_rounds_together_use_the_budget_and_no_more(mechanism, norm):
    privacy = ClientLevel(budget=BUDGET, rounds=7, clip=0.1, norm=norm, mechanism=mechanism, by_layer=True)
    certificate = privacy.noise(network()).certificate
    total = Accountant()
    total.add(certificate, 7)
    assert 0.999 * BUDGET.epsilon <= total.epsilon(BUDGET.delta) <= BUDGET.epsilon
    assert certificate.relation == "replace"


@pytest.mark.parametrize("mechanism", ["classic", "mgm", "idn", "analytic"])
def test_the_published_size_is_never_less_noise_than_the_exact_one(mechanism):
    laws = [
        ClientLevel(budget=BUDGET, rounds=7, clip=0.1, mechanism=mechanism, by_layer=True, size=size)
        .noise(network())
        .law
        for size in ("published", "exact")
    ]
    assert laws[0].root_mean_square >= laws[1].root_mean_square * (1 - 1e-3)


def test_the_budget_of_each_round_is_that_of_exact_composition():
    mu = mu_of_each(BUDGET, 9)
    whole = float(gaussian.mu(BUDGET.epsilon, BUDGET.delta))
    assert whole / 3 * (1 - 1e-3) <= mu <= whole / 3
    each = budget_of_each(BUDGET, 9)
    assert float(gaussian.mu(each.epsilon, each.delta)) == pytest.approx(mu)


def test_the_exact_size_does_not_depend_on_how_much_a_theorem_asks_for():
    """MVG's own noise is far larger here, and can be drawn as published: the grid may use what it leaves of mu."""
    row = OneRow(low=-1.0, high=1.0)
    law = calibrate("mvg", shape=(100, 128), sensitivity=row, budget=Budget(0.1, 1e-5), gamma=113.2)
    exact, drawing = sized(law, row, 0.05, "exact")
    assert 0.0499 < certify(exact, row, drawing=drawing).mu <= 0.05
    published, drawing = sized(law, row, 0.05, "published")
    assert published.root_mean_square == law.root_mean_square > 100 * exact.root_mean_square
    assert certify(published, row, drawing=drawing).mu <= 0.05


def test_what_is_uploaded_is_the_clipped_update_with_noise_of_the_certified_size(tmp_path):
    """A chi-square test with a false-alarm rate of 5e-7, which must also see noise that is 5 % too small."""
    torch.manual_seed(0)
    model = nn.Linear(400, 50)
    privacy = ClientLevel(budget=BUDGET, rounds=1, clip=0.5)
    still = LocalTraining(learning_rate=1e-30)  # so that the update is zero
    made = Client(
        model, torch.zeros(4, 400), torch.zeros(4, dtype=torch.long), training=still, privacy=privacy, folder=tmp_path
    )
    noise = made.upload("a", 1, flat(model).numpy())
    std = privacy.noise(model).law.root_mean_square
    entries = len(noise)
    assert std == pytest.approx(2 * 0.5 * math.sqrt(entries) / mu_of_each(BUDGET, 1), rel=2e-3)

    def alarm(assumed):
        return 2 * min(
            stats.chi2(entries).cdf(np.sum((noise / assumed) ** 2)),
            stats.chi2(entries).sf(np.sum((noise / assumed) ** 2)),
        )

    assert alarm(std) > 5e-7
    assert alarm(std / 0.95) < 5e-7


def test_both_levels_are_stated_by_name(tmp_path):
    by_client = client(tmp_path / "a", ClientLevel(budget=BUDGET, rounds=4, clip=0.1)).guarantees
    assert by_client.client == by_client.record <= BUDGET.epsilon
    assert "client-level: epsilon 2.99" in str(by_client)
    assert "record-level: epsilon 2.99" in str(by_client)
    by_record = client(tmp_path / "b", RecordLevel(budget=BUDGET, rounds=4, clip=1.0)).guarantees
    assert by_record.client is None
    assert by_record.record <= BUDGET.epsilon
    assert "client-level: none" in str(by_record)
    assert "one record of one client added or removed" in str(by_record)


@pytest.mark.parametrize("level", [ClientLevel, RecordLevel])
def test_a_client_spends_once_a_round_and_declines_when_its_budget_is_spent(tmp_path, level):
    made = client(tmp_path, level(budget=BUDGET, rounds=3, clip=0.1), LocalTraining(epochs=2, batch_size=16))
    start = flat(network()).numpy()
    uploads = [made.upload("a", number, start) for number in (1, 2, 3)]
    assert all(upload.shape == start.shape and np.all(np.isfinite(upload)) for upload in uploads)
    with pytest.raises(Declined, match="is spent"):
        made.upload("a", 4, start)
    assert [entry.note for entry in made.participant.ledger.history()] == [f"run a round {n}" for n in (1, 2, 3)]
    assert np.array_equal(made.upload("a", 3, start), uploads[2])


def test_record_level_spends_are_those_of_sampled_steps(tmp_path):
    made = client(tmp_path, RecordLevel(budget=BUDGET, rounds=3, clip=1.0), LocalTraining(epochs=2, batch_size=10))
    made.upload("a", 1, flat(network()).numpy())
    (entry,) = made.participant.ledger.history()
    assert (entry.count, entry.sampling_rate, entry.relation) == (8, 0.25, "add/remove")


@pytest.mark.parametrize("level", [ClientLevel, RecordLevel])
def test_a_global_model_that_cannot_be_trained_is_declined_and_costs_nothing(tmp_path, level):
    made = client(tmp_path, level(budget=BUDGET, rounds=1, clip=0.1))
    for parameters, text in (
        (np.full(47, np.nan), "not finite"),
        (np.full(47, np.inf), "not finite"),
        (np.zeros(46), "must build the same model"),
        (np.zeros((1, 47)), "must build the same model"),
    ):
        with pytest.raises(Declined, match=text):
            made.upload("a", 1, parameters)
    assert made.participant.ledger.history() == []


@pytest.mark.parametrize("level", [ClientLevel, RecordLevel])
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_parameters_from_which_training_explodes_get_an_answer_all_the_same(tmp_path, level, size):
    made = client(tmp_path, level(budget=BUDGET, rounds=1, clip=0.1))
    made.upload("a", 1, np.random.default_rng(0).choice([-size, size], 47).astype(np.float32))
    assert len(made.participant.ledger.history()) == 1


def with_checks(outputs, labels):
    """A loss that raises an error for outputs that are not numbers."""
    return nn.functional.binary_cross_entropy(torch.sigmoid(outputs[:, 0]), labels.float(), reduction="none")


# large enough to go past all numbers, in two directions at once, for a record with two large entries and no other
TRAP = np.zeros(14, dtype=np.float32)
TRAP[:2] = 5e37, -5e37


@pytest.mark.parametrize("trapped", [False, True])
def test_a_server_cannot_look_for_records_that_make_training_fail(tmp_path, trapped):
    """It is sent an update either way, and it is charged for."""
    x, y = some_records()
    x = np.clip(x, -3, 3)
    x[7, :2] = 10.0 if trapped else 1.0
    privacy = ClientLevel(budget=BUDGET, rounds=1, clip=0.1)
    made = Client(nn.Linear(6, 2), x, y, training=LocalTraining(loss=with_checks), privacy=privacy, folder=tmp_path)
    assert np.all(np.isfinite(made.upload("a", 1, TRAP)))
    assert len(made.participant.ledger.history()) == 1


def test_a_loss_that_fails_for_some_parameters_is_refused_where_that_would_tell_of_a_record(tmp_path):
    privacy = RecordLevel(budget=BUDGET, rounds=1, clip=0.1)
    with pytest.raises(InvalidInput, match=r"must work with any parameters.*binary_cross_entropy_with_logits"):
        client(tmp_path, privacy, LocalTraining(loss=with_checks))
    model = network()
    before = flat(model)
    Client(model, *some_records(), training=LocalTraining(), privacy=privacy, folder=tmp_path)
    assert torch.equal(flat(model), before)


def test_training_that_cannot_work_at_all_shows_before_anything_is_spent(tmp_path):
    x, y = some_records()
    for level in (ClientLevel, RecordLevel):
        privacy = level(budget=BUDGET, rounds=1, clip=0.1)
        with pytest.raises(InvalidInput, match="IndexError"):
            Client(network(), x, y + 1, training=LocalTraining(), privacy=privacy, folder=tmp_path)
    for level, loss in ((ClientLevel, nn.functional.cross_entropy), (RecordLevel, lambda outputs, labels: outputs)):
        with pytest.raises(InvalidInput, match=r'one (value|number) per record.*reduction="none"'):
            client(tmp_path, level(budget=BUDGET, rounds=1, clip=0.1), LocalTraining(loss=loss))
    assert not (tmp_path / "budget.db").exists()


KEPT: list[torch.Tensor] = []


class Centred(nn.Module):
    """Centres records by the first batch that it gets, as lazy normalization does, and keeps that outside of itself."""

    def __init__(self):
        super().__init__()
        self.top = network()

    def forward(self, x):
        if len(x) > 1 and not KEPT:
            KEPT.append(x.detach().mean(0))
        return self.top(x - KEPT[0] if KEPT else x)


def test_no_record_reaches_the_model_in_a_check_before_the_first_round(tmp_path):
    KEPT.clear()
    private = RecordLevel(budget=BUDGET, rounds=1, clip=0.1)
    with pytest.warns(UserWarning, match="one at a time"):
        Client(Centred(), *some_records(), training=LocalTraining(), privacy=private, folder=tmp_path)
    assert not KEPT
    central = CentralPrivacy(budget=BUDGET, rounds=1, clients=2, clip=0.1, unit="record", records=100)
    with pytest.warns(UserWarning, match="one at a time"):
        GradientClient(Centred(), *some_records(), privacy=central)
    assert not KEPT


def test_the_local_update_is_that_of_sgd():
    """Against torch's own optimizer; one batch an epoch, so that the order does not count."""
    x, y = (torch.as_tensor(a) for a in some_records())
    ours, theirs = network(), network()
    update = LocalTraining(epochs=3, batch_size=40, learning_rate=0.3, momentum=0.5).update(ours, x.float(), y)
    before, optimizer = flat(theirs), torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x.float()), y).backward()
        optimizer.step()
    assert torch.allclose(update, flat(theirs) - before, atol=1e-6)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimizer_of_torch_trains_in_the_clear_and_by_dp_sgd(tmp_path, monkeypatch, make):
    """The local update, and that of DP-SGD without noise and sampling, in two rounds: its state starts anew."""
    x, y = (torch.as_tensor(a) for a in some_records())
    training = LocalTraining(epochs=3, batch_size=40, optimizer=lambda parameters: make(parameters, lr=0.05))
    private = client(tmp_path, RecordLevel(budget=BUDGET, rounds=2, clip=1e3), training)
    monkeypatch.setattr(ParameterNoise, "add_", lambda self, flat: None)
    start = flat(network()).numpy()
    for number in (1, 2):
        theirs = network()
        optimizer = make(theirs.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(x.float()), y).backward()
            optimizer.step()
        expected = flat(theirs).numpy() - start
        assert np.allclose(training.update(network(), x.float(), y), expected, atol=1e-4)
        assert np.allclose(private.upload("a", number, start), expected, atol=1e-4)


def test_the_average_has_equal_weights_and_needs_enough_replies():
    model, updates = np.array([1, 2], dtype=np.float32), [np.array([1, 0], np.float32), np.array([0, 3], np.float32)]
    assert average(model, updates).tolist() == [1.5, 3.5]
    assert average(model, updates, min_replies=3) is model
    assert average(model, []) is model


def test_load_undoes_flat():
    one, other = network(), network()
    load(other, flat(one) * 2)
    assert torch.equal(flat(other), flat(one) * 2)
    with pytest.raises(InvalidInput, match="must build the same model"):
        load(other, torch.zeros(3))


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"mechanism": "gaussian"}, InvalidInput, "must be one of"),
        ({"mechanism": "r1smg"}, GuaranteeViolated, "theorem that is false"),
        ({"budget": Budget(1e-9, 1e-12), "rounds": 10**9}, MatrixDPError, "budget|grid"),
        ({"budget": 3.0}, InvalidInput, "must be a Budget"),
        ({"clip": math.nan}, InvalidInput, "clip must be finite"),
        ({"norm": "l1"}, InvalidInput, "norm must be one of"),
        ({"rounds": 0}, InvalidInput, "rounds must be"),
        ({"size": "small"}, InvalidInput, "size must be one of"),
        ({"options": {"colour": 1}}, InvalidInput, "no option 'colour'"),
    ],
)
def test_settings_that_cannot_work_say_so(settings, error, text):
    with pytest.raises(error, match=text):
        ClientLevel(**{"budget": BUDGET, "rounds": 3, "clip": 0.1, **settings}).noise(network())


def test_models_and_records_that_cannot_work_say_so(tmp_path):
    privacy = ClientLevel(budget=BUDGET, rounds=1, clip=0.1)
    with pytest.raises(InvalidInput, match="running statistics, which are not parameters"):
        privacy.noise(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)))
    privacy.noise(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2, track_running_stats=False)))
    with pytest.raises(InvalidInput, match="single precision"):
        privacy.noise(nn.Linear(6, 2).double())
    x, y = some_records()
    x[3, 2] = math.nan
    with pytest.raises(InvalidInput, match="inputs must be finite"):
        Client(network(), x, y, training=LocalTraining(), privacy=privacy, folder=tmp_path)
    with pytest.raises(InvalidInput, match="equal length"):
        Client(network(), np.zeros_like(x), y[1:], training=LocalTraining(), privacy=privacy, folder=tmp_path)


def test_the_ledger_of_another_budget_is_refused(tmp_path):
    client(tmp_path, ClientLevel(budget=BUDGET, rounds=1, clip=0.1))
    with pytest.raises(InvalidInput, match="was made for another guarantee: budget must be the ledger's own"):
        client(tmp_path, ClientLevel(budget=Budget(4.0, 1e-5), rounds=1, clip=0.1))
    with pytest.raises(InvalidInput, match="adjacency must be the ledger's own"):
        client(tmp_path, RecordLevel(budget=BUDGET, rounds=1, clip=0.1))


def test_a_model_that_would_mix_or_keep_records_sees_one_at_a_time_and_keeps_none(tmp_path):
    """Other checks run the model too, on copies."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mean = nn.Linear(6, 2), None

        def forward(self, x):
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return self.linear(x - 0.9 * self.mean)

    model, privacy = Centred(), RecordLevel(budget=BUDGET, rounds=2, clip=1.0)
    with pytest.warns(UserWarning, match="one at a time"):
        made = Client(model, *some_records(), training=LocalTraining(), privacy=privacy, folder=tmp_path)
    made.upload("a", 1, flat(model).numpy())
    assert model.mean is None


def test_rounds_of_all_runs_are_one_plan(tmp_path):
    """Its steps were planned together; another plan for the same records does not fit into the budget any more."""
    privacy, start = RecordLevel(budget=BUDGET, rounds=3, clip=1.0), flat(network()).numpy()
    client(tmp_path, privacy).upload("a", 1, start)
    made = client(tmp_path, privacy)
    made.upload("b", 1, start)
    made.upload("b", 2, start)
    entries = made.participant.ledger.history()
    assert len({entry.series for entry in entries}) == 1
    assert [(entry.count, entry.planned) for entry in entries] == [(1, 3)] * 3
    with pytest.raises(Declined, match="is spent"):
        client(tmp_path, privacy).upload("c", 1, start)
    other = client(tmp_path, RecordLevel(budget=BUDGET, rounds=2, clip=1.0))
    with pytest.raises(Declined, match="is spent"):
        other.upload("c", 1, start)


@pytest.mark.parametrize("level", [ClientLevel, RecordLevel])
def test_noise_that_is_not_floating_point_safe_is_refused(tmp_path, level):
    with pytest.raises(GuaranteeViolated, match="not floating-point-safe"):
        client(tmp_path, level(budget=BUDGET, rounds=1, clip=0.1, norm="l2", mechanism="l2"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_client_takes_no_private_steps_and_spends_nothing(tmp_path):
    """Its trainer is in memory; what a client of the other kind has is on the disk, and forks share it."""
    made, start = client(tmp_path, RecordLevel(budget=BUDGET, rounds=3, clip=1.0)), flat(network()).numpy()
    made.upload("a", 1, start)
    child = os.fork()
    if child == 0:
        try:
            made.upload("a", 2, start)
        except InvalidInput as error:
            os._exit(0 if "belongs to process" in str(error) else 1)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(made.participant.ledger.history()) == 1
    made.upload("a", 2, start)

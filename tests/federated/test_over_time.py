"""Clients whose own noise is correlated over the steps of all their rounds."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.federated import Client, Declined, LocalTraining, RecordLevel
from matrixdp.federated.tensors import flat

BUDGET = Budget(3.0, 1e-5)
TRAINING = LocalTraining(epochs=2, batch_size=10, learning_rate=1.0)  # 4 steps per epoch, 8 per round


def nothing(outputs, labels):
    """A loss without gradients, so that uploads are noise alone."""
    return (outputs * 0).sum(dim=1)


def network(classes=2):
    torch.manual_seed(0)
    return nn.Linear(6, classes)


def over_time(folder, *, classes=2, training=TRAINING, mechanism="banded", order="fixed", turned=0, **options):
    x = np.roll(np.random.default_rng(0).normal(size=(40, 6)), turned, axis=0)
    privacy = RecordLevel(budget=BUDGET, rounds=3, clip=1.0, mechanism=mechanism, order=order, options=options)
    labels = (x[:, 0] > 0).astype(np.int64)
    return Client(network(classes), x, labels, training=training, privacy=privacy, folder=folder)


START = flat(network()).numpy()


@pytest.mark.parametrize(("order", "mechanism", "expected"), [
    ("fixed", "banded", (1, 1.0, "zero-out")),
    ("fixed", "inverse-banded", (1, 1.0, "zero-out")),
    ("sampled", "toeplitz", (12, 0.5, "add/remove")),  # two groups take turns in 24 steps
])  # fmt: skip
def test_all_rounds_are_charged_once(tmp_path, order, mechanism, expected):
    made = over_time(tmp_path, order=order, mechanism=mechanism, bands=2)
    for number in (1, 2, 3):
        assert np.all(np.isfinite(made.upload("a", number, START)))
    (entry,) = made.participant.ledger.history()
    assert (entry.count, entry.sampling_rate, entry.relation) == expected
    assert entry.note == "run a all rounds"
    assert 0.98 * 3 < made.guarantees.record <= 3
    assert made.guarantees.client is None
    change = "replaced by zero" if order == "fixed" else "added or removed"
    assert change in str(made.guarantees)
    with pytest.raises(Declined, match="budget"):
        made.upload("a", 4, START)
    with pytest.raises(Declined):
        made.upload("b", 1, START)
    assert len(made.participant.ledger.history()) == 1


def test_another_process_goes_on_with_the_same_noise(tmp_path):
    first = over_time(tmp_path, bands=3)
    first.upload("a", 1, START)
    file = tmp_path / "run-a.npz"
    after_one = file.read_bytes()
    other = over_time(tmp_path, bands=3).upload("a", 2, START)
    with pytest.raises(Declined, match="another process has answered"):
        first.upload("a", 3, START)
    file.write_bytes(after_one)  # what no client does: the round once more, by the process that had not stopped
    assert np.array_equal(first.upload("a", 2, START), other)
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("order", "mechanism"), [("fixed", "banded"), ("sampled", "toeplitz")])
def test_records_in_another_order_are_declined(tmp_path, order, mechanism):
    """Which steps a record takes part in follows from its place; in another one it could take part more often."""
    settings = {"order": order, "mechanism": mechanism, "bands": 2}
    over_time(tmp_path, **settings).upload("a", 1, START)
    with pytest.raises(Declined, match="another order of them"):
        over_time(tmp_path, turned=1, **settings).upload("a", 2, START)
    assert np.all(np.isfinite(over_time(tmp_path, **settings).upload("a", 2, START)))


def test_a_round_that_failed_is_not_gone_on_from(tmp_path, monkeypatch):
    made = over_time(tmp_path, bands=2)
    made.upload("a", 1, START)
    train = made._upload.trainer.train

    def failing(epochs):
        train(epochs)
        raise RuntimeError

    monkeypatch.setattr(made._upload.trainer, "train", failing)
    with pytest.raises(RuntimeError):
        made.upload("a", 2, START)
    monkeypatch.undo()
    with pytest.raises(Declined, match="a round has failed here"):
        made.upload("a", 3, START)
    assert np.all(np.isfinite(over_time(tmp_path, bands=2).upload("a", 3, START)))


def test_noise_of_all_rounds_adds_up_as_the_law_says(tmp_path):
    training = LocalTraining(loss=nothing, epochs=2, batch_size=10, learning_rate=1.0)
    total, start = 0.0, flat(network(400)).numpy()
    for number in (1, 2, 3):  # a new process for each round
        made = over_time(tmp_path, classes=400, training=training, bands=4)
        total = total + made.upload("a", number, start).astype(np.float64) * 10
    covariance = made._upload.trainer.noise.law.covariance
    variance = covariance.answer_variances(np.ones(24))[-1]
    low, high = stats.chi2.ppf([2.5e-7, 1 - 2.5e-7], total.size)  # false alarms: 5e-7

    def fits(variance):
        return low <= np.sum(total**2) / variance <= high

    assert fits(variance)
    assert not fits(variance * 1.35)
    assert not fits(24 * covariance.variance_range()[0])  # no correlation over the rounds


@pytest.mark.parametrize(("changes", "text"), [
    ({"order": "fixed"}, "needs a mechanism over time"),
    ({"order": "shuffled"}, "order"),
    ({"mechanism": "banded", "norm": "linf"}, "norm='l2'"),
    ({"mechanism": "banded", "by_layer": True}, "by_layer"),
])  # fmt: skip
def test_settings_that_do_not_go_together(changes, text):
    with pytest.raises(InvalidInput, match=text):
        RecordLevel(budget=BUDGET, rounds=1, clip=1.0, **changes)
    with pytest.raises(InvalidInput, match="no option 'colour'"):
        RecordLevel(budget=BUDGET, rounds=1, clip=1.0, mechanism="banded", options={"colour": 1}).check(network())

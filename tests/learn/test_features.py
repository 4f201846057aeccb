"""Features released once: bounded, certified for one record replaced, and good enough to train on."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

from matrixdp import Budget
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.learn import PrivateFeatures
from matrixdp.privacy.gaussian import mu as largest_mu
from matrixdp.sensitivity import OneRow

BUDGET = Budget(4.0, 1e-5)
RECORDS, FEATURES = 1500, 3  # more records than pass through the front at a time


pytestmark = pytest.mark.usefixtures("one_thread")


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 2))


def records(scale=1.0):
    inputs = scale * torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e6, 1e30])
def test_features_are_bounded_whatever_the_record(scale):
    private = PrivateFeatures(network(), 1)
    inputs, _ = records(scale)
    found = private.features(inputs)
    assert found.shape == (RECORDS, FEATURES)
    assert float(found.abs().max()) <= 1
    torch.testing.assert_close(found, torch.tanh(private.front[0](inputs)).detach())


def test_the_certificate_is_for_one_record_replaced():
    """One row of d entries changes by at most 2 each, so the noise has std 2 sqrt(d) / B, and a hair for its grid."""
    private = PrivateFeatures(network(), 1)
    inputs, targets = records()
    released = private.release(inputs, BUDGET)
    least = 2 * math.sqrt(FEATURES) / float(largest_mu(BUDGET.epsilon, BUDGET.delta))
    assert least <= released.noise.root_mean_square <= least * (1 + 2e-3)
    assert released.certificate.relation == "replace"
    assert released.certificate.meets(BUDGET)
    assert released.certificate.float_safe
    assert released.value.shape == (RECORDS, FEATURES)
    # 4500 squares, false alarm 5e-7; noise that is 10 % short passes with 4e-7
    squares = float(((released.value - private.features(inputs)) ** 2).sum()) / released.noise.root_mean_square**2
    low, high = stats.chi2.ppf([2.5e-7, 1 - 2.5e-7], RECORDS * FEATURES)
    assert low < squares < high
    assert len(private.dataset(released, targets)) == RECORDS


def test_one_record_changes_one_row_by_a_member_of_the_set():
    private = PrivateFeatures(network(), 1)
    inputs, _ = records()
    other = inputs.clone()
    other[700] = -1000.0 * inputs[700]
    change = private.features(inputs) - private.features(other)
    assert change.any(dim=1).nonzero().flatten().tolist() == [700]
    assert OneRow(low=-1.0, high=1.0).contains(change.numpy())


def test_records_stay_apart_in_training_mode_too():
    """train() on the whole would let batch normalisation mix the records, and learn from them."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    private = PrivateFeatures(model, 3)
    private.train()
    before = {name: value.clone() for name, value in private.front.state_dict().items()}
    inputs, _ = records()
    other = inputs.clone()
    other[700] *= -1000.0
    change = private.features(inputs) - private.features(other)
    assert change.any(dim=1).nonzero().flatten().tolist() == [700]
    assert all(torch.equal(before[name], value) for name, value in private.front.state_dict().items())
    assert private.top.training


def test_normalisation_over_the_batch_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    with pytest.raises(InvalidInput, match="mix records"):
        PrivateFeatures(model, 2)
    PrivateFeatures(model, 1)  # in the top it sees released features alone


def test_the_top_learns_and_the_front_does_not():
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(1, 4))  # a front that lets the first entry through, which decides
    private = PrivateFeatures(model, 1)
    inputs, targets = records(3.0)
    front = [p.clone() for p in private.front.parameters()]
    assert not any(p.requires_grad for p in private.front.parameters())
    rows, labels = private.dataset(private.release(inputs, Budget(10.0, 1e-5)), targets).tensors
    optimizer = torch.optim.SGD([p for p in private.parameters() if p.requires_grad], lr=0.5)
    private.train()
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(private.top(rows), labels).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(front, private.front.parameters(), strict=True))
    accuracy = float((private(inputs).argmax(1) == targets).float().mean())
    assert accuracy > 0.75  # chance is 0.5, and 60 trials gave 0.95 and above


def test_the_ledger_is_charged_and_may_refuse(tmp_path):
    private = PrivateFeatures(network(), 1)
    ledger = Ledger(tmp_path / "ledger", Budget(5.0, 1e-5))
    private.release(records()[0], BUDGET, ledger=ledger, note="once")
    assert [entry.note for entry in ledger.history()] == ["once"]
    assert ledger.relation == "replace"
    assert ledger.spent() == pytest.approx(BUDGET.epsilon, rel=1e-3)
    with pytest.raises(BudgetExceeded):
        private.release(records()[0], BUDGET, ledger=ledger)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_records_that_are_not_finite_are_refused_before_anything_is_spent(tmp_path, value):
    ledger = Ledger(tmp_path / "ledger", BUDGET)
    inputs, _ = records()
    inputs[3, 1] = value
    with pytest.raises(InvalidInput, match="finite"):
        PrivateFeatures(network(), 1).release(inputs, BUDGET, ledger=ledger)
    assert ledger.history() == []


def test_a_front_that_overflows_is_no_error():
    """Which record is too large for the front must not show."""
    private = PrivateFeatures(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2)), 1)
    nn.init.constant_(private.front[0].weight, 3.0)
    inputs = torch.tensor([[3e38, -3e38], [0.1, 0.2]])
    assert private.features(inputs)[:, 0].tolist() == [0.0, pytest.approx(math.tanh(0.9))]
    assert private.release(inputs, BUDGET).value.isfinite().all()


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 2)]), None])
def test_other_models_are_refused(model):
    with pytest.raises(InvalidInput, match=r"nn\.Sequential"):
        PrivateFeatures(model, 1)


@pytest.mark.parametrize("split", [0, 3, 7, -1, 1.0, None])
def test_bad_splits_are_refused(split):
    with pytest.raises(InvalidInput, match="split"):
        PrivateFeatures(network(), split)

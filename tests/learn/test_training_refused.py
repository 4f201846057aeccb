"""Data, settings, laws and batches that a training refuses."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from matrixdp import calibrate
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput
from matrixdp.learn import PrivateSGD, make_private
from matrixdp.sensitivity import Frobenius
from training_cases import BUDGET, DATA, LOSS, RECORDS, SIZE, network, seeded, step, trainer

pytestmark = pytest.mark.usefixtures("one_thread")

# --- what is refused ---


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize("data", [DataLoader(DATA), Stream(), 7, None], ids=["loader", "stream", "number", "none"])
def test_other_data_are_refused(data):
    model = network()
    with pytest.raises(InvalidInput, match="data must be a data set"):
        PrivateSGD(
            model, torch.optim.SGD(model.parameters(), lr=1), data, LOSS, budget=BUDGET, batch_size=1, clip=1.0, steps=1
        )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"batch_size": RECORDS + 1}, InvalidInput, "batch_size must be at most"),
        ({"batch_size": 0}, InvalidInput, "batch_size"),
        ({"batch_size": 2.5}, InvalidInput, "batch_size"),
        ({"epochs": 3}, InvalidInput, "exclude each other"),
        ({"steps": None}, InvalidInput, "epochs or steps"),
        ({"steps": 0}, InvalidInput, "steps"),
        ({"steps": None, "epochs": math.nan}, InvalidInput, "epochs"),
        ({"budget": 3.0}, InvalidInput, "Budget"),
        ({"clip": math.nan}, InvalidInput, "clip"),
        ({"clip": 0.0}, InvalidInput, "clip"),
        ({"clipping": "l1"}, InvalidInput, "norm"),
        ({"largest_batch": 0}, InvalidInput, "largest_batch"),
        ({"noise": "uniform"}, InvalidInput, "noise must be one of"),
        ({"noise": "auto"}, InvalidInput, "noise must be one of"),
        ({"noise": 7}, InvalidInput, "noise must be a mechanism's name"),
        ({"noise": "mvg"}, InvalidInput, "gamma"),
        ({"noise": "analytic", "gamma": 1.0}, InvalidInput, "no option"),
        ({"noise": Gaussian(Isotropic((SIZE + 1,), 9.0))}, InvalidInput, "a law on all"),
        ({"noise": Gaussian(Isotropic((SIZE, 1), 9.0))}, InvalidInput, "a law on all"),
        ({"noise": 9.0, "by_layer": True}, InvalidInput, "used as it is"),
        ({"noise": 9.0, "gamma": 1.0}, InvalidInput, "used as it is"),
        ({"noise": "l2", "by_layer": True}, InvalidInput, "not Gaussian"),
        ({"noise": "r1smg"}, GuaranteeViolated, "theorem that is false"),
        ({"noise": "r1smg", "accept_violation": True}, GuaranteeViolated, "theorem that is false"),
        ({"noise": 0.05}, BudgetExceeded, "too small to take one step"),
        ({"noise": 0.05, "steps": None}, BudgetExceeded, "too small to take one step"),
        ({"noise": 0.05, "accept_violation": 1}, BudgetExceeded, "too small to take one step"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        trainer(**changes)


def test_a_refuted_law_needs_the_word_of_the_caller():
    model = nn.Linear(4, 2)
    law = calibrate("r1smg", shape=(10,), sensitivity=Frobenius(0.5), budget=BUDGET)
    with pytest.raises(GuaranteeViolated, match="accept_violation=True refused"):
        trainer(model, noise=law, steps=2)
    run = trainer(model, noise=law, steps=2, accept_violation=True)
    step(run)
    assert run.epsilon() > BUDGET.epsilon
    assert "no proof" in str(run) or "not of these floats" in str(run)


@pytest.mark.filterwarnings("error")
def test_a_generator_and_a_ledger_exclude_each_other(tmp_path):
    with pytest.raises(InvalidInput, match="exclude each other"):
        seeded(0, ledger=Ledger(tmp_path / "ledger", BUDGET))


@pytest.mark.parametrize(
    "made",
    [lambda: DATA.tensors, lambda: DATA.tensors[0], lambda: next(iter(DataLoader(DATA, 8))), lambda: None],
    ids=["tensors", "inputs", "loader", "none"],
)
def test_other_batches_are_refused(made):
    run = trainer()
    with pytest.raises(InvalidInput, match="batches"):
        run.step(made())
    assert run.steps == 0


def test_a_batch_serves_one_step_of_its_own_trainer():
    run, other = trainer(noise=9.0), trainer(noise=9.0, batch_size=20)
    (drawn,) = run.batches()
    assert len(drawn.targets) == RECORDS
    with pytest.raises(InvalidInput, match="batches"):
        other.step(drawn)
    run.step(drawn)
    with pytest.raises(InvalidInput, match="one step"):
        run.step(drawn)
    assert (run.steps, other.steps) == (1, 0)


def test_a_model_that_mixes_records_is_refused():
    with pytest.raises(InvalidInput, match="mixes the records"):
        trainer(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))


def test_an_embedding_that_writes_into_its_table_is_refused():
    """PyTorch scales the rows that a batch names, in place and without noise; a trusted loop would not see it."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 2))
    data = DataLoader(TensorDataset(torch.zeros(8, 3, dtype=torch.long), torch.zeros(8, dtype=torch.long)))
    with pytest.raises(InvalidInput, match="changes its table"), pytest.warns(UserWarning, match="Poisson"):
        make_private(
            model, torch.optim.SGD(model.parameters()), data, budget=BUDGET, clip=1.0, epochs=1, trust_loop=True
        )


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = network(), nn.Linear(2, 2)
    frozen = network()
    frozen[0].requires_grad_(False)
    for chosen, moved in ((model, [*model.parameters(), *other.parameters()]), (frozen, frozen.parameters())):
        with pytest.raises(InvalidInput, match="would carry no noise"):
            PrivateSGD(chosen, torch.optim.SGD(moved, lr=1), DATA, LOSS, budget=BUDGET, batch_size=1, clip=1.0, steps=1)


def test_a_loss_that_averages_sees_one_record():
    for loss in (nn.CrossEntropyLoss(), lambda outputs, targets: LOSS(outputs, targets).reshape(-1, 1)):
        run = trainer(loss=loss)
        step(run)
        assert run.steps == 1

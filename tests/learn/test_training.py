"""Private SGD: each step against a reference, what its noise guarantees, and that it learns."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import Spherical
from matrixdp.distributions.covariance import Blocks
from matrixdp.errors import BudgetExceeded, GuaranteeViolated
from matrixdp.learn import PoissonBatch, PrivateSGD
from matrixdp.learn.sampling import Turn
from matrixdp.privacy.gaussian import mu as largest_mu
from training_cases import (
    BUDGET,
    DATA,
    LOSS,
    RECORDS,
    network,
    parameters,
    reference_gradient,
    seeded,
    seeds,
    silent,
    step,
    trainer,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_mnist.py"


# --- a step ---


@pytest.mark.parametrize("clipping", ["l2", "linf"])
def test_a_step_without_noise_is_the_reference_step(clipping):
    clip = {"l2": 0.5, "linf": 0.02}[clipping]
    run, before = silent(clipping=clipping, clip=clip), parameters(silent())
    gradient = reference_gradient(network(), *DATA.tensors, clip, clipping)
    step(run)
    torch.testing.assert_close(parameters(run), before - 0.5 * gradient / RECORDS, rtol=1e-5, atol=1e-7)
    assert run.steps == 1


def test_what_was_spent_is_a_record_that_verifies():
    run = trainer()
    assert run.composition().parts[0].count == run.affordable == 10
    step(run)
    composition = Composition.from_json(run.composition().to_json())
    assert composition.parts[0].count == 1
    assert composition.epsilon(BUDGET.delta) == run.epsilon()
    assert composition.verify(), str(composition.verify())


@seeds
def test_a_seeded_step_is_the_reference_step_with_the_noise_of_the_seed():
    run, before = seeded(3), parameters(silent())
    size = len(before)
    normal = torch.randn(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    std = math.sqrt(run.noise.law.expected_squared_error() / size)
    gradient = reference_gradient(network(), *DATA.tensors, 0.5) + std * normal
    step(run)
    torch.testing.assert_close(parameters(run), (before - 0.5 * gradient / RECORDS).float(), rtol=1e-4, atol=1e-6)
    assert std * 0.5 / RECORDS > 1e-3  # the noise was there to be seen


def test_the_denominator_is_public():
    """A batch half as large as expected is divided by what was expected."""
    run, before = silent(), parameters(silent())
    gradient = reference_gradient(network(), *(t[:20] for t in DATA.tensors), 0.5)
    step(run, 0, 20)
    torch.testing.assert_close(parameters(run), before - 0.5 * gradient / RECORDS, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("largest", [1, 7, 39, 1000])
def test_pieces_of_a_batch_give_the_same_gradient(largest):
    whole, pieces = silent(), silent(largest_batch=largest)
    for run in (whole, pieces):
        step(run)
    torch.testing.assert_close(pieces.gradients.flat, whole.gradients.flat, rtol=1e-5, atol=1e-8)


def has_moved(run, before):
    """Whether every parameter has moved; one entry of all may have noise of 0, or too little for a float.

    An entry stands still with at most 7e-7, and 4e-7 if it is alone in its parameter; two entries do with 1e-9.
    """
    moved = [p.detach() != q for p, q in zip(run.model.parameters(), before, strict=True)]
    return all(bool(part.any()) for part in moved) and sum(int((~part).sum()) for part in moved) <= 1


@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_batch_without_records_moves_every_parameter(zero_grad):
    """Also when the gradients were taken away before: else a model that stands still would tell."""
    run, before = trainer(), list(network().parameters())
    if zero_grad:
        run.optimizer.zero_grad(set_to_none=True)
    step(run, 0, 0)
    assert has_moved(run, before)
    assert run.steps == 1


def test_every_step_has_noise_of_its_own():
    run = trainer()
    gradients = []
    for _ in range(2):
        step(run, 0, 0)
        gradients.append(run.gradients.flat.clone())
    assert int((gradients[0] == gradients[1]).sum()) <= 1  # of 40, on a grid of std / 2^21: two with 2e-11


@seeds
def test_a_record_that_is_not_finite_counts_as_no_record():
    broken, empty = seeded(3), seeded(3)
    inputs, targets = (t[:1].clone() for t in DATA.tensors)
    inputs[0, 2] = math.nan
    broken.step(PoissonBatch(inputs, targets, turn=Turn(broken)))
    step(empty, 0, 0)
    assert int(broken.dropped) == 1
    assert int(empty.dropped) == 0
    assert torch.equal(parameters(broken), parameters(empty))


def test_any_optimizer_and_double_precision():
    model = network().double()
    inputs, targets = DATA.tensors
    data = TensorDataset(inputs.double(), targets)
    run = PrivateSGD(
        model, torch.optim.Adam(model.parameters()), data, LOSS, budget=BUDGET, batch_size=RECORDS, clip=1.0, steps=3
    )
    run.train(3)
    assert run.steps == 3


# --- what the noise guarantees ---


def test_the_noise_uses_the_budget_and_no_more():
    run = trainer(steps=10)
    assert 0.98 * BUDGET.epsilon < run._costs.after(10).epsilon(BUDGET.delta) <= BUDGET.epsilon
    assert run.epsilon() == 0.0
    run.train(10)
    assert 0.98 * BUDGET.epsilon < run.epsilon() <= BUDGET.epsilon
    assert run.epsilon(1e-3) < run.epsilon()
    assert run.certificate.relation == "add/remove"
    assert run.certificate.float_safe
    assert "after 10 of 10 steps" in str(run)
    shown = float(str(run).split("epsilon ")[1].split(" ")[0])
    assert run.epsilon() <= shown <= BUDGET.epsilon + 1e-3


@pytest.mark.parametrize("clipping", ["l2", "linf"])
@pytest.mark.parametrize(("name", "options"), [("mvg", {"gamma": 20.0, "precision": "binary"}), ("idn", {})])
def test_layers_with_noise_of_their_own_keep_the_budget(name, options, clipping):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    run = trainer(model, noise=name, by_layer=True, clipping=clipping, **options)
    assert isinstance(run.noise.law.covariance, Blocks)
    assert 0.98 * BUDGET.epsilon < run._costs.after(10).epsilon(BUDGET.delta) <= BUDGET.epsilon
    before = [p.detach().clone() for p in run.model.parameters()]
    run.train(2)
    assert has_moved(run, before)
    assert run.steps == 2


def test_noise_that_is_not_floating_point_safe_needs_the_word_of_the_caller(tmp_path):
    model = nn.Linear(4, 2, bias=False)
    ledger = Ledger(tmp_path / "ledger", BUDGET)
    for name in ("l2", Spherical(shape=(8,), k=8.0, p=1.0, scale=9.0)):
        for more in ({}, {"accept_violation": 1}, {"ledger": ledger}, {"ledger": ledger, "accept_violation": True}):
            with pytest.raises(GuaranteeViolated, match="not floating-point-safe"):
                trainer(model, noise=name, steps=1, **more)
    assert ledger.history() == []
    run = trainer(model, noise="l2", steps=1, accept_violation=True)
    assert isinstance(run.noise.law, Spherical)
    step(run)
    assert 0.9 * BUDGET.epsilon < run.epsilon() <= BUDGET.epsilon


@seeds
def test_a_seeded_study_may_use_any_noise():
    assert isinstance(seeded(0, model=nn.Linear(4, 2), noise="l2", steps=1).noise.law, Spherical)


def test_epsilon_of_the_mnist_setting():
    """Noise 1.1, batches of 256 of 60,000, 30 epochs: against our Accountant and against dp-accounting."""
    data = TensorDataset(torch.zeros(60_000, 1), torch.zeros(60_000))
    model = nn.Linear(1, 1, bias=False)
    run = trainer(model, data, batch_size=256, clip=2.0, noise=2.2, steps=30 * 235, accept_violation=True)
    assert (run.epoch_steps, run.affordable) == (235, 7050)
    run.steps = 7050
    found, accountant, peer = run.epsilon(), Accountant(), PLDAccountant()
    accountant.add(run.certificate, 7050, 256 / 60_000)
    assert found == accountant.epsilon(1e-5)
    peer.compose(PoissonSampledDpEvent(256 / 60_000, GaussianDpEvent(1.1)), 7050)
    truth = peer.get_epsilon(1e-5)  # itself a bound, from above
    assert truth * (1 - 1e-3) <= found <= truth * 1.01


def test_without_planned_steps_a_law_is_used_as_long_as_it_lasts():
    std = 2.0
    run = trainer(noise=std, steps=None)
    exact = (float(largest_mu(BUDGET.epsilon, BUDGET.delta)) * std / 0.5) ** 2  # steps, each of mu = 0.5 / std
    assert 0.98 * exact - 1 < run.affordable <= exact
    with pytest.raises(BudgetExceeded, match=f"allows {run.affordable} steps"):
        trainer(noise=std, steps=2 * run.affordable)
    assert trainer(noise=std, steps=run.affordable).affordable == run.affordable


@seeds
def test_a_seeded_training_is_marked():
    with pytest.warns(UserWarning, match="whoever knows it can remove the noise"):
        run = seeded(0)
    assert run.certificate.drawing.reproducible
    assert "REPRODUCIBLE" in str(run)
    runs = [seeded(4), seeded(4), seeded(5)]
    for one in runs:
        one.train(2)
    assert torch.equal(parameters(runs[0]), parameters(runs[1]))
    assert not torch.equal(parameters(runs[0]), parameters(runs[2]))


# --- it learns ---


@seeds
def test_digits_are_learnt():
    """Ten classes at epsilon 3; chance is 0.1, and eight seeds gave 0.84 to 0.88."""
    found = load_digits()
    inputs = torch.tensor(found.data / 16, dtype=torch.float32)
    targets = torch.tensor(found.target)
    train, test = slice(0, 1500), slice(1500, None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10))
    run = trainer(
        model, TensorDataset(inputs[train], targets[train]), learning_rate=2.0, batch_size=150, clip=1.0, epochs=10,
        steps=None, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    run.train(10)
    accuracy = float((model(inputs[test]).argmax(1) == targets[test]).float().mean())
    assert accuracy > 0.7
    assert run.epsilon() <= 3.0


def test_the_example_fits_a_page_and_runs_on_little_data(tmp_path, capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 60
    specification = importlib.util.spec_from_file_location("train_mnist", EXAMPLE)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    generator = np.random.default_rng(0)
    train, test = (
        TensorDataset(
            torch.tensor(generator.random((count, 1, 28, 28)), dtype=torch.float32),
            torch.tensor(generator.integers(10, size=count)),
        )
        for count in (64, 16)
    )
    example.main(train, test, epochs=2, batch_size=64, ledger=tmp_path / "ledger")
    printed = capsys.readouterr().out
    assert printed.count("accuracy") == 2
    assert "Private SGD: epsilon" in printed
    assert "after 2 of 2 steps" in printed
    assert Ledger(tmp_path / "ledger").spent() <= 3.0

"""Ways around the guarantee that a user may take without noticing: each is closed, or refused with a reason."""

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.learn import ClippedGradients, PoissonBatch, PrivateSGD
from matrixdp.learn.randomness import secret_randomness
from matrixdp.learn.sampling import Turn, loader

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, CLIP = 30, 1.0
LOSS = nn.CrossEntropyLoss(reduction="none")


def records(shape=(5,)):
    rng = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(RECORDS, *shape, generator=rng), torch.arange(RECORDS) % 2)


DATA = records()


def trainer(model=None, data=DATA, **changes):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)) if model is None else model
    options = {"budget": Budget(1.0, 1e-5), "batch_size": len(data), "clip": CLIP, "steps": 20, **changes}
    return PrivateSGD(model, torch.optim.SGD(model.parameters(), lr=1.0), data, LOSS, **options)


def step(run, data=DATA):
    """A step with all records, as if they had been drawn."""
    run.step(PoissonBatch(*data.tensors, turn=Turn(run)))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


# --- the noise reaches the model ---


def has_its_noise(run, data=DATA):
    """Whether a step lies as far from one without noise as the law says; false alarm 1e-7."""
    plain = ClippedGradients(copy.deepcopy(run.model), LOSS, clip=CLIP)
    plain.zero()
    plain.accumulate(*data.tensors)
    before = flat(run.model)
    step(run, data)
    moved = before - flat(run.model)
    raw = plain.flat.double() / len(data)
    noise = (moved - raw) / (run.noise.law.root_mean_square / len(data))
    low, high = stats.chi2.ppf([5e-8, 1 - 5e-8], len(noise))
    return low < float(noise.square().sum()) < high


CONVERSIONS = {
    "none": lambda model: model,
    "there and back": lambda model: model.double().float(),
    "half and back": lambda model: model.half().float(),
    "to another layout": lambda model: model.to(memory_format=torch.channels_last),
    "gradients set to None": lambda model: model.zero_grad(set_to_none=True),
    "gradients replaced": lambda model: [setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()],
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_model_that_was_converted_still_gets_its_noise(name):
    """With 3,202 entries, noise that is 15 % short is told apart too."""
    pictures = records((3, 8, 8))
    run = trainer(nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 2)), pictures)
    for _ in range(3):
        CONVERSIONS[name](run.model)
        assert has_its_noise(run, pictures)


def test_gradients_that_change_hands_during_a_step_do_not_reach_the_optimizer(monkeypatch):
    run = trainer(nn.Sequential(nn.Linear(5, 1000), nn.Tanh(), nn.Linear(1000, 2)))
    real = run.noise.add_

    def replaced(vector):
        real(vector)
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(run.noise, "add_", replaced)
    assert has_its_noise(run)


def test_a_model_that_stays_converted_is_refused_before_the_step():
    for data in (DATA, TensorDataset(*(t[:0] for t in DATA.tensors))):
        run = trainer()
        run.model.double()
        with pytest.raises(InvalidInput, match="another device or type"):
            step(run, data)


# --- records stay apart ---


def test_normalisation_that_is_put_in_later_is_refused():
    run = trainer()
    step(run)
    run.model.insert(1, nn.BatchNorm1d(6, affine=False))
    with pytest.raises(InvalidInput, match="GroupNorm"):
        step(run)


def test_a_data_set_derived_from_tensors_is_read_record_by_record():
    class Scaled(TensorDataset):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return inputs / inputs.abs().max(), target

    (batch,) = list(loader(Scaled(*DATA.tensors), 1.0, 1))
    torch.testing.assert_close(batch[0].abs().amax(1), torch.ones(RECORDS))


def test_masks_of_dropout_do_not_follow_a_seed_that_others_know():
    """Everything else is the same: full batches, hardly any noise, one seed for the weights and for what follows."""

    def after(step_seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 2))
        law = Gaussian(Isotropic((sum(p.numel() for p in model.parameters()),), 1e-9))
        run = trainer(model, noise=law, accept_violation=True)
        torch.manual_seed(step_seed)
        step(run)
        drawn = torch.rand(2)
        return flat(model), drawn

    (first, one), (second, two) = after(1), after(1)
    assert float((first - second).abs().max()) > 1e-3
    assert torch.equal(one, two)  # the caller's own random numbers go on as if nothing had been drawn


NUMBERS = {"torch": lambda: torch.randn(5), "python": random.random, "numpy": np.random.random}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_data_set_that_changes_records_at_random_does_so_in_secret(number):
    """A record's numbers follow from its place in the batch, so those of the others show whether it is there."""

    class Shaken(TensorDataset):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return inputs + number(), target

    def first():
        run = trainer(data=Shaken(*DATA.tensors))
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        return next(run.batches()).inputs, torch.as_tensor(number())

    (one, then), (two, again) = first(), first()
    assert not torch.equal(one, two)
    assert torch.equal(then, again)  # the caller's own random numbers go on as if nothing had been drawn


def test_random_numbers_in_secret_differ_in_more_than_a_seed():
    """The first numbers of 200 tries are all different, and the caller's generator goes on as before."""
    torch.manual_seed(4)
    expected = torch.rand(2)
    torch.manual_seed(4)
    seen = set()
    for _ in range(200):
        with secret_randomness(torch.device("cpu")):
            seen.add(tuple(torch.rand(3).tolist()))
    assert len(seen) == 200
    assert torch.equal(torch.rand(2), expected)


# --- what is paid for ---


def test_a_trainer_is_not_copied():
    run = trainer()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(run)


@pytest.mark.parametrize("name", ["clip", "rate", "noise", "sensitivity", "budget", "batch_size", "affordable"])
def test_what_the_guarantee_rests_on_cannot_be_changed(name):
    run = trainer()
    with pytest.raises(InvalidInput, match=f"{name} is part of the guarantee"):
        setattr(run, name, 3.0)
    for inner in ("clip", "norm", "loss", "model"):
        with pytest.raises(AttributeError):
            setattr(run.gradients, inner, 3.0)
    for inner in ("law", "drawing", "generator", "certificate"):
        with pytest.raises(InvalidInput, match=f"{inner} is part of the guarantee"):
            setattr(run.noise, inner, 3.0)


def test_steps_are_not_forgotten():
    run = trainer()
    step(run)
    with pytest.raises(InvalidInput, match="steps is part of the guarantee"):
        run.steps = 0
    assert run.steps == 1


def test_parameters_that_are_given_to_the_optimizer_later_are_seen():
    run = trainer()
    step(run)
    run.optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    with pytest.raises(InvalidInput, match="would carry no noise"):
        step(run)


def test_a_fused_optimizer_and_another_layout_do_not_go_together():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    with pytest.raises(InvalidInput, match="fused"):
        PrivateSGD(model, optimizer, records((3, 8, 8)), LOSS, budget=Budget(1.0, 1e-5), batch_size=9, clip=1, steps=2)


def test_batches_are_not_left_out():
    run = trainer(batch_size=10)
    batches = run.batches(2)
    run.step(next(batches))
    skipped, later = next(batches), next(batches)
    with pytest.raises(InvalidInput, match="was left out"):
        run.step(later)
    run.step(skipped)
    run.step(later)
    assert run.steps == 3


def test_batches_of_another_trainer_are_refused():
    run, other = trainer(batch_size=10), trainer(batch_size=10)
    with pytest.raises(InvalidInput, match="this trainer's batches"):
        run.step(next(other.batches()))


# --- on a CUDA device ---

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("capture", [False, True])
def test_a_model_that_went_to_the_processor_and_back_still_gets_its_noise(capture):
    data = TensorDataset(*(t.cuda() for t in DATA.tensors))
    model = nn.Sequential(nn.Linear(5, 1000), nn.Tanh(), nn.Linear(1000, 2)).cuda()
    run = trainer(model, data, capture=capture)
    for _ in range(3):
        run.model.cpu().cuda()
        assert has_its_noise(run, data)


@needs_cuda
@pytest.mark.parametrize("capture", [False, True])
def test_masks_on_a_device_are_secret_too(capture):
    data = TensorDataset(*(t.cuda() for t in DATA.tensors))
    model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 2)).cuda()
    law = Gaussian(Isotropic((sum(p.numel() for p in model.parameters()),), 1e-9))
    run, start = (
        trainer(model, data, noise=law, accept_violation=True, capture=capture),
        copy.deepcopy(model.state_dict()),
    )
    found, drawn = [], []
    for _ in range(3):
        model.load_state_dict(start)
        torch.manual_seed(1)
        step(run, data)
        found.append(flat(model))
        drawn.append(torch.rand(2, device="cuda"))
    assert float((found[0] - found[1]).abs().max()) > 1e-3
    assert float((found[1] - found[2]).abs().max()) > 1e-3
    assert torch.equal(drawn[1], drawn[2])

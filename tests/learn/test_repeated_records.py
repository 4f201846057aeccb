"""Repeated records and changed batches are refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from independence_cases import RECORDS, WIDTH, mlp, numbers, trainer
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.learn import PoissonBatch

pytestmark = pytest.mark.usefixtures("one_thread")


def repeated():
    data = numbers()
    half = Subset(data, range(30))
    inputs, targets = data.tensors
    return {
        "subset": Subset(data, [*range(RECORDS), 3, 3, 3]),
        "from the end": Subset(data, [0, 1, RECORDS - 1, -1]),
        "nested": Subset(Subset(data, [5, 6, 7]), [0, 1, 0]),
        "twice": ConcatDataset([data, data]),
        "overlapping": ConcatDataset([half, Subset(data, range(29, 40))]),
        "the same memory": ConcatDataset([data, TensorDataset(inputs, 1 - targets)]),
        "views": ConcatDataset([TensorDataset(inputs[:40], targets[:40]), TensorDataset(inputs[39:], targets[39:])]),
        "expanded": TensorDataset(inputs[:1].expand(9, WIDTH), targets[:1].expand(9)),
    }


@pytest.mark.parametrize("name", list(repeated()))
def test_repeated_records_are_refused(name):
    with pytest.raises(InvalidInput, match="each record once"):
        trainer(mlp(), data=repeated()[name], batch_size=2)


def test_records_that_are_equal_or_in_parts_are_not_repeated():
    data = numbers()
    one, two = random_split(data, [20, 40])
    inputs, targets = data.tensors
    for whole in (
        one,
        ConcatDataset([one, two]),
        TensorDataset(torch.zeros(9, WIDTH), torch.zeros(9, dtype=torch.long)),
        TensorDataset(inputs[::2], targets[::2]),
        ConcatDataset([TensorDataset(inputs[::2], targets[::2]), TensorDataset(inputs[1::2], targets[1::2])]),
        TensorDataset(torch.ones(1, 1).expand(RECORDS, 1), inputs),
    ):
        trainer(nn.Linear(WIDTH, 2), data=whole, batch_size=5)


@pytest.mark.parametrize("name", ["inputs", "targets", "turn"])
def test_parts_of_a_batch_cannot_be_replaced(name):
    run = trainer(mlp(), batch_size=RECORDS)
    batch = next(run.batches())
    with pytest.raises(InvalidInput, match="cannot be changed"):
        setattr(batch, name, getattr(batch, name))
    run.step(batch)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mul_(2), lambda t: t.resize_(2, *t.shape[1:]), lambda t: t.__setitem__(0, t[1]), lambda t: t.zero_()],
    ids=["scaled", "cut", "a record", "zeros"],
)
def test_batches_that_were_written_into_are_refused(change):
    run = trainer(mlp(), batch_size=RECORDS)
    for part in ("inputs", "targets"):
        batch = next(run.batches())
        change(getattr(batch, part))
        with pytest.raises(InvalidInput, match="changed after it was drawn"):
            run.step(batch)
    assert run.steps == 0


def test_batches_made_by_hand_are_refused():
    run = trainer(mlp(), batch_size=RECORDS)
    with pytest.raises(InvalidInput, match="must come from this trainer's batches"):
        run.step(PoissonBatch(*numbers().tensors))


def test_writes_that_are_not_counted_do_not_reach_the_step():
    """Noise is next to nothing here, so that a step on zeros would show."""
    law = Gaussian(Isotropic((sum(p.numel() for p in mlp().parameters()),), 1e-9))
    found = []
    for spoil in (False, True):
        torch.manual_seed(0)
        model = mlp()
        run = trainer(model, batch_size=RECORDS, noise=law, accept_violation=True)
        batch = next(run.batches())
        if spoil:
            batch.inputs.numpy()[:] = 0.0
            batch.targets.data.zero_()
        run.step(batch)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)

"""Poisson sampling: the right probability, independence, a new key for each pass, and batches without records."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import Dataset, TensorDataset

from matrixdp.errors import InvalidInput
from matrixdp.learn.sampling import PoissonSampler, loader

RECORDS, BATCHES, RATE = 2000, 1000, 0.1
FALSE_ALARM = 4e-7  # of one check; no test has more than two


def chosen(sampler):
    """Batches x records, whether each record is in each batch."""
    table = np.zeros((len(sampler), sampler.records), dtype=bool)
    for row, indices in zip(table, sampler, strict=True):
        row[indices] = True
    return table


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=["secure", "seeded"])
def table(request):
    return chosen(PoissonSampler(RECORDS, RATE, BATCHES, seeded(3) if request.param == "seeded" else None))


def frequency_p_value(table, rate):
    return stats.binomtest(int(table.sum()), table.size, rate).pvalue


def dependence_p_value(first, second):
    """Chi-square with one degree of freedom on the 2 x 2 table of two indicators."""
    return stats.chi2_contingency(np.histogram2d(first.ravel(), second.ravel(), bins=2)[0], correction=False).pvalue


def test_each_record_joins_with_the_rate(table):
    """A rate 5 % off is told apart."""
    assert frequency_p_value(table, RATE) > FALSE_ALARM
    assert frequency_p_value(table, RATE * 1.05) < FALSE_ALARM
    assert frequency_p_value(table, RATE / 1.05) < FALSE_ALARM


def test_every_record_and_every_batch_has_that_rate(table):
    """Sums over records and over batches are binomial: no place is favoured."""
    for axis, others in ((0, BATCHES), (1, RECORDS)):
        spread = np.sum((table.sum(axis) - RATE * others) ** 2) / (RATE * (1 - RATE) * others)
        freedom = table.shape[1 - axis]
        assert stats.chi2.isf(1 - FALSE_ALARM / 2, freedom) < spread < stats.chi2.isf(FALSE_ALARM / 2, freedom)


def test_records_and_batches_are_independent(table):
    """One record in fifty that follows its neighbour is told apart."""
    assert dependence_p_value(table[:, :-1], table[:, 1:]) > FALSE_ALARM
    assert dependence_p_value(table[:-1], table[1:]) > FALSE_ALARM
    copied = table.copy()
    copied[:, 50::50] = table[:, 49:-1:50]
    assert dependence_p_value(copied[:, :-1], copied[:, 1:]) < FALSE_ALARM


def test_at_rate_one_everyone_is_in():
    for generator in (None, seeded(0)):
        assert [len(batch) for batch in PoissonSampler(7, 1.0, 3, generator)] == [7, 7, 7]


def test_rates_are_rounded_down():
    """A rate below 2^-64 chooses no one, rather than one word of 2^64."""
    assert not chosen(PoissonSampler(1000, 2.0**-65, 10)).any()
    assert chosen(PoissonSampler(1000, math.nextafter(1.0, 0.0), 10)).all()


def test_every_pass_has_a_key_of_its_own():
    sampler = PoissonSampler(1000, 0.5, 1)
    first, second = chosen(sampler)[0], chosen(sampler)[0]
    assert 300 < np.sum(first != second) < 700  # each with a chance below 1e-30
    assert len(sampler) == 1


def test_a_seed_repeats_the_batches():
    def passes(seed):
        return list(PoissonSampler(100, 0.3, 5, seeded(seed)))

    assert passes(1) == passes(1)
    assert passes(1) != passes(2)


class Records(Dataset):
    """Records one by one: a picture and its class, as a Python number."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.full((2, 3), float(index)), index


TENSORS = TensorDataset(torch.stack([Records()[i][0] for i in range(50)]), torch.arange(50))


@pytest.mark.parametrize("data", [TENSORS, Records()], ids=["tensors", "records"])
def test_batches_without_records_keep_their_shape(data):
    batches = list(loader(data, 1e-12, 3))
    assert len(batches) == 3
    for inputs, targets in batches:
        assert (tuple(inputs.shape), inputs.dtype) == ((0, 2, 3), torch.float32)
        assert (tuple(targets.shape), targets.dtype) == ((0,), torch.int64)


def test_a_batch_without_records_may_follow_others():
    sizes = []
    for inputs, targets in loader(Records(), 0.02, 60, seeded(0)):
        assert inputs.shape == (len(targets), 2, 3)
        assert targets.dtype == torch.int64
        sizes.append(len(targets))
    assert 0 in sizes[1:]
    assert max(sizes) > 1


def test_both_kinds_of_data_give_the_records_that_were_drawn():
    for (a, b), (c, d), indices in zip(
        loader(TENSORS, 0.3, 4, seeded(5)),
        loader(Records(), 0.3, 4, seeded(5)),
        PoissonSampler(50, 0.3, 4, seeded(5)),
        strict=True,
    ):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
        assert b.tolist() == indices


@pytest.mark.parametrize("records", [0, -1, 1.5, True, "7", None])
def test_bad_numbers_of_records_are_refused(records):
    with pytest.raises(InvalidInput, match="records"):
        PoissonSampler(records, 0.5, 1)


@pytest.mark.parametrize("rate", [0, -0.1, 1.0000001, math.nan, math.inf, True, "0.5", None])
def test_bad_rates_are_refused(rate):
    with pytest.raises(InvalidInput, match="rate"):
        PoissonSampler(10, rate, 1)


@pytest.mark.parametrize("batches", [0, -1, 2.0, True, None])
def test_bad_numbers_of_batches_are_refused(batches):
    with pytest.raises(InvalidInput, match="batches"):
        PoissonSampler(10, 0.5, batches)

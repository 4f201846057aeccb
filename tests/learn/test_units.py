"""Units of several records: whose gradients a step has, and what it guarantees for all of them together."""

import collections

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from matrixdp import Budget, Ledger
from matrixdp.errors import InvalidInput
from matrixdp.learn import QuantileClip, make_private
from matrixdp.learn.units import Units
from matrixdp.sensitivity import Frobenius
from training_cases import BUDGET, DATA, LOSS, RECORDS, network, parameters, saved, silent, trainer

IDS = [f"p{i % 10}" for i in range(RECORDS)]  # ten persons with four rows each


def drawn(run, times=1):
    """How often each record's first number is in the batches."""
    found = collections.Counter()
    for _ in range(times):
        for inputs, _ in (batch.drawn for batch in run.batches()):
            found.update(inputs[:, 0].tolist())
    return found


def owner(value):
    return IDS[DATA.tensors[0][:, 0].tolist().index(value)]


@pytest.mark.parametrize("contributions", [1, 3])
def test_a_batch_has_all_rows_of_a_unit_that_count_or_none(contributions):
    run = trainer(batch_size=5, steps=2, ids=IDS, contributions=contributions, noise=3.0)
    rows = collections.defaultdict(set)
    for batch in run.batches(3):
        found = collections.defaultdict(set)
        for value in batch.drawn[0][:, 0].tolist():
            found[owner(value)].add(value)
        assert all(len(values) == contributions for values in found.values())
        for name, values in found.items():
            rows[name] |= values
        batch.turn.take()
    assert all(len(values) == contributions for values in rows.values())  # the same rows in every batch


def test_which_rows_count_is_drawn():
    ids = [i % 20 for i in range(80)]
    chosen = {tuple(Units(ids, 1, 80).rows(range(20))) for _ in range(5)}
    assert len(chosen) == 5  # 20 choices of 4 rows: twice the same with a probability below 1e-11


def test_every_row_is_as_likely(monkeypatch):
    """Of a unit with 4 rows; 2,000 draws, false alarm below 1e-6: 6 standard deviations of a share of 1/4."""
    counts = collections.Counter(Units(["a"] * 4, 1, 4).rows([0])[0] for _ in range(2000))
    assert all(abs(counts[row] - 500) < 6 * (2000 * 3 / 16) ** 0.5 for row in range(4))


def test_the_change_is_that_of_all_rows_of_a_unit():
    one, several = (trainer(batch_size=5, ids=IDS, contributions=k, steps=4) for k in (1, 3))
    assert isinstance(several.sensitivity, Frobenius)
    assert several.sensitivity.radius >= 3 * one.sensitivity.radius > 1.5
    assert several.rate == one.rate == 0.5
    ratio = several.certificate.law.standard_error_range[0] / one.certificate.law.standard_error_range[0]
    assert ratio == pytest.approx(3, rel=1e-3)


def test_without_a_unit_the_sum_changes_by_no_more_than_the_set():
    """All records together, once with and once without the rows of the first unit; clipped, each row adds 0.5."""
    run = silent(ids=IDS, contributions=4, batch_size=10)
    kept = [place for place, name in enumerate(IDS) if name != "p0"]
    run.gradients.zero()
    run.gradients.accumulate(*DATA.tensors)
    every = run.gradients.flat.clone()
    run.gradients.zero()
    run.gradients.accumulate(*(t[kept] for t in DATA.tensors))
    change = float((every - run.gradients.flat).norm())
    assert 0.5 * 1.1 < change <= run.sensitivity.radius


def test_certificate_and_ledger_speak_of_units(tmp_path):
    ledger = Ledger(tmp_path / "ledger", Budget(4.0, 1e-5))
    run = trainer(batch_size=5, steps=2, ids=IDS, contributions=2, ledger=ledger)
    assert "all records of one id, of which 2 count" in run.certificate.remark
    assert bool(type(run.certificate).from_json(run.certificate.to_json()).verify())
    assert "by units of 2 records" in str(run)
    run.train(1)
    assert all("all records of one id" in entry.note for entry in ledger.history())
    assert run.epsilon() <= BUDGET.epsilon


def test_records_without_an_id_are_left_out():
    ids = [None if i % 2 else f"p{i}" for i in range(RECORDS)]
    run = trainer(batch_size=20, steps=2, ids=ids, noise=3.0)
    values = DATA.tensors[0][:, 0].tolist()
    assert {values.index(value) % 2 for value in drawn(run)} == {0}


def test_noise_over_time_takes_units():
    run = trainer(batch_size=5, steps=4, ids=torch.arange(RECORDS) % 10, contributions=2, noise="banded", bands=2)
    run.train(2)
    assert run.steps == 4
    assert run.noise.training.records == 10


def test_a_unit_has_one_number_whichever_of_its_records_count():
    """Groups and turns go by this number: after a resume, a unit must not have the turn of another one."""
    ids = ["a", "b", "b", "a", None, "c", "a", "c"]
    for _ in range(20):
        units = Units(ids, 1, len(ids))
        assert [ids[row] for row in units.rows(range(3))] == ["a", "b", "c"]


def test_a_resumed_training_has_the_same_rows_at_the_same_steps(tmp_path):
    for where in ({}, {"state": tmp_path / "run.state"}):
        settings = {"batch_size": 2, "steps": 5, "ids": IDS, "order": "fixed", "noise": "banded", "bands": 1, **where}
        first = trainer(**settings)
        batches = first.batches()
        first.step(next(batches))
        state = saved(first)
        later = [batch.drawn[0] for batch in batches]
        again = trainer(**settings)
        again.load_state_dict(state)
        assert all(torch.equal(one, other.drawn[0]) for one, other in zip(later, again.batches(), strict=False))
        assert len(later) == 4


def test_checkpoints_of_records_and_of_units_are_not_exchanged():
    """Noise and rate can be the same; steps for records must not count as steps for units."""
    by_record, by_unit = trainer(batch_size=20), trainer(batch_size=20, ids=range(RECORDS))
    assert (by_record.rate, by_record.certificate.mu) == (by_unit.rate, by_unit.certificate.mu)
    for one, other in ((by_record, by_unit), (by_unit, by_record)):
        with pytest.raises(InvalidInput, match="checkpoint"):
            one.load_state_dict(saved(other))


def test_ids_go_by_place_and_not_by_label():
    pandas = pytest.importorskip("pandas")
    shuffled = pandas.Series(IDS, index=range(RECORDS)[::-1])
    assert shuffled[0] != IDS[0]
    for units in (Units(shuffled, 4, RECORDS), Units(torch.arange(RECORDS) % 10, 4, RECORDS)):
        assert [{IDS[row] for row in units.rows([unit])} for unit in range(10)] == [{f"p{i}"} for i in range(10)]


def test_make_private_takes_them_too():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(trainer(model))
    with pytest.warns(UserWarning, match="make_private takes data set"):
        private = make_private(
            model, optimizer, DataLoader(DATA, batch_size=5), loss=LOSS, budget=BUDGET, clip=0.5, epochs=1, ids=IDS
        )
    for batch in private:
        private.step(batch)
    assert private.steps == 2
    assert not torch.equal(before, parameters(private))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": IDS[:-1]}, "one id per record"),
        ({"ids": "p" * RECORDS}, "one id per record"),
        ({"ids": 5}, "one id per record"),
        ({"ids": dict(enumerate(IDS))}, "one id per record"),
        ({"ids": {f"p{i}" for i in range(RECORDS)}}, "one id per record"),
        ({"ids": torch.zeros(RECORDS, 1)}, "one id per record"),
        ({"ids": IDS, "contributions": 0}, "contributions"),
        ({"ids": IDS, "contributions": 1.5}, "contributions"),
        ({"contributions": 2}, "give ids="),
        ({"ids": IDS, "contributions": 2, "clip": QuantileClip()}, "clip must be a number"),
        ({"ids": IDS, "batch_size": 11}, "at most the number of units, 10"),
    ],
)
def test_what_is_refused(changes, words):
    with pytest.raises(InvalidInput, match=words):
        trainer(**{"batch_size": 5, "noise": 3.0, **changes})


def test_no_message_shows_an_id():
    with pytest.raises(InvalidInput) as refused:
        trainer(batch_size=5, ids=["secret-name"] * (RECORDS - 1), noise=3.0)
    assert "secret" not in str(refused.value)


def test_a_model_on_units_still_sees_one_row_per_record():
    model = nn.Sequential(nn.Linear(4, 2))
    run = trainer(model, batch_size=5, ids=IDS, contributions=2, noise=3.0)
    run.prepare()
    assert run.gradients.slow_because is None

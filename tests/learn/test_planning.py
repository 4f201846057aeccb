"""Noise against signal before a training: the same noise that the trainer takes."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.errors import InvalidInput
from matrixdp.learn import PrivateSGD, plan

BUDGET = Budget(3.0, 1e-5)
DATA = TensorDataset(torch.randn(60, 4), torch.zeros(60, dtype=torch.long))
ONE = {"batch_sizes": 20, "epochs": 3}


def test_rows_have_the_noise_of_the_trainer():
    model = nn.Linear(4, 2)
    rows = list(plan(model, DATA, BUDGET, batch_sizes=[20, 60], epochs=[3], clip=[0.5, 2.0]))
    assert [(row.batch_size, row.steps, row.clip) for row in rows] == [
        (20, 9, 0.5), (20, 9, 2.0), (60, 3, 0.5), (60, 3, 2.0)
    ]  # fmt: skip
    for row in rows:
        trainer = PrivateSGD(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            DATA,
            nn.CrossEntropyLoss(reduction="none"),
            budget=BUDGET,
            batch_size=row.batch_size,
            clip=row.clip,
            epochs=row.epochs,
        )
        std = trainer.noise.law.root_mean_square
        assert row.noise_multiplier * row.clip == pytest.approx(std, rel=1e-9)
        assert row.noise_std == pytest.approx(std / row.batch_size, rel=1e-9)
        assert row.noise_to_signal == pytest.approx(row.noise_std * math.sqrt(10) / row.clip)
        assert row.overall == pytest.approx(row.noise_to_signal / math.sqrt(row.steps))


def test_a_clip_above_the_gradients_norm_adds_noise_alone():
    below, above = plan(10, 60, BUDGET, **ONE, clip=[0.5, 2.0], gradient_norm=1.0)
    assert above.noise_to_signal == pytest.approx(2 * below.noise_to_signal)


def test_all_records_at_once_have_the_least_noise_overall():
    found = plan(10, 60, BUDGET, batch_sizes=[6, 20, 60], epochs=3)
    assert found.best is found.rows[2]
    assert len(found.to_pandas()) == len(found) == 3


def test_it_prints_every_row():
    text = str(plan(1234, 60, BUDGET, batch_sizes=[20, 60], epochs=3))
    assert "60 records" in text
    assert "1,234 trained parameters" in text
    assert "epsilon 3" in text
    assert sum(line.split()[:1] in (["20"], ["60"]) for line in text.splitlines()[1:]) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_sizes": 61}, "at most the number of records"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": 2.5}, "batch_sizes"),
        ({"epochs": [3, 0]}, "epochs"),
        ({"clip": math.nan}, "clip"),
        ({"clip": [1.0, -1.0]}, "clip"),
        ({"gradient_norm": 0.0}, "gradient_norm"),
        ({"budget": Budget(3.0, 0.0)}, "delta"),
        ({"budget": 3.0}, "budget"),
        ({"model": 0}, "model"),
        ({"data": 0}, "data"),
    ],
)
def test_bad_input_is_refused(wrong, message):
    given = {"model": 10, "data": 60, "budget": BUDGET} | ONE | wrong
    with pytest.raises(InvalidInput, match=message):
        plan(**given)

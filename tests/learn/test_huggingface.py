"""The example with Hugging Face's Trainer runs."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "transformers", reason="pip install transformers accelerate: the Hugging Face example is NOT tested"
)
pytest.importorskip("accelerate", reason="pip install transformers accelerate: the Hugging Face example is NOT tested")

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("huggingface_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
def test_the_trainer_takes_private_steps(example, capsys):
    found, trainer = example.main(records=600, batch_size=200, epochs=3)
    assert trainer.steps == 9
    assert 0 < trainer.epsilon() <= 8.0
    assert "independence of the loss assumed" in str(trainer.certificate)
    assert 0 <= found <= 1
    assert "loss" not in capsys.readouterr().out.replace("independence of the loss", "")


def test_its_loss_is_the_mean_of_each_records_own(example):
    model, rows = example.network(), example.sentences(5, seed=3)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    alone = [model(**{name: part[k : k + 1] for name, part in batch.items()}).loss for k in range(5)]
    torch.testing.assert_close(model(**batch).loss, torch.stack(alone).mean())

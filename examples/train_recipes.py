"""MNIST and a part of CIFAR-10 under a budget
===========================================

The settings are in recipes.toml.

`MATRIXDP_DATA=folder python examples/train_recipes.py mnist` trains on a part of the training records and prints the
accuracy on the others: that is how the settings were chosen. With `--test` it trains on all of them and prints the
accuracy on the test records. The settings were frozen before that was run for the first time. Choosing settings on
private records costs privacy that no budget here counts: choose them on public data.
"""

import argparse
import tomllib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.learn import PrivateSGD
from matrixdp.learn.recipes import Scattering, average_weights
from matrixdp_papers.datasets import load_cifar10, load_mnist

SETTINGS = Path(__file__).with_name("recipes.toml")
LOADERS = {"mnist": (load_mnist, (1, 28, 28)), "cifar10": (load_cifar10, (3, 32, 32))}


def features(name, device, *, test=False):
    """Scattering features of all pictures; each from one picture alone."""
    load, shape = LOADERS[name]
    found = load(test=test)
    scattering = Scattering()
    pictures = torch.tensor(found.records, dtype=torch.float32).reshape(-1, *shape).split(500)
    return torch.cat([scattering(part.to(device)) for part in pictures]), torch.tensor(found.label, device=device)


def train(data, setting):
    """A linear model on normalised features, and its averaged weights."""
    inputs = data.tensors[0]
    channels = inputs.shape[1]
    model = nn.Sequential(
        nn.GroupNorm(setting["groups"], channels, affine=False),  # each record by itself; nothing to train
        nn.Flatten(),
        nn.Linear(inputs[0].numel(), 10),
    ).to(inputs.device)
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting["learning_rate"], momentum=setting["momentum"])
    averaged = average_weights(model, optimizer, setting["decay"])
    trainer = PrivateSGD(
        model,
        optimizer,
        data,
        nn.CrossEntropyLoss(reduction="none"),
        budget=Budget(setting["epsilon"], setting["delta"]),
        batch_size=setting["batch_size"],
        clip=setting["clip"],
        epochs=setting["epochs"],
    )
    trainer.train(setting["epochs"])
    return averaged, trainer


def accuracy(model, data):
    """The share of records that the model puts into the right class."""
    inputs, labels = data.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def main(name, setting, *, test=False):
    """Trains by a setting; returns the accuracy on records that were not trained on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, labels = features(name, device)
    if test:
        data, others = TensorDataset(inputs, labels), TensorDataset(*features(name, device, test=True))
    else:
        cut = len(inputs) - setting["held_back"]
        data, others = TensorDataset(inputs[:cut], labels[:cut]), TensorDataset(inputs[cut:], labels[cut:])
    model, trainer = train(data, setting)
    found = accuracy(model, others)
    print(trainer)
    print(f"{name}: accuracy on {len(others):,} {'test' if test else 'held-back'} records {found:.4f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=LOADERS)
    parser.add_argument("--test", action="store_true", help="read the test records; the settings are frozen")
    arguments = parser.parse_args()
    main(arguments.name, tomllib.loads(SETTINGS.read_text())[arguments.name], test=arguments.test)

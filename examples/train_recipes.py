"""MNIST and a part of CIFAR-10 under a budget
===========================================

``MATRIXDP_DATA=folder python examples/train_recipes.py mnist`` trains on a part of the training records and prints the
accuracy on the others: that is how the settings in recipes.toml were chosen. With ``--test`` it trains on all of them
and prints the accuracy on the test records. Settings chosen on private records cost privacy that no budget here counts.
"""

import sys
import tomllib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget
from matrixdp.learn import PrivateSGD
from matrixdp.learn.recipes import Scattering, average_weights
from matrixdp_papers.datasets import load_cifar10, load_mnist

LOADERS = {"mnist": (load_mnist, (1, 28, 28)), "cifar10": (load_cifar10, (3, 32, 32))}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def features(name, *, test):
    """Scattering features of all pictures, each from one picture alone, and the labels."""
    load, shape = LOADERS[name]
    found, scattering = load(test=test), Scattering()
    pictures = torch.tensor(found.records, dtype=torch.float32).reshape(-1, *shape).split(500)
    return torch.cat([scattering(part.to(DEVICE)) for part in pictures]), torch.tensor(found.label, device=DEVICE)


def train(data, *, epsilon, delta, learning_rate, momentum, decay, groups, epochs, **options):
    """A linear model on features that are normalised record by record; its averaged weights, and the trainer."""
    inputs, loss = data.tensors[0], nn.CrossEntropyLoss(reduction="none")
    normalised = nn.GroupNorm(groups, inputs.shape[1], affine=False)
    model = nn.Sequential(normalised, nn.Flatten(), nn.Linear(inputs[0].numel(), 10)).to(inputs.device)
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    averaged = average_weights(model, optimizer, decay)
    trainer = PrivateSGD(model, optimizer, data, loss, budget=Budget(epsilon, delta), epochs=epochs, **options)
    trainer.train(epochs)
    return averaged, trainer


def accuracy(model, inputs, labels):
    """The share of records that the model puts into the right class."""
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    name, test = sys.argv[1], "--test" in sys.argv
    setting = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text())[name]
    cut, given = setting.pop("held_back"), features(name, test=False)
    others = features(name, test=True) if test else [part[-cut:] for part in given]
    model, trainer = train(TensorDataset(*given if test else [part[:-cut] for part in given]), **setting)
    print(trainer, f"{name}: accuracy on other records {accuracy(model, *others):.4f}", sep="\n")

"""LeNet on MNIST with differential privacy
========================================

``MATRIXDP_DATA=folder python examples/train_mnist.py``

The folder must hold the four files of MNIST; if one is missing, the error says where to get it and how to name it.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from matrixdp import Budget, Ledger
from matrixdp.learn import PrivateSGD
from matrixdp_papers.datasets import load_mnist
from matrixdp_papers.networks import LeNet

BUDGET = Budget(epsilon=3.0, delta=1e-5)


def pictures(test: bool) -> TensorDataset:
    """MNIST as tensors."""
    found = load_mnist(test=test)
    images = torch.tensor(found.records, dtype=torch.float32).reshape(-1, 1, 28, 28)
    return TensorDataset(images, torch.tensor(found.label))


def accuracy(model: nn.Module, data: TensorDataset, device: str) -> float:
    """The share of records that the model puts into the right class."""
    images, labels = (t.to(device) for t in data.tensors)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main(train, test, *, epochs=15, batch_size=512, ledger="mnist.ledger"):
    """Trains under the budget and prints what came of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LeNet().to(device)
    trainer = PrivateSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        train,  # the records themselves: the batches are drawn by the trainer, for that is part of the guarantee
        nn.CrossEntropyLoss(reduction="none"),  # one loss per record
        budget=BUDGET,
        batch_size=batch_size,
        clip=0.5,
        epochs=epochs,
        ledger=Ledger(ledger, BUDGET),  # on disk: a second training on these records would be refused
    )
    for epoch in range(1, epochs + 1):
        trainer.train()
        print(f"epoch {epoch}: accuracy {accuracy(model, test, device):.3f}")
    print(trainer)


if __name__ == "__main__":
    main(pictures(test=False), pictures(test=True))

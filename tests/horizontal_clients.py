"""Three small clients of horizontal learning, for tests."""

import numpy as np
import torch
from torch import nn

from matrixdp import Budget
from matrixdp.federated import ClientLevel, LocalTraining, horizontal

BUDGET = Budget(3.0, 1e-5)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def data(number):
    x = np.random.default_rng(number).normal(size=(30, 4))
    return x, (x[:, 0] > 0).astype(np.int64)


def client_app(folder, *, model=model, data=data, clients=3, rounds=2, privacy=None):
    agreed = privacy or ClientLevel(budget=BUDGET, rounds=rounds, clip=0.1)
    return horizontal.client_app(model, data, clients=clients, training=LocalTraining(), privacy=agreed, folder=folder)

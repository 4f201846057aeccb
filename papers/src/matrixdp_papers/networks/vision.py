"""The papers' networks for pictures, channels first: 1 x 28 x 28 or 3 x 32 x 32.

None has batch normalisation, which mixes the records of a batch and so leaves no gradient of one record; where the
original has it, groups of channels are normalised within each picture instead.

Source: yang2021improved, table 1; yang2023matrix, table 2; ji2024less, section 7.3.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from matrixdp_papers.networks.parts import Activation, network

GROUPS = 32
"""The number of groups of channels in group normalisation."""


def LeNet(*, classes: int = 10, activation: Activation = nn.ReLU) -> nn.Sequential:
    """LeNet-5 for 1 x 28 x 28: two convolutions make 400 features, three layers classify them; 61,706 parameters.

    Source: yang2021improved, table 1 (400 features); yang2023matrix, table 2 (a gradient of 120 x 400).
    """
    return network(
        features=[
            nn.Conv2d(1, 6, 5, padding=2),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            activation(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ],
        top=[nn.Linear(400, 120), activation(), nn.Linear(120, 84), activation(), nn.Linear(84, classes)],
    )


def TutorialCNN(*, classes: int = 10, activation: Activation = nn.ReLU) -> nn.Sequential:
    """The network of the TensorFlow Privacy tutorial for 1 x 28 x 28: 32 features, 26,010 parameters.

    Source: ji2024less, section 7.3 (MNIST).
    """
    return network(
        features=[
            nn.Conv2d(1, 16, 8, stride=2, padding=3),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(512, 32),
            activation(),
        ],
        top=[nn.Linear(32, classes)],
    )


def TutorialCIFAR(*, classes: int = 10, activation: Activation = nn.ReLU) -> nn.Sequential:
    """The network of the TensorFlow tutorial on convolutions for 3 x 32 x 32: 64 features, 122,570 parameters.

    Source: ji2024less, section 7.3 (CIFAR-10).
    """
    return network(
        features=[
            nn.Conv2d(3, 32, 3),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3),
            activation(),
            nn.Flatten(),
            nn.Linear(1024, 64),
            activation(),
        ],
        top=[nn.Linear(64, classes)],
    )


def VGG16(*, classes: int = 10, activation: Activation = nn.ReLU, normalised: bool = True) -> nn.Sequential:
    """VGG-16 for 3 x 32 x 32: 13 convolutions make 512 features, one layer classifies them.

    Args:
        classes: the number of classes.
        activation: what follows each convolution.
        normalised: whether groups of channels are normalised before each activation.

    Source: yang2021improved, table 1 (512 features).
    """
    channels, layers = 3, list[nn.Module]()
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if normalised:
                layers.append(nn.GroupNorm(GROUPS, width))
            layers.append(activation())
            channels = width
        layers.append(nn.MaxPool2d(2))
    return network(features=[*layers, nn.Flatten()], top=[nn.Linear(512, classes)])


def AlexNet(*, classes: int = 10, activation: Activation = nn.ReLU) -> nn.Sequential:
    """AlexNet for 3 x 32 x 32: five convolutions and two layers make 1,024 features, one layer classifies them.

    Source: yang2021improved, table 1 (1,024 features; the largest gradient is 4,096 x 512).
    Deviates: 1. The paper gives no layers. Kernels and strides are smaller than the original's, for small pictures, and
        the two hidden layers have the widths that agree with its table.
    """
    return network(
        features=[
            nn.Conv2d(3, 64, 5, padding=2),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 192, 5, padding=2),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(192, 384, 3, padding=1),
            activation(),
            nn.Conv2d(384, 256, 3, padding=1),
            activation(),
            nn.Conv2d(256, 256, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4096, 512),
            activation(),
            nn.Linear(512, 1024),
            activation(),
        ],
        top=[nn.Linear(1024, classes)],
    )


def ResNet18(*, classes: int = 10, activation: Activation = nn.ReLU) -> nn.Sequential:
    """ResNet-18 for 3 x 32 x 32: a convolution and eight blocks make 512 features, one layer classifies them.

    The mean over the picture keeps the features as large as the activation; 11,173,962 parameters.

    Source: yang2023matrix, table 2 (a gradient of 4,608 x 512).
    """
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    return network(
        features=[
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, 64),
            activation(),
            *(Block(before, after, activation) for before, after in pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ],
        top=[nn.Linear(512, classes)],
    )


class Block(nn.Module):
    """Two convolutions with a shortcut; where the width grows, the picture is halved along each axis."""

    def __init__(self, before: int, after: int, activation: Activation) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            activation(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
        )
        self.short_cut = nn.Sequential()
        if before != after:
            self.short_cut.append(nn.Conv2d(before, after, 1, stride=stride, bias=False))
            self.short_cut.append(nn.GroupNorm(GROUPS, after))
        self.activation = activation()

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """The activation of the sum of both branches."""
        total: torch.Tensor = self.activation(self.convolutions(pictures) + self.short_cut(pictures))
        return total

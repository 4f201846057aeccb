"""The networks of the papers' experiments.

All but `GCN` are an nn.Sequential of two parts, `features` and `top`: `network[:SPLIT]` makes the features that the
papers release, `network[SPLIT:]` classifies them. With `activation=nn.Tanh` the features lie in [-1, 1].
"""

from matrixdp.learn.models.graph import GCN
from matrixdp.learn.models.parts import SPLIT
from matrixdp.learn.models.tabular import MLP
from matrixdp.learn.models.text import LSTM, BiLSTM
from matrixdp.learn.models.vision import VGG16, AlexNet, LeNet, ResNet18, TutorialCIFAR, TutorialCNN

__all__ = [
    "GCN",
    "LSTM",
    "MLP",
    "SPLIT",
    "VGG16",
    "AlexNet",
    "BiLSTM",
    "LeNet",
    "ResNet18",
    "TutorialCIFAR",
    "TutorialCNN",
]

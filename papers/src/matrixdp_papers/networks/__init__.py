"""The networks of the papers' experiments.

All but `GCN` are an nn.Sequential of two parts, `features` and `top`: `network[:SPLIT]` makes the features that the
papers release, `network[SPLIT:]` classifies them. With `activation=nn.Tanh` the features lie in [-1, 1].
"""

from matrixdp_papers.networks.graph import GCN
from matrixdp_papers.networks.parts import SPLIT, as_tensorflow
from matrixdp_papers.networks.tabular import MLP
from matrixdp_papers.networks.text import LSTM, BiLSTM
from matrixdp_papers.networks.vision import VGG16, AlexNet, LeNet, ResNet18, TutorialCIFAR, TutorialCNN

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
    "as_tensorflow",
]

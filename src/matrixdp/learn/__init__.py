"""Private training in PyTorch: SGD with any noise law, and features that are released once and then trained on."""

from matrixdp import _extras

_extras.require("learn", "torch")

from matrixdp.learn.clipping import QuantileClip
from matrixdp.learn.existing_loops import make_private
from matrixdp.learn.features import PrivateFeatures
from matrixdp.learn.gradients import ClippedGradients
from matrixdp.learn.planning import plan
from matrixdp.learn.sampling import PoissonBatch, PoissonSampler
from matrixdp.learn.training import PrivateSGD

__all__ = [
    "ClippedGradients",
    "PoissonBatch",
    "PoissonSampler",
    "PrivateFeatures",
    "PrivateSGD",
    "QuantileClip",
    "make_private",
    "plan",
]

"""Vertical federated learning without Flower: participants with different attributes of the same records.

Each participant maps its attributes to features between -1 and 1 (its network, then tanh) and releases those of a batch
with noise. The server joins them, trains the top network with the labels, and sends back the gradient with respect to
the features, from which each participant trains its own network.

Everyone knows which records are in a batch, so there is no amplification by sampling: every epoch divides the records
into new batches and releases each record once. But a network that was trained on a record affects the features of all
others, so hiding the record's own rows is not enough. There are two sound ways:

- unit "record": a participant's own training is private too (clipped gradients with noise, or no training at all).
  Then one record changes one row and one gradient per epoch, and nothing else.
- unit "participant": a participant trains without noise, and any change of its data may change every released entry.
"""

from matrixdp.federated.split_learning.client import SplitClient
from matrixdp.federated.split_learning.plan import SplitPlan
from matrixdp.federated.split_learning.server import SplitServer

__all__ = ["SplitClient", "SplitPlan", "SplitServer"]

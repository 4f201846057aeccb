"""Federated learning with any noise law: horizontal (clients share the attributes) and vertical (they share records).

The privacy logic knows nothing of Flower and runs without it; the Flower apps are in `matrixdp.federated.horizontal`
and `matrixdp.federated.vertical`.
"""

from matrixdp import _extras

_extras.require("federated", "torch")

from matrixdp.federated.client import Client, average
from matrixdp.federated.participant import Declined, Participant
from matrixdp.federated.record_level import RecordLevel
from matrixdp.federated.split import Half, SplitPlan, Top
from matrixdp.federated.updates import ClientLevel, Guarantees, LocalTraining

__all__ = [
    "Client",
    "ClientLevel",
    "Declined",
    "Guarantees",
    "Half",
    "LocalTraining",
    "Participant",
    "RecordLevel",
    "SplitPlan",
    "Top",
    "average",
]

"""Federated learning with any noise law: horizontal (clients share the attributes) and vertical (they share records).

The privacy logic does not depend on Flower and runs without it; the Flower apps are `matrixdp.federated.horizontal` and
`matrixdp.federated.vertical`. `matrixdp.federated.central` works with any Flower strategy and needs a trusted server.
"""

from matrixdp import _extras

_extras.require("federated", "torch")

from matrixdp.federated.central_privacy import CentralPrivacy
from matrixdp.federated.client import Client, Guarantees, average
from matrixdp.federated.client_level import ClientLevel
from matrixdp.federated.gradient_client import GradientClient
from matrixdp.federated.local_training import LocalTraining
from matrixdp.federated.participant import Declined, Participant
from matrixdp.federated.record_level import RecordLevel
from matrixdp.federated.split_learning import SplitClient, SplitPlan, SplitServer
from matrixdp.federated.trusted_server import TrustedServer

__all__ = ["CentralPrivacy", "Client", "ClientLevel", "Declined", "GradientClient", "Guarantees", "LocalTraining",
           "Participant", "RecordLevel", "SplitClient", "SplitPlan", "SplitServer", "TrustedServer",
           "average"]  # fmt: skip

"""What the tests of ledgers spend, and where old ones and the worker are."""

import os
import sys
from pathlib import Path

from matrixdp import Budget
from matrixdp.accounting.filter import RESERVE
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

BUDGET = Budget(3.0, 1e-6)
MU = float(gaussian.mu(BUDGET.epsilon, BUDGET.delta))
SHARED = float(gaussian.mu(BUDGET.epsilon, (1 - RESERVE) * BUDGET.delta))  # what several releases may use together
GOLDEN = Path(__file__).parent / "golden"
WORKER = [sys.executable, str(Path(__file__).parent / "accounting" / "ledger_worker.py")]
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def guarantee(mu, adjacency="add/remove", variation=0.0):
    return Guarantee(GaussianProfile(mu), adjacency, variation)

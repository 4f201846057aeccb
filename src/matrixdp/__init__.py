"""Matrices under differential privacy, with a certificate of what each release guarantees."""

from matrixdp import errors, queries
from matrixdp.budget import Budget
from matrixdp.compare import compare
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.accountant import Accountant
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.ledger import Ledger
from matrixdp.release import Release, release
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Vertices

__version__ = "0.2.0.dev0"

__all__ = [
    "Accountant",
    "Budget",
    "Certificate",
    "Counts",
    "Entrywise",
    "Frobenius",
    "Ledger",
    "OneColumn",
    "OneRow",
    "RankOne",
    "Release",
    "Vertices",
    "__version__",
    "calibrate",
    "certify",
    "compare",
    "errors",
    "queries",
    "release",
]

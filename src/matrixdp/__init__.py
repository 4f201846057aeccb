"""Matrices under differential privacy, with a certificate of what each release guarantees."""

from matrixdp import errors, queries, tables
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT, Adjacency
from matrixdp.budget import Budget
from matrixdp.comparison import compare
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import Release, release
from matrixdp.planning import Plan
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.laws import register_law
from matrixdp.sensitivity import (
    L1,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Vertices,
)

__version__ = "0.2.0"

__all__ = [
    "ADD_REMOVE",
    "L1",
    "REPLACE",
    "ZERO_OUT",
    "Accountant",
    "Adjacency",
    "Budget",
    "Certificate",
    "Counts",
    "Entrywise",
    "Frobenius",
    "Ledger",
    "OneColumn",
    "OneRow",
    "Participation",
    "Plan",
    "RankOne",
    "Release",
    "Vertices",
    "__version__",
    "calibrate",
    "certify",
    "compare",
    "errors",
    "queries",
    "register_law",
    "release",
    "tables",
]

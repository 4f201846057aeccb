"""Matrices under differential privacy, with a certificate of what each release guarantees."""

from matrixdp.budget import Budget
from matrixdp.compare import compare
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.accountant import Accountant
from matrixdp.privacy.certificate import certify
from matrixdp.privacy.ledger import Ledger
from matrixdp.release import release

__all__ = ["Accountant", "Budget", "Ledger", "calibrate", "certify", "compare", "release"]

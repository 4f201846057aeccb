"""Matrices under differential privacy, with a certificate of what each release guarantees."""

from matrixdp.budget import Budget
from matrixdp.compare import compare
from matrixdp.mechanisms import calibrate
from matrixdp.privacy.certificate import certify
from matrixdp.release import release

__all__ = ["Budget", "calibrate", "certify", "compare", "release"]

"""Covariances of Gaussian noise on the entries of a matrix, stored by their structure.

Every covariance S can colour standard normal noise (multiply by a factor U, S = U U^T) and whiten a difference V
(multiply by U^-1). mu_V = ||whiten(V)|| is the privacy parameter of that difference. Covariances with full support also
provide the parts of the precision S^-1 that the suprema over sensitivity sets need.
"""

from matrixdp.distributions.covariance.base import Covariance, FullCovariance
from matrixdp.distributions.covariance.blocks import Blocks
from matrixdp.distributions.covariance.dense import Dense
from matrixdp.distributions.covariance.independent import Diagonal, Isotropic
from matrixdp.distributions.covariance.kronecker import Kronecker
from matrixdp.distributions.covariance.over_time import OverTime
from matrixdp.distributions.covariance.residuals import ResidualNoise
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.distributions.covariance.symmetric import Symmetric, SymmetricEntries

__all__ = [
    "Blocks",
    "Covariance",
    "Dense",
    "Diagonal",
    "FullCovariance",
    "Isotropic",
    "Kronecker",
    "OverTime",
    "ResidualNoise",
    "Spectrum",
    "Symmetric",
    "SymmetricEntries",
]

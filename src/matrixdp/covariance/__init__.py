"""The shape of Gaussian noise: covariances on the entries of a matrix, never larger in memory than their structure.

Every covariance S knows how to colour standard normal noise (multiply by a factor U, S = U U^T) and how to whiten a
difference (multiply by U^-1), so that mu_V = ||whiten(V)|| is the privacy of that difference. Covariances with full
support also answer the few questions about the precision S^-1 that the suprema over sensitivity sets need.
"""

from matrixdp.covariance.base import Covariance, FullCovariance
from matrixdp.covariance.blocks import Blocks
from matrixdp.covariance.dense import Dense
from matrixdp.covariance.independent import Diagonal, Isotropic
from matrixdp.covariance.kronecker import Kronecker
from matrixdp.covariance.spectrum import Spectrum
from matrixdp.covariance.symmetric import Symmetric

__all__ = [
    "Blocks",
    "Covariance",
    "Dense",
    "Diagonal",
    "FullCovariance",
    "Isotropic",
    "Kronecker",
    "Spectrum",
    "Symmetric",
]

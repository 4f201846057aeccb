"""The shape of Gaussian noise: covariances on the entries of a matrix, never larger in memory than their structure.

Every covariance S knows how to colour standard normal noise (multiply by a factor U, S = U U^T) and how to whiten a
difference (multiply by U^-1), so that mu_V = ||whiten(V)|| is the privacy of that difference. Covariances with full
support also provide what the suprema over sensitivity sets need of the precision S^-1.
"""

from matrixdp.distributions.covariance.base import Covariance, FullCovariance
from matrixdp.distributions.covariance.blocks import Blocks
from matrixdp.distributions.covariance.dense import Dense
from matrixdp.distributions.covariance.independent import Diagonal, Isotropic
from matrixdp.distributions.covariance.kronecker import Kronecker
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
    "Spectrum",
    "Symmetric",
    "SymmetricEntries",
]

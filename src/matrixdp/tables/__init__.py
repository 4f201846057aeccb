"""People's data: contingency tables, marginals together, quantiles and other statistics, with error bars."""

from matrixdp.tables.marginals import MarginalPlan, MarginalRelease, plan_marginals
from matrixdp.tables.means import Estimate, means, release_means
from matrixdp.tables.moments import Moments, release_moments
from matrixdp.tables.quantiles import Quantiles, quantiles, release_quantiles

__all__ = [
    "Estimate",
    "MarginalPlan",
    "MarginalRelease",
    "Moments",
    "Quantiles",
    "means",
    "plan_marginals",
    "quantiles",
    "release_means",
    "release_moments",
    "release_quantiles",
]

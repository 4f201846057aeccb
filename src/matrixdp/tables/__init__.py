"""People's data: contingency tables, marginals together, quantiles and other statistics, with error bars."""

from matrixdp.tables.marginals import MarginalPlan, MarginalRelease, plan_marginals
from matrixdp.tables.quantiles import Quantiles, quantiles, release_quantiles
from matrixdp.tables.statistics import Estimate, Moments, means, release_means, release_moments

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

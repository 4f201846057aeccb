"""People's data: contingency tables, marginals together, quantiles and other statistics, with error bars."""

from matrixdp.tables.marginals import MarginalPlan, MarginalRelease, plan_marginals
from matrixdp.tables.quantiles import Quantiles, quantiles, release_quantiles

__all__ = ["MarginalPlan", "MarginalRelease", "Quantiles", "plan_marginals", "quantiles", "release_quantiles"]

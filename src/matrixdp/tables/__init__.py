"""People's data: contingency tables, marginals together, quantiles and other statistics, with error bars."""

from matrixdp.tables.marginals import MarginalPlan, MarginalRelease, plan_marginals

__all__ = ["MarginalPlan", "MarginalRelease", "plan_marginals"]

"""Queries on records: a value, and the sensitivity set that its clipping enforces.

    release(*second_moment(X, norm=1.0), Budget(1.0, 1e-6))

Bounds, centers and edges must be known without the data; `DataDependentBound` warns of those that evidently are not,
and cannot see the rest (a quantile, a bound rounded up from the maximum). That there is at least one record, how many
columns there are, and that the data can be read are taken as public. Errors and warnings are for whoever holds the
data: they depend on it, and are not covered by any guarantee.
"""

from matrixdp.queries.answer import Answer
from matrixdp.queries.histogram import histogram
from matrixdp.queries.identity import identity
from matrixdp.queries.moments import covariance, second_moment
from matrixdp.queries.records import DataDependentBound, load
from matrixdp.queries.totals import mean, sum

__all__ = [
    "Answer",
    "DataDependentBound",
    "covariance",
    "histogram",
    "identity",
    "load",
    "mean",
    "second_moment",
    "sum",
]

"""Queries on records: a value, and the sensitivity set that its clipping enforces.

    release(*second_moment(X, norm=1.0), Budget(1.0, 1e-6))

Bounds, centers and edges must be known without the data. Nothing here compares them with the data, since a warning
would depend on the records.

It is taken as public that there is at least one record, how many columns there are, and that the data can be read. An
error about the records (a cell that is not a number, NaN or infinite) depends on them, is visible, and is not covered
by any guarantee. It gives the place and the kind of the problem, never a cell, a header or a label.
"""

from matrixdp.queries.answer import Answer
from matrixdp.queries.histograms import histogram
from matrixdp.queries.matrices import identity
from matrixdp.queries.moments import covariance, moment_entries, second_moment
from matrixdp.queries.records import load
from matrixdp.queries.sparse import sparse_sum
from matrixdp.queries.totals import mean, sum
from matrixdp.queries.units import bounded, by_unit, chosen_rows

__all__ = [
    "Answer",
    "bounded",
    "by_unit",
    "chosen_rows",
    "covariance",
    "histogram",
    "identity",
    "load",
    "mean",
    "moment_entries",
    "second_moment",
    "sparse_sum",
    "sum",
]

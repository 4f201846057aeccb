"""Queries on records: a value, and the sensitivity set that its clipping enforces.

    release(*second_moment(X, norm=1.0), Budget(1.0, 1e-6))

Bounds, centers and edges must be known without the data. Nothing here compares them with it, since a warning would
depend on the records.

That there is at least one record, how many columns there are, and that the data can be read are taken as public. A
refusal of records (a cell that is no number, NaN or infinite) depends on them and is visible: it names the place and
the kind of what is wrong, never a cell, a header or a label, and is not covered by any guarantee.
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

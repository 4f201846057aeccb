"""Tables of people's data: categories, missing values, several rows per person, labelled answers.

    domain = Domain({"region": Categorical(["north", "south"]), "age": Numeric(0, 100, bins=[0, 18, 65, 100])})
    table = Table("patients.csv", domain, unit="patient_id", contributions=3)
    out = table.counts("region", "age").release(Budget(1.0, 1e-6))
    out.table()

A domain is public and total: it assigns every cell a place, so that no error, warning or guess depends on a cell.
"""

from matrixdp.queries.units import bounded
from matrixdp.tables.answers import TableAnswer
from matrixdp.tables.databases import sql
from matrixdp.tables.domain import Domain
from matrixdp.tables.estimates import TableEstimates
from matrixdp.tables.files import csv_file
from matrixdp.tables.kinds import Boolean, Categorical, Date, Numeric, Ordered
from matrixdp.tables.marginal_release import MarginalRelease
from matrixdp.tables.marginals import MarginalPlan, plan_marginals
from matrixdp.tables.mean import Estimate, means, release_means
from matrixdp.tables.moments import Moments, release_moments
from matrixdp.tables.outputs import TableRelease
from matrixdp.tables.quantile import Quantiles, quantiles, release_quantiles
from matrixdp.tables.reading import source_of
from matrixdp.tables.table import Table
from matrixdp.tables.table_marginals import TableMarginals

__all__ = [
    "Boolean",
    "Categorical",
    "Date",
    "Domain",
    "Estimate",
    "MarginalPlan",
    "MarginalRelease",
    "Moments",
    "Numeric",
    "Ordered",
    "Quantiles",
    "Table",
    "TableAnswer",
    "TableEstimates",
    "TableMarginals",
    "TableRelease",
    "bounded",
    "csv_file",
    "means",
    "plan_marginals",
    "quantiles",
    "release_means",
    "release_moments",
    "release_quantiles",
    "source_of",
    "sql",
]

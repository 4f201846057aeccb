"""Records and matrices larger than memory, on Dask: the usual queries, on Dask collections and Parquet folders.

    from matrixdp import Budget, distributed

    answer = distributed.second_moment("people/", norm=1.0)             # one pass, on the workers
    distributed.release(*answer, Budget(1.0, 1e-6), ledger=ledger)      # a small matrix, noise drawn here

    answer = distributed.identity(features, norm=1.0)                   # a Dask array in, a Dask array out
    out = distributed.release(*answer, Budget(1.0, 1e-6), ledger=rows)  # another ledger: here a record is replaced
    dask.array.to_zarr(out.value, "released.zarr")                      # noise drawn on the workers

Queries run immediately (`identity` when its result is computed), on the active `distributed.Client` or, without one, on
threads of this process. docs/scale.md says what they cost and who has to be trusted.
"""

from matrixdp import _extras

_extras.require("distributed", "dask", "distributed", "pandas", "pyarrow")

from matrixdp.distributed.queries import covariance, histogram, identity, mean, second_moment, sum
from matrixdp.pipeline import release

__all__ = ["covariance", "histogram", "identity", "mean", "release", "second_moment", "sum"]

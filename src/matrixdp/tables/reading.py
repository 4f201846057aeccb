"""Sources of rows from everything that can be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matrixdp.errors import InvalidInput
from matrixdp.tables.databases import Relation
from matrixdp.tables.files import from_path
from matrixdp.tables.frames import from_array, from_frame
from matrixdp.tables.sources import Source


def source_of(given: Any, columns: Sequence[str] | None = None) -> Source:
    """A source of rows.

    Args:
        given: a data frame that narwhals knows (pandas, Polars, also lazy, Arrow, Dask and others), a NumPy array, a
            DuckDB relation, the path of a .csv, .tsv (also .gz, .bz2, .xz) or .parquet file, or a result of `csv_file`
            or `sql`.
        columns: the names of the columns, for arrays and for separated text without a header.

    Example:
        >>> import numpy as np
        >>> from matrixdp.tables import Categorical, Domain, Table, source_of
        >>> rows = source_of(np.array([[31, 2], [45, 0]]), columns=["age", "visits"])
        >>> Table(rows, Domain({"visits": Categorical([0, 1, 2])})).counts("visits").sensitivity
        Counts(cells=1, bound=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    if isinstance(given, (str, Path)):
        found = from_path(Path(given), columns)
    elif isinstance(given, np.ndarray):
        return from_array(given, columns)
    elif isinstance(given, Source):
        found = given
    elif type(given).__name__ == "DuckDBPyRelation":
        found = Relation(given)
    else:
        found = from_frame(given)
    if columns is not None and list(found.names) != list(columns):
        raise InvalidInput("columns is for arrays and for separated text without a header; this source has names")
    return found

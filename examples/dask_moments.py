"""Records larger than memory, on Dask
===================================

Records in a folder of Parquet files; one pass clips them on the workers and adds exact integers, so the answer has the
same bits for any partition. ``python examples/dask_moments.py [ROWS]``, extra ``distributed``.
"""

import sys
import tempfile
from pathlib import Path

import dask.array
import numpy as np
import pandas

from matrixdp import Budget, Ledger, distributed


def main(rows: int = 200_000) -> None:
    """Writes generated records, releases their second moment, then a large matrix block by block."""
    folder = Path(tempfile.mkdtemp(prefix="people-"))
    rng = np.random.default_rng(0)
    (folder / "people").mkdir()
    for part in range(4):
        frame = pandas.DataFrame(rng.normal(size=(rows // 4, 5)), columns=["a", "b", "c", "d", "e"])
        frame.to_parquet(folder / "people" / f"part-{part}.parquet")
    ledger = Ledger(folder / "budget.db", Budget(3.0, 1e-6))
    rows_ledger = Ledger(folder / "rows.db", Budget(3.0, 1e-6))  # its neighbours differ by a row that is replaced

    answer = distributed.second_moment(folder / "people", norm=3.0)
    moment = distributed.release(*answer, Budget(1.0, 1e-6), ledger=ledger, note="second moment")
    print((moment.value / rows).round(3))

    features = dask.array.random.default_rng(1).normal(size=(rows, 20), chunks=(rows // 4, 20))
    released = distributed.release(*distributed.identity(features, norm=5.0), Budget(1.0, 1e-6), ledger=rows_ledger)
    print(released.value)  # a Dask array: noise is drawn on the workers, block by block, when it is computed
    print(released.value[:2, :4].compute().round(1))
    print(released.certificate)
    print(f"left: {ledger.remaining()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Queries and releases on two Dask workers of 1 GiB each: time and memory. `python benchmarks/distributed.py`.

1. The second moment of N x 100 float32 records in Parquet. *Bare* reads the same row groups in the same batches, and
   adds up X^T X without clipping and without checks; *Dask* is what one would write: read_parquet, to_dask_array,
   X^T X. All of them compute in float64.
2. An identity release of the same records, and of a matrix that exists block by block only, streamed through the
   workers into a sink that drops each block. *Bare* is the same graph without clipping and noise, *numpy* the bare
   graph with numpy's normal numbers added, which are fast and keep nothing secret. The source of a virtual matrix is
   zeros (nothing to compute, so all of the time is noise) or normal numbers (about as costly as the noise).

Memory is the peak resident size of each worker process, which is new for each row; a worker that has only imported
everything is the first row. Times are the least of --repeats; CPU time is that of both workers, and the one to trust on
a machine that others use. `--full` takes 20 million records, and virtual matrices of 40 GB.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

# This folder, where this file would hide the package of its name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.resolve()]

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from distributed import Client, LocalCluster
from matrixdp import Budget
from matrixdp.distributed import identity, release, second_moment
from matrixdp.distributed.partitions import partitions
from matrixdp.secure.grid import Grid
from matrixdp.secure.kernels import add_noise
from matrixdp.sensitivity import OneRow

BUDGET = Budget(1.0, 1e-6)
COLUMNS = 100
GROUP = 100_000  # records in a row group, one per file: 40 MB, and 80 MB as a block of float64
BLOCK = 1 << 22  # entries in a block of a virtual matrix: 32 MiB

# Dask's own setting of the first has glibc map every array of more than 128 KiB anew, and page faults become half of
# the work.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": 1 << 27, "MALLOC_MMAP_THRESHOLD_": 1 << 25}


def write(folder, rows, columns):
    """Files of records, without holding more than one of them."""
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(columns)]
    for number, first in enumerate(range(0, rows, GROUP)):
        block = rng.standard_normal((columns, min(GROUP, rows - first)), dtype=np.float32) / 10
        pq.write_table(pa.table(list(block), names=names), folder / f"{number:05}.parquet", row_group_size=GROUP)
    return folder


def plain(batch):
    """The records of a batch as float64, without checks."""
    values = np.empty((batch.num_rows, batch.num_columns), order="F")
    for target, column in zip(values.T, batch.columns, strict=True):
        target[:] = column.to_numpy()
    return values


def bare_moment(group):
    """X^T X of a row group, without privacy."""
    return sum(np.dot(x.T, x) for x in map(plain, group.batches()))


def bare_records(group):
    """The records of a row group, without privacy."""
    return np.concatenate(list(map(plain, group.batches())))


def with_numpy_noise(block):
    """The block plus normal noise that anyone could guess the seed of."""
    noise = np.random.default_rng().standard_normal(block.shape)
    noise += block
    return noise


def dropped(block):
    """The sink: a byte for each block."""
    return np.zeros((1,) * block.ndim, dtype=np.uint8)


def stream(array):
    """Computes every block and keeps none."""
    array.map_blocks(dropped, dtype=np.uint8, chunks=tuple((1,) * n for n in array.numblocks)).sum().compute()


def moment_private(folder):
    second_moment(folder, norm=1.0)


def moment_bare(folder):
    parts = [dask.delayed(bare_moment)(part.content) for part in partitions(folder).parts]
    dask.delayed(sum)(parts).compute()


def moment_dask(folder):
    lengths = [part.rows for part in partitions(folder).parts]
    records = dd.read_parquet(folder).to_dask_array(lengths=lengths).astype(np.float64)
    (records.T @ records).compute()


def records_private(folder):
    stream(release(*identity(folder, norm=1.0), BUDGET).value)


def records_clipped(folder):
    stream(identity(folder, norm=1.0).value)


def records_of(folder):
    parts = partitions(folder).parts
    blocks = [
        da.from_delayed(dask.delayed(bare_records)(part.content), (part.rows, COLUMNS), np.float64) for part in parts
    ]
    return da.concatenate(blocks)


def matrix_private(array):
    stream(release(array, OneRow(radius=1.0), BUDGET).value)


def matrix_numpy(array):
    stream(array.map_blocks(with_numpy_noise, dtype=np.float64))


def virtual(source, rows, columns):
    chunks = (max(1, BLOCK // columns), columns)
    if source == "zeros":
        return da.zeros((rows, columns), chunks=chunks)
    return da.random.default_rng(0).standard_normal((rows, columns), chunks=chunks)


def warm_up():
    """Imports and compiles what a worker needs."""
    import pandas  # noqa: F401

    add_noise(np.zeros(4), 1.0, Grid(3))


def peak():
    """The most MiB that this process has held; unlike ru_maxrss it does not begin with the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def spent():
    """The CPU seconds of this process."""
    return sum(os.times()[:2])


def measured(work, repeats):
    """The least wall time and CPU time of all workers, and the peak memory of each, on a cluster of its own."""
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, memory_limit="1GiB", dashboard_address=None
    )
    with cluster, Client(cluster) as client:
        client.run(warm_up)
        walls, efforts = [], []
        for _ in range(repeats):
            before, start = sum(client.run(spent).values()), time.perf_counter()
            work()
            walls.append(time.perf_counter() - start)
            efforts.append(sum(client.run(spent).values()) - before)
        peaks = client.run(peak)
    return min(walls), min(efforts), "{:.0f} {:.0f}".format(*peaks.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="records in the Parquet files; 0 for none")
    parser.add_argument("--entries", type=int, default=100_000_000, help="entries of the virtual matrix; 0 for none")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dask-malloc", action="store_true", help="leave the workers' malloc as Dask sets it")
    parser.add_argument("--full", action="store_true", help="20 million records, 5 billion entries")
    arguments = parser.parse_args()
    rows = 20_000_000 if arguments.full and arguments.rows else arguments.rows
    entries = 5_000_000_000 if arguments.full and arguments.entries else arguments.entries

    if not arguments.dask_malloc:
        dask.config.set({"distributed.nanny.pre-spawn-environ": {**MALLOC, "OPENBLAS_NUM_THREADS": 1}})
    table = Table("", "rows", "columns", "graph", "wall s", "CPU ns/entry", "private/this: wall", "CPU", "peak MiB")

    def show(name, shape, private, **others):
        found = {"private": measured(private, arguments.repeats)}
        found |= {graph: measured(work, arguments.repeats) for graph, work in others.items()}
        for graph, (wall, effort, peaks) in found.items():
            ratios = (found["private"][i] / some for i, some in enumerate((wall, effort)))
            cells = [f"{shape[0]:,}", str(shape[1]), graph, f"{wall:.2f}", f"{effort / math.prod(shape) * 1e9:.1f}"]
            cells += [*(f"{ratio:.2f}" for ratio in ratios), peaks]
            table.add_row(name, *cells)
            print(name, *cells, sep="  ", flush=True)

    table.add_row("idle", *[""] * 7, measured(lambda: None, 1)[2])
    if rows:
        with tempfile.TemporaryDirectory(prefix="matrixdp-") as parent:
            for share in (4, 1):
                folder = Path(parent) / str(share)
                folder.mkdir()
                write(folder, rows // share, COLUMNS)
                show(
                    "second moment",
                    (rows // share, COLUMNS),
                    partial(moment_private, folder),
                    bare=partial(moment_bare, folder),
                    Dask=partial(moment_dask, folder),
                )
            show(
                "identity, Parquet",
                (rows, COLUMNS),
                partial(records_private, folder),
                bare=lambda: stream(records_of(folder)),
                clipped=partial(records_clipped, folder),
                numpy=lambda: matrix_numpy(records_of(folder)),
            )
    sizes = (("zeros", 100, 4), ("normal", 100, 4), ("normal", 100, 1), ("normal", 1000, 4), ("normal", 10_000, 4))
    for source, columns, share in sizes if entries else ():
        array = virtual(source, entries // share // columns, columns)
        others = {"bare": partial(stream, array)} | ({"numpy": partial(matrix_numpy, array)} if share > 1 else {})
        show(f"identity, {source}", array.shape, partial(matrix_private, array), **others)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""Queries and releases on two Dask workers of 1 GiB each: time and memory. `python benchmarks/distributed.py`.

1. The second moment of N x 100 float32 records in Parquet, against the same passes without privacy: the same row groups
   read in the same batches, X^T X without clipping and without checks.
2. An identity release of a matrix that exists block by block only, streamed through the workers into a sink that drops
   each block, against the same graph without noise. The source is zeros (nothing to compute, so all of the time is
   noise), normal numbers (about as dear as the noise), or clipped records from the Parquet files.

Memory is the peak resident size of each worker process, which is new for each row; a worker that has only imported
everything is the first row. Times are the least of --repeats; CPU time is that of both workers, and the one to trust on
a machine that others use. `--full` takes 20 million records.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

# This folder, where this file would hide the package of its name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.resolve()]

import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from distributed import Client, LocalCluster
from matrixdp import Budget
from matrixdp.distributed import identity, release, second_moment
from matrixdp.distributed.partitions import partitions
from matrixdp.noise.grid import Grid
from matrixdp.noise.kernels import add_noise
from matrixdp.sensitivity import OneRow

BUDGET = Budget(1.0, 1e-6)
COLUMNS = 100
GROUP = 100_000  # records in a row group, one a file: 40 MB, and 80 MB as a block of float64
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


def bare_moment(group):
    """X^T X of a row group, without privacy."""
    return sum(np.dot(x.T, x) for x in (frame.to_numpy(dtype=np.float64) for frame in group.batches()))


def bare_records(group):
    """The records of a row group, without privacy."""
    return np.concatenate([frame.to_numpy(dtype=np.float64) for frame in group.batches()])


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


def records_private(folder):
    stream(release(*identity(folder, norm=1.0), BUDGET).value)


def records_clipped(folder):
    stream(identity(folder, norm=1.0).value)


def records_bare(folder):
    parts = partitions(folder).parts
    blocks = [
        da.from_delayed(dask.delayed(bare_records)(part.content), (part.rows, COLUMNS), np.float64) for part in parts
    ]
    stream(da.concatenate(blocks))


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
    parser.add_argument("--rows", type=int, default=1_000_000, help="records in the Parquet files")
    parser.add_argument("--entries", type=int, default=100_000_000, help="entries of the virtual matrix")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dask-malloc", action="store_true", help="leave the workers' malloc as Dask sets it")
    parser.add_argument("--full", action="store_true", help="20 million records, 2 billion entries")
    arguments = parser.parse_args()
    rows = 20_000_000 if arguments.full else arguments.rows
    entries = 2_000_000_000 if arguments.full else arguments.entries

    if not arguments.dask_malloc:
        dask.config.set({"distributed.nanny.pre-spawn-environ": {**MALLOC, "OPENBLAS_NUM_THREADS": 1}})
    heads = ("rows", "columns", "wall s", "bare", "ratio", "CPU ns/entry", "bare", "ratio", "peak MiB", "bare")
    table = Table("", *heads)

    def show(name, rows, columns, private, bare):
        wall, effort, peaks = measured(private, arguments.repeats)
        bare_wall, bare_effort, bare_peaks = measured(bare, arguments.repeats)
        cells = [f"{rows:,}", str(columns), f"{wall:.2f}", f"{bare_wall:.2f}", f"{wall / bare_wall:.2f}"]
        cells += [f"{some / rows / columns * 1e9:.1f}" for some in (effort, bare_effort)]
        cells += [f"{effort / bare_effort:.2f}", peaks, bare_peaks]
        table.add_row(name, *cells)
        print(name, *cells, sep="  ", flush=True)

    idle = measured(lambda: None, 1)[2]
    table.add_row("idle", *[""] * 8, idle, idle)
    parent = Path(tempfile.mkdtemp(prefix="matrixdp-"))
    try:
        for share in (4, 1):
            folder = parent / str(share)
            folder.mkdir()
            write(folder, rows // share, COLUMNS)
            show(
                "second moment",
                rows // share,
                COLUMNS,
                lambda f=folder: moment_private(f),
                lambda f=folder: moment_bare(f),
            )
        show("identity, Parquet", rows, COLUMNS, lambda: records_private(folder), lambda: records_bare(folder))
        show("clipping alone", rows, COLUMNS, lambda: records_clipped(folder), lambda: records_bare(folder))
    finally:
        shutil.rmtree(parent)
    for source, columns, count in (
        ("zeros", 100, entries),
        ("normal", 100, entries // 4),
        ("normal", 100, entries),
        ("normal", 1000, entries),
        ("normal", 10_000, entries),
    ):
        array = virtual(source, count // columns, columns)
        show(
            f"identity, {source}",
            *array.shape,
            lambda a=array: stream(release(a, OneRow(radius=1.0), BUDGET).value),
            lambda a=array: stream(a),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

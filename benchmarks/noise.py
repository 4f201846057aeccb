"""How fast noise is drawn: million entries per second, and memory beyond the output. `python benchmarks/noise.py`.

Every row draws a new 4096 x 4096 matrix of float64; ours also puts values on the grid and adds the noise to them. Rows
take turns, and each shows its median. Memory is what Python and numpy allocate at most beyond the output; compiling is
not counted. With `--peer PYTHON`, OpenDP and diffprivlib draw a small sample in that interpreter's environment
(`peers.py`), from which the rate is taken.
"""

import argparse
import statistics
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from peers import drawn_by
from rich.console import Console
from rich.progress import track
from rich.table import Table

from matrixdp.secure.entropy import Key
from matrixdp.secure.grid import Grid
from matrixdp.secure.kernels import BLOCK, add_noise

SHAPE = 4096, 4096
ENTRIES = SHAPE[0] * SHAPE[1]


def numpy_threads(count):
    generators = np.random.default_rng().spawn(count)

    def draw():
        out = np.empty(SHAPE)
        with ThreadPoolExecutor(count) as pool:
            parts = np.array_split(out.reshape(-1), count)
            list(pool.map(lambda pair: pair[0].standard_normal(out=pair[1]), zip(generators, parts, strict=True)))
        return out

    return draw


def torch_normal():
    import torch

    torch.set_num_threads(1)
    return lambda: torch.randn(SHAPE, dtype=torch.float64)


def words_alone():
    words = np.empty(BLOCK, dtype=np.uint64)

    def fill():
        stream = Key().stream()
        for block in range(ENTRIES // BLOCK):
            stream.fill(words, block)

    return fill


def rows(threads):
    values = np.random.default_rng(0).normal(size=SHAPE)
    slow, fast = np.random.default_rng(), np.random.Generator(np.random.SFC64())
    yield "numpy PCG64, 1 thread", lambda: slow.standard_normal(SHAPE)
    yield "numpy SFC64, 1 thread", lambda: fast.standard_normal(SHAPE)
    yield f"numpy PCG64, {threads} threads", numpy_threads(threads)
    yield "torch.randn, 1 thread", torch_normal()
    yield "AES-256 words alone, 1 thread", words_alone()
    for levels in (1, 2, 3):
        for count in (1, threads):
            name = f"matrixdp, step 2^-{7 * levels}, {count} thread{'s' * (count > 1)}"
            yield name, partial(add_noise, values, 1.0, Grid(levels), threads=count)
    # The rows above make a new array each time, and mapping its pages is part of their time; these write into one.
    reused = np.zeros(SHAPE)
    yield "numpy PCG64, 1 thread, array reused", lambda: slow.standard_normal(out=reused)
    for count in (1, threads):
        name = f"matrixdp, step 2^-7, {count} thread{'s' * (count > 1)}, array reused"
        yield name, partial(add_noise, values, 1.0, Grid(1), out=reused, threads=count)


def memory_beyond_output(draw):
    """The most that was allocated at one time, in bytes, less the output."""
    tracemalloc.start()
    try:
        out = draw()
        return tracemalloc.get_traced_memory()[1] - (0 if out is None else 8 * ENTRIES)
    finally:
        tracemalloc.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", help="the interpreter of an environment with OpenDP and diffprivlib")
    arguments = parser.parse_args()

    draws = dict(rows(arguments.threads))
    seconds = {name: [] for name in draws}
    memory = {}
    for name, draw in draws.items():
        draw()  # compiles
        memory[name] = memory_beyond_output(draw)
    for _ in track(range(arguments.rounds), transient=True):
        for name, draw in draws.items():
            start = time.perf_counter()
            draw()
            seconds[name].append(time.perf_counter() - start)

    table = Table(title=f"Gaussian noise, {SHAPE[0]} x {SHAPE[1]} float64, median of {arguments.rounds}")
    table.add_column("sampler")
    for heading in ("million entries/s", "x numpy PCG64", "MiB beyond output"):
        table.add_column(heading, justify="right")
    rates = {name: ENTRIES / statistics.median(times) / 1e6 for name, times in seconds.items()}
    rates |= drawn_by(arguments.peer, "gaussian")
    reference = next(iter(rates.values()))
    for name, rate in rates.items():
        if isinstance(rate, str):
            table.add_row(name, rate)
            continue
        shown = "" if name not in memory or "torch" in name or "reused" in name else f"{memory[name] / 2**20:.1f}"
        table.add_row(name, f"{rate:,.4g}", f"{rate / reference:.3g}", shown)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

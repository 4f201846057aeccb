"""Secure grid noise on a CUDA device, addition included, against torch.randn and against a plain copy.

    python benchmarks/noise_cuda.py [--entries 268435456]

Medians of triton.testing.do_bench in one run. The bandwidth counts one read and one write of the tensor.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import triton
from rich.console import Console
from rich.table import Table

from matrixdp.secure import cuda
from matrixdp.secure.grid import Grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1 << 28)
    size = parser.parse_args().entries
    table = Table(title=f"{size:,} entries on {torch.cuda.get_device_name()}")
    for heading in ("type", "what", "10^9 entries/s", "x torch.randn", "GB/s", "of a copy"):
        table.add_column(heading, justify="left" if heading in ("type", "what") else "right")
    for dtype in (torch.float64, torch.float32):
        values = torch.zeros(size, dtype=dtype, device="cuda")
        target = torch.empty_like(values)
        work = {
            "torch.randn": partial(torch.randn, size, dtype=dtype, device="cuda"),
            "copy": partial(target.copy_, values),
        }
        for levels in (1, 2, 3, 4):
            work[f"grid, levels {levels}"] = partial(cuda.add_noise, values, 1.0, Grid(levels))
        times = {name: triton.testing.do_bench(call, return_mode="median") for name, call in work.items()}
        for name, milliseconds in times.items():
            moved = 2 * size * values.element_size() / milliseconds / 1e6
            table.add_row(
                str(dtype).removeprefix("torch."),
                name,
                f"{size / milliseconds / 1e6:.1f}",
                f"{times['torch.randn'] / milliseconds:.2f}",
                "" if name == "torch.randn" else f"{moved:,.0f}",
                "" if name == "torch.randn" else f"{times['copy'] / milliseconds:.0%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

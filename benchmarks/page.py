"""Writes the page of benchmarks from the scripts' own output: python benchmarks/page.py docs/benchmarks.md

Runs the scripts that take a minute or so, one after the other, and shows their output as it is, with the machine, its
load and the date. `--peer` is the interpreter of an environment with the other libraries; without it, the rows of
libraries that are not installed are missing.
"""

import argparse
import ast
import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
# Script and arguments; {peer} is there only if it was given.
QUICK = (
    ("calibrate.py",),
    ("noise.py",),
    ("discrete.py",),
    ("release.py",),
    ("design.py",),
    ("over_time.py", "--peer", "{peer}"),
    ("tables.py", "--peer", "{peer}"),
    ("dpsgd.py",),
)
OTHERS = "`distributed.py` (minutes, two workers) and `noise_cuda.py` (a GPU) are run by hand."


def processor() -> str:
    """The name of the processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def section(script: str, *arguments: str, limit: int) -> str:
    """One script: what it measures, how it was called, and what it printed."""
    words = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))).split("\n\n")
    call = [sys.executable, str(HERE / script), *arguments]
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110"}
    load = os.getloadavg()[0]
    try:
        done = subprocess.run(call, env=plain, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"## {script}\n\n{words[0]}\n\nNot finished within {limit} s on this machine.\n"
    shown = (
        "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
        if done.returncode == 0
        else f"failed with exit code {done.returncode}"
    )
    name = " ".join(["python", f"benchmarks/{script}", *arguments])
    return f"## {script}\n\n{words[0]}\n\n`{name}`, load {load:.1f} at its start:\n\n```text\n{shown}\n```\n"


def main() -> None:
    """Runs the scripts and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--peer", help="interpreter of an environment with the other libraries")
    parser.add_argument("--only", nargs="*", help="these scripts alone")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each script")
    asked = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("matrixdp", "numpy", "scipy", "torch"))
    parts = [
        "# Benchmarks\n\nMade by `make benchmarks` from the scripts' own output; do not edit by hand.\n",
        f"{datetime.date.today():%d %B %Y}, {processor()}, {os.cpu_count()} cores, {platform.system()}, Python "
        f"{platform.python_version()}; {packages}.\n\nA load above the number of "
        f"cores says that other work slowed a script: compare inside a table only. {OTHERS}\n",
    ]
    for script, *arguments in QUICK:
        if asked.only and script not in asked.only:
            continue
        if "{peer}" in arguments:
            arguments = [asked.peer if part == "{peer}" else part for part in arguments] if asked.peer else []
        print(script, flush=True)
        parts.append(section(script, *arguments, limit=asked.limit))
    asked.page.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()

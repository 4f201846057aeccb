"""Writes the page of benchmarks from the scripts' own output: python benchmarks/page.py docs/benchmarks.md

Runs the scripts that take a minute or two, one after the other, and shows their output as it is, with the machine, its
load and the date. The other libraries need environments of their own, whose interpreters are `--peer` (OpenDP,
diffprivlib, autodp: see `tables.py` and `peers.py`) and `--peer-jax` (jax_privacy: see `over_time.py`). Without them,
the rows of these libraries are missing. Opacus is measured in this environment. Exits with 1 if a script failed.
"""

import argparse
import ast
import datetime
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PEERS = {"peer": ("opendp", "diffprivlib", "autodp"), "peer_jax": ("jax_privacy",)}
# Each script, the environment of its peers, and arguments.
QUICK = (
    ("calibrate.py", "peer"),
    ("noise.py", "peer"),
    ("discrete.py", "peer"),
    ("release.py", None),
    ("design.py", None),
    ("over_time.py", "peer_jax"),
    ("tables.py", "peer"),
    ("dpsgd.py", None),
    (
        "dpsgd.py",
        None,
        "--alone",
        "--networks",
        "LeNet",
        "--rounds",
        "9",
        "--rows",
        "make_private",
        "analytic",
        "ghost",
    ),
    ("ledger.py", None, "--seconds", "2"),
)
OTHERS = (
    "Run by hand: `distributed.py` (minutes, two workers; [results](scale.md)), `federated.py` (longer; "
    "[results](federated.md)) and `noise_cuda.py` (a GPU)."
)


def processor() -> str:
    """The name of the processor, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(interpreter: str, names: tuple[str, ...]) -> str:
    """The versions of packages in an environment, those that are there."""
    script = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try: print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError: pass
"""
    call = [interpreter, "-c", script, *names]
    return ", ".join(subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines())


def section(script: str, *arguments: str, peer: str | None, limit: int) -> tuple[str, bool]:
    """One script: what it measures, how it was called, and what it printed; and whether it ran to its end."""
    title = " ".join(("##", script, *arguments))
    words = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))).split("\n\n")
    call = [sys.executable, str(HERE / script), *arguments, *(("--peer", peer) if peer else ())]
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110"}
    load, start = os.getloadavg()[0], time.perf_counter()
    try:
        done = subprocess.run(call, env=plain, stdout=subprocess.PIPE, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"{title}\n\n{words[0]}\n\nNot finished within {limit} s on this machine.\n", False
    seconds, ran = time.perf_counter() - start, done.returncode == 0
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    shown = "\n".join(lines) if ran else f"failed with exit code {done.returncode}"
    called = f"Load {load:.1f} at its start, {seconds:.0f} s"
    return f"{title}\n\n{words[0]}\n\n{called}:\n\n```text\n{shown}\n```\n", ran


def main() -> None:
    """Runs the scripts and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    for name, packages in PEERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"interpreter with {', '.join(packages)}")
    parser.add_argument("--only", nargs="*", help="these scripts alone")
    parser.add_argument("--limit", type=int, default=600, help="seconds for each script")
    asked = parser.parse_args()
    installed = [versions(sys.executable, ("matrixdp", "numpy", "scipy", "torch", "opacus", "dp-accounting"))]
    installed += [versions(getattr(asked, name), packages) for name, packages in PEERS.items() if getattr(asked, name)]
    parts = [
        "# Benchmarks\n\nMade by `make benchmarks` from the scripts' own output; do not edit by hand.\n",
        f"{datetime.date.today():%d %B %Y}, {processor()}, {os.cpu_count()} cores, {platform.system()}, Python "
        f"{platform.python_version()}; {', '.join(installed)}.\n\nA load above the number of "
        f"cores says that other work slowed a script: compare inside a table only. {OTHERS}\n",
    ]
    all_ran = True
    for script, environment, *arguments in QUICK:
        if asked.only and script not in asked.only:
            continue
        peer = environment and getattr(asked, environment)
        print(script, flush=True)
        text, ran = section(script, *arguments, peer=peer, limit=asked.limit)
        parts.append(text)
        all_ran = all_ran and ran
    asked.page.write_text("\n".join(parts), encoding="utf-8")
    sys.exit(not all_ran)


if __name__ == "__main__":
    main()

"""Runs a page of the documentation as a reader would: `python tests/run_page.py docs/tutorials/table.md`.

Blocks run in order, in a new folder. Python blocks share their names, bash blocks run with `bash -eu`. What a `text`
block shows must be what the block before it printed, up to spaces; `...` stands for anything. Nothing is patched.
"""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text):
    """The kind, the first line's number and the content of every fenced block."""
    for found in re.finditer(r"^```([\w:{}-]*)[^\n]*\n(.*?)^```", text, flags=re.S | re.M):
        yield found[1], text.count("\n", 0, found.start()) + 2, found[2]


def run(page):
    """Runs a page; raises what its code raises, or says which output is another one."""
    names, printed = {"__name__": "__main__"}, None
    for kind, line, content in blocks(page.read_text(encoding="utf-8")):
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + content, str(page), "exec"), names)
            printed = out.getvalue()
        elif kind == "bash":
            here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            call = ["bash", "-eu", "-c", content]
            done = subprocess.run(call, env={**os.environ, "PATH": here}, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{page}:{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
            printed = done.stdout
        elif kind == "text" and printed is not None:
            if not doctest.OutputChecker().check_output(content, printed, SAME):
                raise SystemExit(f"{page}:{line}: the page shows\n{content}\nand it printed\n{printed}")
            printed = None


if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(page)

"""What the commands print on a terminal: within its width, and without colour where none is wanted."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

ASKED = ["--shape", "20x20", "--epsilon", "0.5", "--delta", "1e-7"]
COMPARE = ["compare", "--sensitivity", "counts:1", "--mechanism", "analytic", "--mechanism", "r1smg", *ASKED]
COLOUR = re.compile("\x1b\\[[0-9;]*(3[0-7]|9[0-7])(;|m)")


def on_a_terminal(arguments, columns, **environment):
    """Everything that a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "TERM")}
    call = [sys.executable, "-c", "from matrixdp.cli import main; main()", *arguments]
    with subprocess.Popen(
        call, stdin=theirs, stdout=theirs, stderr=theirs, env={**unset, "TERM": "xterm-256color", **environment}
    ):
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end was closed
                break
            if not part:
                break
            written += part
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal(columns):
    shown = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", on_a_terminal(COMPARE, columns))
    lines = shown.splitlines()
    assert any("analytic" in line and "exact" in line for line in lines)
    assert max(map(len, lines)) <= columns


def test_no_colour_where_none_is_wanted():
    assert COLOUR.search(on_a_terminal(COMPARE, 80))
    assert not COLOUR.search(on_a_terminal(COMPARE, 80, NO_COLOR="1"))
    wrong = ["compare", "--sensitivity", "nonsense:1", *ASKED]
    assert COLOUR.search(on_a_terminal(wrong, 80))
    assert not COLOUR.search(on_a_terminal(wrong, 80, NO_COLOR="1"))


def test_errors_are_broken_between_words():
    shown = on_a_terminal(["release", "x.csv", "--output", "x.csv", "--shared", "2"], 60)
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown).splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 60 for line in lines)
    assert "error: --plan and --shared need --ledger: without one, nothing counts the releases" in " ".join(lines)

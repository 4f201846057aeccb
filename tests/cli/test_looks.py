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

from matrixdp._pages import wrapped

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


def plain(shown):
    """The lines without colours, and without a spinner's, which are erased."""
    return [line.split("\r")[-1] for line in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()]


LONG = ["calibrate", "banded", "--shape", "365x1", "--sensitivity", "participation:1", *ASKED[2:]]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_certificate_and_an_error_fit_the_terminal(columns):
    lines = plain(on_a_terminal(LONG, columns))
    assert any(line.startswith("  noise      Gaussian correlated over 365 steps") for line in lines)
    assert max(map(len, lines)) <= columns
    set_in = sum(line.startswith(" " * 13) for line in lines)  # a line of the guarantee, and what was wrapped
    assert set_in > 1 if columns == 80 else set_in == 1
    assert max(map(len, plain(on_a_terminal(["compare", "--sensitivity", "nonsense:1", *ASKED], columns)))) <= columns


def test_no_line_is_broken_in_a_pipe(call, monkeypatch):
    assert max(map(len, call(*LONG).stdout.splitlines())) > 100
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, call(*LONG).stdout.splitlines())) <= 80


def test_a_sentence_is_set_in_by_two():
    lines = wrapped("  A verified " + "word " * 20, 80).splitlines()
    assert len(lines[1]) - len(lines[1].lstrip()) == 4
    assert wrapped("  drawn with " + "word " * 20, 80).splitlines()[1].startswith(" " * 13 + "w")


def test_paths_and_hashes_stay_whole():
    path = "/a/very/long/path/" + "x" * 70
    assert wrapped(f"Written: {path}", 80) == f"Written:\n  {path}"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal(columns):
    lines = plain(on_a_terminal(COMPARE, columns))
    assert any("analytic" in line and "exact" in line for line in lines)
    assert max(map(len, lines)) <= columns


def test_no_colour_where_none_is_wanted():
    assert COLOUR.search(on_a_terminal(COMPARE, 80))
    assert not COLOUR.search(on_a_terminal(COMPARE, 80, NO_COLOR="1"))
    wrong = ["compare", "--sensitivity", "nonsense:1", *ASKED]
    assert COLOUR.search(on_a_terminal(wrong, 80))
    assert not COLOUR.search(on_a_terminal(wrong, 80, NO_COLOR="1"))

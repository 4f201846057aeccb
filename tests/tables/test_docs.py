"""The examples of docs/tables.md run, in Python and on the command line."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from matrixdp.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.S | re.M)
    names = {}
    for code in (code for kind, code in blocks if kind == "python"):
        exec(compile(code, "docs/tables.md", "exec"), names)
    assert Path("regions.html").read_text().startswith("<!doctype html>")
    for written in ("budget.db", "regions.csv", "regions.html"):
        Path(written).unlink()
    commands = "".join(code for _, code in blocks if code.startswith("matrixdp "))
    for line in commands.replace("\\\n", " ").splitlines():
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, (line, result.output)
        if line.startswith("matrixdp domain"):  # what a person does
            Path("domain.toml").write_text(names["domain"].to_toml())


def test_the_table_of_kinds_has_them_all():
    from matrixdp.tables.kinds import KINDS

    assert re.findall(r"^\| `(\w+)\(", PAGE, flags=re.M) == [kind.__name__ for kind in KINDS.values()]

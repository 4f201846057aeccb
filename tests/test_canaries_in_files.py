"""Canaries in files must not come out of the command line, nor of queries on folders of files."""

import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from canaries import DAY, HOLES, NUMBER, TEXT, TYPES, WHOLE, frame, leak, said, table
from matrixdp import distributed, queries
from matrixdp.cli import app

LINE = f"{TEXT};{DAY};HIV+;{WHOLE}"
FILES = {  # the command line: a file, and further options
    "no header, semicolons": (f"{LINE}\n{LINE}\n", ()),
    "no header, semicolons, a column asked for": (f"{LINE}\n{LINE}\n", ("--columns", "age")),
    "no header, tabs": (f"{LINE}\n{LINE}\n".replace(";", "\t"), ("--columns", "1")),
    "no header, commas": (f"{LINE}\n{LINE}\n".replace(";", ","), ()),
    "no header, text alone": (f"{TEXT},x{DAY}\n{TEXT},x{DAY}\n", ("--columns", "weight")),
    "same cell twice": (f"{TEXT},{TEXT}\n1,2\n", ()),
    "ragged": (f"{TEXT},b\n{NUMBER},1\n{NUMBER},1,{TEXT}\n", ()),
    "open quote": (f'{TEXT},b\n{NUMBER},"{TEXT}\n', ()),
    "quote inside": (f'{TEXT},b\n1,"{TEXT}"{NUMBER}\n', ()),
    "decimal comma": (f'{TEXT},b\n1,"{str(NUMBER).replace(".", ",")}"\n', ()),
    "hole": (f"{TEXT},b\n{NUMBER},\n", ()),
    "blank line": (f"{TEXT},b\n\n{NUMBER},1\n", ()),
    "nul": (f"{TEXT},b\n{NUMBER},\0{TEXT}\n", ()),
    "another encoding": (f"{TEXT}é,b\n{NUMBER},1\n".encode("latin-1"), ()),
    "UTF-16": (f"{TEXT},b\n{NUMBER},1\n".encode("utf-16"), ()),
    "very long cell": (f"{TEXT},b\n{NUMBER},{TEXT * 20_000}\n", ()),
    "position too large": (f"{TEXT},b\n{NUMBER},1\n", ("--columns", "7")),
    "three columns in a histogram": (f"{TEXT},b,c\n{NUMBER},1,2\n", ("--query", "histogram", "--edges", "0,1")),
    "whole and well": (f"{TEXT},b\n{NUMBER},1\n", ()),
    "objects.npy": (table({TEXT: 1}, TEXT), ()),
    "fields.npy": (TYPES["fields"], ()),
    "holes.npy": (HOLES["NaN"], ()),
    "broken.npy": (b"\x93NUMPY\x01\x00v\x00" + f"{{'descr': [('{TEXT}', '<f8')], 'x".encode(), ()),
    "text.parquet": (frame([TEXT, TEXT]).rename(columns=str), ()),
    "holes.parquet": (frame([NUMBER, np.nan]).rename(columns=str), ()),
    "column.parquet": (frame([NUMBER, np.nan]).rename(columns=str), ("--columns", "age")),
    "broken.parquet": (f"PAR1{LINE}PAR1".encode(), ()),
    "sets.npy": (TYPES["text"], ("--mechanism", "analytic", "--option", "weights=sets.npy")),
}


@pytest.mark.parametrize("name", FILES)
def test_no_canary_comes_out_of_the_command_line(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    content, options = FILES[name]
    path = tmp_path / (name if "." in name else "people.csv")
    if isinstance(content, pd.DataFrame):
        content.to_parquet(path)
    elif isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    asked = ("--query", "sum", "--norm", "1") if "--query" not in options else ()
    call = ("release", path.name, *asked, "--epsilon", "1", "--delta", "1e-6", "--output", "out.csv", *options)
    result = CliRunner().invoke(app, call)
    assert (result.exit_code == 0) == (name == "whole and well"), result.output
    written = {file.name: file.read_text() for file in tmp_path.iterdir() if file != path}
    assert set(written) == ({"out.csv", "out.certificate.json"} if result.exit_code == 0 else set())
    if result.exit_code == 0:
        certificate = json.loads(written["out.certificate.json"])
        certificate["released"].pop("sha256")  # of noise: one in 15,000 looks like a canary
        written = {"certificate": json.dumps(certificate)}
    heard = [result.stdout, result.stderr, *capfd.readouterr(), *written.values()]
    assert not leak("".join(heard)), heard


def test_an_unexpected_error_on_the_command_line_is_not_quoted(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(TEXT)

    monkeypatch.setattr(queries, "sum", fail)
    (tmp_path / "people.csv").write_text("1,2\n")
    call = ("release", f"{tmp_path}/people.csv", "--query", "sum", "--epsilon", "1", "--delta", "1e-6")
    result = CliRunner().invoke(app, [*call, "--output", f"{tmp_path}/out.csv"])
    assert result.exit_code == 1
    assert "RuntimeError in test_canaries_in_files.py" in result.stderr
    assert not leak(result.output + repr(result.exception))


def test_folders_whose_names_are_cells_and_files_with_other_names_are_not_quoted(tmp_path):
    nested = tmp_path / "a" / f"name={TEXT}"
    nested.mkdir(parents=True)
    pd.DataFrame({"a": [1.0]}).to_parquet(nested / "0.parquet")
    other = tmp_path / "b"
    other.mkdir()
    for number, name in enumerate((TEXT, str(WHOLE))):
        pd.DataFrame({name: [NUMBER], "b": [1.0]}).to_parquet(other / f"{number}.parquet")
    for folder in (nested.parent, other):
        text = said(distributed.sum, folder, norm=1.0)
        assert "InvalidInput" in text
        assert not leak(text), text
    lazy = dd.from_pandas(pd.DataFrame({"a": [TEXT, TEXT]}), npartitions=1).a.map(float, meta=("a", float))
    for act in (distributed.sum, distributed.identity):
        assert not leak(said(act, lazy, norm=1.0))

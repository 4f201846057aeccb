"""The reports in docs: one table on top, short sentences, and what a stored run says is what the code makes of it."""

import io
import json
import re
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from matrixdp_papers.studies import STUDIES
from matrixdp_papers.studies.base import Table, beside

DOCS = Path(__file__).parents[3] / "docs" / "studies"
REPORTS = sorted(DOCS.glob("*/report.md"))
WIDTH, TWO_SCREENS, MOST_WORDS = 120, 110, 30


def prose(text):
    """What stands before the tables, without rows, pictures and headings, one paragraph or point in each line."""
    joined = re.sub(r"\n  (?=\S)", " ", text)
    return [line.lstrip("- ") for line in joined.splitlines() if line and line[0] not in "|#!"]


def sentences(line):
    return re.split(r"(?<!i\.i\.d)\. ", line)


def test_every_study_has_a_report():
    assert {path.parent.name for path in REPORTS} == set(STUDIES)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_a_report_is_short_before_its_numbers(path):
    top = path.read_text(encoding="utf-8").split("## Numbers")[0]
    assert beside([]).splitlines()[0] in top
    lines = [part for line in top.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    assert len(lines) <= TWO_SCREENS
    long = [s for line in prose(top) for s in sentences(line) if len(s.split()) > MOST_WORDS]
    assert not long


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_tables_fit_80_columns_with_no_cell_cut(path):
    console = Console(width=80, file=io.StringIO())
    for document in json.loads((path.parent / "results.json").read_text("utf-8"))["tables"]:
        console.print(Table.from_dict(document))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


def test_a_long_sentence_would_be_seen():
    text = f"- One. {'word ' * 31}end.\n  More.\n| a | b |"
    assert any(len(s.split()) > MOST_WORDS for line in prose(text) for s in sentences(line))


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.tell is not None])
def test_a_stored_run_gives_the_report_in_docs(name):
    study = STUDIES[name]
    assert study.report(study.remake(DOCS / name / "results.json")) == (DOCS / name / "report.md").read_text("utf-8")

"""The reports in docs: one table on top, short sentences, and what a stored run says is what the code makes of it."""

import io
import json
import re
import textwrap
from pathlib import Path

import pytest
from matplotlib.container import ErrorbarContainer
from rich.console import Console

from matrixdp_papers.studies import STUDIES, figures
from matrixdp_papers.studies.base import Table, beside

DOCS = Path(__file__).parents[3] / "docs" / "studies"
REPORTS = sorted(DOCS.glob("*/report.md"))
WIDTH, TWO_SCREENS, MOST_WORDS = 120, 110, 30


def prose(text):
    """A report without rows, pictures and headings, one paragraph or point in each line."""
    joined = re.sub(r"\n  (?=\S)", " ", text)
    return [line.lstrip("- ") for line in joined.splitlines() if line and line[0] not in "|#!"]


def sentences(line):
    return re.split(r"(?<!i\.i\.d)\. ", line)


def test_every_study_has_a_report():
    assert {path.parent.name for path in REPORTS} == set(STUDIES)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_a_report_is_short_before_its_numbers(path):
    text = path.read_text(encoding="utf-8")
    top = text.split("## Numbers")[0]
    assert beside([]).splitlines()[0] in top
    lines = [part for line in top.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    assert len(lines) <= TWO_SCREENS
    spoken = [line for line in prose(text) if not line.startswith("Setting: ")]
    long = [s for line in spoken for s in sentences(line) if len(s.split()) > MOST_WORDS]
    assert not long


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_tables_fit_80_columns_with_no_cell_cut(path):
    console = Console(width=80, file=io.StringIO())
    for document in json.loads((path.parent / "results.json").read_text("utf-8"))["tables"]:
        console.print(Table.from_dict(document))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    # rich drops what is too wide, so a frame that does not close was cut
    assert not [line for line in lines if line[:1] in set("┏┃┡│└") and line[-1] not in "┓┃┩│┘"]


NUMBER = r"(?<![\w.,/-])(\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)"


def not_in(text, summary):
    """Numbers of a summary that no number of a report rounds to, in per cent where the summary is."""
    known = [float(found.replace(",", "")) for found in re.findall(NUMBER, text)]
    missing = []
    for number, per_cent in re.findall(NUMBER + r"( %)?(?!\w)", summary):
        digits, _, power = number.replace(",", "").partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
        value, scale = float(number.replace(",", "")), 100 if per_cent else 1
        if not any(abs(scale * other - value) <= 0.501 * unit for other in known):
            missing.append(number)
    return missing


def test_the_numbers_of_the_overview_are_in_the_reports():
    rows = [line for line in (DOCS.parent / "papers.md").read_text("utf-8").splitlines() if line.startswith("| [")]
    found = {re.match(r"\| \[([\w-]+)\]", row).group(1): row.split("|")[3] for row in rows}
    assert set(found) == set(STUDIES)
    missing = {name: not_in((DOCS / name / "report.md").read_text("utf-8"), cell) for name, cell in found.items()}
    assert not any(missing.values()), missing


def test_a_wrong_number_in_the_overview_would_be_seen():
    report = "| 0.3442 ± 0.0088 | 1,173 | 0.009115 | 7.9e+05 |"
    assert not not_in(report, "0.344, 1,173, 0.9 % and 7.9e5 on CIFAR-10")
    assert not_in(report, "0.345, 1,174, 0.8 % and 7.8e5") == ["0.345", "1,174", "0.8", "7.8e5"]


def test_a_long_sentence_would_be_seen():
    text = f"- One. {'word ' * 31}end.\n  More.\n| a | b |"
    assert any(len(s.split()) > MOST_WORDS for line in prose(text) for s in sentences(line))


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.tell is not None])
def test_a_stored_run_gives_the_report_in_docs(name):
    study = STUDIES[name]
    made = study.remake(DOCS / name / "results.json")
    assert study.report(made) == (DOCS / name / "report.md").read_text("utf-8")
    for figure in made.figures.values():
        if figure is not None:
            assert not shared_styles(figure)


def shared_styles(figure):
    """Series of a figure that look alike, or look different in different panels."""
    looks, labels = {}, {}
    for panel in figure.axes:
        for curve, label in zip(*panel.get_legend_handles_labels(), strict=True):
            if isinstance(curve, ErrorbarContainer):
                line = curve.lines[0]
                look = (line.get_color(), line.get_marker(), *line._unscaled_dash_pattern)
                looks.setdefault(label, set()).add(look)
                labels.setdefault(look, set()).add(label)
    return [found for found in (*looks.items(), *labels.items()) if len(found[1]) > 1]


def test_series_that_look_alike_would_be_seen():
    figure, (left, right) = figures.panels(2)
    for panel, name in ((left, "DP-SGD, sized to the claim"), (right, "DP-SGD, on training records")):
        figures.curves(panel, [1, 2], {name: [1.0, 2.0]}, title="", labels=("", ""))
    assert len(shared_styles(figure)) == 1

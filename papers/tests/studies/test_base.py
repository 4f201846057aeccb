"""The frame of a study: tables, means, reports, files, and the command."""

import io
import json
from dataclasses import replace
from importlib.metadata import entry_points

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from matrixdp import plots
from matrixdp.errors import InvalidInput
from matrixdp_papers.cli.study import study as command
from matrixdp_papers.studies import STUDIES, figures
from matrixdp_papers.studies.base import Mean, Results, Study, Table, beaten, merged, plain, shown, silent


def results():
    figure, panels = figures.panels(1)
    figures.bars(panels[0], {"a": Mean(2.0, 0.1, 5), "b": Mean(3.0, np.nan, 1)}, title="t", label="x")
    table = Table("Errors", ("name", "error", "note"), (("a", Mean(2.0, 0.1, 5), None), ("b", np.inf, "no|ne")), "why")
    return Results({"runs": 5, "shape": (2, 3)}, (table,), "found", "difference", {"picture": figure})


STUDY = Study("toy", "A toy", "nobody2000", "the claim", None, lambda data, smoke, progress: results())


def test_a_mean_has_the_interval_of_students_law():
    runs = np.random.default_rng(0).normal(5, 2, 10_000)
    found = Mean.of(runs)
    assert found.mean == np.mean(runs)
    assert found.half_width == pytest.approx(1.96 * 2 / 100, rel=0.05)
    # 4 runs, 3 degrees of freedom: 3.182 standard errors
    assert Mean.of([1.0, 2.0, 3.0, 4.0]).half_width == pytest.approx(3.182446 * np.std([1, 2, 3, 4], ddof=1) / 2)
    assert str(Mean.of([1.0])) == "1"
    assert "±" in str(found)


def test_a_mechanism_has_its_colour_in_every_figure():
    names = ("MVG, binary", "second moment, optimal", "MGM with the utilities", "r1smg, rescaled", "r1smg", "PPCA")
    style = figures.styles(names)
    for name, mechanism in zip(names, ("mvg", "optimal", "mgm", "r1smg", "r1smg"), strict=False):
        assert style[name][0] == plots.COLOURS[mechanism], name
    assert style["r1smg, rescaled"][2] != style["r1smg"][2]
    assert style["PPCA"][0] not in plots.COLOURS.values()


def test_curves_share_one_legend_below_the_panels():
    figure, panels = figures.panels(3)
    for panel, names in zip(panels, (("mvg", "idn"), ("mvg",), ("optimal",)), strict=True):
        curves = {name: [0.1, Mean(0.2, 0.05, 3)] for name in names}
        figures.curves(panel, [1.0, 1e5], curves, title="t", labels=("x", "y"), scales=("log", "linear"))
        figures.mark_constant(panel, 0.5)
        assert panel.get_ylim() == (0, 1)
        assert [label.get_text() for label in panel.get_xticklabels()] == ["1", "1e5"]
    figures.legend_below(figure, panels, columns=2)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["most frequent class", "mvg", "idn", "optimal"]
    assert all(panel.get_legend() is None for panel in panels)


def test_a_table_refuses_rows_of_another_length():
    with pytest.raises(InvalidInput, match="2 cells"):
        Table("t", ("a", "b"), ((1,),))


def test_the_report_has_claim_findings_difference_picture_and_numbers():
    text = STUDY.report(results())
    places = [text.index(part) for part in ("the claim", "found", "difference", "picture.png", "2 ± 0.1", "why")]
    assert places == sorted(places)
    assert "shape 2 x 3" in text


def test_a_stored_run_is_reported_again(tmp_path):
    def tell(setting, tables):
        return Results(setting, tables, f"again {tables[0]['error']['a']}", "difference")

    again = replace(STUDY, tell=tell)
    STUDY.write(results(), tmp_path)
    found = again.remake(tmp_path / "results.json")
    assert found.found == "again 2 ± 0.1"
    assert found.tables[0].rows[0][:2] == ("a", Mean(2.0, 0.1, 5))
    assert found.tables[0].records()[1]["note"] == "no|ne"
    with pytest.raises(InvalidInput, match="has to be run"):
        STUDY.remake(tmp_path / "results.json")
    with pytest.raises(InvalidInput, match="those of the study other"):
        replace(again, name="other").remake(tmp_path / "results.json")
    for text in ("{", "[]", "{}"):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(InvalidInput, match=r"results\.json"):
            again.remake(tmp_path / "results.json")


COLUMNS = ("noise", "epsilon", "std", "accuracy")


def rows_of(*rows, title="MNIST", note="old", columns=COLUMNS):
    return Table(title, columns, rows, note)


def test_another_run_fills_in_what_did_not_run():
    one, three = Mean(0.7, np.nan, 1), Mean(0.9, 0.01, 3)
    first = [rows_of(("none", None, 0.0, three), ("mvg", 0.1, 5.0, None), ("mvg", 1.0, 2.0, three)),
             rows_of(("none", None, 0.0, three), title="Adult")]  # fmt: skip
    second = [rows_of(("mvg", 0.1, 5.0 * (1 + 1e-9), one), ("mvg", 1.0, 2.0, None), note="new"),
              rows_of(("none", None, 0.0, one), title="Cora")]  # fmt: skip
    mnist, adult, cora = merged(first, second)
    assert [row[-1] for row in mnist.rows] == [three, one, three]
    assert mnist.note == "old"
    assert (adult, cora) == (first[1], second[1])
    longer = rows_of(("none", 0.8, 0.9), columns=("noise", "epoch 1", "epoch 2"))
    assert merged(first, [longer])[0] == longer


@pytest.mark.parametrize("rows", [(("none", None, 9.0, Mean(0.9, 0.01, 3)), ("mvg", 0.1, 6.0, Mean(0.7, 0.01, 3))),
                                  (("none", None, 0.0, None), ("mvg", 0.1, 5.0, None), ("mvg", 1.0, 2.0, None))],
                         ids=["as many rows, none empty", "more rows"])  # fmt: skip
def test_a_whole_run_takes_the_place_of_the_first(rows):
    first = [rows_of(("none", None, 0.0, Mean(0.8, 0.01, 3)), ("mvg", 0.1, 5.0, None))]
    whole = rows_of(*rows, note="new")
    assert merged(first, [whole]) == (whole,)


@pytest.mark.parametrize("row", [("mvg", 0.2, 5.0, None), ("mvg", 0.1, 5.1, None), ("mgm", 0.1, 5.0, None),
                                 ("mvg", None, None, None)])  # fmt: skip
def test_another_run_with_other_settings_is_refused(row):
    first = [rows_of(("mvg", 0.1, 5.0, None), ("mvg", 1.0, 2.0, None))]
    with pytest.raises(InvalidInput, match="same settings"):
        merged(first, [rows_of(row)])


def test_a_baseline_that_did_not_train_is_told():
    good, poor, chance = Mean(0.95, 0.01, 3), Mean(0.8, np.nan, 1), Mean(0.11, 0.0, 3)
    assert beaten(good, [("analytic", poor), ("classic", chance)]) == ""
    assert beaten(Mean(0.798, 0.0, 3), [("analytic", poor)]) == ""
    assert beaten(chance, [("classic", chance), ("analytic", poor)]) == "analytic (0.8)"


def test_a_mechanism_has_one_colour_in_every_picture():
    one, other = figures.styles(["no noise", "idn", "PPCA", "idn, composed"]), figures.styles(["idn", "MOD-SULQ"])
    assert one["idn"] == other["idn"]
    assert one["idn"][:2] == one["idn, composed"][:2]
    assert one["idn"][2] != one["idn, composed"][2]
    assert len({colour for colour, _, _ in one.values()}) == 3


def test_rivals_have_colours_of_their_own_in_bars():
    names = ("matrixdp", "DAWA", "H_b")
    _, (panel,) = figures.panels(1)
    figures.bars(panel, dict.fromkeys(names, Mean(1.0, 0.1, 3)), title="", label="")
    assert len({patch.get_facecolor() for patch in panel.patches}) == len(names)
    _, (panel,) = figures.panels(1)
    names = ("imgm, rows and columns", "JL transform", "exponential (PPCA)", "spherical", "0 without data")
    figures.bars(panel, dict.fromkeys(names, Mean(1.0, 0.1, 3)), title="", label="")
    assert len({patch.get_facecolor() for patch in panel.patches}) == len(names)


def test_piped_tables_are_as_wide_as_COLUMNS_says(monkeypatch):
    from matrixdp.cli import show

    monkeypatch.setenv("COLUMNS", "80")
    assert show.console().width == 80
    monkeypatch.delenv("COLUMNS")
    assert show.console().width == show.PIPE_WIDTH


def test_a_wide_table_is_printed_in_parts_of_80_columns():
    columns = ("mechanism", *(f"epsilon {place}" for place in range(20)))
    table = Table("Wide", columns, (("gaussian, per element", *(Mean(0.5, 0.01, 3),) * 20),), "a note")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("gaussian, per element" in line for line in lines) > 1
    assert sum(line.count("0.5 ± 0.01") for line in lines) == 20


@pytest.mark.parametrize("width", [60, 80, 100])
def test_long_headings_cut_no_cell(width):
    """Every line of a table ends in its border, and every cell is there as a whole."""
    columns = ("noise", "error as published", "error at equal guarantee", "drawn", "RMS error / answer")
    cells = ("MGM, utility's own directions", 17230.0, 0.03227, Mean(0.03218, 0.00063, 400), 0.4949)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Table("Headings", columns, (cells,), "a note"))
    lines = console.export_text().splitlines()
    framed = [line.rstrip() for line in lines if line[:1] in set("┏┃┡│└")]
    assert len(framed) >= 6
    assert all(line[-1] in "┓┃┩│┘" for line in framed)
    assert all(any(shown(cell) in line for line in framed) for cell in cells)


def test_written_results_are_strict_json(tmp_path):
    paths = STUDY.write(results(), tmp_path / "out")
    assert {path.name for path in paths} == {"results.json", "report.md", "picture.png"}
    assert all(path.is_file() for path in paths)
    found = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    rows = found["tables"][0]["rows"]
    assert rows[0]["error"] == {"mean": 2.0, "half_width": 0.1, "runs": 5}
    assert rows[1]["error"] is None
    assert plain({"a": [np.float64(1.5), np.nan]}) == {"a": [1.5, None]}


def test_results_are_not_written_where_a_file_lies(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="out must be a folder"):
        STUDY.write(results(), tmp_path / "file")


@pytest.fixture
def call():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_lists_the_studies(call):
    result = call("--list")
    assert result.exit_code == 0
    for name in ("error", "mvg", "histogram", "pca"):
        assert name in STUDIES
        assert f"{name} " in result.stdout


def test_the_command_refuses_unknown_names_and_missing_data(call, tmp_path, monkeypatch):
    monkeypatch.delenv("MATRIXDP_DATA", raising=False)
    for arguments in ((), ("nothing",), ("mvg",), ("mvg", "--data", tmp_path)):
        result = call(*arguments)
        assert isinstance(result.exception, InvalidInput)


def test_the_command_runs_a_study_and_writes_its_results(call, tmp_path, monkeypatch):
    monkeypatch.setitem(STUDIES, "toy", STUDY)
    result = call("toy", "--smoke", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    assert "Errors" in result.stdout
    assert (tmp_path / "out" / "report.md").is_file()


def test_the_command_adds_the_results_of_another_run(call, tmp_path, monkeypatch):
    def tell(setting, tables):
        return Results(setting, tables, "found", "difference")

    monkeypatch.setitem(STUDIES, "toy", replace(STUDY, tell=tell))
    paths = []
    for device, score, own in (("cuda", None, {}), ("cpu", Mean(0.5, np.nan, 1), {"rounds": 2})):
        ran = Results({"seed": 1, "device": device, **own}, (rows_of(("mvg", 0.1, 5.0, score)),), "", "")
        paths += ["--results", STUDY.write(ran, tmp_path / device)[0]]
    result = call("toy", *paths, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["setting"] == {"seed": 1, "device": "cuda", "added run, device": "cpu", "rounds": 2}
    assert found["tables"][0]["rows"][0]["accuracy"]["mean"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mvg", "histogram", "pca"])
def test_every_study_runs_on_the_real_data(name, folder, tmp_path):
    study = STUDIES[name]
    study.write(study.run(study.load(folder), True, silent), tmp_path)
    assert (tmp_path / "report.md").stat().st_size > 1000


def test_installed_it_adds_its_commands_to_matrixdp():
    found = {point.name: point.value for point in entry_points(group="matrixdp.commands")}
    assert found == {"claims": "matrixdp_papers.cli.claims:claims", "study": "matrixdp_papers.cli.study:study"}

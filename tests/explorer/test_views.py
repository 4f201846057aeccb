"""What the views compute, without a page: the numbers are the library's, and the code that they show gives the same."""

import json
from pathlib import Path

import pytest

from matrixdp import Budget, Ledger, compare
from matrixdp.errors import InvalidInput, LedgerError
from matrixdp.explorer import comparing, ledgers, planning, releasing
from matrixdp.explorer.charts import interval_chart, line_chart, step_chart, ticks
from matrixdp.explorer.snippets import without_password
from matrixdp.explorer.statistics import FORMS, statistic, statistics
from matrixdp.explorer.tables import About
from matrixdp.planning import Plan
from matrixdp.privacy.certificate import Certificate
from matrixdp.tables import Domain, Table

# --- statistics ---


def test_every_form_is_answered_as_its_call_and_its_options_say(folder):
    table = Table("patients.csv", Domain.from_toml("domain.toml"))
    for form in FORMS.values():
        found = statistic(form)
        by_line, by_call = found.answer(table), eval(found.python(), {"table": table})
        assert by_line.query == by_call.query or by_line.query["name"] == by_call.query["name"]
        assert by_line.axes == by_call.axes
        assert by_line.value.tolist() == by_call.value.tolist()


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("counts by region, age", ("--by", "region,age")),
        ("cell states", ("--cell-states",)),
        ("mean of cost", ("--mean", "cost")),
        ("mean of cost by region, sex", ("--mean", "cost", "--by", "region,sex")),
        ("quantiles of age at 0.25, .5", ("--quantiles", "age:0.25,0.5")),
        ("regression of cost on age, sex", ("--regress", "cost~age+sex")),
        ("marginals up to 2", ("--marginals", "2")),
        ("marginals of region, age; sex", ("--marginals", "region,age;sex")),
    ],
)
def test_the_options_of_a_line(line, options):
    assert statistic(line).options == options
    assert statistic(f"weight 2.5: {line}").weight == 2.5


@pytest.mark.parametrize(
    "line",
    ["", "count by a", "quantiles of age", "quantiles of a at 1.2.3", "mean by a"]
    + [f"weight {wrong}: cell states" for wrong in ("x", "0", "-1", "nan", "inf")],
)
def test_a_line_that_is_none_is_refused(line):
    with pytest.raises(InvalidInput):
        statistics(line)


def test_no_password_is_shown():
    assert without_password("postgresql://ada:secret@host:5432/db") == "postgresql://ada@host:5432/db"
    assert without_password("postgresql://host/db") == "postgresql://host/db"
    assert without_password("folder/budget.db") == "folder/budget.db"


# --- compare ---


@pytest.fixture(scope="module")
def compared():
    return comparing.compared(comparing.Setting(5, 4, "counts", 1, 1.0, 1e-6))


def test_compare_shows_what_python_and_the_command_give(compared, run_python, run_commands):
    snippet = compared.setting.snippet()
    names, printed = run_python(snippet.python)
    assert names["table"].to_dicts() == compared.comparison.to_dicts()
    assert names["table"].auto == compared.comparison.auto
    assert compared.comparison.auto in printed
    said = json.loads(run_commands(snippet.commands, "--json"))
    assert said["mechanisms"] == compared.comparison.to_dicts()


def test_r1smg_stands_beside_its_claim(compared):
    claim = compared.claim
    row = next(row for row in compared.comparison if row.mechanism == "r1smg")
    assert row.verdict == "violated"
    assert claim.true_delta == row.exact_delta > claim.claimed.delta
    assert claim.true_epsilon > claim.claimed.epsilon
    assert claim.error < claim.least_error


def test_the_curves_are_the_profiles_and_pass_the_budget(compared):
    by_name = {curve.mechanism: curve for curve in compared.curves}
    assert set(by_name) == {row.mechanism for row in compared.comparison.applicable}
    middle = len(by_name["analytic"].epsilons) // 2
    for row in compared.comparison.applicable:
        curve = by_name[row.mechanism]
        assert curve.epsilons[middle] == 1.0
        assert curve.deltas[middle] == pytest.approx(row.exact_delta, rel=1e-9)
        assert list(curve.deltas) == sorted(curve.deltas, reverse=True)


def test_compare_tells_how_far_it_is_and_gives_the_table_before_the_curves():
    told = []
    comparing.compared(comparing.Setting(2, 2, "frobenius", 1.0, 1.0, 1e-6), lambda *now: told.append(now))
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    assert all(done <= total for done, total, *_ in told)
    first = next(more[0] for _, _, *more in told if more)
    assert first.comparison.auto == compare((2, 2), first.comparison.sensitivity, Budget(1.0, 1e-6)).auto
    assert first.curves == ()


@pytest.mark.parametrize("wrong", [("counts", 1.5), ("none", 1.0), ("frobenius", -1.0), ("frobenius", float("nan"))])
def test_a_setting_that_is_none_is_refused(wrong):
    with pytest.raises(InvalidInput):
        comparing.compared(comparing.Setting(2, 2, *wrong, 1.0, 1e-6))


# --- plan ---

WANTED = "counts by region, sex\nweight 4: counts by severity"


def request_of(text, folder, **about):
    about = About(domain=Path("domain.toml"), **about)
    return planning.Request(about=about, statistics=statistics(text), budget=Budget(1.0, 1e-6))


def test_a_plan_agrees_with_python_and_the_commands(folder, run_python, run_commands):
    found = planning.planned(request_of(WANTED, folder, unit="patient_id", contributions=2))
    (folder / "budget.db").rename("other.db")
    (folder / "patients.csv").rename("RECORDS.csv")
    names, _ = run_python(found.snippet.python)
    assert names["plan"].to_json() == found.plan
    assert names["plan"].composition.meets(Budget(1.0, 1e-6))
    assert found.epsilon <= 1.0
    run_commands(found.snippet.commands)
    by_command, by_page = Plan.from_json((folder / "plan.json").read_text()), Plan.from_json(found.plan)
    assert [part.guarantee.profile for part in by_command] == [part.guarantee.profile for part in by_page]
    assert [law.root_mean_square for law in by_command.laws] == [law.root_mean_square for law in by_page.laws]
    ledger = Ledger("budget.db")
    assert len(ledger.history()) == 2
    assert ledger.spent() <= 1.0
    for number, part in enumerate(found.parts, 1):
        certificate = Certificate.load(folder / f"table{number}.certificate.json")
        assert certificate.epsilon(1e-6) == pytest.approx(part.epsilon)


def test_the_error_bars_of_a_plan_are_those_of_the_release(folder):
    """Half the width of the intervals of a true release of the private rows, which the plan has not seen."""
    found = planning.planned(request_of(WANTED, folder))
    table = Table("patients.csv", Domain.from_toml("domain.toml"))
    plan = Plan.from_json(found.plan)
    for part, allotted in zip(found.parts, plan, strict=True):
        out = part.statistic.answer(table).release(allotted).columns(0.95)
        assert max((out["high"] - out["low"]) / 2) == pytest.approx(part.bars.largest, rel=1e-9)
        assert len(out["value"]) == part.bars.numbers


def test_a_weight_gives_smaller_error_bars(folder):
    light, heavy = (
        planning.planned(request_of(f"counts by sex\nweight {weight}: counts by region", folder)) for weight in (1, 20)
    )
    assert heavy.parts[1].bars.largest < light.parts[1].bars.largest
    assert heavy.parts[0].bars.largest > light.parts[0].bars.largest


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_single_statistic_has_the_whole_budget(folder, form, run_commands):
    found = planning.planned(request_of(FORMS[form], folder))
    (part,) = found.parts
    assert part.epsilon == pytest.approx(1.0, rel=1e-5)
    assert 0 < part.bars.typical <= part.bars.largest
    (folder / "patients.csv").rename("RECORDS.csv")
    run_commands(found.snippet.commands)
    certificate = Certificate.load(folder / "table.certificate.json")
    assert certificate.epsilon(1e-6) == pytest.approx(part.epsilon)


def test_a_plan_reads_no_record(folder):
    (folder / "patients.csv").unlink()
    assert len(planning.planned(request_of(WANTED, folder)).parts) == 2


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("counts by nothing", {}),
        ("counts by region\nmarginals up to 1", {}),
        ("counts by region", {"unit": "patient_id"}),
        ("counts by region", {"unit": "patient_id", "contributions": 0}),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(folder, text, about):
    with pytest.raises(InvalidInput):
        planning.planned(request_of(text, folder, **about))


# --- release ---


def asked(**more):
    given = {
        "records": "patients.csv", "about": About(domain=Path("domain.toml"), unit="patient_id", contributions=2),
        "statistic": statistic("counts by region"), "budget": Budget(0.5, 1e-6), "ledger": "budget.db",
    }  # fmt: skip
    return releasing.Request(**(given | more))


def test_a_preview_spends_nothing_and_says_what_a_release_costs(folder):
    found = releasing.preview(asked())
    assert Ledger("budget.db").history() == []
    assert found.spent == 0.0
    assert found.fits
    out = releasing.released(found.request, found.key)
    assert Ledger("budget.db").spent() == pytest.approx(found.spent_after, rel=1e-12)
    halves = [(high - low) / 2 for low, high in zip(out.columns["low"], out.columns["high"], strict=True)]
    assert max(halves) == found.bars.largest
    assert out.certificate.epsilon(1e-6) == found.certificate.epsilon(1e-6)


def test_a_release_agrees_with_python_and_the_command(folder, run_python, run_commands):
    request = asked(analyst="ada", purpose="annual report")
    out = releasing.released(request, "key")
    names, _ = run_python(request.snippet().python)
    (folder / "table.csv").unlink()
    run_commands(request.snippet().commands)
    by_python, by_command = names["out"].certificate, Certificate.load(folder / "table.certificate.json")
    for other in (by_python, by_command):
        assert other.query == out.certificate.query or other.to_dict()["query"] == out.certificate.to_dict()["query"]
        assert other.to_dict()["guarantee"] == out.certificate.to_dict()["guarantee"]
        assert other.to_dict()["law"] == out.certificate.to_dict()["law"]
    entries = Ledger("budget.db").history()
    assert len(entries) == 3
    told = {(entry.note, entry.unit, entry.analyst, entry.purpose) for entry in entries}
    assert told == {("counts", "patient_id", "ada", "annual report")}
    assert {Path(name).name for name in out.files} == {
        path.name for path in folder.iterdir() if path.name in {*out.files, "table.csv"}
    }


def test_the_files_of_a_release_verify(folder, run_commands):
    out = releasing.released(asked(), "key")
    (folder / "out").mkdir()
    for name, content in out.files.items():
        (folder / "out" / name).write_bytes(content)
    assert set(out.files) == {"table.csv", "table.certificate.json", "statement.html", "figure.png"}
    run_commands("matrixdp verify out/table.certificate.json --value out/table.csv")
    assert out.files["figure.png"].startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_drawn_does_not_cost_the_table(folder, monkeypatch):
    def broken(*_):
        raise RuntimeError("no picture")

    monkeypatch.setattr("matrixdp.tables.figures.figure", broken)
    out = releasing.released(asked(), "key")
    assert set(out.files) == {"table.csv", "table.certificate.json", "statement.html"}
    assert len(Ledger("budget.db").history()) == 1


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_statistic_can_be_released(folder, form):
    out = releasing.released(asked(statistic=statistic(FORMS[form])), "key")
    assert out.entry == 1
    assert len(out.columns["value"]) == len(out.columns["low"])


def test_what_the_ledger_refuses_is_not_released(folder):
    request = asked(budget=Budget(2.9, 1e-6))
    releasing.released(request, "first")
    found = releasing.preview(request)
    assert not found.fits
    job = releasing.Desk().confirm(found)
    job.wait()
    assert job.failed
    assert "nothing was spent" in job.message
    assert len(Ledger("budget.db").history()) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"ledger": "none.db"}, LedgerError), ({"records": "none.csv"}, InvalidInput),
     ({"statistic": statistic("counts by none")}, InvalidInput)],
)  # fmt: skip
def test_a_release_that_cannot_be_made_is_refused_before_it_is_charged(folder, wrong, error):
    for call in (releasing.preview, lambda request: releasing.released(request, "key")):
        with pytest.raises(error):
            call(asked(**wrong))
    assert Ledger("budget.db").history() == []


# --- ledger ---


def test_the_ledger_shows_what_python_and_the_commands_give(folder, run_python, run_commands):
    for number, analyst in enumerate(("ada", "bob", "ada")):
        releasing.released(asked(analyst=analyst, purpose="report"), f"key {number}")
    found = ledgers.shown("budget.db")
    names, printed = run_python(found.snippet().python)
    ledger = names["ledger"]
    assert [line.spent for line in found.lines] == ledger.spent_over_time()
    assert found.lines[-1].spent == found.spent == ledger.spent()
    assert found.head in printed
    assert {name: spends for name, (spends, _) in found.analysts.items()} == {"ada": 2, "bob": 1}
    assert found.analysts["bob"][1] == pytest.approx(0.5, rel=1e-6)
    show, verify = found.snippet().commands.splitlines()
    said = json.loads(run_commands(show, "--json"))
    assert said["spent"] == found.spent
    assert [entry["analyst"] for entry in said["entries"]] == [line.entry.analyst for line in found.lines]
    assert found.head in run_commands(verify)


def test_quotas_and_reservations_are_shown_and_kept(folder):
    ledger = Ledger("budget.db")
    ledger.set_quota("ada", Budget(0.6, 1e-6), per="year")
    with pytest.raises(InvalidInput):
        releasing.preview(asked(analyst="bob"))
    found = releasing.preview(asked(analyst="ada"))
    assert [each.name for each in found.left] == ["total", "ada"]
    releasing.released(found.request, "first")
    job = releasing.Desk().confirm(releasing.preview(asked(analyst="ada")))
    job.wait()
    assert job.failed
    shown = ledgers.shown("budget.db")
    assert [(each.name, each.per) for each in shown.left] == [("total", None), ("ada", "year")]
    assert len(shown.lines) == 1


def test_a_kept_hash_must_be_in_the_chain(folder):
    head = ledgers.shown("budget.db").head
    releasing.released(asked(), "key")
    assert ledgers.shown("budget.db", head).kept == head
    with pytest.raises(LedgerError):
        ledgers.shown("budget.db", "0" * 64)


# --- charts ---


def test_charts_are_drawn_whatever_the_numbers(compared):
    lines = [(curve.mechanism, curve.epsilons, curve.deltas) for curve in compared.curves]
    for svg in (
        line_chart(lines, (1.0, 1e-6), title="a <b>", names=("x", "y")),
        step_chart([0.5], 1.0, title="t", names=("x", "y")),
        interval_chart(["<script>", "b" * 99], [-3.0, 0.0], [-4.0, -1.0], [1.0, 1.0], title="t"),
    ):
        assert "nan" not in svg
        assert "<script>" not in svg
        assert "<b>" not in svg


def test_ticks_are_round_and_inside():
    assert ticks(2.0) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert ticks(7.0, -3.0) == [-2.0, 0.0, 2.0, 4.0, 6.0]
    assert ticks(0.0) == [0.0]

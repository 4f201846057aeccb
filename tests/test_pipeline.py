"""release(): the certificate comes before the spend, the spend before the noise."""

import io
import os
import re
import sys
import tracemalloc

import dask.array
import numpy as np
import pytest
import torch
from scipy.stats import norm

import matrixdp
from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp._compiled import compiled
from matrixdp.distributions import Gaussian
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput, MatrixDPError, NumericalFailure
from matrixdp.privacy import gaussian
from matrixdp.sensitivity import Counts, Entrywise, Frobenius, Participation, RankOne

BUDGET = Budget(1.0, 1e-6)


class Book:
    """A ledger that records, and refuses when told to."""

    def __init__(self, refuse=False):
        self.entries, self.refuse = [], refuse

    def spend(self, certificate, note=""):
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.entries.append((certificate, note))


def test_release_carries_value_certificate_and_law():
    value = np.arange(12.0).reshape(4, 3)
    out = release(value, Frobenius(1.0), BUDGET)
    assert out.value.shape == (4, 3)
    assert out.certificate.meets(BUDGET)
    assert out.noise.shape == (4, 3)
    assert str(BUDGET) in str(out)
    assert not np.any(out.value == value)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.int16])
@pytest.mark.parametrize("sensitivity", [Counts(1), Frobenius(1.0)], ids=str)
def test_a_release_keeps_no_array_beside_the_value_and_the_output(sensitivity, kind, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)  # each thread keeps a few blocks
    value = np.arange(1 << 20).reshape(1024, 1024).astype(kind)
    kept = value.copy()
    release(value[:2], sensitivity, BUDGET)  # compiles, and builds tables
    tracemalloc.start()
    try:
        out = release(value, sensitivity, BUDGET)
        extra = tracemalloc.get_traced_memory()[1] - out.value.nbytes
    finally:
        tracemalloc.stop()
    assert out.value.dtype == np.float64
    assert extra < 0.5 * out.value.nbytes
    assert np.array_equal(value, kept)
    assert not np.may_share_memory(out.value, value)


@pytest.mark.parametrize("sensitivity", [Counts(1), Frobenius(1.0)], ids=str)
def test_a_release_is_read_in_few_files(sensitivity):
    release(np.zeros((3, 4)), sensitivity, BUDGET)  # "auto" decides, and tables are built, once
    package, files = os.path.dirname(matrixdp.__file__), set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(os.path.relpath(frame.f_code.co_filename, package))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        release(np.zeros((3, 4)), sensitivity, BUDGET)
    finally:
        sys.setprofile(before)
    assert "pipeline.py" in files
    assert len(files) <= 15, sorted(files)


def test_noise_has_the_calibrated_std():
    """Chi-square at false alarm 1e-9; noise 5 % short is told apart."""
    value = np.zeros((200, 200))
    out = release(value, Frobenius(1.0), BUDGET)
    std = calibrate("analytic", shape=value.shape, sensitivity=Frobenius(1.0), budget=BUDGET).root_mean_square
    threshold = norm.isf(0.5e-9)

    def z_score(noise):
        return (np.sum((noise / std) ** 2) - noise.size) / np.sqrt(2 * noise.size)

    assert abs(z_score(out.value)) < threshold
    assert abs(z_score(0.95 * out.value)) > threshold


def test_two_releases_never_share_noise():
    value = np.zeros((5, 5))
    assert not np.any(release(value, Frobenius(1.0), BUDGET).value == release(value, Frobenius(1.0), BUDGET).value)


def test_a_path_is_no_ledger():
    with pytest.raises(InvalidInput, match="ledger must be a Ledger"):
        release(np.zeros(2), Frobenius(1.0), BUDGET, ledger="budget.db")


def test_the_ledger_is_charged_before_any_noise_exists(monkeypatch):
    from matrixdp.secure import kernels

    drawn = []
    add_noise = kernels.add_noise
    monkeypatch.setattr(kernels, "add_noise", lambda *given: drawn.append(1) or add_noise(*given))
    with pytest.raises(BudgetExceeded):
        release(np.zeros((2, 2)), Frobenius(1.0), BUDGET, mechanism="analytic", ledger=Book(refuse=True))
    assert not drawn
    book = Book()
    out = release(np.zeros((2, 2)), Frobenius(1.0), BUDGET, mechanism="analytic", ledger=book, note="zeros")
    assert drawn
    assert book.entries == [(out.certificate, "zeros")]


@pytest.mark.parametrize(
    ("value", "sensitivity", "options", "words"),
    [
        (np.array([[1.0, np.nan]]), Frobenius(1.0), {}, r"value must be finite, got NaN at \(0, 1\)"),
        (np.array([[np.inf]]), Frobenius(1.0), {}, "finite"),
        (np.zeros((0, 3)), Frobenius(1.0), {}, "empty"),
        (np.zeros((2, 2, 2)), RankOne(1.0), {}, "square"),
        (np.array([["a"]]), Frobenius(1.0), {}, "real numbers"),
        (np.array([[1j]]), Frobenius(1.0), {}, "real numbers"),
        (np.array([[None]], dtype=object), Frobenius(1.0), {}, "real numbers"),
        (np.zeros((2, 3)), RankOne(1.0), {}, "square"),
        (np.zeros((2, 3)), Entrywise(np.ones((3, 2))), {}, "shape"),
        (np.zeros((2, 2)), Frobenius(1.0), {"sigma": 1.0}, "option"),
        (np.zeros((2, 2)), Frobenius(1.0), {"mechanism": "magic"}, "mechanism"),
        (np.zeros((2, 2)), Frobenius(1.0), {"rng": 7}, "rng"),
    ],
)
def test_bad_input_releases_and_spends_nothing(value, sensitivity, options, words):
    book = Book()
    with pytest.raises(InvalidInput, match=words):
        release(value, sensitivity, BUDGET, ledger=book, **options)
    assert not book.entries


def test_a_law_that_breaks_the_promise_is_refused(monkeypatch):
    from matrixdp.distributions.covariance import Isotropic
    from matrixdp.mechanisms import RECIPES
    from matrixdp.mechanisms.base import recipe

    @recipe("short", source="nowhere")
    def short(shape, sensitivity, budget):
        return Gaussian(
            Isotropic(
                shape, 0.9 * calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=budget).root_mean_square
            )
        )

    monkeypatch.setitem(RECIPES, "short", short)
    with pytest.raises(GuaranteeViolated, match="nothing was released"):
        release(np.zeros((2, 2)), Frobenius(1.0), BUDGET, mechanism="short")
    with pytest.raises(GuaranteeViolated):
        release(np.zeros((2, 2)), Frobenius(1.0), BUDGET, mechanism="short", accept_violation="yes")
    out = release(np.zeros((2, 2)), Frobenius(1.0), BUDGET, mechanism="short", accept_violation=True)
    assert not out.certificate.meets(BUDGET)
    assert out.certificate.delta(1.0) > 1e-6
    row = next(row for row in compare((2, 2), Frobenius(1.0), BUDGET) if row.mechanism == "short")
    assert row.verdict == "violated"
    assert not calibrate("auto", shape=(2, 2), sensitivity=Frobenius(1.0), budget=BUDGET).source.startswith("short")


def test_the_certificate_of_a_release_covers_how_it_was_drawn():
    """The grid is in mu, the tables' error in delta, and both fit into the budget that was asked for."""
    for value, sensitivity in (
        (np.zeros((30, 20)), Frobenius(1.0)),
        (np.eye(6), RankOne(1.0)),
        (np.zeros(50), Counts(1)),
    ):
        out = release(value, sensitivity, BUDGET, mechanism="optimal")
        law = certify(out.noise, sensitivity)
        assert out.certificate.float_safe
        assert out.certificate.total_variation > 0
        assert law.mu < out.certificate.mu <= law.mu * 1.002
        assert out.certificate.delta(1.0) > law.delta(1.0)
        assert out.certificate.delta(1.0) <= 1e-6
        assert out.certificate.delta(1.0) >= 1e-6 * (1 - 1e-6)
        assert out.certificate.delta(out.certificate.epsilon(1e-6)) <= 1e-6
        assert "grid of 2^" in str(out)
        assert out.certificate.to_dict()["guarantee"]["float_safe"] is True


def test_several_releases_share_a_budget_with_the_grid_included():
    outs = [release(np.zeros((3, 3)), Frobenius(1.0), BUDGET, "imgm", releases=4) for _ in range(4)]
    assert sum(out.certificate.mu**2 for out in outs) <= gaussian.mu(1.0, 1e-6) ** 2


def test_a_generator_of_the_callers_is_marked_and_warned_about():
    with pytest.warns(UserWarning, match="generator of your own"):
        first = release(np.zeros((3, 3)), Frobenius(1.0), BUDGET, rng=np.random.default_rng(1))
    with pytest.warns(UserWarning, match="generator of your own"):
        second = release(np.zeros((3, 3)), Frobenius(1.0), BUDGET, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(first.value, second.value)
    assert first.certificate.drawing.reproducible
    assert not first.certificate.float_safe
    assert "REPRODUCIBLE" in str(first)


@pytest.mark.parametrize(
    ("value", "sensitivity", "mechanism"),
    [
        (np.zeros((2, 2)), Frobenius(1.0), "analytic"),
        (np.zeros((2, 2)), RankOne(1.0), "optimal"),
        (np.zeros((2, 2)), Entrywise(np.array([[1.0, 2.0]] * 2)), "optimal"),
        (torch.zeros(2, 2), Frobenius(1.0), "analytic"),
        (dask.array.zeros((2, 2)), Frobenius(1.0), "analytic"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fault", ["import", "compilation", "entropy"])
def test_noise_that_cannot_be_drawn_costs_nothing(value, sensitivity, mechanism, fault, monkeypatch):
    from matrixdp.secure import entropy

    def fail(*given):
        raise OSError("no luck")

    book = Book()
    compiled.cache_clear()
    if fault == "import":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif fault == "compilation":
        monkeypatch.setattr("numba.core.dispatcher.Dispatcher.compile", fail)
    else:
        monkeypatch.setattr(entropy.secrets, "token_bytes", fail)
    with pytest.raises(MatrixDPError if fault == "import" else OSError, match=r"numba cannot be imported|no luck"):
        release(value, sensitivity, BUDGET, mechanism, ledger=book)
    assert not book.entries


@pytest.mark.parametrize("huge", [1e20, 1e80])
def test_a_value_too_large_for_its_noise_is_refused_before_the_spend(huge):
    book = Book()
    for sensitivity, mechanism in ((Frobenius(1.0), "analytic"), (RankOne(1.0), "optimal")):
        with pytest.raises(InvalidInput, match="too large for its noise"):
            release(huge * np.eye(3), sensitivity, BUDGET, mechanism=mechanism, ledger=book)
    assert not book.entries


def test_a_delta_below_what_the_sampler_can_promise_is_refused():
    with pytest.raises(NumericalFailure, match="use a larger delta"):
        release(np.zeros((500, 500)), Frobenius(1.0), Budget(1.0, 1e-16), "analytic")


def test_rank_one_releases_are_symmetric_and_asymmetric_values_refused():
    value = np.arange(16.0).reshape(4, 4)
    with pytest.raises(InvalidInput, match=r"use Frobenius for x y\^T"):
        release(value, RankOne(1.0), BUDGET)
    out = release(value + value.T, RankOne(1.0), BUDGET, mechanism="optimal")
    np.testing.assert_array_equal(out.value, out.value.T)


def test_a_reproducible_release_is_never_charged():
    book = Book()
    with pytest.raises(InvalidInput, match="exclude each other"):
        release(np.zeros(3), Frobenius(1.0), BUDGET, "analytic", ledger=book, rng=np.random.default_rng(0))
    assert not book.entries


def test_a_symmetric_value_just_too_large_is_refused_before_the_spend():
    """Off the diagonal the grid sees sqrt(2) times the entry."""
    book, budget = Book(), Budget(15.0, 1e-3)
    std = calibrate("optimal", shape=(2, 2), sensitivity=RankOne(1.0), budget=budget).covariance.std
    value = np.full((2, 2), 0.0)
    for size in 2.0 ** np.arange(20, 60, 0.25):
        value[0, 1] = value[1, 0] = size * std
        before = len(book.entries)
        try:
            release(value, RankOne(1.0), budget, "optimal", ledger=book)
        except InvalidInput:
            break
    with pytest.raises(InvalidInput, match="too large for its noise"):
        release(value, RankOne(1.0), budget, "optimal", ledger=book)
    assert len(book.entries) == before


def test_r1smg_is_refused_unless_the_caller_says_so():
    for size in (3, 100):
        with pytest.raises(GuaranteeViolated, match="theorem that is false"):
            release(np.zeros(size), Frobenius(1.0), Budget(0.005, 1e-5), mechanism="r1smg")
    out = release(np.zeros(100), Frobenius(1.0), Budget(0.005, 1e-5), mechanism="r1smg", accept_violation=True)
    assert out.certificate.delta(0.005) == pytest.approx(0.3635, rel=1e-3)
    assert "refuted" in str(out.certificate)


def test_compare_table():
    table = compare(shape=(89, 89), sensitivity=Counts(1), budget=Budget(0.5, 1e-7))
    rows = {row.mechanism: row for row in table}
    assert rows["analytic"].verdict == "exact"
    assert rows["classic"].verdict == "loose"
    assert rows["classic"].expected_squared_error > rows["analytic"].expected_squared_error
    assert rows["r1smg"].verdict == "violated"
    assert rows["matrix-mechanism"].verdict == "not applicable"
    assert "workload" in rows["matrix-mechanism"].note
    errors = [row.expected_squared_error for row in table if row.verdict in ("exact", "loose")]
    assert errors == sorted(errors)
    columns = [
        "mechanism",
        "source",
        "root_mean_square",
        "expected_squared_error",
        "claimed_delta",
        "exact_delta",
        "verdict",
    ]
    assert list(table.to_pandas().columns)[:7] == columns
    assert "classic" in str(table)
    assert "loose" in str(table)
    assert table.to_dicts()[-1]["root_mean_square"] is None


@pytest.mark.parametrize("wide", [120, 80])
def test_the_verdicts_can_be_read_on_a_narrow_terminal(wide):
    from rich.console import Console

    table = compare((89, 89), Counts(1), Budget(0.5, 1e-7))
    text = io.StringIO()
    Console(file=text, width=wide).print(table)
    lines = text.getvalue().splitlines()
    assert "…" not in text.getvalue()
    for row in table:
        if row.note:  # once for all mechanisms that have the same reason, and without their names in it
            reason = re.sub(f"^{row.mechanism} (is )?", "", row.note)
            assert re.search(rf"{row.mechanism}[a-z, -]*: {re.escape(reason)}", " ".join(text.getvalue().split()))
        else:
            assert row.verdict in next(line for line in lines if row.mechanism in line.split())
    assert "banded, toeplitz, inverse-banded, binary-tree: for Participation" in " ".join(text.getvalue().split())


@pytest.mark.parametrize(
    "sensitivity", [Counts(1), Frobenius(1.0), RankOne(1.0), Entrywise(np.array([[1.0, 2.0]] * 2))]
)
def test_what_compare_advises_is_what_auto_takes(sensitivity):
    table = compare((2, 2), sensitivity, BUDGET)
    assert calibrate("auto", shape=(2, 2), sensitivity=sensitivity, budget=BUDGET).source.startswith(f"{table.auto} [")
    assert f"auto takes {table.auto}:" in str(table)
    assert compare((2, 2), sensitivity, BUDGET, mechanisms=["l2"]).auto is None


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-9), (1.0, 1e-6), (25.0, 1e-7), (28.0, 1e-6), (30.0, 1e-5)])
def test_a_release_is_never_certified_above_what_was_asked(epsilon, delta):
    """Not even where the error of the sampler, times e^epsilon, takes a part of delta."""
    out = release(np.zeros(3), Frobenius(1.0), Budget(epsilon, delta), "analytic")
    assert epsilon * (1 - 1e-9) <= out.certificate.epsilon(delta) <= epsilon


def test_compare_on_chosen_mechanisms_and_with_options():
    table = compare((3,), Entrywise(1.0), BUDGET, mechanisms=["analytic", "optimal"], weights=np.array([1.0, 2.0, 3.0]))
    assert [row.mechanism for row in table] == ["optimal", "analytic"]
    with pytest.raises(InvalidInput, match="mechanism"):
        compare((3,), Entrywise(1.0), BUDGET, mechanisms=["magic"])
    with pytest.raises(InvalidInput, match="option"):
        compare((3,), Entrywise(1.0), BUDGET, magic=1)


def test_an_error_of_a_task_is_called_that():
    names = ["analytic", "matrix-mechanism"]
    plain = compare((8, 1), Counts(1), BUDGET, mechanisms=names[:1])
    of_task = compare((8, 1), Counts(1), BUDGET, mechanisms=names, workload="prefix")
    over_time = compare((8, 1), Participation(1.0), BUDGET, mechanisms=["analytic"])  # running sums by default
    assert plain.rows[0].expected_squared_error < of_task.rows[0].expected_squared_error
    assert "E||Z||^2" in str(plain)
    for table in (of_task, over_time):
        assert "error: expected squared error of the task" in str(table)
        assert "E||Z||^2" not in str(table)


def test_compare_refuses_a_law_for_values_of_another_shape():
    law = calibrate("analytic", shape=(4,), sensitivity=Counts(1), budget=BUDGET)
    assert [row.verdict for row in compare((4,), Counts(1), BUDGET, mechanisms=[law])] == ["exact"]
    with pytest.raises(InvalidInput, match=r"shape \(4,\)"):
        compare((5,), Counts(1), BUDGET, mechanisms=[law])
    with pytest.raises(InvalidInput, match="budget must be"):
        compare((4,), Counts(1), 1.0, mechanisms=[law])


def test_compare_ranks_rows_that_do_not_apply_last():
    table = compare((2, 2), Frobenius(1.0), Budget(2.0, 1e-6))
    absent = [row for row in table if row.note]
    assert list(table.rows[-len(absent) :]) == absent
    assert "below 1" in next(row.note for row in absent if row.mechanism == "classic")
    assert "gamma" in next(row.note for row in absent if row.mechanism == "mvg")


def test_a_refuted_mechanism_is_refused_although_its_noise_is_enough():
    with pytest.raises(GuaranteeViolated, match="theorem that is false, although this noise happens to keep"):
        release(np.zeros(3), Frobenius(1.0), Budget(1.0, 1e-6), "r1smg")
    with pytest.raises(GuaranteeViolated, match="theorem that is false: at epsilon"):
        release(np.zeros(30), Frobenius(1.0), Budget(1.0, 1e-6), "r1smg")

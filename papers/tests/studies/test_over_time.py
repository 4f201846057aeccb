"""The study of noise over time: what it compares is equal in effort and guarantee, and its report follows from it."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from matrixdp.budget import Budget
from matrixdp_papers.datasets import Labelled
from matrixdp_papers.studies import over_time
from matrixdp_papers.studies.base import Table, silent
from matrixdp_papers.studies.splits import Split

torch = pytest.importorskip("torch")

from matrixdp_papers.studies import training  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def make(rng):
    def part(count):
        label = np.arange(count) % 2
        return Labelled(rng.random((count, 6)) + 2 * np.eye(6)[label], label)

    return part


@pytest.fixture
def small(make):
    return Split(make(400), make(50))


def row(order, noise, score):
    return {"order": order, "noise": noise, "epsilon": 1.0, "source": "toeplitz", "bands": 2, "groups": None,
            "steps": 8, "product": 1.0, "clip": 0.25, "scores": [score, score + 0.01, score + 0.02],
            "predicted": 2.0, "measured": 2.02}  # fmt: skip


def test_a_smoke_run_measures_every_way(small, monkeypatch):
    monkeypatch.setitem(over_time.SETTINGS, "Adult", over_time.Setting(200, 1024, 8))
    rows = over_time.trained({"Adult": small}, True, silent, processes=0)["Adult"]
    assert [(r["order"], r["noise"]) for r in rows] == list(over_time.WAYS)
    assert all(len(r["scores"]) == 1 and 0 <= r["scores"][0] <= 1 for r in rows)
    assert all(0.8 < r["measured"] / r["predicted"] < 1.2 for r in rows)
    assert rows[3]["predicted"] < rows[2]["predicted"]


@pytest.mark.slow
def test_processes_side_by_side_measure_the_same(make):
    data = {"Adult": Split(make(6_700), make(50))}
    alone, beside = (over_time.trained(data, True, silent, processes=count) for count in (0, 2))
    assert alone == beside


def test_both_noises_of_an_order_have_the_same_guarantee(small):
    task = training.Task("t", lambda: torch.nn.Linear(6, 2), training.on_device(small.train), None, 50, 1.0)
    for order in (over_time.SAMPLED, over_time.FIXED):
        budget = Budget(2.0, 1e-5)
        plans = [
            over_time.plan(task, 4, budget, order, noise) for noise in (over_time.INDEPENDENT, over_time.CORRELATED)
        ]
        assert [steps for *_, steps in plans] == [32, 32]
        for law, groups, _ in plans:
            run = training.trainer(task, law, budget, 4, 1, order=order, groups=groups if order == "sampled" else None)
            assert 0.97 < run._costs.after(32).epsilon(1e-5) / 2.0 <= 1.0


def test_the_report_has_the_expected_beside_the_measured(rng, tmp_path):
    rows = [row(*way, 0.8 + 0.01 * place) for place, way in enumerate(over_time.WAYS)]
    tables = over_time.tabulated({"MNIST": rows}, over_time.monitor(rng.poisson(3.0, (30, 4)).astype(float)))
    results = over_time.tell({}, tables)
    text = over_time.STUDY.report(results)
    over_time.STUDY.write(results, tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert over_time.STUDY.report(over_time.tell({}, tuple(map(Table.from_dict, stored)))) == text
    Console(width=80, file=io.StringIO()).print(*results.tables)  # as the command does
    assert "| MNIST, fixed order, epsilon 1 | better | 0.83 ± 0.025 -> 0.84 ± 0.025 | running sums have" in text
    assert "+0.010 to +0.010" in text
    assert text.index("| quantity |") < text.index("## Numbers")


def test_correlated_noise_beats_tree_and_independent_noise_on_daily_counts(rng):
    rows = over_time.monitor(rng.poisson(3.0, (30, 4)).astype(float))
    by = {(r["unit"], r["noise"]): r["predicted"] for r in rows}
    for unit in over_time.UNITS:
        assert by[unit, "banded"] < by[unit, "binary-tree"] < by[unit, "analytic"]

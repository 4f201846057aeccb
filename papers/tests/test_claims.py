"""The claims page: the verdicts that the papers' settings get, and the page in docs made from the same run."""

import json
import math
from pathlib import Path

import pytest

from matrixdp import plots
from matrixdp_papers.claims import INTRODUCTION, SETTINGS, examine
from matrixdp_papers.claims_chart import claims_chart

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def claims():
    return examine()


def test_every_setting_of_the_papers_is_there(claims):
    shapes = {row.shape for row in claims}
    assert {
        (89, 89),
        (120, 400),
        (4608, 512),
        (20002, 128),
        (105, 12),
        (2, 10),
        (100, 64),
        (100, 128),
        (30, 64),
        (6, 248),
        (21, 2126),
    } <= shapes
    assert len(list(claims.settings())) == len(SETTINGS) + 1


def test_verdicts(claims):
    for row in claims:
        if row.mechanism in ("r1smg", "wishart"):
            assert row.verdict == "violated", row
            assert row.exact_delta > 100 * row.claimed_delta
        elif row.mechanism in ("analytic", "imgm"):
            assert row.verdict == "exact", row
            assert row.ratio == pytest.approx(1)
        elif row.mechanism == "classic" and row.claimed_epsilon > 1:
            assert row.verdict == "violated", row
        else:
            assert row.verdict == "loose", row
            assert row.ratio > 1


def test_the_page_says_how_much_noise_is_wasted(claims):
    ratios = [row.ratio for row in claims if row.mechanism.split()[0] in ("mvg", "mgm", "udn", "idn")]
    assert f"at {min(ratios):.0f} to {max(ratios):.0e} times".replace("e+", "e") in " ".join(INTRODUCTION.split())


def test_wishart_fails_with_the_probability_of_an_impossible_output(claims):
    (row,) = [row for row in claims if row.mechanism == "wishart"]
    assert row.exact_delta == pytest.approx(1 - math.exp(-1 / 3))


def test_wishart_by_simulation():
    """Outputs that the neighbour cannot give: the share of W with W - x x^T not positive semidefinite."""
    import numpy as np
    from scipy.stats import binom, wishart

    d, n, epsilon, draws = 4, 10, 1.0, 4000
    scale = 3 / (2 * n * epsilon)
    W = wishart(df=d + 1, scale=scale * np.eye(d)).rvs(draws, random_state=np.random.default_rng(0))
    change = np.zeros((d, d))
    change[0, 0] = 1 / n
    impossible = int(np.sum(np.linalg.eigvalsh(W - change)[:, 0] < 0))
    share = 1 - math.exp(-epsilon / 3)
    assert binom(draws, share).cdf(impossible) > 1e-6
    assert binom(draws, share).sf(impossible) > 1e-6
    assert binom(draws, 0.9 * share).sf(impossible) < 1e-3


def test_the_page_in_docs_is_this_run(claims):
    assert (DOCS / "claims.md").read_text(encoding="utf-8") == claims.to_markdown()
    stored = json.loads((DOCS / "claims.json").read_text(encoding="utf-8"))
    assert [(r["setting"], r["mechanism"], r["verdict"]) for r in stored] == [
        (r.setting, r.mechanism, r.verdict) for r in claims
    ]
    assert (DOCS / "claims.png").stat().st_size > 10_000


def test_table_and_chart(claims, tmp_path):
    import io

    from rich.console import Console

    console = Console(width=130, record=True, file=io.StringIO())
    console.print(claims)
    text = console.export_text()
    assert "Uber histogram" in text
    assert "violated" in text
    assert "at least 0.283" in text
    plots.save(claims_chart(claims), tmp_path / "claims.png")
    assert (tmp_path / "claims.png").stat().st_size > 10_000

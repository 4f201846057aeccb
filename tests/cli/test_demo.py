"""The demo keeps its budget, writes what it says, and can be run again."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from matrixdp import Accountant, Certificate, demo
from matrixdp.errors import InvalidInput

NAMES = ("second-moment", "histogram")

pytestmark = pytest.mark.filterwarnings("ignore:release with a generator")


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """A finished demo: its folder and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "deep" / "folder"
    text = io.StringIO()
    demo.run(out, Console(file=text, width=120), rng=np.random.default_rng(0))
    return out, text.getvalue()


def certificates(out):
    return [json.loads((out / f"{name}.certificate.json").read_text()) for name in NAMES]


def test_the_total_budget_is_kept_and_used_up(tour):
    out, _ = tour
    account = Accountant(reproducible=True)
    for name in NAMES:
        account.add(Certificate.load(out / f"{name}.certificate.json"))
    assert 0.99 * demo.TOTAL.delta < account.delta(demo.TOTAL.epsilon) <= demo.TOTAL.delta
    assert {certificate["guarantee"]["adjacency"] for certificate in certificates(out)} == {"add/remove"}


def test_the_files_verify(tour, call):
    out, _ = tour
    for name in NAMES:
        told = call("verify", out / f"{name}.certificate.json", "--value", out / f"{name}.csv")
        assert told.exit_code == 0, told.stdout


def test_the_plan_verifies(tour, call):
    out, _ = tour
    assert call("verify", out / demo.PLAN).exit_code == 0


def test_the_files_are_those_listed(tour):
    out, text = tour
    files = sorted(out.iterdir())
    assert len(files) == 9
    for path in files:
        assert str(path) in text.replace("\n", "")
    for name, shape in zip(NAMES, [(64, 64), (14, 14)], strict=True):
        noisy, better = (np.loadtxt(out / f"{name}{end}.csv", delimiter=",") for end in ("", "-postprocessed"))
        assert noisy.shape == better.shape == shape
        assert not np.array_equal(noisy, better)
        assert noisy.min() < 0
    assert better.min() >= 0


def test_the_pictures_are_pictures(tour):
    out, _ = tour
    for name in ("demo.png", "comparison.png"):
        content = (out / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
        assert width >= 1200
        assert height >= 600


def test_the_text_says_what_matters(tour):
    _, text = tour
    flat = " ".join(text.split())
    assert flat.count("Privacy certificate") == 2
    assert "They are public" in flat
    assert "within the budget of 1" in flat
    assert "violated" not in flat.split("4. Two releases")[1]


def test_the_released_matrices_are_recognisable_and_noisy(tour):
    out, _ = tour
    pixels, ink = demo._digits()
    units = pixels / np.maximum(np.linalg.norm(pixels, axis=1, keepdims=True), 1)
    truths = (units.T @ units, np.histogramdd(ink, bins=[demo.INK, demo.INK])[0])
    for name, truth in zip(NAMES, truths, strict=True):
        noisy = np.loadtxt(out / f"{name}.csv", delimiter=",")
        assert 0.85 < np.corrcoef(noisy.ravel(), truth.ravel())[0, 1] < 0.995


def test_the_command_replaces_an_earlier_demo(call, tmp_path):
    for _ in range(2):
        result = call("demo", "--out", tmp_path / "out")
        assert result.exit_code == 0, result.stderr
    assert len(list((tmp_path / "out").iterdir())) == 9


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="out must be a folder"):
        demo.run(tmp_path / "file", Console(file=io.StringIO()))

"""README and the pages of the site run as they stand; their fenced blocks are all that is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from run_page import blocks, run

ROOT = Path(__file__).parents[1]
SECTIONS = ("tutorials", "how-to", "explanations")
SLOW = {
    *("network", "federated", "dask", "daily-stream", "verify", "come-from-another-library"),  # pages
    *("daily_counts", "second_moments"),  # examples
}
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(p for s in SECTIONS for p in (ROOT / "docs" / s).glob("*.md"))]
    if any(kind in ("python", "bash") for kind, _, _ in blocks(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in PAGES],
)
def test_it_runs_and_prints_what_it_shows(page, tmp_path):
    call = [sys.executable, str(ROOT / "tests" / "run_page.py"), str(page)]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_section_has_pages():
    assert len(PAGES) >= 20


@pytest.mark.parametrize(
    "text",
    ["```python\nprint(2)\n```\n\n```text\n3\n```\n", "```bash\nfalse\n```\n", "```python\nassert False\n```\n"],
    ids=["other output", "exit code", "exception"],
)
def test_a_wrong_page_fails(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises((SystemExit, AssertionError)):
        run(page)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


def run_example(name, *arguments, **environment):
    call = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *arguments]
    return subprocess.run(call, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


EXAMPLES = {
    "hospital_table": ((), "all rows of one patient_id"),
    "verify_certificate": ((), "Certificate NOT verified"),
    "second_moments": ((), "share of the first two components"),
    "daily_counts": ((), "this stream"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXAMPLES],
)
def test_an_example_runs(name, tmp_path):
    arguments, shown = EXAMPLES[name]
    done = run_example(name, *arguments, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_the_audit_finds_every_reported_fault():
    found = run_example("audit_other_libraries", "4000").stdout.splitlines()
    assert "2.236 was found" in found[0]
    assert float(found[1].split()[-3]) > 1
    assert [("rejected;" in line and "not rejected" not in line) for line in found[2:]] == [True, True, False]


def test_examples_are_short():
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert len(scripts) >= 8
    for script in scripts:
        assert script.read_text(encoding="utf-8").count("\n") <= 60, script.name


def test_examples_of_the_gallery_have_a_heading_and_a_picture():
    pictures = (ROOT / "docs" / "thumbnails.py").read_text(encoding="utf-8")
    for script in (ROOT / "examples").glob("*.py"):
        title, line = script.read_text(encoding="utf-8").removeprefix('"""').splitlines()[:2]
        assert line == "=" * len(title), script.name
        assert f"def {script.stem}(" in pictures, script.name


@pytest.mark.slow
def test_the_mnist_example_trains(tmp_path, monkeypatch):
    import importlib.util

    import torch
    from torch.utils.data import TensorDataset

    spec = importlib.util.spec_from_file_location("train_mnist", ROOT / "examples" / "train_mnist.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    images = TensorDataset(torch.rand(64, 1, 28, 28), torch.randint(10, (64,)))
    example.main(images, images, epochs=1, batch_size=16, ledger=str(tmp_path / "mnist.ledger"))

"""The table of dependencies and licences is whole, and says what the packages say."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import matrixdp

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "dependencies.md").read_text()
ROWS = dict(re.findall(r"^\| ([\w-]+) \| ([^|]+) \|", TABLE, flags=re.M))


def wanted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: parts for name, parts in project["optional-dependencies"].items() if name != "peers"}
    for requirement in [*project["dependencies"], *(part for parts in extras.values() for part in parts)]:
        name = re.match(r"[\w-]+", requirement)[0]
        if name != "matrixdp":
            yield name


def stated(name):
    found = importlib.metadata.metadata(name)
    classes = [line for line in found.get_all("Classifier") or [] if line.startswith("License")]
    return " ".join([found.get("License-Expression") or "", (found.get("License") or "")[:80], *classes])


def test_every_dependency_is_in_the_table():
    assert set(wanted()) == set(ROWS) - {"package"}


def test_the_licences_are_those_that_the_packages_state():
    for name in wanted():
        for licence in ROWS[name].split(" or "):
            family = licence.strip().split("-")[0].split()[0]
            assert family in stated(name), f"{name} states {stated(name)!r}"


def test_one_version_and_the_same_pythons_everywhere():
    """In the package, that of the papers, the citation and the changelog; in the classifiers and the workflow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    papers = tomllib.loads((ROOT / "papers" / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)[1]
    changed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1]
    assert {papers["version"], cited, changed} == {matrixdp.__version__}
    pythons = [line.split(" :: ")[-1] for line in project["classifiers"] if "Python :: 3." in line]
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "checks.yml").read_text())[1]
    assert re.findall(r"[\d.]+", matrix) == pythons
    assert project["requires-python"] == papers["requires-python"] == f">={pythons[0]}"

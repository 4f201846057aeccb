"""Every public name has an example in its docstring, and it runs as it stands."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import matrixdp

ROOT = Path(__file__).parents[1]
# The modules that have a page in the reference.
GENERATE = (ROOT / "docs" / "generate.py").read_text(encoding="utf-8")
MODULES = ast.literal_eval(re.search(r"^MODULES = (\(.*?^\))", GENERATE, re.M | re.S)[1])
# Packages whose names are not for callers, or stand at another place too.
OTHERS = {"matrixdp.explorer", "matrixdp.federated.split_learning", "matrixdp.learn.layers", "matrixdp.sensitivity"}


def public(module):
    """The classes and functions that a module offers: those in `__all__`, or else those written in it."""
    names = getattr(module, "__all__", None) or [
        name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__
    ]
    found = ((name, getattr(module, name)) for name in names if not name.startswith("_"))
    return {name: thing for name, thing in found if inspect.isclass(thing) or inspect.isfunction(thing)}


def cases():
    for name in ("matrixdp", *MODULES):
        try:
            module = importlib.import_module(name)
        except matrixdp.errors.MissingExtra:
            continue
        for word, thing in public(module).items():
            yield pytest.param(thing, id=f"{name}:{word}")


@pytest.mark.parametrize("thing", list(cases()))
def test_its_example_runs(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = thing.__name__
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    (example,) = [test for test in found if test.examples] or pytest.fail(f"{name} has no example in its docstring")
    said = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_every_package_with_public_names_is_in_the_reference():
    source = ROOT / "src"
    packages = {
        ".".join(path.parent.relative_to(source).parts)
        for path in source.rglob("__init__.py")
        if re.search(r"^__all__ =", path.read_text(encoding="utf-8"), re.M)
    }
    assert packages - OTHERS == {name for name in ("matrixdp", *MODULES) if name in packages}
    shown = (ROOT / "docs" / "reference" / "modules.md").read_text(encoding="utf-8")
    assert re.findall(r"^generated/(.+)$", shown, re.M) == list(MODULES)

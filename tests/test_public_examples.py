"""Every public name at the root has an example in its docstring, and it runs as it stands."""

import doctest
import inspect

import pytest

import matrixdp

NAMES = [
    name
    for name in matrixdp.__all__
    if inspect.isclass(getattr(matrixdp, name)) or inspect.isfunction(getattr(matrixdp, name))
]


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name):
    found = doctest.DocTestFinder(recurse=False).find(getattr(matrixdp, name), name, globs={})
    (example,) = [test for test in found if test.examples] or pytest.fail(f"{name} has no example in its docstring")
    runner = doctest.DocTestRunner()
    said = []
    assert runner.run(example, out=said.append).failed == 0, "".join(said)

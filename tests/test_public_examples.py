"""Every public name at the root, and of some modules, has an example in its docstring, and it runs as it stands."""

import doctest
import inspect

import pytest

import matrixdp
from matrixdp import audit, postprocess
from matrixdp.privacy import gaussian


def documented(module, names):
    found = ((name, getattr(module, name)) for name in names)
    return [
        pytest.param(thing, id=name) for name, thing in found if inspect.isclass(thing) or inspect.isfunction(thing)
    ]


NAMES = [
    *documented(matrixdp, matrixdp.__all__),
    *documented(audit, ("audit", "audit_law", "audit_scores")),
    *documented(gaussian, ("delta", "epsilon", "mu")),
    *documented(postprocess, [name for name, f in vars(postprocess).items() if not name.startswith("_")
                              and getattr(f, "__module__", "") == postprocess.__name__]),
]  # fmt: skip


@pytest.mark.parametrize("thing", NAMES)
def test_its_example_runs(thing):
    name = thing.__name__
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    (example,) = [test for test in found if test.examples] or pytest.fail(f"{name} has no example in its docstring")
    said = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)

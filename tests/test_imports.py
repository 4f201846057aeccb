"""The direction of imports: a room may look down, never up, by no means; and no two rooms look at each other."""

import ast
from pathlib import Path

import pytest

import matrixdp

PACKAGE = Path(matrixdp.__file__).parent
# Lower rooms first; a room imports only from rooms above it in this list.
ROOMS = [
    "errors",
    "_check",
    "_extras",
    "_compiled",
    "_rounding",
    "_pages",
    "postprocess",
    "adjacency",
    "budget",
    "sensitivity",
    "residuals",
    "secure",
    "distributions",
    "privacy",
    "accounting",
    "mechanisms",
    "queries",
    "backends",
    "intervals",
    "bootstrap",
    "released",
    "pipeline",
    "planning",
    "comparison",
    "audit",
    "plots",
    "tables",
    "sklearn",
    "distributed",
    "streams",
    "learn",
    "federated",
    "demo",
    "explorer",
    "cli",
    "__main__",
]
# Another distribution, which imports this one.
ABOVE = "matrixdp_papers"
# Calls that import what their first argument names; `_extras.require` is the package's own, and takes several.
IMPORTING = {"import_module": 1, "__import__": 1, "run_module": 1, "find_spec": 1}


def room(path, package=PACKAGE):
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported(source):
    """The modules that a file imports: by statement, or by a name in a string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they lead"
            if node.module == "importlib":
                assert not any(alias.asname for alias in node.names), "another name hides what imports"
            if node.module == "matrixdp":
                yield from (f"matrixdp.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "matrixdp":
            yield f"matrixdp.{node.attr}"  # after `import matrixdp`, whose names are loaded when they are asked for
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            counted = 99 if (owner, name) == ("_extras", "require") else IMPORTING.get(name, 0)
            named = [keyword.value for keyword in node.keywords if counted and keyword.arg == "name"]
            for argument in [*node.args[:counted], *named]:
                constant = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                yield argument.value if constant else "<computed>"


def rooms_of(modules, here):
    """The rooms among the modules; what is imported from the root is a name of the room that defines it."""
    for module in modules:
        assert module.split(".")[0] != ABOVE, f"{here} knows {ABOVE}"
        parts = module.split(".")
        if parts[0] == "matrixdp" and len(parts) > 1:
            name = parts[1]
            if name not in ROOMS:
                name = getattr(matrixdp, name).__module__.split(".")[1] if name != "__version__" else "errors"
            yield name


def wrong_imports(files, package=PACKAGE):
    """Every import that goes up, and every room that is imported by a name computed while the program runs."""
    for path in files:
        here = room(path, package)
        if here == "__init__":
            continue
        modules = list(imported(path.read_text()))
        if "<computed>" in modules and here != "_extras":  # whose callers name what it looks for, and are read here
            yield f"{path.relative_to(package)} imports a module whose name is computed"
        for there in rooms_of((module for module in modules if module != "<computed>"), path):
            if ROOMS.index(there) > ROOMS.index(here):
                yield f"{path.relative_to(package)} imports {there}, which lies above it"


def test_every_room_is_in_the_list():
    assert {room(path) for path in PACKAGE.rglob("*.py")} - {"__init__"} == set(ROOMS)


def test_imports_go_down_and_never_up():
    assert list(wrong_imports(sorted(PACKAGE.rglob("*.py")))) == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("privacy/bad.py", "from matrixdp.accounting.accountant import Accountant"),
        ("privacy/bad.py", "from matrixdp import release"),
        ("privacy/bad.py", "import matrixdp.comparison"),
        ("privacy/bad.py", "def f():\n    from matrixdp.cli import main"),
        ("pipeline.py", "import importlib\nimportlib.import_module('matrixdp.distributed')"),
        ("pipeline.py", "import importlib\nimportlib.import_module(name='matrixdp.distributed')"),
        ("pipeline.py", "__import__('matrixdp.' + 'distributed')"),
        ("privacy/bad.py", "import matrixdp\nmatrixdp.release"),
        ("pipeline.py", "from matrixdp import _extras\n_extras.require('distributed', 'matrixdp.distributed')"),
        ("secure/bad.py", "from matrixdp.distributions import Gaussian"),
    ],
)
def test_the_check_sees_an_upward_import(tmp_path, place, text):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert len(list(wrong_imports([path], tmp_path))) == 1


def test_the_check_sees_the_other_distribution(tmp_path):
    path = tmp_path / "cli.py"
    path.write_text("from matrixdp_papers import claims")
    with pytest.raises(AssertionError, match="knows"):
        list(wrong_imports([path], tmp_path))


def test_no_public_function_hides_its_module():
    """`matrixdp.tables.means` must not be a function in one place and a module in another."""
    for path in PACKAGE.rglob("__init__.py"):
        tree = ast.parse(path.read_text())
        listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.dump(node)]
        public = {name for names in listed for name in ast.literal_eval(names)}
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        hiding = {node.module for node in imports if node.module.split(".")[-1] in {each.name for each in node.names}}
        assert not public & {module.split(".")[-1] for module in hiding}, path

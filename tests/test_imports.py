"""The direction of imports: a room may look down, never up."""

import ast
from pathlib import Path

import matrixdp

PACKAGE = Path(matrixdp.__file__).parent
# Lower rooms first; modules of one level may import each other.
LEVELS = [
    {"errors"},
    {"_check", "_extras"},
    {"budget", "sensitivity", "covariance", "postprocess"},
    {"noise", "privacy"},
    {"mechanisms", "queries"},
    {"release", "compare", "audit"},
    {"plots", "sklearn", "distributed", "learn"},
    {"federated"},
    {"demo"},
    {"cli"},
]
# Another distribution, which imports this one.
ABOVE = {"matrixdp_papers"}
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def room(path):
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "matrixdp":
            base = node.module.split(".")
            names = [base[1]] if len(base) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("matrixdp.")]
            assert not any(a.name.split(".")[0] in ABOVE for a in node.names), f"{path} knows the papers"
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in ABOVE, f"{path} knows the papers"
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} has a relative import"
        yield from names


def test_every_module_belongs_to_a_level_and_imports_downwards():
    for path in sorted(PACKAGE.rglob("*.py")):
        here = room(path)
        if here == "__init__":
            continue
        for there in imported_rooms(path):
            assert LEVEL[there] <= LEVEL[here], f"{path.relative_to(PACKAGE)} imports {there}, which lies above it"


def test_the_check_itself_sees_an_upward_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from matrixdp.cli import main\nfrom matrixdp import release\nimport matrixdp.compare\n")
    assert list(imported_rooms(bad)) == ["cli", "release", "compare"]

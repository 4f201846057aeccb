"""Matrices under differential privacy, with a certificate of what each release guarantees.

What `release` needs is imported at once. Accountants, ledgers, plans, comparisons, queries and tables are imported on
first use, so that `import matrixdp` stays quick.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from matrixdp import errors
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT, Adjacency
from matrixdp.budget import Budget, register_planners
from matrixdp.mechanisms import calibrate
from matrixdp.pipeline import Release, release
from matrixdp.privacy.certificate import Certificate, certify
from matrixdp.privacy.laws import register_law
from matrixdp.privacy.records import LATER
from matrixdp.sensitivity import (
    L1,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    Participation,
    RankOne,
    Vertices,
)

if TYPE_CHECKING:
    from matrixdp import queries, tables
    from matrixdp.accounting.accountant import Accountant
    from matrixdp.accounting.ledger.ledger import Ledger
    from matrixdp.comparison import compare
    from matrixdp.planning import Plan

__version__ = "0.2.0"

_MODULES = {
    "Accountant": "matrixdp.accounting.accountant",
    "Ledger": "matrixdp.accounting.ledger.ledger",
    "Plan": "matrixdp.planning",
    "compare": "matrixdp.comparison",
}
_ROOMS = ("accounting", "planning", "queries", "tables")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"matrixdp.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'matrixdp' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    rooms = (name for name, value in globals().items() if isinstance(value, ModuleType) and not name.startswith("_"))
    return sorted({*__all__, *_ROOMS, *rooms})


def _planner(name: str) -> Callable[..., Any]:
    return lambda *arguments: getattr(import_module("matrixdp.planning.plans"), name)(*arguments)


register_planners(plan=_planner("plan"), shared=_planner("shared"))
LATER.append(lambda: import_module("matrixdp.tables"))  # so that its certificates, and those of queries, are verified

__all__ = [
    "ADD_REMOVE",
    "L1",
    "REPLACE",
    "ZERO_OUT",
    "Accountant",
    "Adjacency",
    "Budget",
    "Certificate",
    "Counts",
    "Entrywise",
    "Frobenius",
    "Ledger",
    "OneColumn",
    "OneRow",
    "Participation",
    "Plan",
    "RankOne",
    "Release",
    "Vertices",
    "__version__",
    "calibrate",
    "certify",
    "compare",
    "errors",
    "queries",
    "register_law",
    "release",
    "tables",
]

"""What `import matrixdp` leaves for later, so that it stays quick; and that nothing is missing then."""

import subprocess
import sys

import numpy as np
import pandas
import pytest

import matrixdp
from matrixdp import Budget, queries, release
from matrixdp.queries.histograms import grid_counts
from matrixdp.tables import Categorical, Domain, Table

# Together they take more time than all else that is imported.
LATER = ("numba", "scipy.special", "scipy.linalg", "scipy.optimize", "scipy.stats", "scipy.signal", "dp_accounting")
LATER += ("sqlite3", "matrixdp.accounting", "matrixdp.comparison", "matrixdp.planning", "matrixdp.queries")
LATER += ("matrixdp.tables", "matrixdp.audit", "matrixdp.privacy.verification")
EXTRAS = ("torch", "pandas", "dask", "sklearn", "matplotlib", "flwr", "rich", "typer")


def printed(script, given=""):
    run = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def loaded(code):
    return printed(f"{code}; import sys; print(*sys.modules)")


def test_slow_modules_wait_until_they_are_needed():
    names = loaded("import matrixdp")
    assert "matrixdp.pipeline" in names
    assert not names.intersection(LATER + EXTRAS)
    assert "scipy.special" in loaded("import matrixdp; matrixdp.privacy.gaussian.mu(1.0, 1e-6)")
    assert "matrixdp.queries" in loaded("from matrixdp import queries")


def test_a_release_needs_no_ledger_tables_or_accountant():
    names = loaded("import matrixdp as m; m.release([1.0], m.Counts(1), m.Budget(1.0, 1e-6))")
    assert "numba" in names
    assert not names.intersection(("sqlite3", "matrixdp.accounting", "matrixdp.tables", *EXTRAS))


def test_every_public_name_is_there_and_listed():
    script = "import matrixdp; print(*(name for name in dir(matrixdp) if hasattr(matrixdp, name)))"
    listed = printed(script)
    assert listed >= {*matrixdp.__all__, "privacy", "sensitivity"}
    assert not listed & {"Any", "Callable", "LATER", "import_module", "register_planners"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        matrixdp.nothing  # noqa: B018


def test_a_plan_needs_no_import():
    script = (
        "import matrixdp as m; b = m.Budget(1.0, 1e-6); print(len(b.plan([m.Counts(1)] * 3)), b.shared(4).releases)"
    )
    assert printed(script) == {"3", "4"}


@pytest.mark.parametrize("kind", ["query", "table", "bins"])
def test_a_certificate_is_verified_where_only_the_package_was_imported(kind):
    budget, records = Budget(1.0, 1e-6), np.zeros((3, 2))
    if kind == "table":
        table = Table(pandas.DataFrame({"region": ["north"]}), Domain({"region": Categorical(["north", "south"])}))
        certificate = table.counts("region").release(budget).certificate
    elif kind == "query":
        certificate = certified(queries.second_moment(records, norm=1.0), budget)
    else:
        certificate = certified(grid_counts(records, np.full(2, -1.0), np.full(2, 1.0), 4, "replace"), budget)
    script = "import sys, matrixdp; print(bool(matrixdp.Certificate.from_json(sys.stdin.read()).verify()))"
    assert printed(script, certificate.to_json()) == {"True"}
    named = f'"name": "{certificate.query["name"]}"'
    assert printed(script, certificate.to_json().replace(named, '"name": "nothing"')) == {"False"}


def certified(answer, budget):
    return release(*answer, budget, query=answer.query).certificate

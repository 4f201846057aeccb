"""Records given by mistake where a path, a name, a number or a list of columns is expected are not quoted."""

import types
from collections import namedtuple

import numpy as np
import pytest

from canaries import NUMBER, PUBLIC, TEXT, WHOLE, leak, said
from matrixdp import Budget, _check, queries, release
from matrixdp.accounting.accountant import Accountant
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.errors import InvalidInput
from matrixdp.sensitivity import Frobenius

BUDGET = Budget(1.0, 1e-6)
ROWS = np.ones((4, 2))


class Quoting(float):
    """A number that quotes a record in print, and fails with it."""

    def __repr__(self):
        return TEXT

    def __float__(self):
        raise ValueError(TEXT)


class Printed(float):
    """A number that quotes a record in print alone."""

    def __repr__(self):
        return TEXT


class Shaped:
    """Something whose shape cannot be had without an error."""

    @property
    def shape(self):
        raise ValueError(TEXT)


class Listed:
    """Something that fails when one goes through it."""

    def __iter__(self):
        raise ValueError(TEXT)


STRANGE = {
    "quoting": Quoting(2.0),
    "printed": Printed(2.5),
    "shape that fails": Shaped(),
    "shape of text": types.SimpleNamespace(shape=(TEXT,)),
    "fails as a list": Listed(),
    "named tuple": namedtuple("Row", "name income")(TEXT, NUMBER),
    "long whole number": WHOLE * 10**400,
    "long double": np.array([[-NUMBER, 1]], dtype=np.longdouble) * np.longdouble("1e4000"),
}
GIVEN = PUBLIC | STRANGE


@pytest.fixture(scope="module")
def certificate():
    return release(np.zeros(2), Frobenius(1.0), Budget(0.1, 1e-7)).certificate


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "budget.db", BUDGET)


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_ledger_quotes_nothing_that_was_given_by_mistake(given, ledger, certificate):
    calls = [
        lambda: Ledger(given, BUDGET),
        lambda: Ledger(ledger.path, adaptive=given),
        lambda: ledger.verify(given),
        lambda: ledger.spend(certificate, series=given, planned=2),
        lambda: ledger.spend(certificate, sampling_rate=given),
        lambda: ledger.spend(certificate, count=given),
    ]
    for call in calls:
        text = said(call)
        assert not leak(text), text


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_certificates_and_accountants_quote_no_entry_of_an_array(given, certificate):
    for call in (certificate.epsilon, certificate.delta, lambda x: Accountant().add(certificate, 1, x)):
        text = said(call, given)
        assert not leak(text), text


@pytest.mark.parametrize("name", ["norm", "low", "columns", "relation", "size"])
@pytest.mark.parametrize("given", STRANGE.values(), ids=STRANGE)
def test_queries_quote_no_strange_argument(given, name):
    bounds = {"norm": {}, "low": {"high": 1.0}}.get(name, {"norm": 1.0})
    text = said(lambda: queries.mean(ROWS, adjacency="replace", **{**bounds, name: given}))
    assert not leak(text), text


def test_a_ledger_says_what_is_wrong_with_a_path_and_makes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="path must name a file that can be reached, got DataFrame of shape"):
        Ledger(PUBLIC["frame, NaN"], BUDGET)
    with pytest.raises(InvalidInput, match="adaptive must be True, False or None"):
        Ledger("a.db", BUDGET, adaptive=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("query", [queries.mean, queries.covariance])
def test_a_size_beyond_any_number_of_records_is_refused_at_once(query):
    # rounding up the root of what is below the least float would take for ever
    with pytest.raises(InvalidInput, match=r"size must be below 2\^63"):
        query(ROWS, norm=1.0, size=10**400)


def test_plain_numbers_and_shapes_are_still_shown():
    assert _check.shown(-1.5) == "-1.5"
    assert _check.shown(np.int64(3)) == "np.int64(3)"
    assert _check.shown(ROWS) == "ndarray of shape (4, 2)"

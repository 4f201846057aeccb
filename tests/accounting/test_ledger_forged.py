"""Entries that somebody inserts past the library, with a chain that is right: they free no budget, and are found."""

import secrets

import psycopg
import pytest

from ledgers import BUDGET, guarantee
from matrixdp import Ledger
from matrixdp.accounting.filter import Charge, is_enough
from matrixdp.accounting.ledger.chain import canonical, hashed, link, sha256
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.spends import spend_fields
from matrixdp.accounting.stated import by_budget
from matrixdp.budget import Budget
from matrixdp.errors import LedgerError
from matrixdp.privacy.guarantee import Guarantee

PURE = Guarantee(by_budget(Budget(0.1, 0.0)), "add/remove")


def forged(ledger, certificate=None, documents=(), **record):
    """Inserts an entry, as whoever has the right to insert can; all its hashes fit."""
    named = {sha256(canonical(each)): each for each in documents}
    if certificate is not None:
        fields, named = spend_fields(certificate, BUDGET, note="", count=1, sampling_rate=1.0, series=None)
        record = {**fields, **record}

    def work(session, before):
        row = {"number": before.entries + 1, "time": session.now(), **record}
        session.append(row, link(before.head, hashed(row)), named)
        return None, before

    ledger._book.write(work)


CHARGED = {"planned": 1, "charged_mu": 0.3, "charged_delta": 0.0}
FORGED = {
    "more of a series than was planned": (guarantee(0.1), {"series": "s", "count": 100, "planned": 3}),
    "more releases than were charged": (guarantee(0.3), {**CHARGED, "count": 100}),
    "more releases than are used of a reservation": (guarantee(0.1), {**CHARGED, "reservation": "held", "count": 100}),
    "another release of a series": (guarantee(0.2), {"series": "s", "planned": 3}),
    "another adjacency": (guarantee(0.3, "replace"), CHARGED),
    "as if fixed beforehand": (guarantee(0.3), {}),
    "fewer than none": (PURE, {**CHARGED, "count": -5, "planned": -5}),
    "a rate above 1": (guarantee(0.3), {**CHARGED, "sampling_rate": 1.5}),
    "less revealed than nothing": (PURE, {**CHARGED, "charged_delta": -1e-6}),
    "a reservation that costs nothing": (
        guarantee(0.3),
        {**CHARGED, "kind": "reservation", "reservation": "r", "count": 1000, "planned": 1000, "charged_mu": 1e-9},
    ),
    "a reservation that was never made": (guarantee(0.3), {**CHARGED, "reservation": "nobody's"}),
    "more than was reserved": (guarantee(0.2), {**CHARGED, "reservation": "held"}),
    "the return of what was never reserved": (None, {"kind": "return", "reservation": "nobody's"}),
    "no time": (guarantee(0.3), {**CHARGED, "time": "1999-13-01"}),
    "a time in another zone": (guarantee(0.3), {**CHARGED, "time": "2026-01-01T00:30:00.000000+05:00"}),
    "a name that is a number": (guarantee(0.3), {**CHARGED, "analyst": 7}),
    "an unknown kind": (None, {"kind": "gift"}),
}


@pytest.mark.parametrize("name", FORGED)
def test_an_entry_that_does_not_follow_from_the_others_is_found(new, name):
    ledger = new(BUDGET)
    ledger.spend(guarantee(0.1), series="s", planned=3)
    ledger.reserve("held", guarantee(0.1, variation=1e-15), count=2)
    reader = new()
    certificate, record = FORGED[name]
    forged(ledger, certificate, **record)
    for read in (new, reader.remaining, lambda: reader.spend(guarantee(0.001))):
        with pytest.raises(LedgerError):
            read()


def test_what_an_honest_writer_inserts_is_read(new):
    ledger = new(BUDGET)
    forged(ledger, guarantee(0.3), **CHARGED)
    forged(ledger, PURE, **CHARGED)
    assert len(new().history()) == 2


def test_a_release_that_hardly_any_record_takes_part_in_is_charged_by_delta_alone(new):
    """At so small a rate even epsilon 0 holds, at a delta within what may be revealed; so its mu is 0."""
    ledger = new(BUDGET)
    entry = ledger.spend(guarantee(0.3), sampling_rate=1e-12)
    held = ledger.reserve("held", guarantee(0.3), sampling_rate=1e-12, count=2)
    assert entry.charged_mu == held.charge.mu == 0.0 < min(entry.charged_delta, held.charge.delta)
    assert len(new().history()) == 1
    assert verify_export(ledger.export())
    assert not is_enough({entry.use: 1}, Charge(0.0, 0.0))


def test_a_document_that_no_entry_names_stops_nobody(server):
    """A role that may spend can insert one. Spends go on, and whoever verifies the ledger is told."""
    place = {"path": server.get_uri(), "dataset": secrets.token_hex(16)}
    Ledger(**place, budget=BUDGET).spend(guarantee(0.1))
    stray = canonical({"matrixdp": "guarantee"})
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        row = (place["dataset"], sha256(stray), stray)
        connection.execute("INSERT INTO matrixdp.documents VALUES (%s, %s, %s)", row)
    again = Ledger(**place)
    again.spend(guarantee(0.1))
    assert verify_export(again.export())
    with pytest.raises(LedgerError, match="documents that no entry names"):
        again.verify()

"""Exports: everything that can be computed again is, so no number on which the budget depends can be changed."""

import copy
import json
import math

import numpy as np
import pytest

from ledgers import BUDGET, at, changed_at, missed, rehashed
from matrixdp import Budget, certify, release
from matrixdp.accounting.ledger import exports
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import InvalidInput
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
from matrixdp.sensitivity import Frobenius

BALL = Frobenius(1.0)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Gaussian noise, in every kind of entry: drawn, stated, in parts, sampled."""
    ledger = Ledger(tmp_path_factory.mktemp("export") / "budget.db", BUDGET, adjacency="add/remove")
    release(np.zeros((3, 4)), BALL, Budget(0.3, 1e-6), "analytic", ledger=ledger, note="matrix")
    ledger.spend(Guarantee(GaussianProfile(0.1), "add/remove", 1e-15), "elsewhere", count=2, dataset="survey", key="k")
    step = certify(Gaussian(Isotropic((2, 3), 2.0)), BALL)
    for epoch in (1, 2):
        ledger.spend(step, f"epoch {epoch}", count=10, sampling_rate=0.01, series="5eed", planned=30)
    ledger.spend(step, "one more", unit="user", analyst="A", purpose="B")
    return ledger


@pytest.fixture(scope="module")
def lines(ledger):
    return [json.loads(json.dumps(line)) for line in ledger.export()]


def test_an_export_verifies_without_the_ledger(ledger, lines):
    found = verify_export([json.dumps(line) for line in lines])
    assert found, str(found)
    assert verify_export(ledger.export(), ledger.verify())
    assert (found.entries, found.stated, found.head) == (5, (2,), ledger.verify())
    assert found.spent == pytest.approx(ledger.spent(), rel=1e-9)
    assert found.budget == BUDGET
    text = str(found)
    assert text.startswith("Ledger verified: 5 entries, ")
    assert "1 entry (2)" in text
    assert "nothing is signed" in text
    assert verify_export(rehashed(copy.deepcopy(lines)))  # so that the changes below are found by what they change


def test_an_empty_ledger_and_one_of_a_fixed_plan_verify(tmp_path):
    assert verify_export(Ledger(tmp_path / "empty.db", BUDGET).export())
    plan = Ledger(tmp_path / "plan.db", BUDGET, adaptive=False)
    for _ in range(2):
        plan.spend(certify(Gaussian(Isotropic((2, 3), 1.0)), BALL), count=20, sampling_rate=0.01)
        plan.spend(Guarantee(GaussianProfile(0.1), "add/remove"), series="s", planned=3)
    assert verify_export(plan.export()), str(verify_export(plan.export()))
    for field, value in (("planned", 19), ("count", 19), ("charged_mu", 0.1), ("sampling_rate", 0.009)):
        changed = copy.deepcopy(plan.export())
        changed[1][field] = value
        assert not verify_export(rehashed(changed))
    changed = copy.deepcopy(plan.export())
    changed[1] |= {"planned": 19, "count": 19}
    changed[-1]["releases"] -= 1
    (finding,) = verify_export(rehashed(changed)).findings
    assert finding.entry == "last line, spent"


# --- tampering ---

# What cannot be computed again; a head that was kept elsewhere shows whether it was changed.
WORDS = {
    "header": {"id", "created", "epsilon"},
    "entry": {"time", "note", "dataset", "analyst", "purpose", "unit", "key"},
    "document": {"law.source", "law.note", "remark", "profile.words"},
}


def leaves(content, path=()):
    """The path of every value inside."""
    if isinstance(content, dict) and content:
        for name, part in content.items():
            yield from leaves(part, (*path, name))
    elif isinstance(content, list) and content:
        for index in range(min(len(content), 3)):  # the curve of a law has hundreds of points
            yield from leaves(content[index], (*path, index))
    else:
        yield path


def other_values(value):
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 1.001, value * 0.999] if value else [1e-3]
    if isinstance(value, str):
        return [{"add/remove": "replace"}.get(value, value + "x")]
    return ["x", 0.5]


def changes(line):
    for path in leaves(line):
        if path[0] not in ("hash", "certificate", "curve"):  # which are computed anew
            for value in other_values(at(line, path)):
                yield path, value


def is_word(kind, path):
    if path[0] == "documents":
        return ".".join(map(str, path[2:])) in WORDS["document"]
    return path[0] in WORDS[kind]


@pytest.mark.parametrize("number", range(6))
def test_a_change_of_any_number_is_found_though_all_hashes_are_computed_anew(lines, number):
    kind = "entry" if number else "header"
    chosen = [each for each in changes(lines[number]) if each[0] != ("chain",) and not is_word(kind, each[0])]
    assert missed(lines, number, chosen) == []
    assert len(chosen) >= 4


def test_a_change_of_the_last_line_is_found(lines):
    for field, values in {"entries": (4, 6, 5.0), "releases": (1,), "spent": (1.0,), "head": ("x",)}.items():
        for value in (*values, None):
            changed = copy.deepcopy(lines)
            changed[-1][field] = value
            (finding,) = verify_export(changed).findings
            assert finding.entry == f"last line, {field}"
    assert not verify_export([*lines[:-1], {"head": lines[-1]["head"]}])


def test_words_are_bound_by_a_head_that_was_kept(ledger, lines):
    kept, tried = ledger.verify(), 0
    for number, line in enumerate(lines[:-1]):
        for path, value in changes(line):
            if is_word("entry" if number else "header", path):
                changed = changed_at(lines, number, path, value)
                if path not in (("epsilon",), ("time",)):  # less may be too little, and another text is no time
                    assert verify_export(rehashed(copy.deepcopy(changed))), path
                found = verify_export(rehashed(changed), kept)
                assert not found
                tried += any("head that was kept" in str(finding) for finding in found.findings)
    assert tried > 15


def test_without_new_hashes_every_change_is_found(lines):
    for number, line in enumerate(lines):
        for path, value in changes(line):
            if path != ("chain",) and is_word("entry" if number else "header", path):
                assert not verify_export(changed_at(lines, number, path, value))


def test_entries_that_were_removed_moved_or_repeated_are_found(ledger, lines):
    for number in range(1, len(lines) - 1):
        assert not verify_export(rehashed(copy.deepcopy(lines[:number] + lines[number + 1 :])))
        assert not verify_export(rehashed(copy.deepcopy(lines[: number + 1] + lines[number:])))
    assert not verify_export(rehashed(copy.deepcopy([lines[0], lines[2], lines[1], *lines[3:]])))
    shorter = copy.deepcopy(lines)
    del shorter[-2]  # with a total of its own, only a head that was kept tells
    total = verify_export(rehashed(shorter)).spent
    shorter[-1] |= {"entries": 4, "releases": 23, "spent": total}
    assert verify_export(shorter)
    assert not verify_export(shorter, ledger.verify())


def test_more_than_the_budget_is_found(lines):
    changed = copy.deepcopy(lines)
    changed[0]["epsilon"] = 0.5
    found = verify_export(rehashed(changed))
    assert any("passes the budget" in str(finding) for finding in found.findings)


def test_an_entry_that_claims_to_be_older_is_found(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    for _ in range(2):
        ledger.spend(Guarantee(GaussianProfile(0.3), "add/remove"))
    changed = ledger.export()
    for line in changed[1:-1]:
        for field in ("planned", "charged_mu", "charged_delta"):
            del line[field]
    found = verify_export(rehashed(changed))
    assert [finding.entry for finding in found.findings] == ["entry 1"]
    assert "before schema 3" in str(found)


@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"unit": "record"},
        {"color": "red"},
        {"mu": 0.1},
        {"charged_mu": "much"},
        {"count": 2.5},
        {"count": True},
        {"count": 10**400},
        {"charged_mu": 10**400},
        {"charged_delta": math.nan},
        {"planned": "x"},
        {"sampling_rate": [1]},
        {"note": 3},
        {"number": None},
        {"documents": 3},
        {"documents": {"00": {}}},
        {"certificate": "00"},
        {"certificate": {}},
        {"series": {}},
        {"hash": None},
        {"hash": 3},
    ],
    ids=str,
)
def test_nonsense_in_an_entry_is_found_and_nothing_else_happens(lines, change):
    changed = copy.deepcopy(lines)
    changed[2] |= change
    assert not verify_export(changed)
    if "hash" not in change and "documents" not in change:
        assert not verify_export(rehashed(changed))


@pytest.mark.parametrize("change", [{"epsilon": "3"}, {"delta": 2}, {"adaptive": 3}, {"more": 1}, {"relation": 3}])
def test_nonsense_in_the_header_is_found(lines, change):
    changed = copy.deepcopy(lines)
    changed[0] |= change
    assert not verify_export(rehashed(changed))


def test_certificates_that_a_ledger_refuses_are_found(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    released = release(np.zeros(3), BALL, Budget(0.5, 1e-6), "analytic", ledger=ledger).certificate
    changed = ledger.export()
    with pytest.warns(UserWarning, match="generator of your own"):
        seeded = release(np.zeros(3), BALL, Budget(0.5, 1e-6), "analytic", rng=np.random.default_rng(1)).certificate
    ((name, document),) = changed[1]["documents"].items()
    assert document == json.loads(released.to_json())
    changed[1]["documents"][name] = json.loads(seeded.to_json())
    found = verify_export(rehashed(changed))
    assert any("secret noise" in str(finding) for finding in found.findings)


@pytest.mark.parametrize(
    "content", [[], ["{}"], ["not json", "{}"], ["[1]", "{}"], ['{"chain": "x"}', "{}"], [3, 4], ["3", "4"]], ids=str
)
def test_what_is_no_export_is_refused(content):
    with pytest.raises(InvalidInput, match="export of a ledger must"):
        verify_export(content)


def test_an_entry_written_twice_is_refused(lines):
    text = [json.dumps(line) for line in lines]
    assert verify_export(text)
    text[2] = text[2].replace('"count":', '"count": 1, "count":')
    assert '"count": 1, "count":' in text[2]
    with pytest.raises(InvalidInput, match="export of a ledger must"):
        verify_export(text)


def test_a_head_must_be_a_hash(lines):
    with pytest.raises(InvalidInput, match="head must be a hash"):
        verify_export(lines, 3)


def test_charges_that_cannot_be_computed_do_not_pass(lines, monkeypatch):
    monkeypatch.setattr(exports.Total, "price", lambda *_: {"planned": 1, "charged_mu": None, "charged_delta": None})
    assert not verify_export(lines)

"""The statement of a ledger: one page in plain language, or JSON in the fields of the public registry of deployments.

The registry (registry.opendp.org) describes a deployment in groups of fields. Those that a ledger knows are filled in:
product (name, intended_use, description, publication_date), dp_flavor (name), privacy_loss (privacy_unit,
privacy_unit_description, privacy_parameters, privacy_parameters_description), model (model_name, release_type),
accounting (composition) and implementation (mechanisms). The curator adds the others, such as data_curators.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from matrixdp import _check
from matrixdp._pages import (
    NOT_ABOUT_GROUPS,
    NOT_FOR_SEVERAL,
    NOT_SIGNED,
    counted,
    guess,
    guess_picture,
    in_numbers,
    listed,
    page,
    percent,
)
from matrixdp._rounding import rounded_up
from matrixdp.accounting.ledger.entries import Entry
from matrixdp.accounting.ledger.rules import Quota
from matrixdp.accounting.stated import by_budget
from matrixdp.adjacency import ADD_REMOVE, REPLACE
from matrixdp.budget import Budget

KINDS = ("markdown", "html", "json")


@dataclass(frozen=True)
class Facts:
    """What the page says.

    Attributes:
        dataset: the data set, or the name of the file.
        year: the year, or None for all years.
        entries: the spends of that year, in the order of the chain.
        units: whom the guarantees protect, over the spends of all years.
        before: the number of spends in all years.
        budget: the budget of the ledger.
        adjacency: which data sets are neighbours.
        spent: epsilon of everything ever charged, at the budget's delta.
        spent_in_year: epsilon of the spends of that year alone; None if some may have been charged in another year.
        adaptive: whether releases may be chosen in view of earlier answers.
        kept: whether the budget is kept.
        analysts: epsilon of each analyst's own spends.
        quotas: those that hold now.
        head: the last hash of the chain.
    """

    dataset: str
    year: int | None
    entries: list[Entry]
    units: list[str]
    before: int
    budget: Budget
    adjacency: str | None
    spent: float
    spent_in_year: float | None
    adaptive: bool
    kept: bool
    analysts: Mapping[str, float]
    quotas: list[Quota]
    head: str

    @property
    def releases(self) -> int:
        """How many releases there were."""
        return sum(entry.count for entry in self.entries)


def statement(facts: Facts, kind: str) -> str:
    """The page as Markdown or HTML, or a JSON document."""
    _check.choice("kind", kind, KINDS)
    if kind == "json":
        return json.dumps(document(facts), indent=2) + "\n"
    time = "in all years" if facts.year is None else f"in {facts.year}"
    closing = (
        f"Head of the ledger, which binds every entry: {facts.head}. Whoever has the ledger can check it with matrixdp "
        "ledger verify LEDGER --head HEAD; whoever has its export, with matrixdp verify FILE.jsonl, without the data."
    )
    parts = [
        ("What was released", list(_released(facts))),
        ("About whom", list(_about(facts))),
        ("What is guaranteed", list(_guaranteed(facts))),
        ("Who asked for it", list(_who_asked(facts))),
        ("What is not guaranteed", list(_not_guaranteed(facts))),
    ]
    share = _share(facts.spent, facts.budget.delta) if len(facts.units) == 1 else 1.0
    picture = guess_picture(share, "with all releases, at most")
    return page(f"{facts.dataset}: what was released {time}, and what is guaranteed", parts, closing, kind, picture)


def _released(facts: Facts) -> Iterator[str]:
    yield f"{counted(facts.releases, 'release')}, in {len(facts.entries)} of {facts.before} spends of the ledger."
    for entry in facts.entries:
        words = [f"Entry {entry.number} ({entry.time[:10]}): {entry.note or 'no note'}"]
        words += [f"{entry.count} releases"] * (entry.count > 1) + [entry.in_words]
        words += [f"for {entry.purpose}"] * (entry.purpose is not None)
        words += ["stated, not computed here"] * entry.stated
        yield "; ".join(words)


def _about(facts: Facts) -> Iterator[str]:
    for unit in facts.units:
        yield f"Every {unit} of the data set is protected{'' if unit == 'record' else ', with all of its records'}."
    if facts.units == ["record"]:
        yield "A person with several records is protected less."


def _guaranteed(facts: Facts) -> Iterator[str]:
    who = f"any one {listed(facts.units)}"
    words: dict[str, str] = {ADD_REMOVE: "left out", REPLACE: "replaced by another"}
    changed = words.get(facts.adjacency or "", "counted as nothing")
    if not facts.kept:
        yield "THE BUDGET IS EXCEEDED, by releases made elsewhere. The ledger refuses all that is not charged yet."
    if len(facts.units) > 1:
        yield (
            f"The releases protect different units ({listed(facts.units)}), so their losses cannot be added up for any "
            f"one of them. Those charged have epsilon {rounded_up(facts.spent)} at delta {facts.budget.delta:g} "
            "together, each counted for its own unit. For a total that holds, keep one ledger per unit."
        )
        return
    yield (
        f"All releases together, of all years, would look nearly the same if {who} were {changed}. So whatever happens "
        "to somebody because of them would have been nearly as likely without that person in the data."
    )
    yield in_numbers(facts.spent, facts.budget.delta)
    yield guess(f"the data of {who}", _share(facts.spent, facts.budget.delta), "all releases so far")
    if facts.year is not None and facts.spent_in_year is not None:
        yield (
            f"The releases of {facts.year} alone have epsilon {rounded_up(facts.spent_in_year)}. A new year does not "
            "restore what earlier years have used: the same records are in all of them."
        )
    if facts.kept:
        limit = _share(facts.budget.epsilon, facts.budget.delta)
        chosen = "These numbers hold for releases that are fixed beforehand, and the ledger lets them use"
        if facts.adaptive:
            chosen = (
                "These numbers hold for requests that were fixed beforehand. Whatever is chosen in view of earlier "
                "answers, when to stop included, all releases ever keep"
            )
        yield f"{chosen} {facts.budget}: guesses can then be right in at most {percent(limit)} of cases."


def _who_asked(facts: Facts) -> Iterator[str]:
    for analyst, epsilon in facts.analysts.items():
        yield f"{analyst or 'Nobody named'}: epsilon {rounded_up(epsilon)} in all years."
    for quota in facts.quotas:
        yield f"Quota {quota.name}: {quota}, for {listed(list(quota.members))}."
    if not facts.analysts:
        yield "Nobody yet."


def _not_guaranteed(facts: Facts) -> Iterator[str]:
    yield NOT_ABOUT_GROUPS
    yield "Anything about releases from the same data that were not charged to this ledger."
    stated = sum(entry.stated for entry in facts.entries)
    if stated:
        yield f"What was stated by hand ({counted(stated, 'entry')}): nothing here says why it holds."
    yield from (NOT_FOR_SEVERAL, NOT_SIGNED)


def _share(epsilon: float, delta: float) -> float:
    """The largest probability of a correct guess: that of the worst release with this epsilon and delta."""
    if not math.isfinite(epsilon):
        return 1.0
    return (1.0 + by_budget(Budget(epsilon, delta)).delta(0.0)) / 2 if epsilon > 0 else (1.0 + delta) / 2


def document(facts: Facts) -> dict[str, Any]:
    """The statement in the fields of the registry, and what else the page says under `matrixdp`."""
    purposes = sorted({entry.purpose for entry in facts.entries if entry.purpose})
    sources: Counter[str] = Counter()
    for entry in facts.entries:
        sources[entry.source or "stated"] += entry.count
    last = facts.entries[-1].time[:10] if facts.entries else None
    return {
        "deployment": {
            "product": {
                "name": facts.dataset,
                "intended_use": "; ".join(purposes) or None,
                "description": f"{counted(facts.releases, 'release')} from {facts.dataset}",
                "publication_date": last,
            },
            "dp_flavor": {"name": "Approximate DP" if facts.budget.delta > 0 else "Pure DP"},
            "privacy_loss": {
                "privacy_unit": ", ".join(facts.units),  # of several, none has the total
                "privacy_unit_description": f"Neighbouring data sets: {facts.adjacency or 'not fixed yet'}.",
                "privacy_parameters": {
                    "epsilon": _number(facts.spent) if len(facts.units) == 1 else None,
                    "delta": facts.budget.delta,
                },
                "privacy_parameters_description": f"Of all releases ever charged; the ledger allows {facts.budget}.",
            },
            "model": {"model_name": "Central", "release_type": "Many releases"},
            "accounting": {
                "composition": "Privacy filters of a matrixdp ledger: Gaussian, pure and Rényi, for adaptive choices."
                if facts.adaptive
                else "Privacy-loss distributions, for releases that are fixed beforehand."
            },
            "implementation": {"mechanisms": "; ".join(f"{count} x {name}" for name, count in sources.items())},
        },
        "matrixdp": {
            "year": facts.year,
            "entries": [entry.to_dict() | {"document": None} for entry in facts.entries],
            "spent_in_year": None if facts.spent_in_year is None else _number(facts.spent_in_year),
            "budget": {"epsilon": facts.budget.epsilon, "delta": facts.budget.delta, "kept": facts.kept},
            "guess": _share(facts.spent, facts.budget.delta) if len(facts.units) == 1 else None,
            "analysts": {name: _number(epsilon) for name, epsilon in facts.analysts.items()},
            "quotas": [quota.to_dict() for quota in facts.quotas],
            "head": facts.head,
        },
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

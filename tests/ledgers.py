"""What the tests of accountants and ledgers spend, where old ledgers and the worker are, and changed exports."""

import copy
import hashlib
import json
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from matrixdp import Accountant, Budget
from matrixdp.accounting.filter import RESERVE
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.privacy import gaussian
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee

BUDGET = Budget(3.0, 1e-6)
MU = float(gaussian.mu(BUDGET.epsilon, BUDGET.delta))
SHARED = float(gaussian.mu(BUDGET.epsilon, (1 - RESERVE) * BUDGET.delta))  # what several releases may use together
EPOCHS_OF_MNIST = 256 / 60000, 7032  # rate and steps of 30 in batches of 256, as in R1SMG, section 7.3
GOLDEN = Path(__file__).parent / "golden"
WORKER = [sys.executable, str(Path(__file__).parent / "accounting" / "ledger_worker.py")]
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def guarantee(mu, adjacency="add/remove", variation=0.0):
    return Guarantee(GaussianProfile(mu), adjacency, variation)


def accounts(*entries, relation="add/remove"):
    """An accountant that has seen (profile or mu, count, sampling rate)."""
    result = Accountant()
    for profile, count, rate in entries:
        profile = GaussianProfile(profile) if isinstance(profile, float) else profile
        result.add(Guarantee(profile, relation), count=count, sampling_rate=rate)
    return result


def robbed(law, other, t):
    """A law on cells that has lost t of its mass where the other is likely, so that such an event gives all away."""
    order = np.argsort(law / other)
    taken = np.minimum(law[order], np.maximum(t - (np.cumsum(law[order]) - law[order]), 0.0))
    kept = law.copy()
    kept[order] -= taken
    kept[np.argmax(law)] += taken.sum()
    return kept


def sql(path, *statements):
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def rehashed(lines):
    """The lines of an export with all digests computed anew, as somebody would who changes one."""
    names, head = {}, ""
    for line in lines[:-1]:
        for name in list(line.get("documents", {})):
            content = line["documents"].pop(name)
            names[name] = _digest(content)
            line["documents"][names[name]] = content
        for field in ("certificate", "curve"):
            if str(line.get(field)) in names:
                line[field] = names[line[field]]
        fields = {name: value for name, value in line.items() if name not in ("hash", "documents")}
        line["hash"] = head = _digest(fields, head)
    lines[-1]["head"] = head
    return lines


def _digest(content, previous=""):
    text = previous + json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def at(content, path):
    for step in path:
        content = content[step]
    return content


def changed_at(lines, number, path, value):
    """The lines with another value in one of them; the lines themselves stay as they are."""
    found = copy.deepcopy(lines)
    at(found[number], path[:-1])[path[-1]] = value
    return found


def missed(lines, number, chosen):
    """Which of the chosen changes of a line are not found, though all hashes are computed anew."""
    return [each for each in chosen if verify_export(rehashed(changed_at(lines, number, *each)))]

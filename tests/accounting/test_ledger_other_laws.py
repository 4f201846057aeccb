"""Ledgers of noise that is not Gaussian: laws from outside the package, also where these are not known."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from ledgers import BUDGET, missed, rehashed
from matrixdp import Budget, calibrate, certify
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.distributions import NoiseLaw
from matrixdp.errors import BudgetExceeded, InvalidInput
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate, drawn
from matrixdp.privacy.discrete import DiscreteProfile
from matrixdp.privacy.drawing import drawing_for
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee
from matrixdp.privacy.laws import register_law
from matrixdp.sensitivity import Frobenius

BALL = Frobenius(1.0)


@dataclass(frozen=True)
class Response:
    """Randomised response with this epsilon: its delta has a corner, and is 0 from there on."""

    pure_epsilon: float

    def delta(self, epsilon):
        e = self.pure_epsilon
        return max(0.0, (math.exp(e) - math.exp(epsilon)) / (1.0 + math.exp(e))) * (1 + 1e-12)

    def epsilon(self, delta):
        e = self.pure_epsilon
        least = math.exp(e) - delta / (1 + 1e-12) * (1.0 + math.exp(e))
        return math.log(least) if least > 1.0 else 0.0

    def __str__(self):
        return f"pure epsilon {self.pure_epsilon:g}"


@dataclass(frozen=True)
class Foreign(NoiseLaw):
    """Stands for the noise of somebody else."""

    shape: tuple[int, ...]
    scale: float
    source: str = "somebody"
    note: str = ""

    def expected_squared_error(self, weights=None):
        return self.scale**2

    def sample(self, rng=None):
        return np.zeros(self.shape)

    def describe(self):
        return f"foreign noise of scale {self.scale:g}"


register_law(
    Foreign,
    kind="tests.foreign-of-a-ledger",
    profile=lambda law, sensitivity: Response(sensitivity.frobenius_radius(law.shape) / law.scale),
    float_safe=True,
)


def foreign(scale):
    return certify(Foreign((2,), scale), BALL)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Noise that is not Gaussian: spherical, and from outside the package, certified and stated."""
    ledger = Ledger(tmp_path_factory.mktemp("others") / "budget.db", BUDGET)
    ledger.spend(certify(calibrate("spherical", shape=(6,), sensitivity=BALL, budget=Budget(0.3, 1e-7)), BALL))
    ledger.spend(foreign(20.0), "by somebody")
    ledger.spend(Guarantee(Response(0.05), "add/remove"), "somebody says")
    return ledger


def test_changes_of_other_noise_are_found(others):
    """The law that the certificate names, the curve that is added up, and what is charged for them."""
    lines = [json.loads(json.dumps(line)) for line in others.export()]
    assert verify_export(lines), str(verify_export(lines))
    law = lines[1]["certificate"]
    chosen = [(("documents", law, *path), 1.5) for path in (("law", "k"), ("guarantee", "profile", "scale"))]
    chosen += [(("charged_mu",), lines[1]["charged_mu"] * 0.999), (("charged_delta",), 0.0), (("count",), 2)]
    assert missed(lines, 1, chosen) == []
    law, curve = lines[2]["certificate"], lines[2]["curve"]
    chosen = [(("documents", curve, "deltas", 5), 1e-9), (("documents", curve, "epsilons", 3), 1e-9)]
    chosen += [(("documents", law, "law", "scale"), 21.0), (("charged_mu",), lines[2]["charged_mu"] * 0.999)]
    assert missed(lines, 2, chosen) == []
    # a smaller curve than that of the certificate is found even where nobody would notice it in the charge
    changed = copy.deepcopy(lines)
    content = changed[2]["documents"][curve]
    content["deltas"] = [delta * (1 - 1e-8) for delta in content["deltas"]]
    (finding,) = verify_export(rehashed(changed)).findings
    assert finding.entry.startswith("entry 2, curve")
    # what is merely stated can be stated otherwise, but not at the same price
    content = copy.deepcopy(lines[2]["documents"][curve])
    content["deltas"] = [delta / 2 for delta in content["deltas"]]
    own = {**lines[3], "documents": {**lines[3]["documents"], "other": content}, "curve": "other"}
    found = verify_export(rehashed(copy.deepcopy([*lines[:3], own, lines[-1]])))
    assert {finding.entry for finding in found.findings} == {"entry 3, charged_mu", "last line, spent"}


def test_a_law_from_outside_is_added_up_as_a_curve(others):
    entry, stated = others.history()[1:]
    assert isinstance(entry.profile, Curve)
    assert isinstance(entry.certificate, Certificate)
    assert entry.certificate.profile == Response(0.05)
    for epsilon in np.linspace(0.0, 0.06, 50):
        exact = Response(0.05).delta(float(epsilon))
        assert exact <= entry.profile.delta(float(epsilon)) <= exact * 1.01 + 1e-12
    assert stated.stated
    assert stated.profile == entry.profile


@dataclass(frozen=True)
class ForeignLaplace(Foreign):
    """Stands for discrete Laplace noise of somebody else."""


register_law(
    ForeignLaplace,
    kind="tests.foreign-laplace-of-a-ledger",
    profile=lambda law, sensitivity: DiscreteProfile(1.0, law.scale),
    float_safe=True,
)


def test_the_author_of_a_law_answers_for_its_drawing_where_delta_is_0(path):
    ledger, law = Ledger(path, Budget(1.0, 0)), ForeignLaplace((1,), 4.0)
    undrawn = certify(law, BALL)
    with pytest.raises(InvalidInput, match="how the noise was drawn"):
        ledger.spend(undrawn)
    ledger.spend(drawn(undrawn, drawing_for(law, BALL, None)))
    assert ledger.spent() == 0.25
    assert verify_export(ledger.export())


@dataclass(frozen=True)
class Disguised:
    """The profile of Gaussian noise, under a name that JSON does not know."""

    mu: float

    def delta(self, epsilon):
        return float(gaussian.delta(self.mu, epsilon))

    def epsilon(self, delta):
        return float(gaussian.epsilon(self.mu, delta))


def test_a_law_from_outside_may_use_the_whole_budget(tmp_path):
    budget = Budget(0.5, 1e-6)
    mu = float(gaussian.mu(0.5, 1e-6))
    ledger = Ledger(tmp_path / "budget.db", budget)
    with pytest.raises(BudgetExceeded):
        ledger.spend(Guarantee(Disguised(mu * (1 + 1e-9)), "add/remove"))
    ledger.spend(Guarantee(Disguised(mu * (1 - 1e-9)), "add/remove"))
    assert 0.499 < ledger.spent() <= 0.5
    with pytest.raises(BudgetExceeded):
        ledger.spend(Guarantee(GaussianProfile(0.01), "add/remove"))


ELSEWHERE = """
import json, sys
from matrixdp import Ledger
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.privacy.guarantee import GaussianProfile, Guarantee
ledger = Ledger(sys.argv[1])
entry = ledger.history()[1]
found = verify_export(ledger.export())
answer = {"spent": ledger.spent(), "remaining": ledger.remaining().mu, "kind": type(entry.certificate).__name__}
answer |= {"head": ledger.verify(), "verified": bool(found), "findings": [str(each) for each in found.findings]}
print(json.dumps(answer))
ledger.spend(Guarantee(GaussianProfile(0.01), "add/remove"), "elsewhere")
"""


def test_a_ledger_opens_and_adds_up_where_the_law_is_not_known(others, tmp_path):
    path = tmp_path / "budget.db"
    path.write_bytes(others.path.read_bytes())
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["spent"] == others.spent()
    assert found["remaining"] == others.remaining().mu
    assert found["head"] == others.verify()
    assert found["kind"] == "Guarantee"
    assert not found["verified"]  # nobody there can compute that certificate again
    (finding,) = found["findings"]
    assert "entry 2" in finding
    assert "register it first" in finding
    back = Ledger(path)
    assert isinstance(back.history()[1].certificate, Certificate)
    assert verify_export(back.export())

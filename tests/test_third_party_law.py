"""A noise law from outside the package: registered in one call, it works everywhere, and nothing vouches for it."""

import json
import math
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

from matrixdp import (
    Accountant,
    Budget,
    Certificate,
    Counts,
    Frobenius,
    Ledger,
    calibrate,
    certify,
    compare,
    mechanisms,
    register_law,
    release,
)
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.audit import audit_law
from matrixdp.cli import app
from matrixdp.distributions import Gaussian, NoiseLaw, Product
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import BudgetExceeded, GuaranteeViolated, InvalidInput, NotCertifiable
from matrixdp.mechanisms.base import recipe

BUDGET = Budget(1.0, 1e-6)


@dataclass(frozen=True)
class PureProfile:
    """Discrete Laplace noise on one cell that changes by one step: the loss is +-epsilon, or all of it between."""

    pure_epsilon: float

    def delta(self, epsilon):
        return max(0.0, -math.expm1(epsilon - self.pure_epsilon)) / (1 + math.exp(-self.pure_epsilon)) * (1 + 1e-12)

    def epsilon(self, delta):
        if delta >= self.delta(0.0):
            return 0.0
        low, high = 0.0, self.pure_epsilon
        while high - low > 1e-13:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high


@dataclass(frozen=True)
class DiscreteLaplace(NoiseLaw):
    """P(k) proportional to exp(-|k| rate), on whole numbers."""

    shape: tuple
    rate: float
    source: str = "acme"
    note: str = ""

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))

    def expected_squared_error(self, weights=None):
        q = math.exp(-self.rate)
        return math.prod(self.shape) * 2 * q / (1 - q) ** 2

    def sample(self, rng=None):
        rng = rng or np.random.default_rng(secrets.randbits(128))
        p = -math.expm1(-self.rate)
        return (rng.geometric(p, self.shape) - rng.geometric(p, self.shape)).astype(float)

    def describe(self):
        return f"discrete Laplace, rate {self.rate:g}"


class Unnamed(DiscreteLaplace):
    """The same noise, with a profile that does not name its pure epsilon."""


class UnnamedProfile:
    def __init__(self, epsilon):
        self._known = PureProfile(epsilon)

    def delta(self, epsilon):
        return self._known.delta(epsilon)

    def epsilon(self, delta):
        return self._known.epsilon(delta)


def profile(law, sensitivity):
    if not (isinstance(sensitivity, Counts) and sensitivity.cells == 1 and sensitivity.bound == 1):
        raise NotCertifiable("nothing is proven about discrete Laplace noise beyond one cell that changes by 1")
    return PureProfile(law.rate)


def add_noise(law, value):
    return np.floor(value) + law.sample()


@recipe("acme-laplace", source="acme's handbook")
def laplace(shape, sensitivity, budget):
    """Noise for a pure epsilon."""
    return DiscreteLaplace(shape, budget.epsilon)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_law(
        DiscreteLaplace,
        kind="acme.discrete-laplace",
        profile=profile,
        add_noise=add_noise,
        float_safe=True,
        exact=True,
        witness=lambda law, sensitivity: np.eye(1, math.prod(law.shape)).reshape(law.shape),
    )
    register_law(
        Unnamed,
        kind="acme.unnamed",
        profile=lambda law, _: UnnamedProfile(law.rate),
        add_noise=add_noise,
        float_safe=True,
    )
    mechanisms.register(laplace)
    yield
    del mechanisms.RECIPES["acme-laplace"]


LAW = DiscreteLaplace((3, 4), 1.0)


def test_its_certificate_says_who_proved_it():
    certificate = certify(LAW, Counts(1), BUDGET)
    assert certificate.delta(1.0) <= 1e-15
    assert certificate.delta(0.5) == pytest.approx(-math.expm1(-0.5) / (1 + math.exp(-1)))
    assert "matrixdp does not vouch" in str(certificate)
    with pytest.raises(NotCertifiable, match="beyond one cell"):
        certify(LAW, Counts(2), BUDGET)


def test_it_is_released_charged_and_verified(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", BUDGET)
    out = release(np.full((3, 4), 7.0), Counts(1), BUDGET, LAW, ledger=ledger)
    assert np.all(out.value == np.round(out.value))
    assert "matrixdp does not vouch for it" in str(out.certificate.drawing)
    assert len(ledger.history()) == 1
    assert 0.9 <= ledger.spent() <= 1.0
    back = Certificate.from_json(out.certificate.to_json())
    found = back.verify()
    assert found, str(found)
    assert any("does not vouch" in remark for remark in found.remarks)
    document = json.loads(back.to_json())
    document["law"]["rate"] = 0.5
    assert not Certificate.from_json(json.dumps(document)).verify()


def test_a_sampler_that_nobody_claims_to_be_safe_is_refused():
    @dataclass(frozen=True)
    class Unclaimed(DiscreteLaplace):
        pass

    register_law(Unclaimed, kind="acme.unclaimed", profile=profile)
    with pytest.raises(GuaranteeViolated, match="not floating-point-safe"):
        release(np.zeros((3, 4)), Counts(1), BUDGET, Unclaimed((3, 4), 1.0))


def test_compare_lists_it_where_it_applies_and_stands_where_it_does_not():
    rows = {row.mechanism: row for row in compare(shape=(3, 4), sensitivity=Counts(1), budget=BUDGET)}
    assert rows["acme-laplace"].verdict in ("exact", "loose")
    assert rows["acme-laplace"].expected_squared_error < rows["analytic"].expected_squared_error / 5
    assert compare(shape=(3, 4), sensitivity=Counts(2), budget=BUDGET).rows[-1].note
    (one,) = compare(shape=(3, 4), sensitivity=Counts(1), budget=BUDGET, mechanisms=[LAW])
    assert (one.mechanism, one.verdict) == ("acme.discrete-laplace", rows["acme-laplace"].verdict)


def test_auto_never_takes_what_nobody_vouches_for():
    assert isinstance(calibrate("auto", shape=(3, 4), sensitivity=Counts(1), budget=BUDGET), Product)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_accountant_composes_it_never_below_the_truth(count):
    acct = Accountant()
    acct.add(certify(LAW, Counts(1)), count)
    for epsilon in (0.3, 1.0, 1.9):
        # losses are +-1 with these probabilities: for one step on whole numbers nothing lies between
        up = 1 / (1 + math.exp(-1.0))
        truth = sum(
            math.comb(count, k) * up**k * (1 - up) ** (count - k) * max(0.0, -math.expm1(epsilon - (2 * k - count)))
            for k in range(count + 1)
        )
        assert truth * (1 - 1e-9) <= acct.delta(epsilon) <= truth * 1.05 + 1e-12


def test_it_composes_with_gaussian_noise():
    acct = Accountant()
    acct.add(certify(LAW, Counts(1)))
    alone = acct.epsilon(1e-6)
    acct.add(certify(Gaussian(Isotropic((3, 4), 10.0)), Counts(1)))
    assert alone < acct.epsilon(1e-6) < 2.5


def test_audits_draw_from_it():
    kept = audit_law(LAW, Counts(1), BUDGET, samples=4000, rng=np.random.default_rng(1))
    assert not kept.rejected
    short = audit_law(DiscreteLaplace((3, 4), 3.0), Counts(1), BUDGET, samples=4000, rng=np.random.default_rng(1))
    assert short.rejected


def test_the_command_line_knows_it():
    asked = ["--shape", "3x4", "--sensitivity", "counts:1", "--epsilon", "1", "--delta", "1e-6"]
    shown = CliRunner().invoke(app, ["calibrate", "acme-laplace", *asked])
    assert shown.exit_code == 0
    assert "discrete Laplace" in shown.output
    assert "does not vouch" in shown.output
    assert "acme-laplace" in CliRunner().invoke(app, ["compare", *asked]).output


PLUGIN = """
from dataclasses import dataclass
from matrixdp import mechanisms
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Isotropic
from matrixdp.mechanisms.base import recipe

@mechanisms.register
@recipe("acme-wide", source="acme")
def wide(shape, sensitivity, budget):
    return Gaussian(Isotropic(shape, 1000.0))
"""


def test_an_installed_plugin_is_known_to_the_command_line(tmp_path):
    (tmp_path / "acme_noise.py").write_text(PLUGIN)
    info = tmp_path / "acme_noise-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-noise\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[matrixdp.plugins]\nacme = acme_noise\n")
    asked = ["--shape", "3", "--sensitivity", "counts:1", "--epsilon", "1", "--delta", "1e-6"]
    call = [sys.executable, "-c", "from matrixdp.cli import main; main()", "calibrate", "acme-wide", *asked]
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(call, env=path, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "acme-wide [acme]" in shown.stdout


def test_a_ledger_with_delta_0_takes_the_pure_epsilon_that_its_profile_names(tmp_path):
    ledger, pure = Ledger(tmp_path / "budget.db", Budget(1.0, 0)), Budget(0.4, 0)
    release(np.full((3, 4), 7.0), Counts(1), pure, DiscreteLaplace((3, 4), 0.4), ledger=ledger)
    release(np.full((3, 4), 7.0), Counts(1), pure, "laplace", ledger=ledger)
    assert ledger.spent() == 0.8
    with pytest.raises(BudgetExceeded, match=r"epsilon at delta 0 would be 1\.2"):
        release(np.full((3, 4), 7.0), Counts(1), pure, DiscreteLaplace((3, 4), 0.4), ledger=ledger)
    found = verify_export(ledger.export())
    assert found, str(found)
    assert Ledger(tmp_path / "budget.db").spent() == 0.8


def test_its_pure_epsilons_add_up_in_a_ledger_with_a_delta(tmp_path):
    ledger = Ledger(tmp_path / "budget.db", Budget(1.0, 1e-6))
    for _ in range(2):
        release(np.full((3, 4), 7.0), Counts(1), Budget(0.4, 1e-9), DiscreteLaplace((3, 4), 0.4), ledger=ledger)
    with pytest.raises(BudgetExceeded):
        release(np.full((3, 4), 7.0), Counts(1), Budget(0.4, 1e-9), DiscreteLaplace((3, 4), 0.4), ledger=ledger)
    found = verify_export(ledger.export())
    assert found, str(found)


def test_a_ledger_with_delta_0_trusts_no_delta_that_was_rounded_to_0(tmp_path):
    """A profile that names no pure epsilon may have a delta too small for a float."""
    out = release(np.zeros((3, 4)), Counts(1), BUDGET, Unnamed((3, 4), 1.0))
    assert out.certificate.profile.delta(1.0) == 0.0
    with pytest.raises(BudgetExceeded, match="must be pure"):
        Ledger(tmp_path / "budget.db", Budget(2.0, 0)).spend(out.certificate)


def test_bad_registrations_are_refused():
    with pytest.raises(InvalidInput, match="derived from NoiseLaw"):
        register_law(dict, kind="acme.dict", profile=profile)
    with pytest.raises(InvalidInput, match="with a dot"):
        register_law(DiscreteLaplace, kind="laplace", profile=profile)
    with pytest.raises(InvalidInput, match="registered already"):
        register_law(DiscreteLaplace, kind="acme.discrete-laplace", profile=profile)
    with pytest.raises(InvalidInput, match="law is used as it is"):
        release(np.zeros((3, 4)), Counts(1), BUDGET, LAW, gamma=2.0)
    with pytest.raises(InvalidInput, match="shape"):
        release(np.zeros((2, 2)), Counts(1), BUDGET, LAW)
    with pytest.raises(NotCertifiable):
        release(np.zeros((3, 4)), Frobenius(1.0), BUDGET, LAW)

"""Budgets with delta = 0: discrete Laplace noise keeps them to the last digit, all else says that it cannot."""

import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from matrixdp import (
    L1,
    Accountant,
    Budget,
    Certificate,
    Counts,
    Entrywise,
    Frobenius,
    calibrate,
    certify,
    compare,
    release,
)
from matrixdp.accounting.accountant import noise_multiplier_for
from matrixdp.accounting.composition import Composition
from matrixdp.audit import audit_law
from matrixdp.distributions import Gaussian, Product
from matrixdp.distributions.covariance import Isotropic
from matrixdp.errors import GuaranteeViolated, InvalidInput, NotApplicable
from matrixdp.mechanisms import RECIPES
from matrixdp.pipeline import mu_of_each
from matrixdp.privacy import gaussian
from matrixdp.privacy.discrete import DiscreteProfile

PURE = Budget(1.0, 0)
SETS = [Counts(1), Counts(3), Counts(200), Counts(2, 0.3), Entrywise(0.7), L1(2.5), L1(2.5, 0.7), L1(5, 2, step=1)]


@pytest.mark.parametrize("sensitivity", SETS, ids=str)
@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 3.7, 100.0])
@pytest.mark.parametrize("mechanism", ["laplace", "discrete"])
def test_epsilon_is_kept_to_the_last_digit(sensitivity, epsilon, mechanism):
    """In fractions: the l1 sensitivity in steps, over the scale, is at most epsilon, and no smaller float would do."""
    law = calibrate(mechanism, shape=(15, 20), sensitivity=sensitivity, budget=Budget(epsilon, 0))
    certificate = certify(law, sensitivity)
    profile = certificate.profile
    total = sum(shift * cells for shift, cells in ((profile.shift, profile.cells), *profile.others))
    assert law.exponent == 1.0
    assert total <= Fraction(epsilon) * Fraction(law.scale_in_steps)
    if law.scale_in_steps > 2.0**-10:
        assert total > Fraction(epsilon) * Fraction(law.scale_in_steps) * (1 - Fraction(1, 2**51))
    assert certificate.epsilon(0) <= epsilon
    assert certificate.delta(epsilon) == 0.0
    assert certificate.delta(0.999 * certificate.epsilon(0)) > 0.0


@pytest.mark.parametrize("sensitivity", SETS, ids=str)
def test_a_pure_release_is_drawn_exactly_and_verifies(sensitivity):
    certificate = release(np.zeros((15, 20)), sensitivity, PURE, "laplace").certificate
    assert certificate.drawing.exact
    assert certificate.total_variation == 0.0
    assert certificate.float_safe
    assert certificate.meets(PURE)
    assert "pure differential privacy" in str(certificate)
    assert "takes longer" in str(certificate)
    back = Certificate.from_json(certificate.to_json())
    assert back.verify(), str(back.verify())
    assert back.epsilon(0) <= 1.0


def test_the_pure_epsilon_is_the_least_float_that_is_not_below_it():
    rng = np.random.default_rng(8)
    for _ in range(300):
        shift, cells, scale = int(rng.integers(1, 50)), int(rng.integers(1, 9)), float(np.exp(rng.uniform(-4, 9)))
        profile = DiscreteProfile(1.0, scale, shift, cells)
        found = profile.pure_epsilon
        assert (
            Fraction(math.nextafter(found, 0.0)) * Fraction(scale) < shift * cells <= Fraction(found) * Fraction(scale)
        )
        assert profile.delta(found) == 0.0 == profile.delta(1.5 * found)
        assert profile.delta(0.999 * found) > 0.0


def test_one_count_has_the_scale_of_the_textbook():
    out = release(np.arange(4.0), Counts(1), PURE, "laplace")
    assert out.noise.scale_in_steps == 1.0
    assert out.certificate.epsilon(0) == 1.0
    assert out.certificate.exact
    assert np.array_equal(out.value, np.round(out.value))


def test_pure_noise_has_the_certified_variance():
    """False alarm 1e-8, by a normal bound on the mean of 40,000 squares; 93 % of the scale must be seen."""
    out = release(np.zeros((200, 200)), Counts(4), PURE, "laplace")
    q = math.exp(-1 / out.noise.scale_in_steps)
    fourth = 2 * q * (1 + 10 * q + q**2) / (1 - q) ** 4
    spread = 6 * math.sqrt(fourth - out.noise.variance**2) / 200
    assert abs(np.mean(out.value**2) - out.noise.variance) < spread
    narrow = replace(out.noise, scale=0.93 * out.noise.scale).sample()
    assert not abs(np.mean(narrow**2) - out.noise.variance) < spread


def test_tables_are_not_pure():
    """The same law, drawn from tables, keeps no delta = 0; and a document cannot pass one off as the other."""
    law = calibrate("laplace", shape=(3,), sensitivity=Counts(1), budget=PURE)
    tabled = release(np.zeros(3), Counts(1), Budget(1.0, 1e-9), law).certificate
    assert tabled.drawing.exact is None
    assert tabled.epsilon(0) == math.inf
    assert not tabled.meets(PURE)
    assert "exact" not in json.loads(tabled.to_json())["drawing"]
    document = json.loads(tabled.to_json())
    document["drawing"]["exact"] = True
    assert not Certificate.from_json(json.dumps(document)).verify()


def test_a_law_with_a_larger_exponent_is_refused():
    with pytest.raises(GuaranteeViolated, match="does not keep epsilon 1, delta 0"):
        release(np.zeros(3), Counts(1), PURE, Product((3,), 1.0, 1.5, 50.0))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if not recipe.pure])
def test_other_mechanisms_say_that_they_cannot(name):
    options = {"mvg": {"gamma": 1.0}, "matrix-mechanism": {"workload": "prefix"}, "rank-r": {"rank": 1}}.get(name, {})
    with pytest.raises(NotApplicable, match="is not for delta = 0"):
        RECIPES[name].calibrate((4, 4), Counts(1), PURE, **options)


def test_a_gaussian_law_is_refused_and_never_made_finite():
    law = Gaussian(Isotropic((3,), 100.0))
    with pytest.raises(GuaranteeViolated, match="does not keep epsilon 1, delta 0"):
        release(np.zeros(3), Frobenius(1.0), PURE, law)
    out = release(np.zeros(3), Frobenius(1.0), PURE, law, accept_violation=True)
    assert out.noise.root_mean_square == 100.0
    assert out.certificate.epsilon(0) == math.inf
    back = Certificate.from_json(out.certificate.to_json())
    assert back.verify(), str(back.verify())


def test_what_cannot_keep_delta_0_says_so():
    for refused in (
        lambda: noise_multiplier_for(1.0, 0.0, 0.01, 10),
        lambda: mu_of_each(PURE, 3),
        lambda: gaussian.mu(1.0, 0.0),
    ):
        with pytest.raises(InvalidInput, match="delta"):
            refused()


def test_pure_epsilons_add_up_to_the_last_digit():
    accountant = Accountant()
    accountant.add(release(np.arange(3), Counts(1), Budget(0.25, 0)).certificate, 2)
    accountant.add(release(np.arange(3), Counts(1), Budget(0.1, 0)).certificate, 5)
    assert accountant.epsilon(0) == 1.0
    assert accountant.delta(1.0) == 0.0
    total = accountant.composition(PURE)
    assert total.meets(PURE)
    assert not total.meets(Budget(math.nextafter(1.0, 0.0), 0))
    assert Composition.from_json(total.to_json()).verify()
    assert not Composition.from_json(total.to_json().replace('"epsilon": 1.0', '"epsilon": 0.9')).verify()
    accountant.add(release(np.arange(3), Counts(1), Budget(0.25, 1e-9), "laplace").certificate)
    assert accountant.epsilon(0) == math.inf  # from tables
    other = Accountant()
    other.add(certify(Gaussian(Isotropic((2,), 1.0)), Frobenius(1.0)))
    assert other.epsilon(0) == math.inf


def test_a_scale_out_of_range_is_refused_in_words():
    for budget in (Budget(1e-12, 0), Budget(1e-300, 0)):
        with pytest.raises(NotApplicable):
            calibrate("laplace", shape=(9,), sensitivity=Counts(8), budget=budget)


def test_audits_of_pure_claims():
    law = calibrate("laplace", shape=(4,), sensitivity=Counts(1), budget=PURE)
    given = {"samples": 20_000, "rng": np.random.default_rng(3)}
    assert not audit_law(law, Counts(1), PURE, **given).rejected
    assert audit_law(replace(law, scale=0.7 * law.scale), Counts(1), PURE, **given).rejected
    gaussian_noise = audit_law(Gaussian(Isotropic((2,), 1.0)), Frobenius(1.0), PURE, **given)
    assert gaussian_noise.rejected
    assert gaussian_noise.epsilon_lower == math.inf


def test_an_audit_of_releases_themselves():
    """Each output is a release of its own, drawn exactly; an output without noise must be seen."""
    law = calibrate("laplace", shape=(2,), sensitivity=Counts(1), budget=PURE)
    given = {"samples": 600, "method": "clopper-pearson"}
    drawn = audit_law(law, Counts(1), PURE, release_fn=lambda v: release(v, Counts(1), PURE, law).value, **given)
    assert not drawn.rejected
    assert audit_law(law, Counts(1), PURE, release_fn=lambda value: value, **given).rejected


def test_trainings_and_federated_plans_refuse_it():
    torch = pytest.importorskip("torch")
    from matrixdp.federated.noise import budget_of_each
    from matrixdp.learn import PrivateSGD

    network, data = torch.nn.Linear(2, 1), torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="delta above 0"):
        PrivateSGD(network, optimizer, data, lambda *_: None, budget=PURE, batch_size=4, clip=1.0, steps=2)
    with pytest.raises(InvalidInput, match="delta above 0"):
        budget_of_each(PURE, 3)


def test_compare_shows_who_keeps_it():
    rows = {row.mechanism: row for row in compare(shape=(6, 10), sensitivity=Counts(1), budget=PURE)}
    assert rows["laplace"].verdict == "exact"
    assert rows["analytic"].verdict == "not applicable"


@pytest.mark.parametrize("bad", [-1e-9, 1.0, math.nan, True, "0", None])
def test_deltas_that_are_none(bad):
    with pytest.raises(InvalidInput, match="delta"):
        Budget(1.0, bad)


def test_no_value_shows_in_a_refusal():
    with pytest.raises(InvalidInput, match="too large") as caught:
        release(np.full(3, 2.0**60), Counts(1), PURE, "laplace")
    assert "1152921504606846976" not in str(caught.value)

"""Compositions as records: they round-trip, pickle, print, verify, and fail to verify when any number is changed."""

import copy
import json
import math
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest

from matrixdp import Accountant, Budget, certify, release
from matrixdp.accounting.composition import LOSSES_TOLERANCE, Composition, Part
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.distributions.covariance import Diagonal, Isotropic
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy import gaussian, spherical
from matrixdp.privacy.guarantee import Curve, GaussianProfile, Guarantee
from matrixdp.privacy.laws import register_law
from matrixdp.sensitivity import Counts, Frobenius

BUDGET = Budget(2.0, 1e-6)


@dataclass(frozen=True, eq=False)
class Flip(NoiseLaw):
    """A law of somebody else."""

    pure: float
    shape: tuple[int, ...] = (1,)

    def sample(self, rng=None):
        return np.ones(self.shape)

    def expected_squared_error(self, weights=None):
        return 1.0

    def describe(self):
        return f"flips with {self.pure:g}"


def flip_profile(law, sensitivity):
    return Curve((0.0, law.pure), (math.tanh(law.pure / 2) * (1 + 1e-12), 0.0))


register_law(Flip, kind="composition-test.flip", profile=flip_profile, float_safe=True)


def drawn(mechanism="analytic", sensitivity=None, shape=(4, 3)):
    return release(np.zeros(shape), sensitivity or Counts(1), Budget(0.3, 1e-6), mechanism).certificate


def closed():
    """Gaussian noise without sampling, drawn, merely certified and merely stated."""
    certified = certify(Gaussian(Diagonal(np.linspace(3.0, 5.0, 6).reshape(2, 3))), Frobenius(1.5))
    stated = Guarantee(GaussianProfile(0.2), "add/remove", 1e-12)
    published = replace(drawn(), released={"name": "histogram.csv", "sha256": "0" * 64})
    return Composition((Part(published, 3), Part(certified), Part(stated, 2)), BUDGET)


def sampled():
    """A training and a histogram: what privacy-loss distributions are for."""
    step = certify(Gaussian(Isotropic((5,), 1.3)), Frobenius(1.0))
    return Composition((Part(step, 200, 0.02), Part(drawn(), 2)), BUDGET)


def every_kind():
    """Noise of all kinds, with a law from outside the package."""
    ball = certify(release(np.zeros(3), Frobenius(1.0), BUDGET, "l2", accept_violation=True).noise, Frobenius(1.0))
    flip = certify(Flip(0.1), Counts(1))
    return Composition((Part(ball), Part(flip, 4, 0.5), Part(Guarantee(Curve((0.0, 1.0), (0.1, 0.0)), "add/remove"))))


def again(composition):
    return Composition.from_json(composition.to_json())


# --- the record ---


@pytest.mark.parametrize("make", [closed, sampled, every_kind])
def test_written_read_and_verified(make):
    composition = make()
    read = again(composition)
    for delta in (1e-3, 1e-6):
        assert read.epsilon(delta) == composition.epsilon(delta)
    assert read.delta(1.0) == composition.delta(1.0)
    assert read.to_json() == composition.to_json()
    assert json.loads(composition.to_json())["matrixdp"] == "composition"
    for each in (composition, read, pickle.loads(pickle.dumps(composition)), pickle.loads(pickle.dumps(read))):
        found = each.verify()
        assert found, str(found)
        assert found.compared > 20
        assert str(each) == str(composition)


def test_the_numbers_are_those_of_an_accountant():
    for composition in (closed(), sampled()):
        accountant = Accountant()
        for part in composition.parts:
            accountant.add(part.certificate, part.count, part.sampling_rate)
        assert accountant.history == accountant.composition().parts
        assert accountant.composition(BUDGET).to_json() == composition.to_json()
        assert accountant.epsilon(1e-5, "pld") == composition.epsilon(1e-5, "pld")
        assert composition.adjacency == accountant.adjacency
        assert composition.meets(BUDGET) == (accountant.delta(BUDGET.epsilon) <= BUDGET.delta)


def test_closed_form_and_mu():
    composition = closed()
    mus = [part.certificate.mu for part in composition.parts for _ in range(part.count)]
    assert composition.closed_form
    assert composition.mu == pytest.approx(math.hypot(*mus), rel=1e-12)
    assert composition.delta(1.0) >= gaussian.delta(math.hypot(*mus) * (1 - 1e-12), 1.0)
    assert (sampled().closed_form, sampled().mu) == (False, None)
    nothing = Composition(())
    assert (nothing.adjacency, nothing.epsilon(1e-6), nothing.delta(0.0), nothing.mu) == (None, 0.0, 0.0, 0.0)
    assert again(nothing).verify()


def test_print():
    text = str(sampled())
    assert text.splitlines()[0] == "Privacy of a composition"
    assert "200 x mu = 0.769231, each record sampled with probability 0.02" in text
    assert "privacy-loss distributions" in text
    assert "asked for  epsilon 2, delta 1e-06: kept" in text
    assert "stated without a law" in str(closed())
    assert "covers" in str(closed())
    assert "covers" not in str(Composition((Part(drawn(), 3),)))
    assert "NOT kept" in str(Composition((Part(drawn(), 300),), BUDGET))


def test_only_what_was_drawn_safely_keeps_a_budget():
    unsafe = release(np.zeros(3), Frobenius(1.0), Budget(0.1, 1e-6), "l2", accept_violation=True).certificate
    assert unsafe.unsafe_floats
    composition = Composition((Part(unsafe),), BUDGET)
    assert composition.delta(BUDGET.epsilon) <= BUDGET.delta
    assert not composition.meets(BUDGET)
    assert not composition.float_safe
    assert again(composition).verify()
    assert Composition((Part(drawn()),)).float_safe


def test_remarks_say_what_was_not_proved():
    text = str(closed().verify())
    assert "parts[2] states a guarantee without a law" in text
    assert "nothing is signed" in text
    with pytest.warns(UserWarning, match="generator"):
        seeded = release(np.zeros(3), Counts(1), BUDGET, rng=np.random.default_rng(1)).certificate
    assert "seeded" in str(Composition((Part(seeded),)).verify())
    foreign = release(np.zeros(1), Counts(1), BUDGET, Flip(0.1)).certificate
    assert "does not vouch" in str(Composition((Part(foreign),)).verify())
    assert again(Composition((Part(foreign, 3),))).verify()


def test_different_neighbours_do_not_add_up():
    parts = (Part(Guarantee(GaussianProfile(0.5), "replace")), Part(Guarantee(GaussianProfile(0.5), "add/remove")))
    with pytest.raises(InvalidInput, match="adjacency"):
        Composition(parts)


@pytest.mark.parametrize("bad", [None, 1, "part", GaussianProfile(1.0), Guarantee(GaussianProfile(1.0), "replace")])
def test_bad_parts(bad):
    with pytest.raises(InvalidInput):
        Composition((bad,))
    with pytest.raises(InvalidInput, match="budget"):
        Composition((), budget=bad or 1)


# --- tampering ---


def leaves(content, path=()):
    """The place of every number, truth value and string."""
    if isinstance(content, dict):
        for name, part in content.items():
            yield from leaves(part, (*path, name))
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield from leaves(part, (*path, index))
    else:
        yield path, content


def changed(value, factor):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * factor if value else 1e-3
    return f"{value} " if isinstance(value, str) else 1.0


def tampered(document, path, value):
    result = copy.deepcopy(document)
    inside = result
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    return json.dumps(result)


def verifies(text):
    try:
        return bool(Composition.from_json(text).verify())
    except MatrixDPError:
        return False


def is_remark(path):
    """Whether nothing follows from this entry: words, or the name of the file that was released."""
    return path[-1] in ("remark", "source", "note") or "released" in path


@pytest.mark.parametrize("factor", [1.0001, 0.9999])
def test_any_changed_entry_is_found(factor):
    document = closed().to_dict()
    places = [(path, value) for path, value in leaves(document) if not is_remark(path)]
    numbers = {path[-1] for path, _ in places}
    assert {"count", "sampling_rate", "mu", "delta", "epsilon", "std", "total_variation", "keeps_budget"} <= numbers
    assert len(places) > 100
    for path, value in places:
        assert not verifies(tampered(document, path, changed(value, factor))), path


@pytest.mark.slow
def test_any_changed_entry_of_a_sampled_composition_is_found():
    document = sampled().to_dict()
    places = [(path, value) for path, value in leaves(document) if "certificate" not in path]
    places += [(("parts", 0, "certificate", "law", "covariance", "std"), 1.3)]
    for path, value in places:
        assert not verifies(tampered(document, path, changed(value, 0.9999))), path


def test_entries_that_were_added_or_removed_are_found():
    document = closed().to_dict()
    for name in document:
        assert not verifies(json.dumps({key: value for key, value in document.items() if key != name}))
    for name in document["guarantee"]:
        rest = {key: value for key, value in document["guarantee"].items() if key != name}
        assert not verifies(json.dumps({**document, "guarantee": rest}))
    assert not verifies(json.dumps({**document, "parts": document["parts"][:-1]}))
    assert not verifies(json.dumps({**document, "parts": document["parts"] * 2}))
    assert not verifies(json.dumps({**document, "more": 1}))
    stated = {**document["parts"][0], "stated": document["parts"][2]["stated"]}
    assert not verifies(json.dumps({**document, "parts": [stated, *document["parts"][1:]]}))


def test_a_total_is_computed_from_laws_and_not_from_stated_profiles():
    """A part whose profile was made smaller, with the total that would follow from it."""
    true = certify(Gaussian(Isotropic((5,), 1.3)), Frobenius(1.0))
    lie = Composition((Part(replace(true, profile=GaussianProfile(0.01)), 10),), BUDGET)
    for composition in (lie, again(lie)):
        found = {finding.entry: finding for finding in composition.verify().findings}
        assert {"parts[0].certificate.guarantee.mu", "guarantee.epsilon", "guarantee.mu"} <= found.keys()
        assert found["guarantee.epsilon"].computed == Composition((Part(true, 10),)).epsilon(BUDGET.delta)


@pytest.mark.parametrize("mu", [math.nan, -1.0, "1", None, True])
def test_a_stated_profile_must_be_one(mu):
    document = closed().to_dict()
    document["parts"][2]["stated"]["profile"]["mu"] = mu
    document["parts"][2]["stated"]["mu"] = mu
    assert not verifies(json.dumps(document))
    document["parts"][2]["stated"]["profile"] = {"kind": "budget", "epsilon": 1.0, "delta": 1e-6}
    with pytest.raises(MatrixDPError, match="profile"):
        Composition.from_json(json.dumps(document))


HEAD = '"matrixdp": "composition", "schema": 1'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", f"{{{HEAD}}}", f'{{{HEAD}, "parts": "", "budget": null, "guarantee": {{}}}}', "{" * 10**5]
)
def test_what_is_no_composition(text):
    with pytest.raises(InvalidInput):
        Composition.from_json(text)
    with pytest.raises(InvalidInput, match="composition"):
        Composition.from_json(drawn().to_json())


def test_privacy_loss_distributions_agree_within_their_tolerance():
    document = sampled().to_dict()
    for factor, fine in ((1 + LOSSES_TOLERANCE / 2, True), (1 - LOSSES_TOLERANCE / 2, True), (1 - 3e-6, False)):
        other = copy.deepcopy(document)
        other["guarantee"]["epsilon"] *= factor
        assert verifies(json.dumps(other)) == fine
    exact = closed().to_dict()
    exact["guarantee"]["epsilon"] *= 1 - 1e-8
    assert not verifies(json.dumps(exact))


def test_a_total_that_cannot_be_computed_does_not_verify():
    document = closed().to_dict()
    document["parts"][2]["stated"]["profile"] = {"kind": "curve", "epsilons": [0.0, 1.0], "deltas": [1.0, 1.0]}
    found = Composition.from_json(json.dumps(document)).verify()
    assert [finding.entry for finding in found.findings] == ["guarantee"]


def test_parts_for_other_neighbours_are_found_by_their_sets():
    law = Gaussian(Isotropic((5,), 1.3))
    parts = [Part(certify(law, Frobenius(1.0, adjacency=adjacency))) for adjacency in ("add/remove", "replace")]
    document = Composition((parts[0], parts[0]), BUDGET).to_dict()
    document["parts"][1] = Composition((parts[1],), BUDGET).to_dict()["parts"][0]
    document["parts"][1]["certificate"]["guarantee"]["adjacency"] = "add/remove"
    found = Composition.from_json(json.dumps(document)).verify()
    assert "guarantee" in {finding.entry for finding in found.findings}


def test_spherical_noise_may_be_stated():
    stated = Guarantee(spherical.Profile(3, 3, 1.0, 5.0, 1.0), "add/remove")
    composition = Composition((Part(stated, 2),))
    assert again(composition).verify()
    assert again(composition).epsilon(1e-6) == composition.epsilon(1e-6)

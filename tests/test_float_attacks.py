"""What the floating-point numbers of a release reveal: attacks on their last bits, through the public interface.

A sum of floats can reach only some floats, and which ones depends on the value. From a true value of 1 no noise added
in floating point gives a result below 1/2 in size that is no multiple of 2^-53; from 0 a share of all draws does. One
such result proves the value, whatever epsilon is. On a grid the numbers that can come out are the same for all values.
"""

import math
from dataclasses import replace
from functools import cache

import dask.array
import numpy as np
import pytest
import torch

from matrixdp import Budget, calibrate, certify, compare, release
from matrixdp.audit import audit
from matrixdp.distributions import Gaussian, Product, Spherical
from matrixdp.distributions.covariance import Isotropic, Kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import GuaranteeViolated, NotApplicable
from matrixdp.mechanisms import RECIPES
from matrixdp.mechanisms.base import recipe
from matrixdp.privacy.certificate import refuse_unsafe_floats
from matrixdp.privacy.drawing import Drawing
from matrixdp.queries import histogram
from matrixdp.sensitivity import Counts, Frobenius, OneColumn, RankOne, Vertices

BUDGET = Budget(1.0, 1e-6)
BALL = Frobenius(1.0)
SPHERICAL = ("l2", "spherical")
OPTIONS = {"mvg": {"gamma": 3.0}, "matrix-mechanism": {"workload": "prefix"}}
SETTINGS = [((4, 3), BALL), ((4, 3), OneColumn(1.0)), ((3, 3), RankOne(1.0)), ((4, 4), Counts(1))]


@pytest.fixture(autouse=True, scope="module")
def _calibrated_once():
    """Spherical laws take up to seconds to calibrate, and are asked for many times here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SPHERICAL:
            patch.setitem(RECIPES, name, replace(RECIPES[name], propose=cache(RECIPES[name].propose)))
        yield


@pytest.fixture
def analytic_alone():
    """All other mechanisms are gone for a while; afterwards they are back in their order."""
    everything = dict(RECIPES)
    for name in everything:
        if name != "analytic":
            del RECIPES[name]
    yield
    RECIPES.clear()
    RECIPES.update(everything)


class Book:
    """A ledger that records."""

    def __init__(self):
        self.entries = []

    def spend(self, certificate, note=""):
        self.entries.append(certificate)


def event(outputs):
    """Out of reach from a true value of 1, for noise added in floating point."""
    return (np.abs(outputs) < 0.5) & (np.mod(outputs * 2.0**53, 1.0) != 0)


def drawn_in_floating_point(monkeypatch):
    """Plants the fault: the release is value + noise, as floats add."""
    fault = lambda value, law, drawing, rng=None, original=None: lambda: value + law.sample(rng)  # noqa: E731
    monkeypatch.setattr("matrixdp.backends.numpy.prepared", fault)


@pytest.mark.parametrize("mechanism", SPHERICAL)
@pytest.mark.parametrize(
    "value", [np.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64), dask.array.zeros(2)], ids=type
)
def test_noise_without_a_proof_about_floats_is_refused(value, mechanism):
    book = Book()
    for options in ({}, {"accept_violation": "yes"}, {"ledger": book}):
        with pytest.raises(GuaranteeViolated, match=r"not floating-point-safe.*ideal law.*Use the mechanism 'auto'"):
            release(value, BALL, BUDGET, mechanism, **options)
    assert not book.entries


@pytest.mark.parametrize("mechanism", ["l2", "r1smg"])
def test_an_accepted_violation_is_not_charged(mechanism):
    book = Book()
    with pytest.raises(GuaranteeViolated, match=r"to a ledger refused: .* not floating-point-safe"):
        release(np.zeros(3), BALL, BUDGET, mechanism, ledger=book, accept_violation=True)
    assert not book.entries


def test_an_accepted_violation_with_gaussian_noise_is_charged_its_true_profile(monkeypatch):
    @recipe("short", source="nowhere")
    def short(shape, sensitivity, budget):
        return Gaussian(
            Isotropic(
                shape, 0.9 * calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=budget).root_mean_square
            )
        )

    monkeypatch.setitem(RECIPES, "short", short)
    book = Book()
    out = release(np.zeros(3), BALL, BUDGET, "short", ledger=book, accept_violation=True)
    assert book.entries == [out.certificate]
    assert out.certificate.float_safe
    assert out.certificate.epsilon(1e-6) > 1.0


@pytest.mark.parametrize("mechanism", SPHERICAL)
def test_what_is_released_on_purpose_claims_nothing_about_its_floats(mechanism):
    out = release(np.zeros(2), BALL, BUDGET, mechanism, accept_violation=True)
    certificate = out.certificate
    assert certificate.delta(1.0) <= 1e-6  # of the ideal law
    assert not certificate.meets(BUDGET)
    assert not certificate.float_safe
    assert "exact for the ideal law only" in str(certificate)
    assert "the ideal law only, not the floating-point numbers released" in str(certificate)
    assert certificate.to_dict()["guarantee"]["covers"] == "the ideal law only, not the floating-point numbers released"
    with pytest.raises(GuaranteeViolated, match=r"^a step refused: the noise of .* is not floating-point-safe"):
        refuse_unsafe_floats(certificate, "a step")


def test_what_every_certificate_covers():
    law = calibrate("l2", shape=(2,), sensitivity=BALL, budget=BUDGET)
    ideal = certify(law, BALL, BUDGET)
    assert ideal.meets(BUDGET)  # a statement about a law that nobody has drawn
    refuse_unsafe_floats(ideal, "release")
    assert "no floating-point-safe sampler is known" in str(ideal)
    assert "(exact)" not in str(ideal)
    seeded = certify(law, BALL, BUDGET, Drawing(reproducible=True))
    refuse_unsafe_floats(seeded, "release")
    assert seeded.meets(BUDGET)
    assert "seeded noise is not private" in seeded.covers
    gaussian = calibrate("analytic", shape=(2,), sensitivity=BALL, budget=BUDGET)
    assert "(exact)" in str(certify(gaussian, BALL))
    out = release(np.zeros(2), BALL, BUDGET, "analytic")
    refuse_unsafe_floats(out.certificate, "release")
    assert out.certificate.to_dict()["guarantee"]["covers"] == "the floating-point numbers released"
    assert "covers" not in str(out)


def test_a_covariance_that_cannot_be_whitened_exactly_is_refused_too():
    rows = Spectrum(np.array([1.0, 1e-13]), directions=np.array([[0.6, 0.8], [-0.8, 0.6]]))
    book = Book()
    for options in ({}, {"ledger": book, "accept_violation": True}):
        with pytest.raises(GuaranteeViolated, match="not floating-point-safe"):
            release(np.zeros((2, 2)), BALL, BUDGET, "imgm", rows=rows, **options)
    assert not book.entries
    out = release(np.zeros((2, 2)), BALL, BUDGET, "imgm", rows=rows, accept_violation=True)
    assert out.certificate.mu is not None
    assert "ideal law only" in str(out)
    table = compare((2, 2), BALL, BUDGET, rows=rows)
    assert next(row.verdict for row in table if row.mechanism == "imgm") == "not float-safe"


@pytest.mark.usefixtures("analytic_alone")
def test_auto_does_not_take_the_least_noise_if_it_is_not_floating_point_safe():
    """The set has one direction, and noise along it alone would be enough."""
    directions = np.array([[0.6, 0.8], [-0.8, 0.6]])
    only = Vertices(directions[:, :1])
    std = calibrate("analytic", shape=(2, 1), sensitivity=only, budget=BUDGET).root_mean_square

    def taken(ratio):
        @recipe("thin", source="nowhere")
        def thin(shape, sensitivity, budget):
            spectrum = Spectrum(np.array([1.0, ratio]), directions=directions)
            return Gaussian(Kronecker(spectrum, np.ones(1)).scaled(1.001 * std))

        RECIPES["thin"] = thin
        verdict = next(row.verdict for row in compare((2, 1), only, BUDGET) if row.mechanism == "thin")
        return verdict, release(np.zeros((2, 1)), only, BUDGET).noise.source.partition(" ")[0]

    assert taken(0.1) == ("loose", "thin")
    assert taken(1e-13) == ("not float-safe", "analytic")


def test_compare_says_that_the_law_alone_keeps_the_claim():
    table = compare((2,), BALL, BUDGET, mechanisms=["analytic", *SPHERICAL])
    assert {row.mechanism: row.verdict for row in table} == {
        "analytic": "exact",
        "l2": "not float-safe",
        "spherical": "not float-safe",
    }
    assert table.rows[0].mechanism == table.auto == "analytic"
    text = " ".join(str(table).split())
    assert "release refuses it: the guarantee does not cover the floating-point numbers" in text


def unreachable(out):
    """How many coordinates are off the grid that the law alone determines; 0 if the numbers can come from any value.

    The coordinates in which the noise was drawn are recovered by rounding, and what they give must be the release, bit
    by bit.
    """
    if isinstance(out.noise, Product):
        return int(np.sum(out.noise.step * np.rint(out.value / out.noise.step) != out.value))
    covariance, step = out.noise.covariance, out.certificate.drawing.grid.step
    if isinstance(covariance, Isotropic):
        unit = covariance.std * step
        return int(np.sum(unit * np.rint(out.value / unit) != out.value))
    white = covariance.coordinates(covariance.whiten(out.value))
    again = covariance.color(covariance.assemble(step * np.rint(white / step)))
    return int(np.sum(again != out.value))


def safe_cases():
    rows = np.array([[2.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 1.0]])
    yield pytest.param((3, 4), BALL, BUDGET, {"mechanism": "imgm", "rows": rows}, id="correlated rows")
    for name, known in RECIPES.items():
        for shape, sensitivity in SETTINGS:
            if known.refuted or name in (*SPHERICAL, "rank-r") or (known.slow and not isinstance(sensitivity, Counts)):
                continue
            given = {"mechanism": name, **OPTIONS.get(name, {})}
            yield pytest.param(shape, sensitivity, Budget(0.9, 1e-6), given, id=f"{name} {sensitivity}")


@pytest.mark.parametrize(("shape", "sensitivity", "budget", "given"), list(safe_cases()))
def test_the_numbers_that_can_come_out_do_not_depend_on_the_value(shape, sensitivity, budget, given, monkeypatch):
    values = [np.zeros(shape), np.full(shape, 1.0), np.full(shape, 1 / 3), np.full(shape, 1e-9)]
    try:
        outs = [release(value, sensitivity, budget, **given) for value in values]
    except NotApplicable:
        pytest.skip("no theorem for this set")
    assert [unreachable(out) for out in outs] == [0] * len(outs)
    drawn_in_floating_point(monkeypatch)
    assert unreachable(release(values[2], sensitivity, budget, **given)) > 0


@pytest.mark.parametrize("mechanism", ["analytic", "optimal"])
def test_the_event_has_the_same_support_for_both_neighbours(mechanism, monkeypatch):
    """False alarm 1e-6 (Hoeffding): from 1 the event happens e^-epsilon times as often as from 0, or more."""
    draws = 400_000
    slack = math.sqrt(draws * math.log(2e6) / 2) * (1 + math.e)

    def hits(value):
        # one cell changes at most, so every cell is a release of its own
        return int(event(release(np.full(draws, value), Counts(1), BUDGET, mechanism).value).sum())

    def revealing():
        return hits(0.0) > math.e * hits(1.0) + draws * BUDGET.delta + slack

    assert not revealing()
    drawn_in_floating_point(monkeypatch)
    # the planted noise has steps of 2^-28, which the event does not see: as floats have it, with all their digits
    monkeypatch.setattr(
        Gaussian, "sample", lambda law, rng: law.root_mean_square * np.random.default_rng().normal(size=law.shape)
    )
    assert hits(1.0) == 0
    assert revealing()


def test_a_histogram_does_not_prove_that_a_cell_is_empty():
    """With noise added in floating point a fifth of these releases prove the cell empty, rightly each time."""

    def proofs(people, **options):
        records = np.array([[0.5]] * 3 + [[1.5]] * people)
        answer = histogram(records, edges=[0, 1, 2])
        return sum(bool(event(release(*answer, BUDGET, **options).value[1])) for _ in range(200))

    assert proofs(0, mechanism="l2", accept_violation=True) > 0  # none in 4e-20 of all runs
    assert proofs(1, mechanism="l2", accept_violation=True) == 0
    with pytest.raises(GuaranteeViolated):
        proofs(0, mechanism="l2")


def test_an_audit_with_this_event_rejects_floats_and_not_the_grid():
    law = calibrate("l2", shape=(1,), sensitivity=BALL, budget=BUDGET)
    assert isinstance(law, Spherical)
    pair = (np.zeros(1), np.ones(1))

    def score(outputs):
        return event(outputs[:, 0]).astype(float)

    found = audit(lambda value: value + law.sample(), *pair, 1.0, 1e-6, samples=1000, statistic=score)
    assert found.verdict == "rejected"
    grid = audit(
        lambda value: release(value, BALL, BUDGET, "analytic").value,
        *pair, 1.0, 1e-6, samples=1000, statistic=score,
    )  # fmt: skip
    assert grid.verdict == "not rejected"

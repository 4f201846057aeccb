"""Certificates as data: they come back from JSON as they were, and no changed number passes."""

import base64
import copy
import json
import math
import pickle

import numpy as np
import pytest

from matrixdp import (
    Budget,
    Certificate,
    Counts,
    Entrywise,
    Frobenius,
    OneColumn,
    OneRow,
    RankOne,
    Vertices,
    calibrate,
    certify,
    queries,
    release,
)
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Blocks, Dense, Diagonal, Isotropic, Kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import InvalidInput, MatrixDPError
from matrixdp.privacy import records
from matrixdp.privacy.verification import close, recomputed

BUDGET = Budget(1.0, 1e-6)
RNG = np.random.default_rng(5)
TURNED = np.linalg.qr(RNG.standard_normal((3, 3))).Q
SPREAD = RNG.uniform(1.0, 3.0, (3, 4))


def released(value, sensitivity, mechanism="auto", **options):
    return release(value, sensitivity, BUDGET, mechanism, **options).certificate


def given(covariance, sensitivity):
    return release(np.zeros(covariance.shape), sensitivity, Budget(8.0, 1e-3), Gaussian(covariance)).certificate


ANSWERS = {
    "sum": queries.sum(RNG.random((9, 3)), norm=2.0),
    "sum in a box": queries.sum(RNG.random((9, 2)), low=[-1.0, 0.0], high=[1.0, 3.0], adjacency="replace"),
    "mean": queries.mean(RNG.random((9, 3)), norm=2.0, adjacency="replace"),
    "second moment": queries.second_moment(RNG.random((9, 3)), norm=2.0, average=True, size=50),
    "covariance": queries.covariance(RNG.random((9, 3)), norm=2.0, adjacency="replace"),
    "covariance about a center": queries.covariance(RNG.random((9, 2)), norm=2.0, center=[0.1, 0.2], size=9),
    "histogram": queries.histogram(RNG.random((9, 2)), edges=[[0.0, 0.5, 1.0], [0.0, 0.3, 0.6, 1.0]]),
    "identity": queries.identity(RNG.random((9, 3)), norm=2.0),
    "identity in a box": queries.identity(RNG.random((9, 3)), low=0.0, high=[1.0, 2.0, 3.0], adjacency="zero-out"),
}
CERTIFICATES = {
    "counts": lambda: released(np.zeros((3, 4)), Counts(2, bound=1.5, adjacency="replace")),
    "frobenius": lambda: released(np.zeros(5), Frobenius(1.25)),
    "entrywise": lambda: released(np.zeros((3, 4)), Entrywise(SPREAD)),
    "one row": lambda: released(np.zeros((3, 4)), OneRow(low=0.0, high=[1.0, 2.0, 3.0, 4.0])),
    "one column": lambda: released(np.zeros((3, 4)), OneColumn(2.0)),
    "rank one": lambda: released(np.zeros((4, 4)), RankOne(1.5)),
    "vertices": lambda: released(np.zeros((2, 2)), Vertices(np.eye(2), np.ones((2, 2)) / 4)),
    "mvg": lambda: released(np.zeros((3, 4)), Frobenius(1.0), "mvg", gamma=5.0),
    "diagonal": lambda: given(Diagonal(SPREAD), Frobenius(1.0)),
    "kronecker": lambda: given(Kronecker(Spectrum(np.array([4.0, 9.0, 16.0]), TURNED), np.arange(1.0, 5.0)), Counts(1)),
    "dense": lambda: given(Dense(Spectrum(np.array([4.0, 9.0, 16.0]), TURNED)), Frobenius(1.0)),
    "blocks": lambda: given(Blocks((Isotropic((2,), 3.0), Diagonal(np.array([2.0, 5.0])))), Frobenius(1.0)),
    "spherical law": lambda: certify(
        calibrate("l2", shape=(2, 2), sensitivity=Frobenius(1.0), budget=BUDGET), Frobenius(1.0), BUDGET
    ),
    "without a budget": lambda: certify(Gaussian(Isotropic((3,), 5.0)), Frobenius(1.0)),
    **{
        f"query: {name}": lambda answer=answer: released(*answer, query=answer.query)
        for name, answer in ANSWERS.items()
    },
}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in CERTIFICATES.items()}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_certificate_comes_back_from_json_and_verifies(made, name):
    certificate = made[name]
    text = certificate.to_json()
    back = Certificate.from_json(text)
    assert back.to_json() == text  # to the last digit
    assert str(back) == str(certificate)
    found = back.verify()
    assert found, str(found)
    assert found.compared > 20
    for epsilon in (0.1, 1.0, 3.0):
        assert back.delta(epsilon) == certificate.delta(epsilon)
    np.testing.assert_array_equal(back.witness, certificate.witness)


MATRICES = {
    "nearly the identity": lambda n: np.eye(n) + 1e-9,
    "all alike": lambda n: np.eye(n) + 0.3,
    "neighbours alike": lambda n: 0.9 ** np.abs(np.subtract.outer(np.arange(n), np.arange(n))),
    "random": lambda n: np.cov(np.random.default_rng(n).standard_normal((n, 2 * n))).reshape(n, n) + 0.1 * np.eye(n),
}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10, 30])
@pytest.mark.parametrize("name", MATRICES)
def test_a_covariance_matrix_comes_back_from_json_and_verifies(name, size):
    """Its spectrum is read again unchanged: neither directions nor rounding are found to be other than stated."""
    matrix = MATRICES[name](size)
    for covariance in (Dense(matrix), Kronecker(matrix, np.array([1.0, 2.0])), Kronecker(np.ones(2), matrix)):
        found = Certificate.from_json(certify(Gaussian(covariance), Frobenius(1.0)).to_json()).verify()
        assert found, str(found)


def test_correlated_noise_without_a_largest_norm_is_no_proof_about_floats():
    """Whitening rounds in proportion to the value, so without a limit nothing follows for the numbers released."""
    law, change = Gaussian(Dense(np.eye(3) + 0.3)), Frobenius(0.1)
    certificate = release(np.zeros(3), change, BUDGET, law).certificate
    assert certificate.float_safe
    for norm in (None, -1.0, math.nan, "large"):
        document = json.loads(certificate.to_json())
        document["drawing"]["largest_norm"] = norm
        try:
            back = Certificate.from_json(json.dumps(document))
        except InvalidInput:
            continue
        assert not recomputed(back).float_safe


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_certificate_pickles(made, name):
    back = pickle.loads(pickle.dumps(made[name]))
    assert back.to_json() == made[name].to_json()
    assert back.verify()


def leaves(content, path=()):
    """Every number, truth value and array in a document; the texts that only people read are no claims."""
    if isinstance(content, dict):
        for name, part in content.items():
            yield from leaves(part, (*path, name))
    elif isinstance(content, list):
        for index, part in enumerate(content):
            yield from leaves(part, (*path, index))
    elif isinstance(content, (bool, int, float)) or path[-1] in ("float64", "adjacency", "kind"):
        yield path, content


def tampered(value):
    """Other values for an entry: a little more, a little less, and much more."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value - 1, 0) if value != 1 else 7, 10**400]
    if isinstance(value, float):
        return [10**400, value * (1 + 1e-6), value * (1 - 1e-6), value * 2 + 1.0, value / 2 + 1e-3]
    if value in ("add/remove", "replace", "zero-out"):
        return [other for other in ("add/remove", "replace", "zero-out") if other != value]
    if value in records._BUILD:
        return [other for other in ("frobenius", "gaussian-profile", "isotropic") if other != value]
    numbers = np.frombuffer(base64.b64decode(value), dtype="<f8").copy()
    numbers[len(numbers) // 2] *= 1 + 1e-4
    return [base64.b64encode(numbers.tobytes()).decode()]


# What was asked, and no guarantee depends on: where the cells and the center lie, and the nearer end of a box.
FREE = {("query", "parameters", name) for name in ("edges", "center")}


def with_entry(document, path, value):
    changed = copy.deepcopy(document)
    place = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return changed


def passes(document):
    try:
        return bool(Certificate.from_json(json.dumps(document)).verify())
    except MatrixDPError:
        return False


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "spherical law" else n for n in CERTIFICATES]
)
def test_no_changed_number_passes(made, name):
    document = made[name].to_dict()
    assert passes(document)
    entries = list(leaves(document))
    assert len(entries) > 15
    for path, value in entries:
        if path[:3] in FREE or (name == "query: identity in a box" and path[:3] == ("query", "parameters", "low")):
            continue
        for other in tampered(value):
            if other == value or (isinstance(other, float) and math.isclose(other, value, rel_tol=1e-8)):
                continue
            assert not passes(with_entry(document, path, other)), (path, value, other)


@pytest.mark.parametrize("factor", [1 - 1e-7, 1 + 1e-7])
@pytest.mark.parametrize("entry", [("guarantee", "mu"), ("guarantee", "epsilon"), ("guarantee", "delta")])
def test_a_result_must_agree_both_ways(made, entry, factor):
    document = made["frobenius"].to_dict()
    value = document[entry[0]][entry[1]]
    assert not passes(with_entry(document, entry, value * factor))
    assert passes(with_entry(document, entry, value * (1 + (factor - 1) * 1e-4)))  # as another machine may find it


def test_findings_quote_words(made):
    document = made["frobenius"].to_dict()
    (finding,) = Certificate.from_json(json.dumps(with_entry(document, ("facts", "noise"), "none"))).verify().findings
    assert "the document says 'none', computed again it is '" in str(finding)


def test_a_whole_consistent_lie_is_a_certificate_of_another_law(made):
    """Whoever changes the law and computes everything again has a true certificate: of the law that it now names."""
    smaller = certify(Gaussian(Isotropic((5,), 0.1)), Frobenius(1.25), BUDGET)
    assert Certificate.from_json(smaller.to_json()).verify()
    assert not Certificate.from_json(smaller.to_json()).meets(BUDGET)


def test_what_cannot_be_read_is_refused():
    document = certify(Gaussian(Isotropic((3,), 5.0)), Frobenius(1.0)).to_dict()
    broken = {
        "no json": "{",
        "a list": "[]",
        "no law": json.dumps({k: v for k, v in document.items() if k != "law"}),
        "a newer schema": json.dumps({**document, "schema": 2}),
        "an unknown kind": json.dumps(with_entry(document, ("law", "kind"), "acme.nothing")),
        "a law that is a set": json.dumps({**document, "law": document["sensitivity"]}),
        "an entry too many": json.dumps(with_entry(document, ("law", "extra"), 1)),
        "a string for a number": json.dumps(with_entry(document, ("law", "covariance", "std"), "5.0")),
        "nan": json.dumps(with_entry(document, ("law", "covariance", "std"), math.nan)),
        "an entry twice": json.dumps(document).replace('"mu":', '"mu": 0.01, "mu":'),  # of which readers take either
    }
    for name, text in broken.items():
        with pytest.raises(InvalidInput):
            Certificate.from_json(text)
        assert name


NONSENSE = [math.nan, -math.inf, 10**400, "1.0", "", None, True, [], {}, [[1.0], 2.0], {"array": [1.0]}, {"float": "x"}]
WORDS = {("law", "source"), ("law", "note"), ("remark",), ("query",)}  # people alone read these; a query may be absent


@pytest.mark.parametrize("name", ["frobenius", "counts", "kronecker", "vertices", "rank one", "query: covariance"])
def test_nonsense_in_any_place_is_refused_and_nothing_else_happens(made, name):
    document = made[name].to_dict()
    for path, value in [*places(document)]:
        other = NONSENSE[len(str(path)) % len(NONSENSE)]
        if path not in WORDS and type(other) is not type(value):
            assert not passes(with_entry(document, path, other)), (path, value, other)


def places(content, path=()):
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, part in parts:
        yield (*path, name), part
        yield from places(part, (*path, name))


def test_a_tiny_delta_is_not_0():
    document = certify(Gaussian(Isotropic((3,), 50.0)), Frobenius(1.0), BUDGET).to_dict()
    assert 0 < document["guarantee"]["delta"] < 1e-300
    assert passes(document)
    assert not passes(with_entry(document, ("guarantee", "delta"), 0.0))


def test_a_query_has_no_further_entries(made):
    document = made["query: sum"].to_dict()
    assert not passes(with_entry(document, ("query", "epsilon"), 0.1))


def test_large_arrays_lie_beside_the_certificate_and_are_bound_by_their_hash(tmp_path):
    directions = np.linalg.qr(RNG.standard_normal((260, 260))).Q
    law = Gaussian(Dense(Spectrum(RNG.uniform(1.0, 2.0, 260), directions)))
    certificate = certify(law, Frobenius(1.0), BUDGET)
    path = tmp_path / "large.json"
    certificate.save(path)
    assert path.stat().st_size < 10_000
    assert Certificate.load(path).verify()
    with pytest.raises(InvalidInput, match="file beside"):
        Certificate.from_json(path.read_text())
    with pytest.raises(FileExistsError):
        certificate.save(path)
    beside = tmp_path / "large.json.npz"
    with np.load(beside) as arrays:
        content = dict(arrays)
    (name,) = content
    content[name][7] += 1e-3
    np.savez(beside, **content)
    with pytest.raises(InvalidInput, match="not the one"):
        Certificate.load(path)
    # nor does it help to write the hash of the changed array into the certificate
    changed = records.digest(content[name].astype("<f8").tobytes())
    np.savez(beside, **{changed: content[name]})
    path.write_text(path.read_text().replace(name, changed))
    with pytest.raises(InvalidInput, match="orthonormal"):
        Certificate.load(path)


def test_a_release_pickles():
    out = release(np.ones((3, 3)), Counts(1), BUDGET)
    back = pickle.loads(pickle.dumps(out))
    np.testing.assert_array_equal(back.value, out.value)
    assert back.certificate.verify()
    assert back.noise.root_mean_square == out.noise.root_mean_square


def test_seeded_noise_says_so():
    with pytest.warns(UserWarning, match="generator"):
        out = release(np.zeros(3), Frobenius(1.0), BUDGET, rng=np.random.default_rng(1))
    found = Certificate.from_json(out.certificate.to_json()).verify()
    assert found
    assert any("seed" in remark for remark in found.remarks)
    document = out.certificate.to_dict()
    assert not passes(with_entry(document, ("drawing", "reproducible"), False))


@pytest.mark.parametrize("broken", [b"", b"text", b"PK", lambda content: content[:4000], lambda content: content[::-1]])
def test_a_broken_file_of_arrays_is_named(tmp_path, broken):
    path = tmp_path / "noise.json"
    certify(Gaussian(Dense(np.eye(260) + 0.5)), Frobenius(1.0)).save(path)
    assert Certificate.load(path).verify()
    arrays = tmp_path / "noise.json.npz"
    arrays.write_bytes(broken(arrays.read_bytes()) if callable(broken) else broken)
    with pytest.raises(InvalidInput, match=r"noise\.json\.npz"):
        Certificate.load(path)


@pytest.mark.parametrize("words", [1, None, ["text"], True])
@pytest.mark.parametrize("entry", ["remark", "source", "note"])
def test_what_is_printed_must_be_text(made, entry, words):
    document = made["counts"].to_dict()
    (document if entry == "remark" else document["law"])[entry] = words
    with pytest.raises(InvalidInput, match="must be text"):
        Certificate.from_json(json.dumps(document))


def test_numbers_of_other_signs_never_agree():
    assert close(5e-324, 1e-323, 1e-9)  # no digits are left to compare
    for stated in (-5e-324, 0.0, 1e-300):
        assert not close(stated, 5e-324, 1e-9)

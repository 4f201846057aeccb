"""Canaries in cells, headers and labels must not come out of any error, warning, log, repr, certificate or file.

Every public function that takes records gets every kind of bad input; all that it says is searched for the canaries.
"""

import inspect
import logging
import warnings
from functools import cache
from types import SimpleNamespace

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import matrixdp
from canaries import DAY, HOLES, NUMBER, PUBLIC, RECORDS, SHAPES, TEXT, TYPES, WHOLE, Loud, leak, said
from matrixdp import Budget, _check, audit, distributed, federated, learn, postprocess, queries, sensitivity, tables
from matrixdp import sklearn as estimators
from matrixdp.distributions.covariance import Dense, Diagonal
from matrixdp.errors import InvalidInput
from matrixdp.federated import flower
from matrixdp.privacy.certificate import certify
from matrixdp.secure import grid, kernels

BUDGET, SMALL = Budget(1.0, 1e-6), sensitivity.Frobenius(1.0)
GOOD = np.random.default_rng(0).random((6, 2))


def lazily(given):
    """Records as Dask has them, where it can."""
    if isinstance(given, (pd.DataFrame, pd.Series)):
        return dd.from_pandas(given, npartitions=1, sort=False)
    return da.from_array(given) if type(given) is np.ndarray and given.ndim in (1, 2) else given


@cache
def fitted(name):
    return MODELS[name]().fit(pd.DataFrame(GOOD, columns=[TEXT, "b"]))


def computed(answer):
    return answer, np.asarray(answer.value)[:0]


def of_network(act):
    """Something done with a network of two inputs and three classes."""
    return lambda given: act(nn.Linear(2, 3), given)


def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def quoting(outputs, targets):
    raise ValueError(f"cannot learn from {targets}")


class Strange(Dataset):
    """A data set that fails with the record in the message."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise KeyError(TEXT)


def accumulated(network, given):
    gradients = learn.ClippedGradients(network, loss, clip=1.0)
    gradients.accumulate(ROWS, LABELS % 3)  # prepared, so that the next error is that of the pass itself
    return gradients.accumulate(*given)


def trained(network, given, loss=loss):
    data = given if isinstance(given, Dataset) else TensorDataset(*given)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    trainer = learn.PrivateSGD(
        network, optimizer, data, loss, budget=Budget(3.0, 1e-5), batch_size=4, clip=1.0, steps=2
    )
    for batch in trainer.batches():
        trainer.step(batch)
    return trainer


def in_a_loop(network, given):
    data = given if isinstance(given, Dataset) else TensorDataset(*given)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="make_private takes")
        private = learn.make_private(
            network, optimizer, DataLoader(data, batch_size=4), loss=loss, budget=Budget(3.0, 1e-5), clip=1.0, steps=2
        )
    for batch in private:
        private.step(batch)
    return private


BOUND, EDGES = {"norm": 1.0}, {"edges": [0.0, 0.5, 1.0]}
QUERIES = dict.fromkeys(("sum", "mean", "second_moment", "covariance", "identity"), BOUND) | {
    "histogram": EDGES,
    "sparse_sum": {"radius": 2.0},
    "moment_entries": {"norm": 1.0},
}
POST = {"low_rank": (1,), "soft_threshold": (1.0,), "clip": (0.0, 1.0)}
MODELS = {
    "PrivatePCA": lambda: estimators.PrivatePCA(budget=BUDGET, norm=1.0),
    "PrivateCovariance": lambda: estimators.PrivateCovariance(budget=BUDGET, norm=1.0),
    "PrivateHistogram": lambda: estimators.PrivateHistogram([[0, 0.5, 1], [0, 1]], budget=BUDGET),
    "PrivateKBins": lambda: estimators.PrivateKBins(2, low=0.0, high=1.0, budget=BUDGET),
    "PrivateStandardScaler": lambda: estimators.PrivateStandardScaler(low=0.0, high=1.0, budget=BUDGET),
}
TARGETS = {"low": 0.0, "high": 1.0, "target_low": 0.0, "target_high": 1.0, "budget": BUDGET}
REGRESSIONS = {
    "PrivateLinearRegression": lambda: estimators.PrivateLinearRegression(**TARGETS),
    "PrivateRidge": lambda: estimators.PrivateRidge(**TARGETS),
    "PrivateLogisticRegression": lambda: estimators.PrivateLogisticRegression(
        low=0.0, high=1.0, classes=[0, 1], budget=BUDGET
    ),
}
ROWS = torch.rand(4, 2)
LABELS = torch.full((4,), WHOLE)
LEARNED = {  # what of a batch goes wrong; torch quotes a label that is out of range
    "labels": (ROWS, LABELS), "types": (ROWS.double() * NUMBER, LABELS), "shapes": (torch.full((4, 3), NUMBER), LABELS),
    "lengths": (torch.full((3, 2), NUMBER), LABELS), "holes": (ROWS * float("nan"), LABELS),
    "no tensors": (np.full((4, 2), NUMBER), [TEXT] * 4), "text": ([[TEXT]], TEXT), "objects": ([Loud()], [Loud()]),
}  # fmt: skip
# entry point: (what it does with bad input, the bad inputs)
ENTRIES = {f"queries.{name}": (lambda x, n=name: getattr(queries, n)(x, **QUERIES[n]), RECORDS) for name in QUERIES}
ENTRIES |= {
    f"distributed.{name}": (lambda x, n=name: computed(getattr(distributed, n)(lazily(x), **QUERIES[n])), RECORDS)
    for name in QUERIES
}
ENTRIES |= {f"sklearn.{name}": (lambda x, n=name: MODELS[n]().fit(x), RECORDS) for name in MODELS}
for _name, _make in REGRESSIONS.items():
    ENTRIES[f"sklearn.{_name}"] = (lambda x, make=_make: make().fit(x, [0, 1, 0, 1, 0, 1]), RECORDS)
    ENTRIES[f"sklearn.{_name}, targets"] = (lambda x, make=_make: make().fit(GOOD, x), RECORDS)
ENTRIES |= {
    f"postprocess.{name}": (lambda x, n=name: getattr(postprocess, n)(x, *POST.get(n, ())), RECORDS)
    for name, found in vars(postprocess).items()
    if inspect.isfunction(found) and not name.startswith("_")
}
ENTRIES |= {
    "queries.load": (queries.load, RECORDS),
    "matrixdp.release": (lambda x: str(matrixdp.release(x, SMALL, BUDGET)), RECORDS),
    "matrixdp.release, symmetric": (lambda x: str(matrixdp.release(x, sensitivity.RankOne(1.0), BUDGET)), RECORDS),
    "matrixdp.release, swapped": (lambda x: matrixdp.release(GOOD, x, x), PUBLIC),
    "distributed.release": (lambda x: distributed.release(lazily(x), SMALL, BUDGET).value.compute()[:0], RECORDS),
    "matrixdp.calibrate": (lambda x: matrixdp.calibrate("analytic", shape=x, sensitivity=x, budget=x), PUBLIC),
    "matrixdp.compare": (lambda x: matrixdp.compare(shape=(2, 2), sensitivity=x, budget=BUDGET), PUBLIC),
    "matrixdp.Budget": (lambda x: Budget(x, x), PUBLIC),
    "matrixdp.certify": (lambda x: certify(x, x), PUBLIC),
    "matrixdp.Accountant": (lambda x: matrixdp.Accountant().add(x), PUBLIC),
    "matrixdp.Ledger": (lambda x: matrixdp.Ledger("no such folder/ledger.db", x), PUBLIC),
    "audit.audit": (lambda x: audit.audit(lambda _: x, 0.0, 1.0, 1.0, 0.1, samples=20), HOLES | TYPES),
    "audit.audit, inputs": (lambda x: audit.audit(lambda _: 1.0, x, 0.0, 1.0, 0.1, samples=20), RECORDS),
    "audit.audit, function": (lambda x: audit.audit(x, 0.0, 1.0, 1.0, 0.1, samples=20), RECORDS),
    "audit.audit_scores": (lambda x: audit.audit_scores(x, x, 1.0, 0.1), RECORDS),
    "audit.audit_law": (lambda x: audit.audit_law(x, x, x), PUBLIC),
    "sklearn, transform": (lambda x: fitted("PrivatePCA").transform(x), RECORDS),
    "sklearn, inverse": (lambda x: fitted("PrivatePCA").inverse_transform(x), RECORDS),
    "sklearn, score": (lambda x: [fitted("PrivateHistogram").score(x)][:0], RECORDS),
    "noise": (lambda x: kernels.add_noise(x, 1.0, grid.Grid(1)), RECORDS),
    "learn.ClippedGradients": (of_network(accumulated), LEARNED),
    "learn, a loss that quotes": (
        of_network(lambda network, x: learn.ClippedGradients(network, quoting, clip=1.0).accumulate(*x)), LEARNED,
    ),
    "learn, a loss without rows": (
        of_network(lambda n, x: learn.ClippedGradients(n, lambda *_: NUMBER, clip=1.0).accumulate(*x)), LEARNED,
    ),
    "learn.PrivateSGD": (of_network(trained), LEARNED | {"strange": Strange()}),
    "learn.make_private": (of_network(in_a_loop), LEARNED | {"strange": Strange()}),
    "learn.plan": (lambda x: [learn.plan(10, x, BUDGET)][:0], RECORDS),
    "learn.PrivateFeatures": (
        lambda x: learn.PrivateFeatures(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), 1).release(x, BUDGET),
        {name: x for name, (x, _) in LEARNED.items()} | RECORDS,
    ),
}  # fmt: skip
for _set in ("Counts", "Entrywise", "Frobenius", "L1", "OneColumn", "OneRow", "Participation", "RankOne", "Vertices"):
    _kind, _one = getattr(matrixdp, _set), np.eye(2) if _set == "Vertices" else 1
    ENTRIES[f"matrixdp.{_set}"] = (lambda x, k=_kind: [k(x)][:0], PUBLIC)
    ENTRIES[f"matrixdp.{_set}, contains"] = (lambda x, k=_kind, one=_one: k(one).contains(x), PUBLIC)
for _name in ("norm", "low", "high", "columns", "relation"):
    ENTRIES[f"option {_name}"] = (lambda x, n=_name: queries.sum(GOOD, **{"high": 1.0, n: x}), PUBLIC)
ENTRIES |= {
    "option edges": (lambda x: queries.histogram(GOOD, edges=x), PUBLIC),
    "option center": (lambda x: queries.covariance(GOOD, adjacency="replace", norm=1.0, center=x), PUBLIC),
    "option size": (lambda x: queries.mean(GOOD, adjacency="replace", norm=1.0, size=x), PUBLIC),
    "option norm of an estimator": (lambda x: estimators.PrivatePCA(budget=x, norm=x).fit(GOOD), PUBLIC),
    "covariance": (lambda x: [str(Diagonal(x)), Dense(x)][:0], PUBLIC),
}
PEOPLE = tables.Domain({"a": tables.Numeric(0, 1, bins=2), "b": tables.Categorical(["x"])})


def _estimates(cell):
    """Every estimate, down to what is published; no cell may make any of them fail."""
    public = tables.Domain({"a": tables.Numeric(0, 1, bins=2), "b": tables.Categorical(["x", "y"])})
    table = tables.Table(pd.DataFrame({"a": [cell], "b": [cell]}), public)
    asked = [table.means("a", ["b"]), table.quantiles("a", [0.5]), table.regression("a", ["b"])]
    asked += [table.marginals(up_to=1), table.sums("a"), table.variances("a"), table.pca("a", components=1)]
    return [answer.release(BUDGET).table() for answer in asked][:0]


ENTRIES |= {
    "tables.Table": (lambda x: tables.Table(x, PEOPLE, unit="c", contributions=1).counts("a", "b"), RECORDS),
    "tables.Table, named": (lambda x: tables.Table(x, PEOPLE, columns=["a", "b"]).cell_states(), RECORDS),
    "tables.Table, swapped": (lambda x: tables.Table(GOOD, x, unit=x, contributions=x, columns=x), PUBLIC),
    "tables.Table, counts": (lambda x: tables.Table(GOOD, PEOPLE, columns=["a", "b"]).counts(x), PUBLIC),
    "tables.Table, cells": (
        lambda x: tables.Table(pd.DataFrame({"a": [x], "b": [x]}), PEOPLE).counts("a", "b"),
        PUBLIC,
    ),
    "tables.Table, ids": (
        lambda x: tables.Table(
            pd.DataFrame({"a": [1], "b": [1], "c": [x]}), PEOPLE, unit="c", contributions=1
        ).counts(),
        PUBLIC,
    ),
    "tables.Table, estimates": (_estimates, PUBLIC),
    "tables.Table, estimates, names": (
        lambda x: tables.Table(GOOD, PEOPLE, columns=["a", "b"]).means("a", x),
        PUBLIC,
    ),
    "tables.Domain": (tables.Domain, PUBLIC),
    "tables.Categorical": (lambda x: [tables.Categorical(x)][:0], PUBLIC),
    "tables.Ordered": (lambda x: tables.Ordered(["a"], missing=x, unexpected=x), PUBLIC),
    "tables.Boolean": (lambda x: [tables.Boolean(true=x, missing_values=x)][:0], PUBLIC),
    "tables.Numeric": (lambda x: [tables.Numeric(x, x), tables.Numeric(0, 1, x)], PUBLIC),
    "tables.Numeric, bins": (lambda x: tables.Numeric(0, 1, x), PUBLIC),
    "tables.Date": (lambda x: tables.Date(x, x, x), PUBLIC),
    "queries.bounded": (lambda x: [queries.bounded(x, [1, 1], 1)][:0], RECORDS),
    "queries.chosen_rows": (lambda x: [queries.chosen_rows(x, 1)][:0], RECORDS),
    "queries.by_unit": (lambda x: [queries.by_unit(queries.sum, x, [1, 1], 1, norm=1.0)][:0], RECORDS),
    "queries.by_unit, ids": (lambda x: [queries.by_unit(queries.sum, GOOD, x, 1, norm=1.0)][:0], RECORDS),
    "tables.bounded": (lambda x: [tables.bounded(x, [1, 1], 1)][:0], RECORDS),
    "tables.bounded, ids": (lambda x: [tables.bounded(GOOD, x, 1)][:0], RECORDS),
    "tables.release_means": (lambda x: tables.release_means(x, 0, 1, budget=BUDGET), RECORDS),
    "tables.release_means, groups": (
        lambda x: tables.release_means([0.5, 0.5], 0, 1, budget=BUDGET, groups=x, group_count=2),
        RECORDS,
    ),
    "tables.release_quantiles": (lambda x: tables.release_quantiles(x, [0.5], edges=[0, 1, 2], budget=BUDGET), RECORDS),
    "tables.release_moments": (lambda x: tables.release_moments(x, 0, 1, budget=BUDGET), RECORDS),
    "tables.plan_marginals": (lambda x: tables.plan_marginals(x, budget=BUDGET, up_to=1), PUBLIC),
    "tables.plan_marginals, release": (
        lambda x: tables.plan_marginals({"a": 2, "b": 2}, budget=BUDGET, up_to=1).release(x),
        RECORDS,
    ),
    "tables.csv_file": (lambda x: tables.csv_file(x, separator=",", columns=["a"]), RECORDS),
    "tables.sql": (lambda x: tables.sql(x, "SELECT 1").names, RECORDS),
    "tables.sql, query": (lambda x: tables.sql("a.db", x), PUBLIC),
    "tables.source_of": (lambda x: [tables.source_of(x).names][:0], RECORDS),
}
# public names that take no records and no argument in their place
PLAIN = {
    "matrixdp.ADD_REMOVE", "matrixdp.REPLACE", "matrixdp.ZERO_OUT", "matrixdp.Adjacency", "matrixdp.register_law",
    "matrixdp.Certificate", "matrixdp.Plan", "matrixdp.Release", "matrixdp.__version__", "matrixdp.errors",
    "matrixdp.queries", "matrixdp.tables", "tables.TableAnswer", "tables.TableRelease",
    "tables.TableEstimates", "tables.TableMarginals",
    "tables.Estimate", "tables.MarginalPlan", "tables.MarginalRelease", "tables.Moments", "tables.Quantiles",
    "tables.means", "tables.quantiles",
    "queries.Answer", "audit.AuditResult", "learn.PoissonBatch", "learn.PoissonSampler", "learn.QuantileClip",
    "federated.Declined", "federated.Guarantees", "federated.ClientLevel", "federated.RecordLevel",
    "federated.LocalTraining", "federated.Participant", "federated.SplitPlan", "federated.average",
    "federated.CentralPrivacy",
}  # fmt: skip
IN_TESTS_BELOW = {
    "federated.Client", "federated.GradientClient", "federated.SplitClient", "federated.SplitServer",
    "federated.TrustedServer",
}  # fmt: skip


def test_every_public_name_has_a_case():
    rooms = {"matrixdp": matrixdp, "queries": queries, "distributed": distributed, "sklearn": estimators}
    rooms |= {"audit": audit, "learn": learn, "federated": federated, "tables": tables}
    names = {f"{room}.{name}" for room, module in rooms.items() for name in module.__all__}
    assert names - set(ENTRIES) - PLAIN - IN_TESTS_BELOW == set()


@pytest.mark.parametrize("name", ENTRIES)
def test_no_canary_comes_out(name, capfd):
    act, inputs = ENTRIES[name]
    for which, given in inputs.items():
        text = said(act, given)
        shown = leak(text)
        assert not shown, f"{which}: {text[max(0, shown.start() - 300) : shown.end() + 60]}"
    assert not leak("".join(capfd.readouterr()))


def finished(update):
    server = federated.TrustedServer(federated.CentralPrivacy(budget=BUDGET, rounds=1, clients=1, clip=0.1), 2)
    server.choose([0])
    return server.finish({0: update})[1]


@pytest.mark.parametrize("level", [federated.ClientLevel, federated.RecordLevel])
def test_no_canary_comes_out_of_a_federated_client(level, tmp_path):
    plan = federated.SplitPlan(budget=BUDGET, records=4, epochs=1, batch_size=4)
    kept = {"training": federated.LocalTraining(), "privacy": level(budget=BUDGET, rounds=1, clip=0.1)}
    agreed = {"rounds": 1, "clients": 1, "clip": 0.1, "records": 100, "sampling_rate": 0.9}
    central = federated.CentralPrivacy(budget=BUDGET, unit="record", **agreed)
    for which, given in LEARNED.items():
        for act in (
            lambda x: federated.Client(nn.Linear(2, 3), *x, **kept, folder=tmp_path),
            lambda x: federated.GradientClient(nn.Linear(2, 3), *x, privacy=central).update(np.zeros(9)),
            lambda x: federated.SplitClient(nn.Linear(2, 3), x[0], plan=plan, folder=tmp_path),
            lambda x: federated.SplitServer(nn.Linear(3, 3), x[1], plan=plan).learn(0, [np.zeros((4, 3))]),
            lambda x: federated.SplitServer(nn.Linear(3, 3), x[1], plan=plan).discriminant({0: [np.zeros((4, 3))]}),
            lambda x: finished(x[0]),
        ):
            assert not leak(said(act, given)), which
    # an error in training is logged without its text, and so is one on the way to the server
    training = federated.LocalTraining(loss=loss)
    upload = level(budget=BUDGET, rounds=1, clip=0.1).upload(nn.Linear(2, 3), training, ROWS, LABELS % 3)
    object.__setattr__(training, "loss", quoting)
    upload.labels = LABELS
    assert not leak(said(upload.compute, torch.zeros(9)))
    asked = SimpleNamespace(content=flower.request({}, {}))
    heard = said(lambda: flower.handler(lambda *_: quoting(None, LABELS))(asked, None))
    assert "nothing was sent" in heard
    assert not leak(heard)


def test_what_is_said_does_not_depend_on_the_cells():
    """Bounds that are extremes of the records, records in order, sizes that fit: nobody is told."""
    records = np.sort(np.random.default_rng(1).normal(size=(64, 2)), axis=0)
    largest = float(np.linalg.norm(records, axis=1).max())
    box = {"low": records.min(axis=0), "high": records.max(axis=0)}
    for scale in (1.0, 1e-320, 1e300):
        assert not said(lambda x: queries.sum(x, norm=largest)[:0], records * scale).strip("() ")
        for act in (queries.sum, queries.mean, queries.identity):
            assert not said(lambda x, a=act: a(x, **box, adjacency="replace")[:0], records * scale).strip("() ")
        for act in (queries.second_moment, queries.covariance):
            text = said(lambda x, a=act: a(x, norm=largest, adjacency="replace")[:0], records * scale)
            assert not text.strip("() ")
    edges = np.linspace(records.min(), records.max(), 4)
    assert not said(lambda x: queries.histogram(x, edges=edges)[:0], records[:, :1]).strip("() ")
    center = {"norm": 9.0, "center": records.mean(axis=0), "size": 64}
    assert not said(lambda x: queries.covariance(x, **center)[:0], records).strip("() ")


def test_planted_leaks_are_found(monkeypatch):
    assert not leak(said(MODELS["PrivateHistogram"]().fit, SHAPES["one dimension"]))
    with monkeypatch.context() as patch:
        patch.setattr(_check, "kind", repr)
        assert leak(said(MODELS["PrivateHistogram"]().fit, SHAPES["one dimension"]))
        assert leak(said(queries.histogram, GOOD, edges=HOLES["labels of text"]))

    def chained():
        try:
            float(TEXT)
        except ValueError:
            raise InvalidInput("not a number")  # noqa: B904

    def printed():
        return {"value": np.array([NUMBER])}

    for planted in (chained, printed, lambda: warnings.warn(f"seen {NUMBER:g}", stacklevel=1)):
        assert leak(said(planted))
    assert leak(said(logging.getLogger("any").error, "largest %.3g", NUMBER))
    for text in (
        f"{NUMBER:,}",
        f"{NUMBER:_}",
        f"{NUMBER:.3e}",
        f"{NUMBER:.2g}",
        str(DAY),
        f"{DAY:%Y%m%d}",
        f"{WHOLE:,}",
    ):
        assert leak(text), text

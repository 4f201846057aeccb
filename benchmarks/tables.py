"""Questions to tables, answered by matrixdp, OpenDP and diffprivlib: python benchmarks/tables.py --peer PYTHON

The other libraries need an environment of their own; give its interpreter, and all run in the same session:

    python -m venv peer && peer/bin/pip install 'opendp[polars]==0.16.0' diffprivlib==0.6.6 'scikit-learn<1.8' pandas
    MATRIXDP_DATA=... python benchmarks/tables.py --peer peer/bin/python --figure docs/tables-benchmark.png

The data are Adult (adult_train.csv.gz), and a generated hospital file with missing and misspelt cells
(tests/hospital.py).
Their lists of values and bounds are taken as public. The others get categories as codes and cells without messes. An
error is the root of the mean squared error over entries and repeats, against the answer without noise; for PCA, the
mean share of the variance that the best components explain and these do not. A ratio above 1 says that matrixdp has the
smaller error; its range is that of 90 % of 2,000 bootstrap draws of the repeats. Lines are those of each task's
function, without its first one.

The rank error of a quantile is 0 if p is between the shares of values below and not above. Answers for whole
numbers are rounded. The others' quantiles have no intervals; matrixdp's get a hundredth of epsilon for theirs.
diffprivlib's regression takes the lower bound of a feature for both when it sizes noise on squares. Only bounds that
are symmetric about 0 are safe then, and its own intercept shifts them, so it gets a constant column instead.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from matrixdp import Budget
from matrixdp.sklearn import PrivatePCA
from matrixdp.tables import Boolean, Categorical, Domain, Numeric, Ordered, Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from hospital import DIAGNOSES, REGIONS, hospital

PURE, APPROXIMATE = Budget(1.0, 0.0), Budget(1.0, 1e-6)
REPEATS = {"counts": 20, "marginals": 2, "means": 12, "quantiles": 24, "regression": 10, "line": 4, "pca": 6}
MOST = 3000.0  # ratios beyond this are drawn there
LABELS = {"matrixdp": "matrixdp", "opendp": "OpenDP", "diffprivlib": "diffprivlib"}
LABELS["diffprivlib_sizes_public"] = "diffprivlib, sizes public"
GUARANTEES = {  # what each one truly keeps
    "counts": "pure, add/remove",
    "marginals": "(1, 1e-6), add/remove; diffprivlib pure",
    "means": "pure, add/remove; with sizes public: replace within a group only",
    "quantiles": "pure, add/remove",
    "regression": "pure, add/remove",
    "line": "pure, add/remove",
    "pca": "pure, replace",
}
ADULT = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "income")
VISITS = ("sex", "region", "diagnosis", "severity", "smoker")
HOURS, SCHOOL, GAIN, SICK = "hours-per-week", "education-num", "capital-gain", ("age", "severity", "smoker")
QUARTILES, UPPER = (0.25, 0.5, 0.75), (0.95, 0.97, 0.99)
# Kind, data and label of each task, the unit of its error, and what is asked.
TASKS = {
    "counts adult": ("15 occupations: counts", "rows", {"by": ["occupation"]}),
    "counts hospital": ("regions by diagnoses: counts", "rows", {"by": ["region", "diagnosis"]}),
    "marginals adult": ("28 two-way tables together", "rows", {"columns": ADULT}),
    "marginals hospital": ("10 two-way tables together", "rows", {"columns": VISITS}),
    "means adult": ("mean hours in 15 occupations", "hours", {"of": "hours-per-week", "by": "occupation"}),
    "means hospital": ("mean cost in 6 regions", "cost", {"of": "cost", "by": "region"}),
    "quantiles adult fnlwgt": ("quartiles of fnlwgt", "% of ranks", {"of": "fnlwgt", "p": QUARTILES}),
    "quantiles adult median": ("median of fnlwgt", "% of ranks", {"of": "fnlwgt", "p": (0.5,)}),
    "quantiles adult age": ("quartiles of age", "% of ranks", {"of": "age", "p": QUARTILES, "whole": True}),
    "quantiles adult hours": ("quartiles of hours", "% of ranks", {"of": HOURS, "p": QUARTILES, "whole": True}),
    "quantiles adult gain": ("upper quantiles of gain", "% of ranks", {"of": GAIN, "p": UPPER, "whole": True}),
    "quantiles hospital": ("quartiles of cost", "% of ranks", {"of": "cost", "p": QUARTILES}),
    "quantiles hospital tenth": ("0.9-quantile of cost", "% of ranks", {"of": "cost", "p": (0.9,)}),
    "regression adult": ("hours on age, education, sex", "hours", {"of": HOURS, "on": ("age", SCHOOL, "sex")}),
    "regression hospital": ("cost on age, severity, smoker", "cost", {"of": "cost", "on": SICK}),
    "line adult": ("hours on age", "hours", {"of": "hours-per-week", "on": ("age",)}),
    "line hospital": ("cost on age", "cost", {"of": "cost", "on": ("age",)}),
    "pca adult": ("2 components of 4 columns", "% variance", {"of": ("age", "education-num", "hours-per-week", "sex")}),
    "pca hospital": ("2 components of 4 columns", "% variance", {"of": ("age", "cost", "severity", "smoker")}),
}  # fmt: skip


def matrixdp_table(frame):
    kept = {"missing": "out", "unexpected": "out"}
    bounds = {"age": (17, 90), HOURS: (1, 99), SCHOOL: (1, 16), "fnlwgt": (0, 1_500_000), GAIN: (0, 99_999)}
    values = {name: Categorical(sorted(set(frame[name])), **kept) for name in ADULT}
    return Table(frame, Domain({**values, **{name: Numeric(*ends, **kept) for name, ends in bounds.items()}}))


def hospital_table():
    def filled(value):
        return {"missing": {"fill": value}, "unexpected": {"fill": value}, "missing_values": ("NA", "?")}

    listed = {"sex": ["f", "m"], "region": REGIONS, "diagnosis": DIAGNOSES}
    columns = {name: Categorical(values, missing_values=("NA", "?")) for name, values in listed.items()}
    columns["severity"] = Ordered(["low", "medium", "high"], **filled("low"))
    columns |= {"age": Numeric(0, 110, **filled(0)), "cost": Numeric(0, 5000, **filled(0))}
    return Table(hospital(12_000), Domain({**columns, "smoker": Boolean(**filled(False))}))


def matrixdp_counts(table, by, **_):
    return table.counts(*by).release(PURE).table()["value"]


def matrixdp_marginals(table, columns, **_):
    return table.marginals(*itertools.combinations(columns, 2)).release(APPROXIMATE).table()["value"]


def matrixdp_means(table, of, by, **_):
    return table.means(of, by=(by,)).release(PURE).table()["value"]


def matrixdp_quantiles(table, of, p, bins, **_):
    return table.quantiles(of, p, bins=bins, intervals=0.01).release(PURE).table()["value"]


def matrixdp_regression(table, of, on, **_):
    return table.regression(of, on=on).release(PURE).table()["value"]


matrixdp_line = matrixdp_regression


def matrixdp_pca(records, norm, components, **_):
    return PrivatePCA(components, budget=PURE, norm=norm).fit(records).components_


def given(kind, table, asked):
    """The private values of a task, as arrays for the other libraries."""
    domain = table.domain

    def number(name):
        column = domain[name]
        if isinstance(column, Categorical) and not isinstance(column, Ordered):
            return table.codes(name)[:, 0].astype(float), (0.0, len(column.labels) - 1.0)
        ends = (column.low, column.high) if isinstance(column, Numeric) else (0.0, len(column.categories) - 1.0)
        return table.numbers(name)[:, 0], ends

    def scaled(name):
        values, (low, high) = number(name)
        return (2.0 * values - low - high) / (high - low)

    if kind == "counts":
        code = np.ravel_multi_index(table.codes(*asked["by"]).T, [len(domain[name].labels) for name in asked["by"]])
        return {"codes": code, "size": int(np.prod([len(domain[name].labels) for name in asked["by"]]))}
    if kind == "marginals":
        pairs = list(itertools.combinations(asked["columns"], 2))
        sizes = [[len(domain[name].labels) for name in pair] for pair in pairs]
        codes = [np.ravel_multi_index(table.codes(*pair).T, size) for pair, size in zip(pairs, sizes, strict=True)]
        return {"pairs": codes, "sizes": [int(np.prod(size)) for size in sizes]}
    if kind == "means":
        values, (low, high) = number(asked["of"])
        values, low, high = np.round(values).astype(np.int64), int(low), int(high)  # OpenDP's sums of floats need more
        groups = {"groups": table.codes(asked["by"])[:, 0], "group_count": len(domain[asked["by"]].labels)}
        return {"values": values, "low": low, "high": high, **groups}
    if kind == "quantiles":
        values, (low, high) = number(asked["of"])
        bins = "whole" if asked.get("whole") else 1 << 16
        return {"values": values, "probabilities": asked["p"], "low": low, "high": high, "bins": bins}
    if kind == "pca":
        return {"records": np.column_stack([scaled(name) for name in asked["of"]]), "norm": 2.0, "components": 2}
    features, target = np.column_stack([scaled(name) for name in asked["on"]]), scaled(asked["of"])
    plain = np.column_stack([np.ones(len(target)), *(number(name)[0] for name in asked["on"])])
    values, (low, high) = number(asked["of"])
    return {"features": features, "target": target, "plain": plain, "values": values, "half": (high - low) / 2}


def losses(kind, task, answers, library):
    """The mean squared error of each repeat; for PCA the share of variance that is lost."""
    answers = np.asarray(answers, dtype=float).reshape(len(answers), *np.shape(answers)[1:] or (1,))
    if kind == "pca":
        moment = task["records"].T @ task["records"]
        best = np.sum(np.linalg.eigvalsh(moment)[-task["components"] :])
        bases = [np.linalg.qr(found.T)[0] for found in answers]
        return np.array([100.0 * (1.0 - np.trace(basis.T @ moment @ basis) / best) for basis in bases])
    if kind in ("regression", "line"):
        design, target, scale = task["plain"], task["values"], 1.0
        if library != "matrixdp":
            design = np.column_stack([np.ones(len(target)), task["features"]])
            target, scale = task["target"], task["half"]
        right = np.linalg.lstsq(design, target, rcond=None)[0]
        return np.mean((scale * design @ (answers - right).T) ** 2, axis=0)
    if kind == "quantiles":
        values, wanted = np.sort(task["values"]), np.array(task["probabilities"]) * len(task["values"])
        found = np.round(answers) if task["bins"] == "whole" else answers
        below, upto = (np.searchsorted(values, found, side) for side in ("left", "right"))
        off = np.maximum(np.maximum(below - wanted, wanted - upto), 0.0)
        return np.mean((100.0 * off / len(values)) ** 2, axis=1)
    return np.mean((answers - truth(kind, task)) ** 2, axis=1)


def truth(kind, task):
    if kind == "counts":
        return np.bincount(task["codes"], minlength=task["size"])
    if kind == "marginals":
        tables = zip(task["pairs"], task["sizes"], strict=True)
        return np.concatenate([np.bincount(codes, minlength=size) for codes, size in tables])
    return np.bincount(task["groups"], task["values"]) / np.bincount(task["groups"])


def error(kind, lost):
    return float(np.mean(lost) if kind == "pca" else np.sqrt(np.mean(lost)))


def ratio(kind, own, other, rng):
    """Another library's error over matrixdp's, and the range of 90 % of bootstrap draws."""
    draws = []
    if not error(kind, own) > 0:
        return (np.inf,) * 3
    for _ in range(2000):
        drawn = [lost[rng.integers(0, len(lost), len(lost))] for lost in (other, own)]
        draws.append(error(kind, drawn[0]) / max(error(kind, drawn[1]), 1e-12))
    return (error(kind, other) / error(kind, own), *np.quantile(draws, (0.05, 0.95)))


def lines(path):
    """How many lines of code the body of each function of a file has."""
    text = Path(path).read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            body = text.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
            found[node.name] = sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in found:
            found[node.targets[0].id] = found[node.value.id]
    return found


def repeats_of(key):
    """Fewer for OpenDP's slowest task."""
    return max(REPEATS[key.split()[0]] // (4 if key.endswith("gain") else 1), 1)


def measured(peer, only, more):
    """One row per task and library: key, library, error, ratio with its range, lines."""
    frame = pd.read_csv(Path(os.environ["MATRIXDP_DATA"], "adult_train.csv.gz"), keep_default_na=False)
    tables = {"adult": matrixdp_table(frame), "hospital": hospital_table()}
    tasks, answers = {}, {}
    for key, (_, _, asked) in TASKS.items():
        if only and key not in only:
            continue
        kind, data = key.split()[:2]
        tasks[key] = given(kind, tables[data], asked)
        function = globals()[f"matrixdp_{kind}"]
        all_given = {**tasks[key], **asked, "table": tables[data]}
        answers[f"matrixdp/{key}"] = [np.asarray(function(**all_given)) for _ in range(more * repeats_of(key))]
        print(key, "done", file=sys.stderr, flush=True)
    written = lines(__file__)
    if peer is not None:
        script = Path(__file__).with_name("tables_peers.py")
        written.update(lines(script))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tasks.npz")
            whole = {key: (task, more * repeats_of(key)) for key, task in tasks.items()}
            np.savez(path, tasks=np.array(whole, dtype=object))
            output = subprocess.run([peer, script, path], stdout=subprocess.PIPE, text=True, check=True).stdout
        found, *versions = json.loads(output.splitlines()[-1])
        print("OpenDP {}, diffprivlib {}".format(*versions))
        answers.update(found)
    rows, rng = [], np.random.default_rng(0)
    own = {key: losses(key.split()[0], task, answers[f"matrixdp/{key}"], "matrixdp") for key, task in tasks.items()}
    for place, values in answers.items():
        library, key = place.split("/")
        kind = key.split()[0]
        lost = losses(kind, tasks[key], values, library)
        base, *variant = library.split("_", 1)
        count = written["_".join([base, kind, *variant])]
        rows.append((key, library, error(kind, lost), ratio(kind, own[key], lost, rng), count))
    return rows


def draw(rows, path):
    """Ratios of errors on a logarithmic axis, and lines of code."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    looks = {"opendp": ("#0072B2", "o"), "diffprivlib": ("#D55E00", "s"), "diffprivlib_sizes_public": ("#CC79A7", "^")}
    looks["matrixdp"] = ("#000000", "D")
    places = {key: -place for place, key in enumerate(TASKS)}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 6.6), sharey=True, width_ratios=(2, 1), layout="constrained"
    )
    for shift, (library, (color, marker)) in enumerate(looks.items()):
        chosen = [row for row in rows if row[1] == library]
        heights = np.array([places[row[0]] for row in chosen]) + 0.12 * (1 - shift % 3)
        style = {"color": color, "marker": marker, "linestyle": "none", "label": LABELS[library]}
        right.plot([row[4] for row in chosen], heights, **style)
        if library == "matrixdp":
            left.plot([], [], **style)
            continue
        middle, low, high = np.minimum(np.array([row[3] for row in chosen]).T, MOST)  # matrixdp's error may be 0
        left.errorbar(middle, heights, xerr=[middle - low, high - middle], capsize=2, elinewidth=1, **style)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set(xscale="log", xlabel="error, as a multiple of matrixdp's; at the edge: of 0", yticks=list(places.values()))
    left.set_yticklabels([f"{key.split()[1].capitalize()}: {TASKS[key][0]}" for key in places], fontsize=8)
    left.grid(axis="x", linewidth=0.3)
    right.set(xlabel="lines of code", xlim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", help="the interpreter of an environment with OpenDP and diffprivlib")
    parser.add_argument("--figure", help="where to write the figure")
    parser.add_argument("--only", action="append", choices=TASKS, help="one of the tasks; give it again for more")
    parser.add_argument("--more", type=int, default=1, help="so many times the usual repeats")
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = measured(arguments.peer, arguments.only, arguments.more)
    print(
        f"{'task':<40} {'library':<26} {'error':>9} {'':<10} {'ratio':>7} {'90 % range':>17} {'lines':>5}  at epsilon 1"
    )
    for wanted, (label, unit, _) in TASKS.items():
        kind, data = wanted.split()[:2]
        for key, library, value, (middle, low, high), count in rows:
            if key == wanted:
                end = GUARANTEES[kind] if library == "matrixdp" else ""
                spread = "" if library == "matrixdp" else f"{low:.2f} to {high:.2f}"
                name = f"{data}: {label}"
                numbers = f"{value:>9.3g} {unit:<10} {middle:>7.2f} {spread:>17} {count:>5}"
                print(f"{name:<40} {LABELS[library]:<26} {numbers}  {end}")
    seconds = time.perf_counter() - start
    print(f"matrixdp's domain and table: {lines(__file__)['matrixdp_table']} lines, once; {seconds:.0f} s in all")
    if arguments.figure is not None:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()

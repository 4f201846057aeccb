"""Questions to a table, answered by matrixdp, OpenDP and diffprivlib: python benchmarks/tables.py --peer PYTHON

The other libraries need an environment of their own; give its interpreter, and all run in the same session:

    python -m venv peer && peer/bin/pip install 'opendp[polars]==0.16.0' diffprivlib==0.6.6 'scikit-learn<1.8' pandas
    MATRIXDP_DATA=... python benchmarks/tables.py --peer peer/bin/python --figure tables.png

The data is Adult (adult_train.csv.gz); its lists of values and bounds are taken as public. An error is the root of the
mean squared error over entries and repeats, against the answer without noise; for PCA, the share of the variance that
the best components explain and these do not. A ratio above 1 says that matrixdp has the smaller error. Lines are those
of each task's function, without its first one.

diffprivlib's regression takes the lower bound of a feature for both when it sizes noise on squares. Only bounds
that are symmetric about 0 are safe then, and its own intercept shifts them, so it gets a constant column instead.
"""

import argparse
import ast
import itertools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from matrixdp import Budget
from matrixdp.sklearn import PrivatePCA
from matrixdp.tables import Categorical, Domain, Numeric, Table

PURE, APPROXIMATE = Budget(1.0, 0.0), Budget(1.0, 1e-6)
COLUMNS = ("workclass", "education", "marital-status", "occupation", "relationship", "race", "sex", "income")
BOUNDS = {"age": (17, 90), "hours-per-week": (1, 99), "education-num": (1, 16), "fnlwgt": (0, 1_500_000)}
PROBABILITIES = (0.25, 0.5, 0.75)
BINS = {"fnlwgt": 500}
REPEATS = {"counts": 50, "marginals": 4, "means": 25, "quantiles": 20, "regression": 30, "line": 20, "pca": 20}
COMPONENTS = 2

TASKS = {
    "counts": ("counts of 15 occupations", "rows"),
    "marginals": ("28 two-way tables together", "rows"),
    "means": ("mean hours in 15 occupations", "hours"),
    "quantiles fnlwgt": ("quartiles of fnlwgt", "% of ranks"),
    "regression": ("hours on age, education, sex", "hours"),
    "line": ("hours on age", "hours"),
    "pca": ("2 components of 4 columns", "% variance"),
}
LABELS = {"matrixdp": "matrixdp", "opendp": "OpenDP", "diffprivlib": "diffprivlib"}
LABELS["diffprivlib_sizes_public"] = "diffprivlib, sizes public"
GUARANTEES = {  # what each one truly keeps
    "counts": "pure, add/remove",
    "marginals": "(1, 1e-6), add/remove; diffprivlib pure",
    "means": "pure, add/remove; with sizes public: replace within a group only",
    "quantiles fnlwgt": "pure, add/remove",
    "regression": "matrixdp (1, 1e-6), diffprivlib pure; add/remove",
    "line": "matrixdp (1, 1e-6), the others pure; add/remove",
    "pca": "matrixdp (1, 1e-6), the others pure; replace",
}


def matrixdp_table(frame):
    kept = {"missing": "out", "unexpected": "out"}
    values = {name: Categorical(sorted(set(frame[name])), **kept) for name in COLUMNS}
    return Table(frame, Domain({**values, **{name: Numeric(*ends, **kept) for name, ends in BOUNDS.items()}}))


def matrixdp_counts(table, **_):
    return table.counts("occupation").release(PURE).table()["value"]


def matrixdp_marginals(table, **_):
    return table.marginals(*itertools.combinations(COLUMNS, 2)).release(APPROXIMATE).table()["value"]


def matrixdp_means(table, **_):
    return table.means("hours-per-week", by=("occupation",)).release(PURE).table()["value"]


def matrixdp_quantiles(table, column, bins, **_):
    return table.quantiles(column, PROBABILITIES, bins=bins).release(PURE).table()["value"]


def matrixdp_regression(table, **_):
    return table.regression("hours-per-week", on=("age", "education-num", "sex")).release(APPROXIMATE).table()["value"]


def matrixdp_line(table, **_):
    return table.regression("hours-per-week", on=("age",)).release(APPROXIMATE).table()["value"]


def matrixdp_pca(records, norm, components, **_):
    return PrivatePCA(components, budget=APPROXIMATE, norm=norm).fit(records).components_


def tasks(frame):
    """The private values of each task, as arrays for the other libraries."""
    codes = {name: np.unique(frame[name], return_inverse=True) for name in COLUMNS}
    size = {name: len(values) for name, (values, _) in codes.items()}
    pairs = list(itertools.combinations(COLUMNS, 2))
    unit = {name: unit_scale(frame[name], *ends) for name, ends in BOUNDS.items()}
    hours, low_high = (
        frame["hours-per-week"].to_numpy(),
        dict(zip(("low", "high"), BOUNDS["hours-per-week"], strict=True)),
    )
    sex = 2.0 * codes["sex"][1] - 1.0
    records = np.column_stack([unit["age"], unit["education-num"], unit["hours-per-week"], sex])
    return {
        "counts": {"codes": codes["occupation"][1], "size": size["occupation"]},
        "marginals": {
            "pairs": [codes[a][1] * size[b] + codes[b][1] for a, b in pairs],
            "sizes": [size[a] * size[b] for a, b in pairs],
        },
        "means": {"values": hours, "groups": codes["occupation"][1], "group_count": size["occupation"], **low_high},
        **{
            f"quantiles {name}": {
                "values": frame[name].to_numpy(),
                "probabilities": PROBABILITIES,
                "low": BOUNDS[name][0],
                "high": BOUNDS[name][1],
                "bins": BINS[name],
                "column": name,
            }
            for name in BINS
        },
        "regression": {
            "features": np.column_stack([unit["age"], unit["education-num"], sex]),
            "target": unit["hours-per-week"],
        },
        "line": {"features": unit["age"][:, None], "target": unit["hours-per-week"]},
        "pca": {"records": records, "norm": 2.0, "components": COMPONENTS},
    }


def unit_scale(values, low, high):
    return (2.0 * np.asarray(values, dtype=float) - low - high) / (high - low)


def error(name, task, answers, frame, library):
    """The root of the mean squared error of the answers."""
    answers = np.asarray(answers, dtype=float)
    if name == "pca":
        moment = task["records"].T @ task["records"]
        best = np.sum(np.linalg.eigvalsh(moment)[-COMPONENTS:])
        bases = [np.linalg.qr(found.T)[0] for found in answers]
        return 100.0 * np.mean([1.0 - np.trace(basis.T @ moment @ basis) / best for basis in bases])
    if name in ("regression", "line"):
        if library == "matrixdp":
            columns = [frame["age"]]
            if name == "regression":
                columns += [frame["education-num"], frame["sex"] == "Male"]
            design, target = np.column_stack([np.ones(len(frame)), *columns]).astype(float), frame["hours-per-week"]
            scale = 1.0
        else:
            design, target, scale = np.column_stack([np.ones(len(frame)), task["features"]]), task["target"], 49.0
        right = np.linalg.lstsq(design, np.asarray(target, dtype=float), rcond=None)[0]
        return scale * np.sqrt(np.mean((design @ (answers - right).T) ** 2))
    if name == "quantiles fnlwgt":
        ranks = np.searchsorted(np.sort(task["values"]), answers) / len(frame)
        return 100.0 * np.sqrt(np.mean((ranks - PROBABILITIES) ** 2))
    return np.sqrt(np.mean((answers - truth(name, task)) ** 2))


def truth(name, task):
    if name == "counts":
        return np.bincount(task["codes"], minlength=task["size"])
    if name == "marginals":
        tables = zip(task["pairs"], task["sizes"], strict=True)
        return np.concatenate([np.bincount(codes, minlength=size) for codes, size in tables])
    if name == "means":
        return np.bincount(task["groups"], task["values"]) / np.bincount(task["groups"])
    return np.quantile(task["values"], PROBABILITIES, method="inverted_cdf")


def lines(path):
    """How many lines of code the body of each function of a file has."""
    text = Path(path).read_text()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            body = text.splitlines()[node.body[0].lineno - 1 : node.end_lineno]
            found[node.name] = sum(bool(line.strip()) and not line.strip().startswith("#") for line in body)
    return found


def measured(peer):
    """Errors and lines by task and library."""
    frame = pd.read_csv(Path(os.environ["MATRIXDP_DATA"], "adult_train.csv.gz"), keep_default_na=False)
    given, table = tasks(frame), matrixdp_table(frame)
    answers = {}
    for name, task in given.items():
        function = globals()[f"matrixdp_{name.split(' ')[0]}"]
        answers[f"matrixdp/{name}"] = [
            np.asarray(function(table=table, **task)) for _ in range(REPEATS[name.split(" ")[0]])
        ]
    written = lines(__file__)
    if peer is not None:
        script = Path(__file__).with_name("tables_peers.py")
        written.update(lines(script))
        written["diffprivlib_line"] = written["diffprivlib_regression"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tasks.npz")
            whole = {name: (task, REPEATS[name.split(" ")[0]]) for name, task in given.items()}
            np.savez(path, tasks=np.array(whole, dtype=object))
            output = subprocess.run([peer, script, path], stdout=subprocess.PIPE, text=True, check=True).stdout
        found, *versions = json.loads(output.splitlines()[-1])
        print("OpenDP {}, diffprivlib {}".format(*versions))
        answers.update(found)
    rows = []
    for place, values in answers.items():
        library, name = place.split("/")
        base, *variant = library.split("_", 1)
        function = "_".join([base, name.split(" ")[0], *variant])
        rows.append((name, library, error(name, given[name], values, frame, library), written[function]))
    return rows


def draw(rows, path):
    """Ratios of errors on a logarithmic axis, and lines of code."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    looks = {"opendp": ("#0072B2", "o"), "diffprivlib": ("#D55E00", "s"), "diffprivlib_sizes_public": ("#CC79A7", "^")}
    looks["matrixdp"] = ("#000000", "D")
    own = {name: value for name, library, value, _ in rows if library == "matrixdp"}
    places = {name: -place for place, name in enumerate(TASKS)}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.2), sharey=True, width_ratios=(2, 1), layout="constrained"
    )
    for library, (color, marker) in looks.items():
        chosen = [row for row in rows if row[1] == library]
        heights = [places[row[0]] for row in chosen]
        style = {"color": color, "marker": marker, "linestyle": "none", "label": LABELS[library]}
        left.plot([row[2] / own[row[0]] for row in chosen], heights, **style)
        right.plot([row[3] for row in chosen], heights, **style)
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set(xscale="log", xlabel="error, as a multiple of matrixdp's", yticks=list(places.values()))
    left.set_yticklabels([TASKS[name][0] for name in places])
    right.set(xlabel="lines of code", xlim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", help="the interpreter of an environment with OpenDP and diffprivlib")
    parser.add_argument("--figure", help="where to write the figure")
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = measured(arguments.peer)
    own = {name: value for name, library, value, _ in rows if library == "matrixdp"}
    print(f"{'task':<30} {'library':<26} {'error':>9} {'':<10} {'ratio':>7} {'lines':>5}  guarantee at epsilon 1")
    for wanted, (label, unit) in TASKS.items():
        for name, library, value, count in rows:
            if name == wanted:
                ratio = value / own[name]
                end = GUARANTEES[name] if library == "matrixdp" else ""
                print(f"{label:<30} {LABELS[library]:<26} {value:>9.3g} {unit:<10} {ratio:>7.2f} {count:>5}  {end}")
    seconds = time.perf_counter() - start
    print(f"matrixdp's domain and table: {lines(__file__)['matrixdp_table']} lines, once; {seconds:.0f} s in all")
    if arguments.figure is not None:
        draw(rows, arguments.figure)


if __name__ == "__main__":
    main()

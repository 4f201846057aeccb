"""What OpenDP and diffprivlib answer; run by benchmarks/tables.py with the interpreter of their environment.

Each function is one task, as short as the library allows. Category columns come as codes and are not counted as work.
Prints one line of JSON: answers by task and repeat, and versions.
"""

import json
import sys
import warnings
from importlib.metadata import version

import diffprivlib
import numpy as np
import opendp.prelude as dp
import polars as pl
from diffprivlib import mechanisms, models, tools

dp.enable_features("contrib", "honest-but-curious", "idealized-numerics")
warnings.simplefilter("ignore")


def opendp_counts(codes, size, **_):
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    count = space >> dp.t.then_count_by_categories(list(range(size)), null_category=False) >> dp.m.then_laplace(1.0)
    assert count.map(1) <= 1.0
    return count(codes.tolist())


def diffprivlib_counts(codes, size, **_):
    return tools.histogram(codes, epsilon=1.0, bins=size, range=(0, size))[0]


def opendp_marginals(pairs, sizes, **_):
    number = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)

    def tables(std):
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*number, scale=std)), delta=1e-6)

    std = dp.binary_search_param(tables, d_in=len(pairs) ** 0.5, d_out=(1.0, 1e-6), T=float)
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    answers = []
    for codes, size in zip(pairs, sizes, strict=True):
        counts = dp.t.then_count_by_categories(list(range(size)), null_category=False, MO=dp.L2Distance[int])
        answers += (space >> counts >> dp.m.then_gaussian(std))(codes.tolist())
    return answers


def diffprivlib_marginals(pairs, sizes, **_):
    answers = []
    for codes, size in zip(pairs, sizes, strict=True):
        answers += tools.histogram(codes, epsilon=1.0 / len(pairs), bins=size, range=(0, size))[0].tolist()
    return answers


def opendp_means(values, groups, low, high, **_):
    context = dp.Context.compositor(
        data=pl.LazyFrame({"group": groups, "value": values}),
        privacy_unit=dp.unit_of(contributions=1),
        privacy_loss=dp.loss_of(epsilon=1.0),
        split_evenly_over=1,
        margins=[dp.polars.Margin(by=["group"], invariant="keys", max_length=100_000)],
    )
    total = pl.col("value").fill_null(low).dp.sum((0, high - low)).alias("total")
    query = context.query().with_columns(pl.col("value") - low).group_by("group").agg(total, dp.len().alias("count"))
    found = query.release().collect().sort("group")
    return np.clip(low + found["total"].to_numpy() / np.maximum(found["count"].to_numpy(), 1), low, high)


def diffprivlib_means(values, groups, group_count, low, high, **_):
    counts = tools.histogram(groups, epsilon=0.5, bins=group_count, range=(0, group_count))[0]
    noise = mechanisms.Laplace(epsilon=0.5, sensitivity=high - low)
    totals = [noise.randomise(float(np.sum(values[groups == group] - low))) for group in range(group_count)]
    return np.clip(low + np.array(totals) / np.maximum(counts, 1), low, high)


def diffprivlib_means_sizes_public(values, groups, group_count, low, high, **_):
    return [tools.mean(values[groups == group], epsilon=1.0, bounds=(low, high)) for group in range(group_count)]


def opendp_quantiles(values, probabilities, low, high, bins, **_):
    candidates = (np.arange(low, high + 1) if bins == "whole" else np.linspace(low, high, 15_001)).tolist()
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    answers = []
    for p in probabilities:
        score = space >> dp.t.then_quantile_score_candidates(candidates, alpha=p)
        pick = dp.binary_search_chain(
            lambda s, score=score: score >> dp.m.then_noisy_max(dp.max_divergence(), s, negate=True),
            d_in=1,
            d_out=1.0 / len(probabilities),
        )
        answers.append(candidates[pick(values.astype(float).tolist())])
    return answers


def diffprivlib_quantiles(values, probabilities, low, high, **_):
    return tools.quantile(values.astype(float), list(probabilities), epsilon=1.0, bounds=(low, high))


def diffprivlib_regression(features, target, **_):
    # All within [-1, 1], with a constant column: its own intercept has too little noise, see benchmarks/tables.py.
    with_constant = np.column_stack([np.ones(len(features)), features])
    model = models.LinearRegression(epsilon=1.0, bounds_X=(-1, 1), bounds_y=(-1, 1), fit_intercept=False)
    return model.fit(with_constant, target).coef_


def opendp_line(features, target, **_):
    def fit(scale):
        return dp.sklearn.linear_model.LinearRegression(
            dp.max_divergence(), x_bounds=[(-1, 1)], y_bounds=(-1, 1), scale=scale
        )

    scale = dp.binary_search(lambda s: fit(s).measurement.map(1) <= 1.0, bounds=(1e-3, 1e3))
    model = fit(scale).fit(features, target)
    return [model.intercept_, *np.ravel(model.coef_)]


diffprivlib_line = diffprivlib_regression


def opendp_pca(records, norm, components, **_):
    rows, columns = records.shape
    domain = dp.numpy.array2_domain(p=2, norm=norm, origin=0.0, size=rows, num_columns=columns, T=float)
    release = dp.sklearn.decomposition.make_private_pca(
        domain, dp.symmetric_distance(), unit_epsilon=1.0, num_components=components
    )
    return release(records).Vt[:components]


def diffprivlib_pca(records, norm, components, **_):
    return models.PCA(components, epsilon=1.0, data_norm=norm, centered=True).fit(records).components_


def main():
    given = np.load(sys.argv[1], allow_pickle=True)["tasks"].item()
    answers = {}
    for name, (task, repeats) in given.items():
        task = {key: value for key, value in task.items() if key not in ("plain", "half")}
        for library in ("opendp", "diffprivlib"):
            for variant in ("", "_sizes_public"):
                function = globals().get(f"{library}_{name.split(' ')[0]}{variant}")
                if function is not None:
                    try:
                        found = [np.asarray(function(**task), dtype=float).tolist() for _ in range(repeats)]
                    except RuntimeError as reason:  # diffprivlib's quantiles do not take many equal values
                        print(f"{library} fails on {name}: {str(reason)[:60]}", file=sys.stderr, flush=True)
                        continue
                    answers[f"{library}{variant}/{name}"] = found
                    print(library, name, "done", file=sys.stderr, flush=True)
    print(json.dumps([answers, version("opendp"), diffprivlib.__version__]))


if __name__ == "__main__":
    main()

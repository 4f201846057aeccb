"""Daily counts by region for a year, as private running totals
============================================================

Generated visits in ten regions on 365 days; a person comes at most once a week. All running totals keep epsilon 1.
The figure has the standard error of each day's total: this stream, the binary tree, and independent noise per day
("analytic"). Its points are the errors of one run, root mean square over the regions.
``python examples/daily_counts.py [FIGURE]``
"""

import sys
from pathlib import Path

import numpy as np

from matrixdp import Budget, Participation, calibrate, plots
from matrixdp.streams import Stream

DAYS, REGIONS = 365, 10
WEEKLY = Participation(1.0, separation=7, times=53, adjacency="add/remove")
BUDGET = Budget(1.0, 1e-6)


def made_counts(seed=0):
    """Visits by day and region: a level per region, a week and a year."""
    rng = np.random.default_rng(seed)
    days = np.arange(DAYS)[:, None]
    season = 1 + 0.3 * np.sin(2 * np.pi * days / 365) + 0.2 * (days % 7 >= 5)
    return rng.poisson(rng.uniform(200, 2000, REGIONS) * season).astype(float)


def standard_errors(name):
    """Of the running total on every day, for a mechanism at this budget."""
    law = calibrate(name, shape=(DAYS, REGIONS), sensitivity=WEEKLY, budget=BUDGET)
    if name == "analytic":
        return law.covariance.std * np.sqrt(np.arange(1, DAYS + 1))
    return np.sqrt(law.covariance.answer_variances("prefix"))


def main(path=None):
    """Runs the stream, compares its error with the prediction and the rivals; the figure goes to the path if given."""
    counts = made_counts()
    stream = Stream(steps=DAYS, sensitivity=WEEKLY, budget=BUDGET, shape=(REGIONS,))
    answers = [stream.add(day) for day in counts]
    off = np.array([answer.value for answer in answers]) - np.cumsum(counts, axis=0)
    predicted = np.array([answer.standard_error for answer in answers])
    print(f"{stream.certificate}\non the last day: {answers[-1].value.round()} +- {answers[-1].standard_error:.0f}")
    measured = np.sqrt(np.mean((off / predicted[:, None]) ** 2))
    print(f"error in standard errors, root mean square over days and regions: {measured:.2f}")
    rivals = {name: standard_errors(name) for name in ("binary-tree", "analytic")}
    for name, errors in {"this stream": predicted, **rivals}.items():
        print(f"{name:<12} root mean square of the standard errors {np.sqrt(np.mean(errors**2)):8.1f}")
    errors, names = {**rivals, "this stream": predicted}, ("day", "standard error of the running total")
    chart = plots.lines(np.arange(1, DAYS + 1), errors, points=np.sqrt(np.mean(off**2, axis=1)), names=names)
    if path is not None:
        plots.save(chart, Path(path))
    return chart


if __name__ == "__main__":
    figure = main(*sys.argv[1:])

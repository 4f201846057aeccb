"""Daily counts by region for a year, as private running totals: python examples/daily_counts.py [FIGURE]

Made data: visits in ten regions on 365 days. A person comes at most once a week, and is counted in one region each
time. The running totals are released every day, and all of them together keep epsilon 1. The figure has the standard
error of each day's total: noise over time, the binary tree, and independent noise on each day, at the same guarantee.
"""

import sys

import numpy as np

from matrixdp import Budget, Participation, calibrate
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


def main(figure=None):
    """Runs the stream, compares its error with the prediction and the rivals, and draws the figure if asked to."""
    counts = made_counts()
    stream = Stream(steps=DAYS, sensitivity=WEEKLY, budget=BUDGET, shape=(REGIONS,))
    print(stream.certificate)
    answers = [stream.add(day) for day in counts]
    off = np.array([answer.value for answer in answers]) - np.cumsum(counts, axis=0)
    predicted = np.array([answer.standard_error for answer in answers])
    print(f"on the last day: {answers[-1].value.round()} +- {answers[-1].standard_error:.0f}")
    measured = np.sqrt(np.mean((off / predicted[:, None]) ** 2))
    print(f"error in standard errors, root mean square over days and regions: {measured:.2f}")
    rivals = {name: standard_errors(name) for name in ("binary-tree", "analytic")}
    for name, errors in {"this stream": predicted, **rivals}.items():
        print(f"{name:<12} root mean square of the standard errors {np.sqrt(np.mean(errors**2)):8.1f}")
    if figure is not None:
        draw(figure, predicted, rivals, np.sqrt(np.mean(off**2, axis=1)))


def draw(path, predicted, rivals, measured):
    """The standard error of each day's total."""
    from matplotlib.figure import Figure

    found = Figure(figsize=(7, 4), layout="constrained")
    axes, days = found.subplots(), np.arange(1, DAYS + 1)
    axes.plot(days, rivals["analytic"], label="independent noise on each day")
    axes.plot(days, rivals["binary-tree"], label="binary tree")
    axes.plot(days, predicted, label="noise over time (this stream)")
    axes.plot(days, measured, ".", markersize=2, color="gray", label="measured, over ten regions")
    axes.set(xlabel="day", ylabel="standard error of the running total", ylim=(0, None))
    axes.legend()
    found.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])

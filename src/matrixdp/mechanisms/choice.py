"""How "auto" chooses the mechanism with the least expected error: by a theorem wherever one applies.

Write B for `gaussian.mu(epsilon, delta)`, s for the Frobenius radius of the set K, and P for the Gram matrix of the
task: the identity, diag(weights), W^T W for a workload W, or that of two utilities. Noise N(0, S) keeps the budget on K
if v^T S^-1 v <= B^2 for every v in K, and costs the task tr(P S). The noise of "analytic" is (s/B)^2 I, and costs
(s/B)^2 tr(P).

**Where "analytic" is the optimum among Gaussian noise**, no other is calibrated (docs/optimal-noise.md has the proofs
of the first three):

1. Frobenius, every task: the constraint is S >= (s/B)^2 I.
2. Counts and L1, all entries alike: only multiples of the identity commute with the symmetries of the set. OneRow and
   OneColumn by norm, with weights or utilities that do not mix these lines: each line has a separate constraint.
3. Entrywise with one bound, OneRow and OneColumn with one width, all entries alike: equality in the Cauchy-Schwarz
   inequality.
4. Counts(1) and a diagonal P: weights, or a workload whose Gram matrix is diagonal. The constraint is
   (S^-1)_ii <= (B/s)^2, and S_ii >= 1/(S^-1)_ii, so tr(P S) = sum_i P_ii S_ii >= (s/B)^2 tr(P).
   Likewise L1 without a smaller bound per entry, and weights.
5. Counts and a workload with P = c I: as 2.

**What "analytic" dominates among Gaussian noise.** If S >= (s/B)^2 I then tr(P S) >= (s/B)^2 tr(P) for every task, so S
is never better.
Let N be the number of entries, z^2 = N + 2 sqrt(N ln(1/delta)) + 2 ln(1/delta), and x the positive root of
x^2 + 2 z x = 2 epsilon. Then x <= B: as epsilon/x - x/2 = z, the exact delta of mu = x (balle2018improving, Theorem 8)
is at most Phi(-z) <= exp(-z^2/2)/2 <= delta/2, and it grows with mu. Hence

6. classic is i.i.d., and "analytic" is the least i.i.d. noise that keeps the budget (balle2018improving, Theorem 8).
7. imgm scales its covariance until the least standard deviation is s/B or more.
8. mgm and udn: the inverse variances along the axes of the noise add up to (x/s)^2, so each variance is at least
   (s/x)^2.
9. idn without row_utility: all variances are N w^2/x^2 >= (s/x)^2, where w is the most that an entry can change.
10. mvg with gamma >= s/2, as every true bound on the norm is. Every variance is at least 1/phi^2, where
    a phi^2 + b phi = 2 epsilon. As gamma >= s/2, z >= 1 and the harmonic sums are at least 1, a >= s^2 and
    b >= 2 z s, so s phi <= x.

**What is left** is calibrated and compared: "optimal" where it is not i.i.d. (RankOne, unequal bounds, Vertices, tasks
that theorems 1 to 4 do not settle); "matrix-mechanism" for a workload on Counts; "banded", "toeplitz", "inverse-banded"
and "binary-tree" where rows are steps in time; idn with row_utility; mechanisms from outside the package.
"laplace" and "discrete" are tried wherever they apply, which is where few entries change. With one count they have a
tenth of the variance of Gaussian noise; with 32 about the same. No theorem here says beforehand which is less, so both
are always tried, and results are cached. With delta = 0 no other mechanism applies.
Residuals of marginals matter only through the tables computed from them, and get the noise of "marginals".

"auto" takes only what is floating-point-safe: "l2" and "spherical" have less error with few entries, but no such
sampler is known for them. It minimises the error of one release. Where several share a budget, `Budget.plan` fixes
their noise together. If errors differ by less than 1e-9, relatively, it takes the mechanism listed first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian, NoiseLaw, Product, time_workloads
from matrixdp.errors import MatrixDPError, NotApplicable, NotCertifiable, NumericalFailure
from matrixdp.mechanisms.base import Recipe
from matrixdp.mechanisms.matrix_mechanism import as_workload, workload_error
from matrixdp.mechanisms.optimal import isotropic_is_optimal
from matrixdp.mechanisms.task import task_error, task_of
from matrixdp.privacy.certificate import certify
from matrixdp.privacy.drawing import has_safe_sampler
from matrixdp.residuals import Residuals
from matrixdp.sensitivity import Counts, Frobenius, Participation, Sensitivity

# Errors that differ by less count as equal.
TIE = 1e-9
# Options that define the error, where no workload does.
_TASK = ("weights", "row_utility", "column_utility")
# The first two are not floating-point-safe; the third is one of the laws that "discrete" tries.
_BY_NAME_ONLY = ("l2", "spherical", "discrete-gaussian")
_DISCRETE = ("laplace", "discrete")
# Only for Participation.
_OVER_TIME = ("banded", "toeplitz", "inverse-banded", "binary-tree")


def least_error(
    recipes: Mapping[str, Recipe],
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    options: Mapping[str, Any],
    family: type[NoiseLaw] = NoiseLaw,
) -> NoiseLaw:
    """The law of the mechanism with the least expected error that keeps the budget and is floating-point-safe.

    Args:
        recipes: the mechanisms by name; "analytic" is one of them.
        shape: the shape of the value to release.
        sensitivity: what a neighbour can change.
        budget: the budget to keep.
        options: of any of the recipes; `weights`, utilities and `workload` define the error.
        family: the class of laws to choose from; Gaussian where the caller rescales the noise to a mu afterwards.

    Raises:
        NotApplicable: if there is none; with delta = 0 there is one for few sets only.
    """
    if isinstance(sensitivity, Residuals):
        chosen = recipes["marginals"]
        return chosen.calibrate(shape, sensitivity, budget, **chosen.known(options))
    options = _with_task(shape, sensitivity, options)
    best: tuple[float, NoiseLaw] | None = None
    reasons: list[MatrixDPError] = []
    for recipe in (recipes["analytic"], *recipes.values()):
        if recipe.missing(options) or not _may_win(recipe, shape, sensitivity, options, family):
            continue
        if best is not None and recipe.name == "analytic":
            continue
        try:
            law = recipe.calibrate(shape, sensitivity, budget, **recipe.known(options))
            error = expected_error(law, options, sensitivity)
            less = best is None or error < best[0] * (1 - TIE)
            if less and (recipe.name == "analytic" or _keeps(law, sensitivity, budget, family)):
                best = error, law
        except (NotApplicable, NotCertifiable, NumericalFailure) as reason:
            reasons.append(reason)
    if best is None:
        raise NotApplicable(f"no mechanism keeps {budget} here: {reasons[0]}")
    return best[1]


def _keeps(law: NoiseLaw, sensitivity: Sensitivity, budget: Budget, family: type[NoiseLaw]) -> bool:
    if type(law) not in (Gaussian, Product) or not isinstance(law, family):  # no profile is proven for other laws here
        return False
    certificate = certify(law, sensitivity)
    return certificate.meets(budget) and has_safe_sampler(law, certificate.mu)


def expected_error(law: NoiseLaw, options: Mapping[str, Any], sensitivity: Sensitivity | None = None) -> float:
    """The expected squared error for the task in the options: a workload, weights, utilities, or all entries alike.

    Where rows are steps in time, the workload acts along them, and is running sums by default.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> from matrixdp.mechanisms import expected_error
        >>> noise = calibrate("analytic", shape=(6, 8), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))
        >>> round(expected_error(noise, {}), 2)  # of all 48 entries together
        856.7
    """
    workload, (weights, *utilities) = options.get("workload"), map(options.get, _TASK)
    unsaid = weights is None and all(utility is None for utility in utilities)
    if isinstance(sensitivity, Participation) and (workload is not None or unsaid):
        task = time_workloads.coefficients("prefix" if workload is None else workload, law.shape[0])
        if isinstance(law, Gaussian):
            return law.expected_squared_error(workload=task)
        of_steps = float(np.sum(time_workloads.column_squares(task)))  # of a law with entries uncorrelated and alike
        return law.root_mean_square**2 * law.shape[1] * of_steps
    if workload is not None:
        return workload_error(workload, law)
    if weights is not None or unsaid:
        return law.expected_squared_error(weights)
    shape = law.covariance.shape if isinstance(law, Gaussian) else law.shape  # as in `workload_error`
    return task_error(task_of(shape, None, *utilities), law)


def has_task(options: Mapping[str, Any], sensitivity: Sensitivity) -> bool:
    """Whether `expected_error` is that of a task, and not of all entries alike."""
    return isinstance(sensitivity, Participation) or any(options.get(name) is not None for name in ("workload", *_TASK))


def _with_task(shape: Shape, sensitivity: Sensitivity, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with the workload built once, as that is slow; also checks weights and utilities."""
    task_of(shape, *map(options.get, _TASK))
    if options.get("workload") is None or isinstance(sensitivity, Participation):
        return options
    return {**options, "workload": as_workload(options["workload"], shape)}


def _analytic_is_optimal(shape: Shape, sensitivity: Sensitivity, options: Mapping[str, Any]) -> bool:
    """Theorems 1 to 5."""
    if options.get("workload") is None:
        return isotropic_is_optimal(sensitivity, *map(options.get, _TASK))
    if not isinstance(sensitivity, Counts):
        return isinstance(sensitivity, Frobenius)
    grams = [gram for term in options["workload"].terms for gram in term]
    diagonal = all(np.count_nonzero(gram) == np.count_nonzero(np.diagonal(gram)) for gram in grams)
    return diagonal and (sensitivity.cells == 1 or all(np.ptp(np.diagonal(gram)) == 0 for gram in grams))


def _may_win(
    recipe: Recipe, shape: Shape, sensitivity: Sensitivity, options: Mapping[str, Any], family: type[NoiseLaw]
) -> bool:
    """Whether the recipe has to be tried: False if theorems 1 to 10, or the kind of recipe, rule it out."""
    if recipe.refuted or recipe.slow or recipe.name in _BY_NAME_ONLY:
        return False
    if recipe.name in _DISCRETE:
        return issubclass(Product, family)
    if recipe.name == "analytic":
        return True
    if _analytic_is_optimal(shape, sensitivity, options):
        return False
    if recipe.name in _OVER_TIME:
        return isinstance(sensitivity, Participation)
    if recipe.name == "optimal":
        return not isotropic_is_optimal(sensitivity, *map(options.get, _TASK))
    if recipe.name == "idn":
        return options.get("row_utility") is not None
    if recipe.name == "mvg":
        return 2 * _check.positive("gamma", options["gamma"]) < sensitivity.frobenius_radius(shape)
    return recipe.name not in ("classic", "imgm", "mgm", "udn", "marginals")

"""Recipes that turn a sensitivity set and a budget into a noise law, one file each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.mechanisms.analytic import analytic
from matrixdp.mechanisms.base import Recipe
from matrixdp.mechanisms.classic import classic
from matrixdp.mechanisms.imgm import imgm
from matrixdp.mechanisms.matrix_mechanism import matrix_mechanism, workload_error
from matrixdp.mechanisms.mgm import idn, mgm, udn
from matrixdp.mechanisms.mvg import mvg
from matrixdp.mechanisms.optimal import optimal
from matrixdp.mechanisms.r1smg import r1smg
from matrixdp.mechanisms.spherical import l2, spherical
from matrixdp.noise.laws import Gaussian, NoiseLaw
from matrixdp.noise.sampler import has_safe_sampler
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Sensitivity

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        classic,
        analytic,
        mvg,
        mgm,
        udn,
        idn,
        imgm,
        r1smg,
        l2,
        spherical,
        optimal,
        matrix_mechanism,
    )
}
"""Every mechanism by name; of two that are equally good, "auto" takes the one listed first."""


def calibrate(mechanism: str, *, shape: Any, sensitivity: Sensitivity, budget: Budget, **options: Any) -> NoiseLaw:
    """The noise that a mechanism proposes for a budget.

    Args:
        mechanism: a name in RECIPES, or "auto" for the least expected error among those that keep the budget with
            Gaussian noise that is floating-point-safe, and composes exactly. With few entries the ideal laws of "l2"
            and "spherical" have less error, but no floating-point-safe sampler is known for them.
        shape: the shape of the value to release.
        sensitivity: what a neighbour can change.
        budget: the promise to keep.
        **options: the recipe's own options; an unknown one is an error.

    Returns:
        A noise law; `certify` says what it guarantees.
    """
    _check.choice("mechanism", mechanism, [*RECIPES, "auto"])
    shape = _check.shape(shape)
    if not isinstance(sensitivity, Sensitivity):
        raise InvalidInput(f"sensitivity must be a set from matrixdp.sensitivity, got {type(sensitivity).__name__}")
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(budget).__name__}")
    sensitivity.fits(shape)
    if mechanism == "auto":
        return _least_error(shape, sensitivity, budget, options)
    chosen = RECIPES[mechanism]
    law = chosen.calibrate(shape, sensitivity, budget, **options)
    return law.attributed_to(f"{chosen.name} [{chosen.source}]")


def proposals(
    shape: Any, sensitivity: Sensitivity, budget: Budget, options: dict[str, Any], names: Any = None
) -> Iterator[tuple[Recipe, NoiseLaw | NotApplicable]]:
    """What each mechanism proposes, or why it has nothing to propose; options go to the recipes that know them."""
    named = [RECIPES[_check.choice("mechanism", name, RECIPES)] for name in names or ()]
    chosen = named or list(RECIPES.values())
    for name in options:
        if not any(name in recipe.options for recipe in chosen):
            raise InvalidInput(f"no mechanism here has an option {name!r}")
    for recipe in chosen:
        known = {name: value for name, value in options.items() if name in recipe.options}
        missing = [n for n, p in recipe.options.items() if p.default is p.empty and n not in known]
        if missing:
            yield recipe, NotApplicable(f"needs the option {missing[0]!r}")
            continue
        if recipe.slow and not named:
            yield recipe, NotApplicable("takes seconds; ask for it by name")
            continue
        try:
            law = calibrate(recipe.name, shape=shape, sensitivity=sensitivity, budget=budget, **known)
        except NotApplicable as reason:
            yield recipe, reason
        else:
            yield recipe, law


def expected_error(law: NoiseLaw, options: dict[str, Any]) -> float:
    """What the noise costs the task that the options name: a workload, weights, or all entries alike."""
    if options.get("workload") is not None:
        return workload_error(options["workload"], law)
    return law.expected_squared_error(options.get("weights"))


def _least_error(shape: Any, sensitivity: Sensitivity, budget: Budget, options: dict[str, Any]) -> NoiseLaw:
    best: tuple[float, NoiseLaw] | None = None
    for recipe, law in proposals(shape, sensitivity, budget, options):
        if recipe.refuted or not isinstance(law, Gaussian):
            continue
        try:
            certificate = certify(law, sensitivity)
            kept = certificate.meets(budget) and has_safe_sampler(law, certificate.mu)
        except NotCertifiable:
            kept = False
        error = expected_error(law, options)
        if kept and (best is None or error < best[0] * (1 - 1e-9)):
            best = error, law
    if best is None:
        raise NotCertifiable(f"no mechanism keeps {budget} on this set: {sensitivity}")
    return best[1]

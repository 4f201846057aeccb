"""Recipes that turn a sensitivity set and a budget into a noise law, one file each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from matrixdp import _check
from matrixdp.budget import Budget
from matrixdp.errors import InvalidInput, NotApplicable, NotCertifiable
from matrixdp.mechanisms.analytic import analytic
from matrixdp.mechanisms.base import Recipe
from matrixdp.mechanisms.classic import classic
from matrixdp.mechanisms.imgm import imgm
from matrixdp.mechanisms.optimal import optimal
from matrixdp.noise.laws import NoiseLaw
from matrixdp.privacy.certificate import certify
from matrixdp.sensitivity import Sensitivity

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (classic, analytic, imgm, optimal)}
"""Every mechanism by name; of two that are equally good, "auto" takes the one listed first."""


def calibrate(mechanism: str, *, shape: Any, sensitivity: Sensitivity, budget: Budget, **options: Any) -> NoiseLaw:
    """The noise that a mechanism proposes for a budget.

    Args:
        mechanism: a name in RECIPES, or "auto" for the least expected error among those that keep the budget.
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
        raise InvalidInput(f"sensitivity must be a set from matrixdp.sensitivity, got {sensitivity!r}")
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {budget!r}")
    sensitivity.fits(shape)
    if mechanism == "auto":
        return _least_error(shape, sensitivity, budget, options)
    chosen = RECIPES[mechanism]
    law = chosen.calibrate(shape, sensitivity, budget, **options)
    return replace(law, source=f"{chosen.name} [{chosen.source}]")


def proposals(
    shape: Any, sensitivity: Sensitivity, budget: Budget, options: dict[str, Any], names: Any = None
) -> Iterator[tuple[Recipe, NoiseLaw | NotApplicable]]:
    """What each mechanism proposes, or why it has nothing to propose; options go to the recipes that know them."""
    chosen = [RECIPES[_check.choice("mechanism", name, RECIPES)] for name in (names or RECIPES)]
    for name in options:
        if not any(name in recipe.options for recipe in chosen):
            raise InvalidInput(f"no mechanism here has an option {name!r}")
    for recipe in chosen:
        known = {name: value for name, value in options.items() if name in recipe.options}
        missing = [n for n, p in recipe.options.items() if p.default is p.empty and n not in known]
        if missing:
            yield recipe, NotApplicable(f"needs the option {missing[0]!r}")
            continue
        try:
            law = calibrate(recipe.name, shape=shape, sensitivity=sensitivity, budget=budget, **known)
        except NotApplicable as reason:
            yield recipe, reason
        else:
            yield recipe, law


def _least_error(shape: Any, sensitivity: Sensitivity, budget: Budget, options: dict[str, Any]) -> NoiseLaw:
    best: tuple[float, NoiseLaw] | None = None
    for _, law in proposals(shape, sensitivity, budget, options):
        if isinstance(law, NotApplicable):
            continue
        try:
            kept = certify(law, sensitivity).meets(budget)
        except NotCertifiable:
            kept = False
        error = law.expected_squared_error(options.get("weights"))
        if kept and (best is None or error < best[0] * (1 - 1e-9)):
            best = error, law
    if best is None:
        raise NotCertifiable(f"no mechanism keeps {budget} on this set: {sensitivity}")
    return best[1]

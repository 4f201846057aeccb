"""Recipes that turn a sensitivity set and a budget into a noise law, one file each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Shape
from matrixdp.budget import Allotment, Budget
from matrixdp.distributions import Gaussian, NoiseLaw
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.analytic import analytic
from matrixdp.mechanisms.base import Recipe, recipe
from matrixdp.mechanisms.choice import expected_error, least_error
from matrixdp.mechanisms.classic import classic
from matrixdp.mechanisms.discrete import discrete, discrete_gaussian, laplace
from matrixdp.mechanisms.imgm import imgm
from matrixdp.mechanisms.marginals import marginals
from matrixdp.mechanisms.matrix_mechanism import matrix_mechanism
from matrixdp.mechanisms.mgm import idn, mgm, udn
from matrixdp.mechanisms.mvg import mvg
from matrixdp.mechanisms.optimal import optimal
from matrixdp.mechanisms.over_time import banded, binary_tree, inverse_banded, toeplitz
from matrixdp.mechanisms.r1smg import r1smg
from matrixdp.mechanisms.spherical import l2, rank_r, spherical
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, Sensitivity
from matrixdp.sensitivity.entries import checked_set

__all__ = ["RECIPES", "Recipe", "calibrate", "calibrate_gaussian", "expected_error", "proposals", "recipe", "register"]

RECIPES: dict[str, Recipe] = {}
"""Every mechanism by name; of two with equal error, "auto" takes the one listed first."""

# Laws that "auto" has chosen, for sets that a few numbers describe completely.
_FOUND: dict[tuple[Any, ...], NoiseLaw] = {}
_MOST_FOUND = 4096


def register(mechanism: Recipe) -> Recipe:
    """Adds a mechanism, which then works by its name everywhere: in calibrate, release, compare, audit and the CLI.

    Args:
        mechanism: made from a function by `recipe`, under a name not yet taken. "auto" considers it unless it is slow.

    Returns:
        The mechanism itself, so that `register` can be a decorator above `recipe`.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> from matrixdp.mechanisms import RECIPES, recipe, register
        >>> @register
        ... @recipe("cautious", source="an example: half the epsilon")
        ... def cautious(shape, sensitivity, budget):
        ...     half = Budget(budget.epsilon / 2, budget.delta)
        ...     return calibrate("analytic", shape=shape, sensitivity=sensitivity, budget=half)
        ...
        >>> calibrate("cautious", shape=(3,), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6)).describe()
        'i.i.d. Gaussian, std 8.05762'
        >>> _ = RECIPES.pop("cautious")
    """
    if not isinstance(mechanism, Recipe):
        raise InvalidInput(f"mechanism must be a Recipe, made with `recipe`, got {_check.kind(mechanism)}")
    name = mechanism.name
    if not (isinstance(name, str) and name.strip() and name.isprintable()):
        raise InvalidInput(f"name must be printable text, got {_check.kind(name)}")
    if name in (*RECIPES, "auto"):
        raise InvalidInput(f"name must be free, {name!r} is taken; choose another")
    RECIPES[name] = mechanism
    return mechanism


for _own in (
    *(classic, analytic, mvg, mgm, udn, idn, imgm, r1smg, rank_r, l2, spherical),
    *(laplace, discrete, discrete_gaussian, optimal, matrix_mechanism, marginals),
    *(banded, toeplitz, inverse_banded, binary_tree),
):
    register(_own)


def calibrate(mechanism: str, *, shape: Any, sensitivity: Sensitivity, budget: Budget, **options: Any) -> NoiseLaw:
    """The noise that a mechanism proposes for a budget.

    Args:
        mechanism: a name in RECIPES, or "auto" for the least expected error among those that keep the budget and are
            floating-point-safe (`choice` says how it is found). With few entries the ideal laws of "l2" and "spherical"
            have less error, but no floating-point-safe sampler is known for them.
        shape: the shape of the value to release, of any number of dimensions. Recipes work on vectors and matrices;
            other values are reshaped to `sensitivity.matrix_shape`.
        sensitivity: what a neighbour can change.
        budget: the budget to keep.
        **options: the recipe's own options; an unknown one is an error. "auto" gives each to the recipes that know it.

    Returns:
        A noise law; `certify` says what it guarantees.

    Example:
        >>> from matrixdp import Budget, Frobenius, calibrate
        >>> noise = calibrate("analytic", shape=(6, 8), sensitivity=Frobenius(1.0), budget=Budget(1.0, 1e-6))
        >>> noise.describe()
        'i.i.d. Gaussian, std 4.22468'
    """
    _check.choice("mechanism", mechanism, [*RECIPES, "auto"])
    shape = _check.any_shape(shape)
    checked_set("sensitivity", sensitivity)
    if not isinstance(budget, Budget):
        raise InvalidInput(f"budget must be a Budget(epsilon, delta), got {type(budget).__name__}")
    sensitivity.fits(shape)
    if isinstance(budget, Allotment):
        if mechanism != "auto" or options:
            raise InvalidInput(
                "mechanism and options are fixed by the plan that the budget is a part of; leave them out"
            )
        law: NoiseLaw = budget.law(shape, sensitivity)
        return law
    matrix = sensitivity.matrix_shape(shape)
    if matrix != shape:
        read = {name: np.reshape(o, matrix) if shape and np.shape(o) == shape else o for name, o in options.items()}
        same = sensitivity.read_as(shape, matrix)
        return calibrate(mechanism, shape=matrix, sensitivity=same, budget=budget, **read).reshaped(shape)
    if mechanism == "auto":
        _check_options(options, RECIPES.values())
        return _auto(shape, sensitivity, budget, options)
    return RECIPES[mechanism].calibrate(shape, sensitivity, budget, **options)


def calibrate_gaussian(
    mechanism: str, *, shape: Any, sensitivity: Sensitivity, budget: Budget, **options: Any
) -> NoiseLaw:
    """As `calibrate`, but "auto" takes Gaussian noise, which can be sized by its mu for many releases.

    Example:
        >>> from matrixdp import Budget, Counts
        >>> from matrixdp.mechanisms import calibrate_gaussian
        >>> calibrate_gaussian("auto", shape=(6, 8), sensitivity=Counts(1), budget=Budget(1.0, 1e-6)).describe()
        'i.i.d. Gaussian, std 4.22468'
    """
    if mechanism != "auto" or isinstance(budget, Allotment):
        return calibrate(mechanism, shape=shape, sensitivity=sensitivity, budget=budget, **options)
    _check_options(options, RECIPES.values())
    return _auto(_check.shape(shape), sensitivity, budget, options, family=Gaussian)


def _auto(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    options: dict[str, Any],
    family: type[NoiseLaw] = NoiseLaw,
) -> NoiseLaw:
    """The result of `least_error`, cached for sets that a few numbers describe."""
    one_bound = type(sensitivity) is Entrywise and np.ndim(sensitivity.bound) == 0
    if options or not (one_bound or type(sensitivity) in (Counts, Frobenius, L1)):
        return least_error(RECIPES, shape, sensitivity, budget, options, family)
    key = (*RECIPES, type(sensitivity), *sensitivity.extent(shape), shape, budget, family)
    law = _FOUND.get(key)
    if law is None:
        law = least_error(RECIPES, shape, sensitivity, budget, options, family)
        if len(_FOUND) < _MOST_FOUND:
            _FOUND[key] = law
    return law


def proposals(
    shape: Any, sensitivity: Sensitivity, budget: Budget, options: dict[str, Any], names: Any = None
) -> Iterator[tuple[Recipe, NoiseLaw | NotApplicable]]:
    """The law that each mechanism proposes, or why it proposes none; each recipe gets the options that it knows.

    Example:
        >>> from matrixdp import Budget, Counts
        >>> from matrixdp.mechanisms import proposals
        >>> names = ["analytic", "laplace"]
        >>> for mechanism, law in proposals((6, 8), Counts(1), Budget(1.0, 1e-6), {}, names=names):
        ...     print(mechanism.name, law.describe())
        ...
        analytic i.i.d. Gaussian, std 4.22468
        laplace discrete Laplace, scale 0.999999, on multiples of 1
    """
    named = [RECIPES[_check.choice("mechanism", name, RECIPES)] for name in names or ()]
    chosen = named or list(RECIPES.values())
    _check_options(options, chosen)
    for mechanism in chosen:
        missing = mechanism.missing(options)
        if missing:
            yield mechanism, NotApplicable(f"needs the option {missing[0]!r}")
            continue
        if mechanism.slow and not named:
            yield mechanism, NotApplicable("takes seconds; ask for it by name")
            continue
        given = {"shape": shape, "sensitivity": sensitivity, "budget": budget, **mechanism.known(options)}
        try:
            yield mechanism, calibrate(mechanism.name, **given)
        except NotApplicable as reason:
            yield mechanism, reason


def _check_options(options: Iterable[str], recipes: Iterable[Recipe]) -> None:
    known = {name for mechanism in recipes for name in mechanism.options}
    for name in options:
        if name not in known:
            raise InvalidInput(f"no mechanism here has an option {name!r}")

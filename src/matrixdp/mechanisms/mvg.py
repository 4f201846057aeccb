"""The matrix-variate Gaussian mechanism (MVG) with directional noise."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.budget import Budget
from matrixdp.distributions import Gaussian
from matrixdp.distributions.covariance import Kronecker
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.errors import BudgetExceeded, InvalidInput, NotApplicable
from matrixdp.mechanisms.base import recipe
from matrixdp.mechanisms.directions import largest_root, rows_and_columns, squared_radius
from matrixdp.privacy import gaussian
from matrixdp.privacy.certificate import Certificate
from matrixdp.sensitivity import Sensitivity


@runtime_checkable
class Released(Protocol):
    """An earlier release on the same data, such as a second-moment matrix."""

    @property
    def value(self) -> Array:
        """The released matrix."""

    @property
    def certificate(self) -> Certificate:
        """Its certificate; the mu in it is what the release cost."""


@recipe("mvg", source="chanyaswad2018mvg, Theorem 3")
def mvg(
    shape: Shape,
    sensitivity: Sensitivity,
    budget: Budget,
    *,
    gamma: float,
    radius: str = "published",
    modes: str = "unimodal",
    precision: Any = "uniform",
    important: int = 1,
    share: float = 0.9,
    directions: Any = None,
) -> Gaussian:
    """Directional noise whose precisions share the budget of Theorem 3.

    Args:
        gamma: the largest Frobenius norm that the value can have on any data set, a public bound.
        radius: "published" uses the squared Laurent-Massart radius where the proof needs the radius (valid, looser);
            "laurent-massart" uses the radius itself.
        modes: "unimodal" gives the rows directions and leaves columns independent; "equimodal", for square symmetric
            values, gives both sides the same covariance.
        precision: "uniform", "binary" (a share for the first `important` directions, the rest for the others), or a
            share for every direction.
        important: how many directions the binary allocation favours.
        share: their share of the precision.
        directions: orthonormal directions (columns), public; the axes by default. Or an earlier release of a symmetric
            matrix on the same data: its eigenvectors are used, the leading ones first. Its cost is deducted from this
            budget, so that both releases together keep it.

    Source: chanyaswad2018mvg, Theorem 3 and Algorithms 1 and 2.
    Deviates: (1) radius="laurent-massart" applies the root that the published statement leaves out.
    """
    m, n = rows_and_columns("mvg", shape)
    gamma = _check.positive("gamma", gamma)
    _check.choice("modes", modes, ("unimodal", "equimodal"))
    if modes == "equimodal" and m != n:
        raise NotApplicable(f"mvg's equimodal noise needs a square value, got shape {shape}; use modes='unimodal'")
    turned, rest, spent = _directions(directions, m, budget, sensitivity.adjacency)
    phi = _precision_bound(shape, sensitivity.frobenius_radius(shape), rest, gamma, radius)
    total = phi**4 / n if modes == "unimodal" else phi**2
    rows = Spectrum(1 / np.sqrt(_shares(precision, important, share, m) * total), turned)
    return Gaussian(Kronecker(rows, np.ones(n) if modes == "unimodal" else rows), note=spent)


def _precision_bound(shape: Shape, s: float, budget: Budget, gamma: float, radius: str) -> float:
    """phi, where phi^2 is the largest ||sv(Sigma^-1)|| ||sv(Psi^-1)|| that Theorem 3 allows."""
    size, r = math.prod(shape), min(shape)
    squared = squared_radius(size, budget.delta)
    published = _check.choice("radius", radius, ("published", "laurent-massart")) == "published"
    z = squared if published else math.sqrt(squared)
    orders = np.arange(1, r + 1)
    harmonic, half = float(np.sum(1 / orders)), float(np.sum(1 / np.sqrt(orders)))
    a = (harmonic + half) * gamma**2 + 2 * harmonic * gamma * s
    b = 2 * size**0.25 * harmonic * s * z
    return largest_root(a, b, budget.epsilon)


def _shares(precision: Any, important: int, share: float, size: int) -> Array:
    """The share of the precision that each direction gets."""
    if not isinstance(precision, str):
        given = _check.finite("precision", precision, ndim=1)
        if not (len(given) == size and np.all(given > 0) and abs(float(np.sum(given)) - 1) <= 1e-9):
            raise InvalidInput(f"precision must be {size} shares above 0 that add up to 1, got {len(given)}")
        return given / max(1.0, float(np.sum(given)))
    if _check.choice("precision", precision, ("uniform", "binary")) == "uniform":
        return np.full(size, 1 / size)
    important = _check.count("important", important)
    share = _check.probability("share", share)
    if not important < size:
        raise InvalidInput(f"important must be below the number of directions, {size}, got {important}")
    shares = np.full(size, (1 - share) / (size - important))
    shares[:important] = share / important
    return shares


def _directions(directions: Any, size: int, budget: Budget, adjacency: str) -> tuple[Array | None, Budget, str]:
    """The directions, the budget that is left for the noise, and a note on what the directions cost."""
    if directions is None:
        return None, budget, ""
    if not isinstance(directions, Released):
        return _check.finite("directions", directions, ndim=2), budget, ""
    matrix = _check.finite("directions", directions.value, ndim=2)
    if matrix.shape != (size, size):
        raise InvalidInput(f"directions must come from a {size} x {size} matrix, got shape {matrix.shape}")
    if directions.certificate.adjacency != adjacency:
        raise InvalidInput(
            f"directions were released under the adjacency {directions.certificate.adjacency}, this value has "
            f"{adjacency}; what they cost cannot be added up"
        )
    spent = directions.certificate.mu
    if spent is None:
        raise InvalidInput("directions must come from a release with Gaussian noise")
    whole = float(gaussian.mu(budget.epsilon, budget.delta))
    if not spent < whole:
        raise BudgetExceeded(f"the directions cost mu = {spent:.4g} of a budget of mu = {whole:.4g}; nothing is left")
    left = math.sqrt((whole - spent) * (whole + spent)) * (1 - 1e-12)
    epsilon = float(gaussian.epsilon(left, budget.delta))
    if not epsilon > 0:
        raise BudgetExceeded(f"the directions cost mu = {spent:.4g} of {whole:.4g}, which leaves too little for mvg")
    rest = Budget(epsilon, budget.delta)
    eigenvectors = np.linalg.eigh((matrix + matrix.T) / 2)[1][:, ::-1]
    return eigenvectors, rest, f"its directions had cost mu = {spent:.4g} of {whole:.4g} before"

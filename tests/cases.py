"""Shared cases: every covariance with a dense oracle, every sensitivity set with a sampler of its members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from matrixdp.distributions.covariance import (
    Covariance,
    Dense,
    Diagonal,
    Isotropic,
    Kronecker,
    Symmetric,
    SymmetricEntries,
)
from matrixdp.distributions.covariance.spectrum import Spectrum
from matrixdp.sensitivity import L1, Counts, Entrywise, Frobenius, OneColumn, OneRow, RankOne, Sensitivity, Vertices

SHAPE = (3, 3)
OFF = np.array([[0.0, 0.3, 0.8], [0.3, 0.0, 1.2], [0.8, 1.2, 0.0]])


def spd(size: int, seed: int) -> np.ndarray:
    """A well-conditioned symmetric positive definite matrix."""
    factor = np.random.default_rng(seed).standard_normal((size, size + 3))
    return factor @ factor.T / size


def orthogonal(size: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


@dataclass(frozen=True)
class CovarianceCase:
    """A covariance and its matrix on the entries taken row by row, written down independently."""

    covariance: Covariance
    oracle: np.ndarray


def _symmetric_oracle(d: int, std: float, trace_std: float) -> np.ndarray:
    """Sum over an orthonormal basis of the symmetric matrices, the first along the identity."""
    basis = [np.eye(d) / np.sqrt(d)]
    for i in range(d):
        for j in range(i + 1, d):
            off = np.zeros((d, d))
            off[i, j] = off[j, i] = np.sqrt(0.5)
            basis.append(off)
    for k in range(1, d):
        flat = np.zeros(d)
        flat[:k], flat[k] = 1, -k
        basis.append(np.diag(flat / np.linalg.norm(flat)))
    scales = [trace_std] + [std] * (len(basis) - 1)
    return sum(s**2 * np.outer(b.ravel(), b.ravel()) for s, b in zip(scales, basis, strict=True))


def _entries_oracle(diagonal: np.ndarray, off: np.ndarray, turned: np.ndarray) -> np.ndarray:
    """Of U Y U^T, from how each entry of Y moves it."""
    d = len(diagonal)
    moved = {(i, j): np.outer(turned[:, i], turned[:, j]) for i in range(d) for j in range(d)}
    on = np.stack([moved[i, i].ravel() for i in range(d)], axis=1)
    pairs = [((moved[i, j] + moved[j, i]).ravel(), off[i, j]) for i in range(d) for j in range(i)]
    return on @ diagonal @ on.T + sum(v * np.outer(m, m) for m, v in pairs)


def covariance_cases() -> dict[str, CovarianceCase]:
    m, n = SHAPE
    std = np.random.default_rng(1).uniform(0.5, 2, SHAPE)
    rows, columns = spd(m, 2), spd(n, 3)
    turned, variances = orthogonal(m, 4), np.array([0.5, 1.0, 3.0])
    return {
        "isotropic": CovarianceCase(Isotropic(SHAPE, 1.7), 1.7**2 * np.eye(m * n)),
        "diagonal": CovarianceCase(Diagonal(std), np.diag(std.ravel() ** 2)),
        "kronecker dense": CovarianceCase(Kronecker(rows, columns), np.kron(rows, columns)),
        "kronecker diagonal": CovarianceCase(
            Kronecker(np.array([1.0, 2.0, 4.0]), np.array([1.0, 0.5, 0.25])),
            np.kron(np.diag([1.0, 2.0, 4.0]), np.diag([1.0, 0.5, 0.25])),
        ),
        "kronecker spectrum": CovarianceCase(
            Kronecker(Spectrum(variances, turned), np.ones(n)),
            np.kron(turned @ np.diag(variances) @ turned.T, np.eye(n)),
        ),
        "dense": CovarianceCase(Dense(spd(m * n, 5), SHAPE), spd(m * n, 5)),
        "symmetric": CovarianceCase(Symmetric(3, 1.3), _symmetric_oracle(3, 1.3, 1.3)),
        "symmetric entries": CovarianceCase(
            SymmetricEntries(spd(3, 7), OFF), _entries_oracle(spd(3, 7), OFF, np.eye(3))
        ),
        "symmetric entries, turned": CovarianceCase(
            SymmetricEntries(spd(3, 8), OFF, orthogonal(3, 9)), _entries_oracle(spd(3, 8), OFF, orthogonal(3, 9))
        ),
        "symmetric, two scales": CovarianceCase(Symmetric(3, 1.3, 0.6), _symmetric_oracle(3, 1.3, 0.6)),
    }


COVARIANCES = covariance_cases()


@dataclass(frozen=True)
class SetCase:
    """A set and a sampler that draws members, the extreme ones among them."""

    sensitivity: Sensitivity
    member: Callable[[np.random.Generator], np.ndarray]


def _ball(rng: np.random.Generator) -> np.ndarray:
    v = rng.standard_normal(SHAPE)
    return 2.0 * v / np.linalg.norm(v)


BOX = np.random.default_rng(6).uniform(0.2, 1.5, SHAPE)
LOW, HIGH = np.array([-1.0, 0.0, 0.5]), np.array([1.0, 0.5, 0.75])


def _line(axis: int, draw: Callable[[np.random.Generator], np.ndarray]) -> Callable[[np.random.Generator], np.ndarray]:
    def member(rng: np.random.Generator) -> np.ndarray:
        v = np.zeros(SHAPE)
        np.moveaxis(v, axis, 0)[rng.integers(SHAPE[axis])] = draw(rng)
        return v

    return member


def _short(rng: np.random.Generator) -> np.ndarray:
    v = rng.standard_normal(3)
    return 1.5 * v / np.linalg.norm(v)


def _signs(widths: np.ndarray) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: widths * rng.choice([-1.0, 1.0], widths.shape)


def _cells(k: int) -> Callable[[np.random.Generator], np.ndarray]:
    def member(rng: np.random.Generator) -> np.ndarray:
        v = np.zeros(SHAPE)
        v.flat[rng.choice(v.size, k, replace=False)] = 0.7 * rng.choice([-1.0, 1.0], k)
        return v

    return member


def _sizes(*sizes: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Entries of these sizes at random places, or some mixture of such."""

    def member(rng: np.random.Generator) -> np.ndarray:
        found = np.zeros(SHAPE)
        for weight in rng.dirichlet(np.ones(40)) if rng.random() < 0.3 else [1.0]:
            v = np.zeros(SHAPE)
            v.flat[rng.choice(v.size, len(sizes), replace=False)] = sizes * rng.choice([-1.0, 1.0], len(sizes))
            found += weight * v
        return found

    return member


def _record(rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal(3) * (rng.random(3) < rng.uniform(0.3, 1))
    return 1.2 * x / max(np.linalg.norm(x), 1e-9)


def _replace(rng: np.random.Generator) -> np.ndarray:
    x, y = _record(rng), _record(rng)
    if rng.random() < 0.5:
        y = y - x * (x @ y) / max(x @ x, 1e-9)
        y *= 1.2 / max(np.linalg.norm(y), 1e-9)
    return np.outer(x, x) - np.outer(y, y)


LISTED = [np.diag([1.0, 0.0, 0.0]), np.ones((3, 3)), np.diag([1.0, -2.0, 0.5])]


def _hull(rng: np.random.Generator) -> np.ndarray:
    mix = rng.dirichlet(np.ones(len(LISTED))) if rng.random() < 0.5 else np.eye(len(LISTED))[rng.integers(len(LISTED))]
    return sum(w * v for w, v in zip(mix, LISTED, strict=True))


SETS = {
    "Frobenius": SetCase(Frobenius(2.0), _ball),
    "Entrywise": SetCase(Entrywise(BOX), _signs(BOX)),
    "Entrywise, one bound": SetCase(Entrywise(0.8), _signs(np.full(SHAPE, 0.8))),
    "OneColumn, norm": SetCase(OneColumn(1.5), _line(1, _short)),
    "OneColumn, box": SetCase(OneColumn(LOW, HIGH), _line(1, _signs(HIGH - LOW))),
    "OneRow, norm": SetCase(OneRow(radius=1.5), _line(0, _short)),
    "OneRow, box": SetCase(OneRow(low=LOW, high=HIGH), _line(0, _signs(HIGH - LOW))),
    "Counts, one": SetCase(Counts(1, 0.7), _cells(1)),
    "Counts, two": SetCase(Counts(2, 0.7, relation="replace"), _cells(2)),
    "Counts, four": SetCase(Counts(4, 0.7), _cells(4)),
    "L1": SetCase(L1(1.3), _sizes(1.3)),
    "L1, largest entry": SetCase(L1(1.3, 0.5), _sizes(0.5, 0.5, 1.3 - 2 * 0.5)),
    "RankOne, add": SetCase(RankOne(1.2), lambda rng: np.outer(*[_record(rng)] * 2)),
    "RankOne, replace": SetCase(RankOne(1.2, relation="replace"), _replace),
    "Vertices": SetCase(Vertices(*LISTED), _hull),
}

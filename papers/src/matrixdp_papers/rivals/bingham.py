"""Samples from the matrix Bingham law: d x k matrices V with orthonormal columns, density exp(tr V^T A V).

**Gibbs.** Given the k - 1 other columns, a column is a unit vector x orthogonal to them with density exp(x^T A x).
That is a vector Bingham law in q = d - k + 1 dimensions. Columns are drawn in turn from exactly that.

**One column.** Rejection from the angular central Gaussian law: x = z/|z| for z normal with precision tau I - A, on the
space orthogonal to the others. On the sphere its density is proportional to w^(-q/2) with w = tau - x^T A x, and

    exp(x^T A x) / w^(-q/2) = e^tau e^-w w^(q/2)

is largest at w = q/2, whatever tau is; x is kept with probability (2w/q)^(q/2) e^(q/2 - w). Most are kept when the
inverse of the precision has trace 2: then at least about 0.6 sqrt(2/q) of them, however concentrated the law is.

**z in O(d k).** In the eigenbasis A = diag(a), a_1 >= a_2 >= .. Let T be the first k coordinates and R the rest, and
V_T, V_R the rows of the other columns there. As tau > a_k, the precision D_R = tau - a_R is positive, though D_T need
not be. Given z_T, z_R is normal with precision D_R under the condition V_R^T z_R = -V_T^T z_T. Integrating it out
leaves z_T normal with precision D_T + V_T G^-1 V_T^T, where G = V_R^T D_R^-1 V_R. No matrix is larger than d x k.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from matrixdp._check import Array
from matrixdp.errors import NumericalFailure

# The tolerance for the trace of the proposal's covariance around 2, its best value; the loss is of second order.
_TRACE_TOLERANCE = 0.2
_MOST_BATCHES = 1000


def matrix_bingham(matrix: Array, columns: int, sweeps: int, rng: np.random.Generator) -> Array:
    """One matrix from a Markov chain whose limit is the matrix Bingham law; for one column, from the law itself.

    Args:
        matrix: A, symmetric.
        columns: k, below the side of A.
        sweeps: how often every column is redrawn.
        rng: a numpy Generator.

    Source: hoff2009simulation; kent2018new for the rejection.
    Deviates: (1) exact draws of a column, instead of one coordinate at a time; (2) V is turned at random among its own
        columns after each sweep, which the law allows and which mixes better; (3) above d/2 columns the complement is
        drawn, with -A, for tr V^T A V is tr A less the complement's.
    """
    dimension = len(matrix)
    values, vectors = np.linalg.eigh(matrix)
    if 2 * columns > dimension:
        complement = vectors @ _gibbs(-values, dimension - columns, sweeps, rng)
        rest = np.linalg.qr(complement, mode="complete")[0][:, dimension - columns :]
        return _turned(rest, rng)
    return np.asarray(vectors[:, ::-1] @ _gibbs(values[::-1], columns, sweeps, rng))


def _gibbs(values: Array, columns: int, sweeps: int, rng: np.random.Generator) -> Array:
    """The chain in the eigenbasis, for falling eigenvalues.

    It starts from columns drawn one after the other, each given the previous ones. That is near the law however
    concentrated it is, whereas a uniform start takes dozens of sweeps to find the leading directions.
    """
    V = np.empty((len(values), 0))
    tau = float(values[0]) + len(values) / 2
    for sweep in range(sweeps + 1):
        for column in range(columns):
            others = V if sweep == 0 else np.delete(V, column, axis=1)
            proposal = _best_proposal(values, others, tau)
            V = np.insert(others, column, _draw(values, proposal, rng), axis=1)
            tau = proposal.tau  # does not affect the law; close to the best value for the next column
        V = _turned(V, rng)
    return V


def _turned(V: Array, rng: np.random.Generator) -> Array:
    """V times a random rotation of its columns, orthonormal up to rounding."""
    return np.asarray(np.linalg.qr(V @ rng.standard_normal((V.shape[1], V.shape[1])))[0])


class _Proposal(NamedTuple):
    """Normal vectors orthogonal to the other columns, with precision tau I - A there."""

    tau: float
    std: Array  # of R before the condition, D_R^(-1/2)
    root: Array  # the inverse of a Cholesky factor L of the precision of T
    condition: Array  # G^-1 V_R^T, one row per column of the others
    carry: Array  # D_R^-1 V_R
    slope: Array  # D_R^-1 V_R G^-1 V_T^T, from T to R
    trace: float

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Draws `count` vectors, as columns."""
        first = self.root.T @ rng.standard_normal((len(self.root), count))
        rest = self.std[:, None] * rng.standard_normal((len(self.std), count))
        return np.vstack([first, rest - self.carry @ (self.condition @ rest) - self.slope @ first])


def _proposal(values: Array, others: Array, tau: float) -> _Proposal | None:
    """The proposal for this tau, or None if tau is too small."""
    split = others.shape[1] + 1
    top, rest = others[:split], others[split:]
    precision = tau - values
    carry = rest / precision[split:, None]
    try:
        solved: Array = np.asarray(np.linalg.solve(rest.T @ carry, np.hstack([rest.T, top.T])), dtype=np.float64)
        condition, back = np.hsplit(solved, [len(rest)])
        root = np.asarray(np.linalg.inv(np.linalg.cholesky(np.diag(precision[:split]) + top @ back)), dtype=np.float64)
    except np.linalg.LinAlgError:
        return None
    slope = carry @ back
    covariance = float(np.sum(root**2) + np.sum((slope @ root.T) ** 2) + np.sum(1 / precision[split:]))
    trace = covariance - float(np.sum(condition.T * (carry / precision[split:, None])))
    return _Proposal(tau, precision[split:] ** -0.5, root, condition, carry, slope, trace)


def _best_proposal(values: Array, others: Array, tau: float) -> _Proposal:
    """The proposal whose covariance has a trace near 2, by bisection from a guess.

    On the space orthogonal to k - 1 columns the largest eigenvalue of A lies between a_k and a_1, and the tau wanted
    between 1/2 and q/2 above it.
    """
    low = float(values[others.shape[1]]) + 0.5
    high = float(values[0]) + (len(values) - others.shape[1]) / 2
    tau = min(max(tau, low), high)
    for _ in range(200):
        found = _proposal(values, others, tau)
        if found is not None and abs(found.trace - 2) <= _TRACE_TOLERANCE:
            return found
        if found is None or found.trace > 2:
            low = tau
        else:
            high = tau
        tau = (low + high) / 2
    raise NumericalFailure("the matrix is too ill-conditioned for a Bingham law: no proposal has a sensible spread")


def _draw(values: Array, proposal: _Proposal, rng: np.random.Generator) -> Array:
    """One unit vector from the vector Bingham law."""
    half = (len(values) - proposal.condition.shape[0]) / 2
    for _ in range(_MOST_BATCHES):
        vectors = proposal.draw(8 + math.ceil(3 * math.sqrt(2 * half)), rng)
        vectors /= np.linalg.norm(vectors, axis=0)
        w = proposal.tau - values @ vectors**2
        kept = -rng.standard_exponential(len(w)) <= half - w + half * np.log(w / half)
        if kept.any():
            chosen: Array = vectors[:, np.argmax(kept)]
            return chosen
    raise NumericalFailure("the matrix is too ill-conditioned for a Bingham law: every proposal was rejected")

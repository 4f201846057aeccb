"""Linear tasks on a histogram, by their Gram matrices P = W^T W, and the best noise for the symmetric ones.

The expected squared error of a task W under noise N(0, S) is tr(P S), so the rows of W are never needed. All ranges on
n cells have n(n+1)/2 rows, but their Gram matrix has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations, product
from numbers import Integral

import numpy as np
import numpy.typing as npt

from matrixdp import _check
from matrixdp._check import Array
from matrixdp.errors import InvalidInput, NotApplicable
from matrixdp.mechanisms.solvers.design import MARGIN, ROUNDOFF, Design, frozen, proven_gap

# Dense Gram matrices of more cells than this are refused; at this size one takes 2 GiB.
MOST_CELLS = 2**14


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A task on a histogram with one or more axes.

    Attributes:
        name: A short human-readable description.
        terms: The Gram matrix as a sum of Kronecker products: each term holds one Gram matrix per axis. A task with one
            term is a product, whose best noise `design.solve_kronecker` finds axis by axis.
    """

    name: str
    terms: tuple[tuple[Array, ...], ...]

    def __post_init__(self) -> None:
        sides = {tuple(np.shape(factor) for factor in term) for term in self.terms}
        if (
            len(sides) != 1
            or () in sides
            or not all(len(side) == 2 and side[0] == side[1] for side in next(iter(sides)))
        ):
            raise InvalidInput(
                f"terms must each hold one square matrix per axis, of the same sides, got {sorted(sides)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of the histogram."""
        return tuple(len(factor) for factor in self.terms[0])

    @property
    def cells(self) -> int:
        """The number of cells of the histogram."""
        return math.prod(self.shape)

    def gram(self) -> Array:
        """The Gram matrix on the flattened histogram (rows first), for small ones."""
        if not self.cells <= MOST_CELLS:
            raise InvalidInput(
                f"workload {self.name} has {self.cells} cells, a dense Gram matrix at most {MOST_CELLS}; "
                "use its terms, one Gram matrix per axis"
            )
        return sum((_kronecker(term) for term in self.terms), np.zeros((self.cells, self.cells)))

    def diagonal(self) -> Array:
        """The diagonal of that matrix."""
        return sum((_kronecker(map(np.diagonal, term)) for term in self.terms), np.zeros(self.cells))

    def spectrum(self) -> Array | None:
        """The eigenvalues of P, of shape (2, .., 2), if every factor is a sum of multiples of identity and ones.

        Entry b belongs to the arrays that are constant along the axes with b_j = 0 and sum to zero along those with 1.
        On them a*identity + b*ones is a + n*b and a. None for other tasks.
        """
        eigenvalues = np.zeros((2,) * len(self.shape))
        for term in self.terms:
            values = np.ones(())
            for factor in term:
                off = float(factor[0, -1]) if len(factor) > 1 else 0.0
                varying = float(factor[0, 0]) - off
                if not np.array_equal(factor, varying * np.eye(len(factor)) + off):
                    return None
                values = np.multiply.outer(values, np.array([varying + len(factor) * off, varying]))
            eigenvalues += values
        return eigenvalues


def identity(n: int) -> Workload:
    """Every cell."""
    return Workload(name=f"identity({n})", terms=((frozen(np.eye(_check.count("n", n))),),))


def total(n: int) -> Workload:
    """The sum of all cells."""
    side = _check.count("n", n)
    return Workload(name=f"total({n})", terms=((frozen(np.ones((side, side))),),))


def prefix(n: int) -> Workload:
    """The n prefix sums x_0 + .. + x_i; cells i and j are together in the n - max(i, j) longest."""
    place = np.arange(_check.count("n", n), dtype=np.float64)
    return Workload(name=f"prefix({n})", terms=((frozen(n - np.maximum.outer(place, place)),),))


def all_ranges(n: int) -> Workload:
    """The n(n+1)/2 sums over ranges; i <= j share those that start at 0 .. i and end at j .. n - 1."""
    place = np.arange(_check.count("n", n), dtype=np.float64)
    gram = (np.minimum.outer(place, place) + 1) * (n - np.maximum.outer(place, place))
    return Workload(name=f"all ranges({n})", terms=((frozen(gram),),))


def given(W: npt.ArrayLike) -> Workload:
    """The rows of W, one query each."""
    rows = _check.finite("W", W, ndim=2)
    if not np.any(rows):
        raise InvalidInput("W must not be zero: such a task needs no noise")
    return Workload(name=f"given({rows.shape[0]} queries, {rows.shape[1]} cells)", terms=((frozen(rows.T @ rows),),))


def tensor(*workloads: Workload) -> Workload:
    """All products of one query from each workload, on the histogram with all their axes."""
    if not workloads:
        raise InvalidInput("tensor needs at least one workload, got none")
    return Workload(
        name=" x ".join(workload.name for workload in workloads),
        terms=tuple(tuple(chain(*choice)) for choice in product(*(workload.terms for workload in workloads))),
    )


def union(*workloads: Workload) -> Workload:
    """The queries of all the workloads, which have one shape."""
    if len({workload.shape for workload in workloads}) != 1:
        raise InvalidInput(f"union needs workloads of one shape, got {[workload.shape for workload in workloads]}")
    return Workload(
        name=" + ".join(workload.name for workload in workloads),
        terms=tuple(chain(*(workload.terms for workload in workloads))),
    )


def marginals(shape: Sequence[int], orders: int | Iterable[int]) -> Workload:
    """All marginals of these orders: 0 is the total, 1 the histogram of each axis, 2 that of each pair of axes."""
    sides = tuple(_check.count("each entry of shape", side) for side in shape)
    wanted = sorted({orders} if isinstance(orders, int) else set(orders))
    if not (sides and wanted and all(isinstance(order, Integral) and 0 <= order <= len(sides) for order in wanted)):
        raise InvalidInput(f"orders must be whole numbers from 0 to {len(sides)}, the number of axes")
    kept = [frozen(np.eye(side)) for side in sides]
    summed = [frozen(np.ones((side, side))) for side in sides]
    axes = range(len(sides))
    terms = tuple(
        tuple(kept[axis] if axis in margin else summed[axis] for axis in axes)
        for order in wanted
        for margin in combinations(axes, order)
    )
    return Workload(name=f"marginals({' x '.join(map(str, sides))}, orders {wanted})", terms=terms)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeableDesign:
    """The best noise at the unit budget for a task with a `Workload.spectrum`, held as 2^d variances for d axes.

    Attributes:
        shape: The sides of the histogram.
        variances: Shape (2, .., 2), indexed like the spectrum.
        value: tr(P S), the expected squared error of the task.
        lower_bound: No covariance that keeps the unit budget has a smaller tr(P S).
        gap: value / lower_bound - 1; more than rounding only if the task ignores one of the spaces.
    """

    shape: tuple[int, ...]
    variances: Array
    value: float
    lower_bound: float
    gap: float

    def dense(self) -> Design:
        """The same noise as N variances and directions, for small histograms."""
        bases = [np.linalg.qr(np.column_stack([np.ones(side), np.eye(side, side - 1)]))[0] for side in self.shape]
        kinds = [np.minimum(np.arange(side), 1) for side in self.shape]
        cells = math.prod(self.shape)
        return Design(
            variances=frozen(self.variances[np.ix_(*kinds)].ravel()),
            directions=frozen(_kronecker(bases)),
            weights=frozen(np.full(cells, 1 / cells)),
            value=self.value,
            lower_bound=self.lower_bound,
            gap=self.gap,
            iterations=0,
        )


def solve_exchangeable(workload: Workload, tolerance: float = 1e-6) -> ExchangeableDesign:
    """The best noise, in closed form, for a task whose Gram matrix is made of identities and ones, such as marginals.

    Such a P stays the same when cells are shifted cyclically along an axis, and shifts carry every cell to every other.
    For any P with such a group of permutations Q, uniform weights are optimal in the dual of `design`:
    f(w) = tr((P^(1/2) diag(w) P^(1/2))^(1/2)) is concave, f(Qw) = f(w) because Q P Q^T = P, and the mean of Qw over the
    group is uniform, so f(uniform) >= mean f(Qw) = f(w). Hence the optimum is tr(P^(1/2))^2 / N, the singular value
    bound, reached by S = P^(-1/2) tr(P^(1/2)) / N, for S^-1 has a constant diagonal, which is then 1.

    The task ignores spaces where P is 0; as in `design.solve` they get a large variance, which costs tolerance/2.

    Args:
        workload: Any number of cells, a modest number of axes.
        tolerance: For the gap.

    Guarantee: the diagonal of S^-1 is below 1, so one cell may change by 1; lower_bound <= optimum <= value.

    Raises:
        NotApplicable: A factor of the Gram matrix is not a sum of multiples of identity and ones.
        InvalidInput: The sum of the terms is zero or not a Gram matrix.
        NumericalFailure: The tolerance is below 1e-9, too near to rounding.

    Source: xiao2023optimal for the optimum of marginals; li2013optimal for the singular value bound.
    Deviates: (1) one covariance on the histogram, instead of noise on residuals of the marginals.
    """
    tolerance = _check.positive("tolerance", tolerance)
    eigenvalues = workload.spectrum()
    if eigenvalues is None:
        raise NotApplicable(
            f"workload {workload.name} is not made of identities and ones; use design.solve on its Gram matrix"
        )
    multiplicity = reduce(np.multiply.outer, [np.array([1.0, side - 1.0]) for side in workload.shape])
    cells = workload.cells
    eigenvalues = np.where(multiplicity > 0, eigenvalues, 0)  # an axis with one cell has no varying part
    rounding = 8 * len(workload.shape) * ROUNDOFF * float(np.abs(eigenvalues).max())
    if not (eigenvalues.max() > 0 and eigenvalues.min() >= -rounding):
        raise InvalidInput(f"workload {workload.name} has no Gram matrix W^T W: eigenvalue {eigenvalues.min()}")
    seen = eigenvalues > rounding
    roots = np.sqrt(np.where(seen, eigenvalues, 0))
    trace = float(np.sum(multiplicity * roots))
    unseen = float(np.sum(multiplicity[~seen])) / cells  # the squared length of a cell's unit vector there
    precision = np.where(seen, roots * cells / trace, tolerance / 2 / (unseen or 1))
    precision /= float(np.sum(multiplicity * precision)) / cells * (1 + MARGIN)
    value = float(np.sum(multiplicity * roots**2 / precision))
    lower_bound = trace**2 / cells * (1 - multiplicity.size * ROUNDOFF)
    return ExchangeableDesign(
        shape=workload.shape,
        variances=frozen(1 / precision),
        value=value,
        lower_bound=lower_bound,
        gap=proven_gap(value, lower_bound, tolerance),
    )


def _kronecker(factors: Iterable[Array]) -> Array:
    return reduce(lambda left, right: np.asarray(np.kron(left, right), dtype=np.float64), factors)

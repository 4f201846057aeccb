"""Second moments and covariances of records."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp._check import Array, Shape
from matrixdp.adjacency import ADD_REMOVE, REPLACE, ZERO_OUT, checked, takes_relation
from matrixdp.errors import InvalidInput
from matrixdp.queries import clipping, exact_sums
from matrixdp.queries.answer import Answer, changes, query
from matrixdp.queries.exact_sums import Integers
from matrixdp.queries.records import load, rows_of
from matrixdp.queries.sparse import sparse_sum
from matrixdp.sensitivity import L1, RankOne

STEP = 2.0**-16
"""Products of entries are rounded to whole multiples of this if their sums get discrete noise."""

# How many rows have their products in memory at a time.
_ROWS = 1 << 14


@takes_relation
def second_moment(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
    average: bool = False,
    size: int | None = None,
) -> Answer:
    """X^T X, for the matrix X with one clipped record per row.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT.
        average: divide by size, or by the number of records where that is public.
        size: a public number to divide by, when averaging; ADD_REMOVE needs it.

    Guarantee: a neighbour changes the value by x x^T (replace: x x^T - y y^T), with x and y of norm at most `norm`,
        divided by the same number as the value. This holds for any number of records: only the final sum is rounded,
        and the certificate covers that (see `matrixdp.queries.exact_sums`).

    Example:
        >>> from matrixdp.queries import second_moment
        >>> second_moment([[0.6, 0.8], [3.0, 4.0]], norm=1.0).sensitivity
        RankOne(radius=1.0, adjacency=<Adjacency.ADD_REMOVE: 'add/remove'>)
    """
    adjacency = checked(adjacency)
    if size is not None and not average:
        raise InvalidInput(f"size={_check.shown(size)} divides only when average=True; set it, or leave size out")
    rows, ball = rows_of(records, columns), clipping.Ball(norm)
    divisor = clipping.divisor(size, adjacency) if average else 1
    asked = query("second-moment", columns=columns, norm=norm, adjacency=adjacency, size=divisor)
    total, count = rows.total(partial(exact_sums.moments, ball=ball))
    divisor = asked["parameters"].setdefault("size", count)
    return Answer.of(exact_sums.moment_value(total, ball, divisor), asked)


@changes("second-moment")
def change_in_moment(shape: Shape, *, norm: float, adjacency: str, size: int = 1, columns: Any = None) -> RankOne:
    """What a neighbour can change in the second moment of clipped records divided by the size."""
    square = Fraction(clipping.Ball(norm).norm) ** 2 / clipping.checked_size(size)
    return RankOne(clipping.root_at_least(square), adjacency)


@takes_relation
def covariance(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    adjacency: str = ADD_REMOVE,
    center: Any = None,
    size: int | None = None,
) -> Answer:
    """The covariance of the records, about a public center or about their own mean.

    Args:
        records: see `load`.
        norm: the largest distance of a record from the center, or from 0 without a center.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE where the number of records is public, or
            ZERO_OUT, only with a center.
        center: a vector known without the data. A good one allows a smaller norm; at the same norm the noise has a
            quarter of the std that it has without a center.
        size: a public number to divide by; ADD_REMOVE needs it. The number of records by default.

    Guarantee: with a center, that of the averaged second moment of x - center. Without one, write m for the mean of n
        clipped records, |m| <= r, S for their scatter sum (x_i - m)(x_i - m)^T, and r for the norm. One more record x
        moves the mean by (x - m)/(n + 1), so the scatter becomes

            S + n (x - m)(x - m)^T / (n + 1)^2 + (n/(n + 1))^2 (x - m)(x - m)^T = S + n/(n + 1) (x - m)(x - m)^T,

        the first term from the n old records, the second from the new one. As |x - m| <= 2r, add/remove changes S by
        +-u u^T with |u| < 2r. Replacing x by y is to remove x and add y to the same n - 1 records, with mean m':
        (n - 1)/n ((x - m')(x - m')^T - (y - m')(y - m')^T). So the sets are RankOne(2r/sqrt(size)), and
        RankOne(2r sqrt((n - 1)/n)/sqrt(size), REPLACE), with size = n unless given. Neither radius can be smaller:
        records at -r and one at r attain the second, and approach the first as n grows. (The replace set is not tight
        in Frobenius norm: it contains orthogonal pairs of length 2r, which no records reach.) The scatter is computed
        without rounding, as in `second_moment`.

    Example:
        >>> from matrixdp import Budget, queries, release
        >>> records = [[0.1, 0.2], [0.3, 0.1], [0.2, 0.4]]
        >>> out = release(*queries.covariance(records, norm=1.0, size=3), Budget(1.0, 1e-6))
        >>> out.value.shape
        (2, 2)
    """
    adjacency = checked(adjacency)
    rows, ball = rows_of(records, columns), clipping.Ball(norm)
    divisor = clipping.divisor(size, adjacency)
    asked = query("covariance", columns=columns, norm=norm, adjacency=adjacency, center=center, size=divisor)
    parameters = asked["parameters"]
    change_in_covariance((rows.width,) * 2, **{"size": 1, "records": 2, **parameters})  # refuses what it cannot be
    middle = None if center is None else clipping.center_of(center, (rows.width,))
    total, count = rows.total(partial(_moments_about, ball=ball, center=middle))
    divisor = parameters.setdefault("size", count)
    if center is not None:
        return Answer.of(exact_sums.moment_value(total, ball, divisor), asked)
    if adjacency == REPLACE:
        parameters["records"] = count  # public, and the set depends on it
    return Answer.of(exact_sums.scatter_value(total, ball, count, divisor), asked)


def _moments_about(rows: Array, ball: clipping.Ball, center: Array | None) -> Integers:
    return exact_sums.moments(rows if center is None else rows - center, ball)


@changes("covariance")
def change_in_covariance(
    shape: Shape,
    *,
    norm: float,
    adjacency: str,
    size: int,
    center: Any = None,
    records: int = 0,
    columns: Any = None,
) -> RankOne:
    """What a neighbour can change in the scatter of clipped records about a center or their mean, divided by the size.

    Guarantee: see `covariance`.
    """
    if center is not None:
        return change_in_moment(shape, norm=norm, adjacency=adjacency, size=size)
    if adjacency == ZERO_OUT:
        raise InvalidInput("adjacency must be add/remove or replace for a covariance about the mean; or give a center")
    if adjacency == REPLACE and records < 2:
        raise InvalidInput("covariance needs at least 2 records, or a center: one record does not vary about its mean")
    share = Fraction(1) if adjacency == ADD_REMOVE else Fraction(records - 1, records)
    square = 4 * share * Fraction(clipping.Ball(norm).norm) ** 2 / clipping.checked_size(size)
    return RankOne(clipping.root_at_least(square), adjacency)


@takes_relation
def moment_entries(records: Any, *, norm: float, columns: Any = None, adjacency: str = ADD_REMOVE) -> Answer:
    """The entries of X^T X / norm^2 on and above its diagonal, row by row: for noise that keeps delta = 0.

    Each product of two entries is rounded to a whole multiple of `STEP`. `full_matrix` turns a release into the matrix.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        columns: which columns to use; all by default.
        adjacency: which data sets are neighbours; ADD_REMOVE, REPLACE or ZERO_OUT.

    Guarantee: for |x| <= 1 the products x_i x_j, i <= j, have the l1 norm (|x|_1^2 + |x|_2^2)/2 <= (columns + 1)/2. A
        neighbour changes the value by at most that (replace: twice that), by whole multiples of the step.

    Example:
        >>> import numpy as np
        >>> from matrixdp import Budget, queries, release
        >>> records = np.random.default_rng(0).normal(size=(100, 3))
        >>> out = release(*queries.moment_entries(records, norm=1.0), Budget(1.0, 0))
        >>> out.value.shape, out.certificate.epsilon(0)
        ((6,), 1.0)
    """
    asked = query("moment-entries", columns=columns, norm=norm, adjacency=checked(adjacency))
    rows = clipping.Ball(norm).clip(load(records, columns)) / norm
    return Answer.of(summed_products(rows, (rows.shape[1] + 1) / 2), asked)


@changes("moment-entries")
def change_in_moment_entries(shape: Shape, *, norm: float, adjacency: str, columns: Any = None) -> L1:
    """What a neighbour can change; see `moment_entries`."""
    clipping.Ball(norm)
    sides = _side(shape[0])
    if shape != (sides * (sides + 1) // 2,):
        raise InvalidInput(f"the value must have the entries of half a matrix, not the shape {shape}")
    return L1((sides + 1) / 2 * (2 if adjacency == REPLACE else 1), None, adjacency, step=STEP)


def summed_products(rows: Array, radius: float, shift: Any = 0.0) -> Array:
    """The sum over the rows of all products of two entries minus the shift, each row's clipped to the radius in l1."""
    first, second = np.triu_indices(rows.shape[1])
    total = np.zeros(len(first))
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        products = np.round((part[:, first] * part[:, second] - shift) / STEP) * STEP
        total += sparse_sum(products, radius=radius, step=STEP).value
    return total


def full_matrix(entries: Array) -> Array:
    """The symmetric matrix with these entries on and above its diagonal."""
    sides = _side(len(entries))
    matrix = np.zeros((sides, sides))
    matrix[np.triu_indices(sides)] = entries
    return np.asarray(matrix + np.triu(matrix, 1).T)


def _side(entries: int) -> int:
    """How many rows a symmetric matrix has, from the number of entries on and above its diagonal."""
    return (math.isqrt(8 * entries + 1) - 1) // 2

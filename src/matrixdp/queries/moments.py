"""Second moments and covariances of records."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from matrixdp import _check
from matrixdp.errors import InvalidInput
from matrixdp.queries import clipping, exact_sums
from matrixdp.queries.answer import Answer
from matrixdp.queries.records import read
from matrixdp.sensitivity import RELATIONS, RankOne


def second_moment(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    relation: str = "add/remove",
    average: bool = False,
    size: int | None = None,
) -> Answer:
    """X^T X, for the matrix X with a clipped record in each row.

    Args:
        records: see `load`.
        norm: the largest norm of a record.
        columns: which columns to use; all by default.
        relation: "add/remove" one record, or "replace" one.
        average: divide by the number of records, or by size.
        size: a public number to divide by, when averaging; "add/remove" needs it.

    Guarantee: a neighbour changes the value by x x^T (replace: x x^T - y y^T), with x and y of norm at most `norm`,
        divided as the value is, for any number of records: nothing but the final sum is rounded, and the certificate
        covers that (see `matrixdp.queries.exact_sums`).
    """
    _check.choice("relation", relation, RELATIONS)
    if size is not None and not average:
        raise InvalidInput(f"size={_check.shown(size)} divides only when average=True; set it, or leave size out")
    rows = read(records, columns)
    ball = clipping.Ball(norm)
    divisor = clipping.divisor(size, len(rows), relation) if average else 1
    radius = clipping.root_at_least(Fraction(ball.norm) ** 2 / divisor)
    value = exact_sums.moment_value(exact_sums.moments(rows, ball), ball, divisor)
    return Answer(value, RankOne(radius, relation))


def covariance(
    records: Any,
    *,
    norm: float,
    columns: Any = None,
    relation: str = "replace",
    center: Any = None,
    size: int | None = None,
) -> Answer:
    """The covariance of the records, about a public center or about their own mean.

    Args:
        records: see `load`.
        norm: the largest norm of a record, counted from the center if there is one and from 0 if there is none.
        columns: which columns to use; all by default.
        relation: "replace" one record, where the number of records is public, or "add/remove" one.
        center: a vector known without the data. A good one allows a smaller norm, and costs a quarter of the noise
            of no center at the same norm.
        size: a public number to divide by; the number of records by default, which only "replace" allows.

    Guarantee: with a center, that of the averaged second moment of x - center. Without one, write m for the mean of n
        clipped records, |m| <= r, S for their scatter sum (x_i - m)(x_i - m)^T, and r for the norm. One more record x
        moves the mean by (x - m)/(n + 1), so the scatter becomes

            S + n (x - m)(x - m)^T / (n + 1)^2 + (n/(n + 1))^2 (x - m)(x - m)^T = S + n/(n + 1) (x - m)(x - m)^T,

        the first term from the n old records, the second from the new one. As |x - m| <= 2r, add/remove changes S by
        +-u u^T with |u| < 2r. Replacing x by y is to remove x and add y to the same n - 1 records, with mean m':
        (n - 1)/n ((x - m')(x - m')^T - (y - m')(y - m')^T). So the sets are RankOne(2r/sqrt(size)), and
        RankOne(2r sqrt((n - 1)/n)/sqrt(size), "replace"); n = size unless given. Both radii are needed: records at
        -r and one at r attain the second, and approach the first as n grows. (The replace set is not tight in Frobenius
        norm: it holds orthogonal pairs of length 2r, which no records reach.) The scatter is computed without rounding,
        as in `second_moment`.
    """
    _check.choice("relation", relation, RELATIONS)
    rows = read(records, columns)
    ball = clipping.Ball(norm)
    divisor = clipping.divisor(size, len(rows), relation)
    if center is not None:
        middle = _check.broadcast("center", center, rows.shape[1:])
        if not np.all(np.abs(middle) <= clipping.LARGEST):
            raise InvalidInput(f"center must lie within {clipping.LARGEST} of 0; rescale the records")
        change = RankOne(clipping.root_at_least(Fraction(ball.norm) ** 2 / divisor), relation)
        return Answer(exact_sums.moment_value(exact_sums.moments(rows - middle, ball), ball, divisor), change)
    change = change_about_mean(ball, len(rows), divisor, relation)
    return Answer(exact_sums.scatter_value(exact_sums.moments(rows, ball), ball, len(rows), divisor), change)


def change_about_mean(ball: clipping.Ball, count: int, divisor: int, relation: str) -> RankOne:
    """What a neighbour can change in the scatter of `count` clipped records about their mean, over the divisor.

    Guarantee: see `covariance`.
    """
    if relation == "replace" and count < 2:
        raise InvalidInput("covariance needs at least 2 records, or a center: about its own mean one record has none")
    share = Fraction(1) if relation == "add/remove" else Fraction(count - 1, count)
    return RankOne(clipping.root_at_least(4 * share * Fraction(ball.norm) ** 2 / divisor), relation)

"""Sensitivity sets: the differences V = f(X) - f(X') of a query's values on neighbouring data sets.

A set carries the adjacency that it was derived for. All sets are symmetric (V and -V together) and contain every
shorter multiple of their members, so only their extreme points matter.

Values may have any number of dimensions. For Frobenius, Entrywise, Counts, L1 and Vertices the arrangement of the
entries does not matter. OneRow reads a value as a matrix of its first axis by all others, OneColumn as all others by
its last axis. RankOne is for square matrices, Participation for matrices with one row per step.
"""

from matrixdp.sensitivity.entries import L1, Counts, Entrywise, Frobenius, Sensitivity
from matrixdp.sensitivity.matrices import OneColumn, OneRow, RankOne, Vertices
from matrixdp.sensitivity.participation import Participation

__all__ = [
    "L1",
    "Counts",
    "Entrywise",
    "Frobenius",
    "OneColumn",
    "OneRow",
    "Participation",
    "RankOne",
    "Sensitivity",
    "Vertices",
]

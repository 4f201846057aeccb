"""Budgets that several releases share."""

from matrixdp.planning.plans import Plan, PlannedRelease, Shared

__all__ = ["Plan", "PlannedRelease", "Shared"]

"""Solvers for the noise of least error: for workloads, sets of differences, steps in time, marginals and counts."""

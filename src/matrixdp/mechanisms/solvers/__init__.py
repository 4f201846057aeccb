"""Optimal designs and the workloads that they serve."""
